"""JSON files of a checkpoint, and the error for what is wrong with one. Imports neither torch nor safetensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """The checkpoint is not what its family says it must be; the message lists every difference."""


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {found!r:.80}")
    return found


def refuse(problems: Sequence[str], what: str) -> None:
    """Raises CheckpointError if there are any problems: `what`, and the first twenty of them."""
    if problems:
        shown = "\n  ".join(sorted(problems)[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{what}:\n  {shown}{more}")
