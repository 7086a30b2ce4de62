"""A pipeline from the command line's overrides, for the benchmarks that run any model and recipe."""

from __future__ import annotations

from typing import Any

from dinfer.cli import conf


def configured(overrides: list[str]) -> dict[str, Any]:
    """The configuration that `dinfer` makes of the overrides. Raises ValueError for those it does not know."""
    with conf.session():
        return conf.compose(conf.PRIMARY, overrides)
