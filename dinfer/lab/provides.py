"""What core and other layers get from this one, see `dinfer.core.provided`."""

from typing import Any


def as_html(*given: Any) -> str:
    """What a notebook shows of an answer, see `dinfer.lab.notebooks.as_html`."""
    from dinfer.lab import notebooks  # needs torch

    return notebooks.as_html(*given)
