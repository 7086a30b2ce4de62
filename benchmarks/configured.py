"""What the benchmarks share that run any model and recipe: overrides of the command line, and checks of arguments."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from dinfer.cli import conf


def configured(overrides: list[str]) -> dict[str, Any]:
    """The configuration that `dinfer` makes of the overrides. Raises ValueError for unknown ones."""
    with conf.session():
        return conf.compose(conf.PRIMARY, overrides)


def check_least(given: Namespace, **least: int) -> None:
    """Raises ValueError for an argument below its least value."""
    for name, value in least.items():
        if (own := vars(given)[name]) < value:
            raise ValueError(f"--{name}={own} must be at least {value}")
