"""Sweeps: finds the points, runs them, and reports those without a result.

A sweep is the product of all values, but an option goes only to components that have it. In
`decoder=threshold,factor decoder.threshold=0.7,0.9 decoder.factor=0.5,1` each decoder is swept over its own option:
four points in all. A point that fails does not end the sweep. The end of the sweep names the points without a result.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from dinfer.cli.errors import FAILED
from dinfer.cli.explain import components
from dinfer.cli.terminal import say
from dinfer.recipe.registry import unknown


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a point has no result."""

    reason: str
    failed: bool  # else its components cannot work together, which is a finding and no failure


def sweep(command: str, overrides: Sequence[Override], context: HydraContext, task: TaskFunction) -> None:
    """Runs the task at every point, by the launcher of the configuration. Raises ValueError before any point runs."""
    loader = context.config_loader
    own = [str(override.input_line) for override in overrides if override.is_hydra_override()]
    # A preset may hold settings of Hydra's too. Options are left out: the components may differ from point to point.
    plain = [one for one in overrides if not one.is_hydra_override() and "." not in one.key_or_group]
    single = [str(one.input_line) for one in plain if not one.is_sweep_override()]
    if not any(text.startswith(("hydra.sweep.dir=", "hydra/launcher=")) for text in own):
        own += ["hydra.sweep.dir=.", "hydra.sweep.subdir=."]  # no folder of Hydra's for points that run here
    config = hydra.compose(command, [*own, *single, "hydra.mode=MULTIRUN"], return_hydra_config=True)
    if (sweeper := config.hydra.runtime.choices["hydra/sweeper"]) != "basic":
        raise ValueError(f"hydra/sweeper={sweeper}: dinfer has a sweeper of its own. Leave it out, or use dinfer tune")
    arguments = [f"{name}={value}" for name, value in (config.hydra.sweeper.params or {}).items()]
    arguments += [str(override.input_line) for override in overrides if not override.is_hydra_override()]
    found = points(arguments, loader, config)
    for point in found:
        composed(loader, config, point)
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    size, jobs = config.hydra.sweeper.max_batch_size or len(found), list[JobReturn]()
    for first in range(0, len(found), size):
        jobs += launcher.launch(found[first : first + size], initial_job_idx=first)
    report(jobs)


def points(arguments: list[str], loader: ConfigLoader, config: DictConfig) -> list[list[str]]:
    """The different points, each without the options that its components do not have.

    Says what it leaves out. Raises ValueError for an option that no component of the sweep has.
    """
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
    choices = {override.key_or_group for override in overrides if loader.get_group_options(override.key_or_group)}
    parts_at = cache(lambda point: composed(loader, config, point))
    found: dict[tuple[str, ...], None] = {}
    kept: set[str] = set()
    left_out: dict[str, dict[str, list[str]]] = {}  # key -> component -> the options that it has
    for values in itertools.product(*map(written, overrides)):
        pairs = list(zip((override.key_or_group for override in overrides), values, strict=True))
        parts = parts_at(tuple(value for key, value in pairs if key in choices))
        point = []
        for key, value in pairs:
            kind, _, option = key.partition(".")
            if option and kind in parts and option.partition(".")[0] not in parts[kind]:
                own = [name for name in parts[kind] if name != "name"]
                left_out.setdefault(key, {})[parts[kind]["name"]] = own
            else:
                kept.add(key)
                point.append(value)
        found[tuple(point)] = None
    for key in left_out.keys() - kept:
        kind, _, option = key.partition(".")
        known = {name for own in left_out[key].values() for name in own}
        raise unknown(f"option of {kind} {' or '.join(map(repr, left_out[key]))}:", option, sorted(known))
    if left_out:
        told = sorted(f"{key} of {key.partition('.')[0]}={name}" for key, names in left_out.items() for name in names)
        say(f"# no such option, so not swept: {', '.join(told)}")
    return [list(point) for point in found]


def composed(loader: ConfigLoader, config: DictConfig, point: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The components at a point. Raises ValueError."""
    return components(loader.load_sweep_config(config, list(point)))


def written(override: Override) -> list[str]:
    """The values of an override, each as an override of its own. Raises ValueError."""
    key = override.get_key_element()
    if override.is_interval_sweep():
        raise ValueError(f"{override.input_line}: an interval has no steps. Write range(START,STOP,STEP), or values")
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def report(jobs: Sequence[JobReturn]) -> None:
    """Names the points without a result; ends the program with a failure if some failed."""
    missed = [(job, job.return_value) for job in jobs if isinstance(job.return_value, Missed)]
    for failed, title in ((False, "left out, since the components cannot work together"), (True, "failed")):
        listed = [(job, miss) for job, miss in missed if miss.failed == failed]
        if listed:
            say(f"\n# {title}: {len(listed)} of {len(jobs)}")
        for job, miss in listed:
            say(f"{' '.join(job.overrides or [])}: {miss.reason}")
    if any(miss.failed for _, miss in missed):
        raise SystemExit(FAILED)
