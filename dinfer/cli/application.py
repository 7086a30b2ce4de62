"""Runs a command as a Hydra application: configuration, overrides, launchers and --cfg are Hydra's."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from dinfer.cli import conf
from dinfer.cli.arguments import divided
from dinfer.cli.errors import debugging, failures, input_errors, message, reported
from dinfer.cli.explain import explained, parse
from dinfer.cli.recipe import located, ranks_of
from dinfer.cli.sweep_points import Missed, sweep
from dinfer.cli.terminal import say
from dinfer.parallel.started import check_copies, follows
from dinfer.recipe.registry import unknown

Task = Callable[[dict[str, Any], str | None], None]


def launch(args: Namespace, task: Task, *, takes_text: bool = False) -> None:
    """Calls `task(configuration, text)` once, or once for each point of a sweep.

    `conf/<command>.yaml` is the configuration.
    """
    command, folder = args.command, args.config_dir
    text, overrides = divided(args, cache(lambda: names(command, folder)), takes_text=takes_text)
    overrides += [f"hydra.searchpath={conf.searched(folder)}"] if folder else []
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
        check(command, folder, parsed, multirun=args.multirun)
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


def roots(command: str, folder: str | None) -> set[str]:
    """All that an override may begin with. `folder`: a further one of configurations."""
    groups = [path.name for path in Path(folder).iterdir() if path.is_dir()] if folder else []
    with conf.session():
        return {*conf.compose(command, []), *groups, conf.RECIPE, "hydra"}


def names(command: str, folder: str | None) -> set[str]:
    """All that an override may begin with, and options, since a user may forget to name their component."""
    described = [registry.describe(name) for registry in conf.GROUPS.values() for name in registry.names()]
    return roots(command, folder) | {option.name for description in described for option in description.options}


def check(command: str, folder: str | None, overrides: Sequence[Override], *, multirun: bool) -> None:
    """Raises ValueError for wrong overrides that Hydra would accept, or refuse without naming them."""
    for override in overrides:
        key, swept = override.key_or_group, override.is_sweep_override()
        if swept and not multirun:
            raise ValueError(f"{override.input_line} has several values: add -m for a run with each of them")
        if key in conf.GROUPS and not swept and not isinstance(override.value(), (str, list)):
            raise unknown(key, override.value(), conf.GROUPS[key].names())
        if override.is_add() or override.is_force_add():
            root, known = key.replace("/", ".").partition(".")[0], roots(command, folder)
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
