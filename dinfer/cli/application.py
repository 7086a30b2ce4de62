"""Runs a command as a Hydra application: configuration, overrides, sweeps and --cfg are Hydra's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dinfer.cli import conf
from dinfer.cli.arguments import flags_of, split
from dinfer.cli.errors import debugging, failures, input_errors, message, reported
from dinfer.cli.names import check, spread
from dinfer.cli.sweep_points import Missed
from dinfer.cli.terminal import say
from dinfer.core.recipe import IncompatibleRecipe

Task = Callable[[dict[str, Any], str | None], None]


def launch(
    command: str, args: list[str], task: Task, *, switches: Mapping[str, str] | None = None, takes_text: bool = False
) -> None:
    """Calls `task(configuration, text)` once, or once for each point of a sweep.

    `conf/<command>.yaml` is the configuration; `switches` are flags that stand for an override.
    """
    schema = schema_of(command, args)
    found = split(args, roots=schema.roots, words=schema.words, switches=switches or {}, takes_text=takes_text)
    check(found.overrides, schema, multirun=found.multirun)
    if found.multirun:
        found.overrides = spread(found.overrides)
    conf.publish_components()

    def guarded(config: DictConfig) -> Missed | None:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        settings = {str(key): value for key, value in values.items()}  # type: ignore[union-attr]
        if found.multirun:
            return point(task, settings, found.text)
        # Inside Hydra, which would add lines of its own to an error that reaches it.
        with reported():
            task(settings, found.text)
        return None

    with TemporaryDirectory(prefix="dinfer-sweep-") as scratch, _errors_raised():
        # Hydra gives every sweep a folder; what a command has to keep, it writes itself.
        sweep = [f"hydra.sweep.dir='{scratch}'", "hydra.sweep.subdir=."] if found.multirun else []
        if any(text.startswith(("hydra.sweep.dir=", "hydra/launcher=")) for text in found.overrides):
            sweep = []  # jobs elsewhere need a folder that is there too, and outlives this process
        sys.argv = ["dinfer", *found.flags, *sweep, *found.overrides]
        hydra.main(version_base="1.3", config_path=str(conf.folder()), config_name=command)(guarded)()


def schema_of(command: str, args: list[str]) -> conf.Schema:
    """What a command with these arguments may be told; names in a folder of the user's are settings too."""
    extra = next((Path(value) for flag, value in flags_of(args) if flag in ("--config-dir", "-cd")), None)
    if extra is not None and not extra.is_dir():
        raise ValueError(f"--config-dir {extra}: there is no such folder")
    return conf.Schema(command, extra)


def numbered(path: Path) -> Path:
    """A file of one point of a sweep, which must not be that of another; outside of sweeps the path as it is."""
    settings = HydraConfig.get()
    return path.with_stem(f"{path.stem}-{settings.job.num}") if settings.mode == RunMode.MULTIRUN else path


def point(task: Task, settings: dict[str, Any], text: str | None) -> Missed | None:
    """Runs one point of a sweep and returns why it has no result, if it has none: the others run all the same."""
    job = HydraConfig.get()
    number = "\n" if job.job.num else ""
    print(f"{number}# {' '.join(job.overrides.task)}", flush=True)
    try:
        task(settings, text)
    except IncompatibleRecipe as error:
        return missed(error, failed=False)
    except (*input_errors(), *failures()) as error:
        return missed(error, failed=True)
    return None


def missed(error: BaseException, *, failed: bool) -> Missed:
    """Says at once why a point has no result."""
    if failed and debugging():
        raise error
    sys.stdout.flush()
    say(f"dinfer: {message(error)}")
    return Missed(message(error), failed)


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Lets Hydra raise its errors instead of printing them and leaving, for us to report."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
