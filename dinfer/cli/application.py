"""Runs a command as a Hydra application, once or at each point of a sweep. Configuration and launchers are Hydra's.

A sweep is the product of all values, but an option goes only to components that have it. In
`decoder=threshold,factor decoder.threshold=0.7,0.9 decoder.factor=0.5,1` each decoder is swept over its own option:
four points in all. A point that fails does not end the sweep. The end of the sweep names the points without a result.
"""

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

from dinfer.cli import conf
from dinfer.cli.arguments import divided
from dinfer.cli.conf import components, explained, parse
from dinfer.cli.settings import located, ranks_of
from dinfer.cli.terminal import FAILED, debugging, failures, input_errors, message, reported, say
from dinfer.parallel.leader import check_copies, follows
from dinfer.recipe.registry import unknown


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a point has no result."""

    reason: str
    failed: bool  # else its components cannot work together, which is a finding and no failure


Task = Callable[[dict[str, Any], str | None], None]


def launch(args: Namespace, task: Task, *, takes_text: bool = False) -> None:
    """Calls `task(configuration, text)` once, or once for each point of a sweep.

    `conf/<command>.yaml` is the configuration.
    """
    command, folders = args.command, args.config_dirs
    text, overrides = divided(args, cache(lambda: names(command, folders)), takes_text=takes_text)
    overrides = [one for override in overrides for one in conf.model_named(override)]
    overrides += [f"hydra.searchpath={conf.searched(folders)}"] if folders else []
    parsed = [parse(override) for override in overrides]

    def run(config: DictConfig) -> Missed | None:
        with reported():  # inside Hydra, which would add lines of its own to an error that reaches it
            values = conf.values_of(config)
            if args.multirun:
                return point(found, values, text)
            found(values, text)
        return None

    def found(values: dict[str, Any], text: str | None) -> None:
        if command != "eval":
            check_copies(ranks_of(values))
        if follows(ranks_of(values)):
            from dinfer.parallel.divided_model import serve_torchrun

            serve_torchrun()
        located(values)  # before the task imports torch, so that an error comes at once
        task(values, text)

    if args.flags and args.multirun:
        raise ValueError("-m runs a sweep, and --cfg and its like show something and stop: leave one of them out")
    with conf.session() as loader, explained():
        check(command, folders, parsed, multirun=args.multirun)
        # Hydra names a type that is internal; the public one has the same methods.
        context = HydraContext(config_loader=loader, callbacks=Callback())  # type: ignore[arg-type]
        if args.multirun:
            return sweep(command, parsed, context, run)
        config = hydra.compose(command, [*overrides, "hydra.mode=RUN"], return_hydra_config=True)
        if not args.flags:
            job = run_job(run, config, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
            return job.return_value  # raises what the task raised
    in_hydra([*args.flags, *overrides], command)


def in_hydra(argv: Sequence[str], command: str) -> None:
    """Runs Hydra's own command line, for flags that show something and stop."""
    conf.publish()
    before, sys.argv = sys.argv, ["dinfer", *argv]
    try:
        hydra.main(config_path=str(conf.folder()), config_name=command, version_base=conf.VERSION)(print)()
    finally:
        sys.argv = before


def roots(command: str, folders: Sequence[str]) -> set[str]:
    """All that an override may begin with. `folders`: further ones of configurations."""
    groups = [path.name for folder in folders for path in Path(folder).iterdir() if path.is_dir()]
    with conf.session():
        return {*conf.compose(command, []), *groups, conf.RECIPE, "hydra"}


def names(command: str, folders: Sequence[str]) -> set[str]:
    """All that an override may begin with, and options, since a user may forget to name their component."""
    described = [registry.describe(name) for registry in conf.GROUPS.values() for name in registry.names()]
    return roots(command, folders) | {option.name for description in described for option in description.options}


def check(command: str, folders: Sequence[str], overrides: Sequence[Override], *, multirun: bool) -> None:
    """Raises ValueError for wrong overrides that Hydra would accept, or refuse without naming them."""
    for override in overrides:
        key, swept = override.key_or_group, override.is_sweep_override()
        if swept and not multirun:
            raise ValueError(f"{override.input_line} has several values: add -m for a run with each of them")
        if key in (*conf.GROUPS, conf.RECIPE) and not swept and override.value() in ("", None):
            raise ValueError(
                f"{override.input_line} names no {key}: choose one of {', '.join(conf.choices(key))}, or leave it out"
            )
        if key in conf.GROUPS and not swept and not isinstance(override.value(), (str, list)):
            raise unknown(key, override.value(), conf.GROUPS[key].names())
        if override.is_add() or override.is_force_add():
            root, known = key.replace("/", ".").partition(".")[0], roots(command, folders)
            if root not in known:
                raise unknown("setting", key, sorted(known))


def numbered(path: Path) -> Path:
    """The path, in a sweep with the number of the point, so that no two points write one file."""
    settings = HydraConfig.get()
    return path.with_stem(f"{path.stem}-{settings.job.num}") if settings.mode == RunMode.MULTIRUN else path


def point(task: Task, settings: dict[str, Any], text: str | None) -> Missed | None:
    """Runs one point of a sweep. Returns why it has no result, if it has none, so that the other points still run."""
    job = HydraConfig.get()
    number = "\n" if job.job.num else ""
    print(f"{number}# {' '.join(job.overrides.task)}", flush=True)
    try:
        task(settings, text)
    except (*input_errors(), *failures()) as error:
        from dinfer.recipe.recipe import IncompatibleRecipe

        failed = not isinstance(error, IncompatibleRecipe)
        if failed and debugging():
            raise
        sys.stdout.flush()
        say(f"dinfer: {message(error)}")
        return Missed(message(error), failed)
    return None


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
