"""The points of a sweep: which there are, and what became of them.

A sweep is the product of all values, but an option goes only to those of the chosen components that have it: in
`decoder=threshold,factor decoder.threshold=0.7,0.9 decoder.factor=0.5,1` each decoder is swept over its own option,
four points in all. A point that fails does not end the sweep; those without a result are named at its end.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from dinfer.cli.explain import explained
from dinfer.core.registry import REGISTRIES, unknown

KINDS = [registry.kind for registry in REGISTRIES]
FAILED = 1  # exit status


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a point has no result."""

    reason: str
    failed: bool  # else its components cannot work together, which is a finding and no failure


class PointsSweeper(Sweeper):
    """The sweeper of dinfer's commands, `hydra/sweeper=dinfer`."""

    __module__ = "hydra_plugins.dinfer"  # Hydra builds no plugin from elsewhere, registered or not
    CONFIG = {"_target_": f"{__module__}.PointsSweeper", "max_batch_size": None, "params": None}

    def __init__(self, max_batch_size: int | None, params: Mapping[str, str] | None) -> None:
        """`max_batch_size`: points that are launched together; None: all. `params`: further overrides."""
        self._batch, self._params = max_batch_size, params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Launches all points, then says which were left out and which failed. Raises ValueError before any runs."""
        found = self._points([*(f"{name}={value}" for name, value in self._params.items()), *arguments])
        for point in found:
            self._composed(tuple(point))
        jobs: list[JobReturn] = []
        for first in range(0, len(found), self._batch or len(found)):
            batch = found[first : first + (self._batch or len(found))]
            jobs += self.launcher.launch(batch, initial_job_idx=first)
        report(jobs)
        return jobs

    def _points(self, arguments: list[str]) -> list[list[str]]:
        """The different points, each without the options that its components do not have. Says what was dropped."""
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
        choices = {override.key_or_group for override in overrides if loader.get_group_options(override.key_or_group)}
        found: dict[tuple[str, ...], None] = {}
        kept_keys: set[str] = set()
        dropped: dict[tuple[str, str], list[str]] = {}  # key, component -> the options that it has
        composed = cache(self._composed)
        for values in itertools.product(*map(written, overrides)):
            pairs = list(zip(overrides, values, strict=True))
            config = composed(tuple(value for override, value in pairs if override.key_or_group in choices))
            point = []
            for override, value in pairs:
                kind, _, option = (key := override.key_or_group).partition(".")
                if kind in KINDS and option and option.partition(".")[0] not in config[kind]:
                    dropped[key, config[kind]["name"]] = [name for name in config[kind] if name != "name"]
                else:
                    kept_keys.add(key)
                    point.append(value)
            found[tuple(point)] = None
        for key in {key for key, _ in dropped} - kept_keys:
            kind, _, option = key.partition(".")
            names = [name for other, name in dropped if other == key]
            known = {name for (other, _), names in dropped.items() if other == key for name in names}
            raise unknown(f"option of {kind} {' or '.join(map(repr, names))}:", option, sorted(known))
        if dropped:
            pairs_told = sorted(f"{key} of {key.partition('.')[0]}={name}" for key, name in dropped)
            print(f"# no such option, so not swept: {', '.join(pairs_told)}", file=sys.stderr)
        return [list(point) for point in found]

    def _composed(self, point: tuple[str, ...]) -> dict[str, Any]:
        """The components at a point. Raises ValueError."""
        with explained():
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(point))
        return components(config)


def written(override: Override) -> list[str]:
    """The values of an override, each as an override of its own. Raises ValueError."""
    key = override.get_key_element()
    if override.is_interval_sweep():
        raise ValueError(f"{override.input_line}: an interval has no steps. Write range(START,STOP,STEP), or the values")
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def spread(overrides: list[str]) -> list[str]:
    """The overrides of a sweep, with those of a component's option as part of the product, single values too.

    Otherwise Hydra sets them before there are points, in a component that may not be swept over and may not have them.
    """
    return [
        f"{text.partition('=')[0]}=choice({value})"
        if (one := parse(text)).key_or_group.partition(".")[0] in KINDS
        and "." in one.key_or_group and not one.is_sweep_override() and not one.is_delete()
        and (value := text.partition("=")[2])
        else text
        for text in overrides
    ]  # fmt: skip
def report(jobs: Sequence[JobReturn]) -> None:
    """Names the points without a result; ends the program with a failure if some failed."""
    missed = [(job, job.return_value) for job in jobs if isinstance(job.return_value, Missed)]
    for failed, title in ((False, "left out, since the components cannot work together"), (True, "failed")):
        listed = [(job, miss) for job, miss in missed if miss.failed == failed]
        if listed:
            print(f"\n# {title}: {len(listed)} of {len(jobs)}", file=sys.stderr)
        for job, miss in listed:
            print(f"{' '.join(job.overrides or [])}: {miss.reason}", file=sys.stderr)
    if any(miss.failed for _, miss in missed):
        raise SystemExit(FAILED)
