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
from dinfer.cli.errors import reported
from dinfer.cli.names import check

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
    conf.publish_components()

    def guarded(config: DictConfig) -> None:
        # Inside Hydra, which would add lines of its own to an error that reaches it.
        with reported():
            announce()
            values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            task({str(key): value for key, value in values.items()}, found.text)  # type: ignore[union-attr]

    with TemporaryDirectory(prefix="dinfer-sweep-") as scratch, _errors_raised():
        # Hydra gives every sweep a folder; what a command has to keep, it writes itself.
        sweep = [f"hydra.sweep.dir='{scratch}'", "hydra.sweep.subdir=."] if found.multirun else []
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


def announce() -> None:
    """In a sweep, says which of its points comes next."""
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        number = "\n" if settings.job.num else ""
        print(f"{number}# {' '.join(settings.overrides.task)}", flush=True)


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
