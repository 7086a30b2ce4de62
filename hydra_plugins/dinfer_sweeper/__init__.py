"""Hydra's own product of values, where an option goes only to the components that have it: `cli.sweep_points`.

Hydra finds plugins in this namespace package only, and imports all of them at every start, so nothing heavy is imported
before a sweep begins.
"""

from __future__ import annotations

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override


class PointsSweeper(BasicSweeper):
    """The sweeper of dinfer's commands, `hydra/sweeper=dinfer`."""

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The points, in batches of which each is launched as one."""
        from dinfer.cli.conf import Schema
        from dinfer.cli.sweep_points import points

        batches = super().split_arguments(overrides, None)
        found = points([point for batch in batches for point in batch], Schema.of(self.config))
        return list(self.split_overrides_to_chunks(found, max_batch_size or -1))

    def sweep(self, arguments: list[str]) -> Any:
        """Launches all points, then says which were left out and which failed."""
        from dinfer.cli.sweep_points import report

        results = super().sweep(arguments)
        report([job for batch in results for job in batch])
        return results


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="dinfer",
    node={"_target_": f"{__name__}.PointsSweeper", "max_batch_size": None, "params": None},
    provider="dinfer",
)
