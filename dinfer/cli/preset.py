"""Writes a recipe as a preset of the configuration: `conf/recipe/NAME.yaml`, used as `recipe=NAME`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dinfer.cli import conf
from dinfer.registry import options_of


def target(folder: Path, name: str) -> Path:
    """Where a preset goes. Raises ValueError for a name that cannot be one, or is that of a preset of dinfer's."""
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"name={name!r} must be letters, digits and underscores, with a letter first")
    if folder.resolve() != conf.folder().resolve() and (conf.folder() / conf.RECIPE / f"{name}.yaml").is_file():
        raise ValueError(f"name={name}: there is a recipe of that name in {conf.folder()}; choose another")
    return folder / conf.RECIPE / f"{name}.yaml"


def changed(kind: str, part: dict[str, Any]) -> dict[str, Any]:
    """The options of a component that are not at their defaults."""
    infos = options_of(conf.GROUPS[kind].get(part["name"]))
    defaults = {info.name: list(info.default) if isinstance(info.default, tuple) else info.default for info in infos}
    return {name: value for name, value in part.items() if name != "name" and value != defaults.get(name)}


def write(path: Path, parts: dict[str, dict[str, Any]], heading: Sequence[str]) -> None:
    """Writes the components, with each option that is not at its default. Raises OSError."""
    lines = ["# @package _global_", *(f"# {line}" for line in heading), "defaults:"]
    lines += [f"  - override /{kind}: {part['name']}" for kind, part in parts.items()]
    options = {kind: own for kind, part in parts.items() if (own := changed(kind, part))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + (f"\n{OmegaConf.to_yaml(options)}" if options else ""))


def usage(path: Path, name: str) -> str:
    """The arguments that use a preset."""
    folder = path.parent.parent
    here = folder.resolve() == conf.folder().resolve()
    return f"{conf.RECIPE}={name}" if here else f"--config-dir {folder} {conf.RECIPE}={name}"
