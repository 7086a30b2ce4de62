"""Writes a recipe as presets of the configuration, `conf/recipe/NAME.yaml` and its components: `recipe=NAME`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dinfer.analysis.outputs import check_file, write
from dinfer.cli import conf
from dinfer.recipe.registry import options_of


def target(path: Path) -> Path:
    """The file of a recipe. Raises ValueError for one that is none, or whose name a preset of dinfer's has."""
    folder, name, own = path.parent.parent, path.stem, conf.folder()
    if not re.fullmatch(rf"(.*/)?{conf.RECIPE}/[A-Za-z]\w*\.yaml", str(path)):
        raise ValueError(
            f"preset={path} must be FOLDER/{conf.RECIPE}/NAME.yaml, NAME of letters, digits and underscores"
        )
    taken = {path.stem for path in (own / conf.RECIPE).glob("*.yaml")} if folder.resolve() != own.resolve() else set()
    if name in taken | {choice for registry in conf.GROUPS.values() for choice in registry.names()}:
        raise ValueError(f"preset={path}: {name} is a component or recipe of dinfer's: choose another name")
    return path


def changed(kind: str, part: dict[str, Any]) -> dict[str, Any]:
    """The options of a component that are not at their defaults."""
    infos = options_of(conf.GROUPS[kind].get(part["name"]))
    defaults = {info.name: list(info.default) if isinstance(info.default, tuple) else info.default for info in infos}
    return {name: value for name, value in part.items() if name != "name" and value != defaults.get(name)}


def save(path: Path, parts: dict[str, dict[str, Any]], heading: Sequence[str]) -> list[Path]:
    """Writes the recipe, and a preset of each component with an option that is not at its default; all files.

    So a component of the recipe can be exchanged like any other, its options with it. Raises OSError.
    """
    comments = [f"# {line}" for line in heading]
    lines, files = ["# @package _global_", *comments, "defaults:"], {}
    for kind, part in parts.items():
        own = changed(kind, part)
        lines.append(f"  - override /{kind}: {path.stem if own else part['name']}")
        if own:
            text = f"defaults: [{part['name']}, _self_]\n{OmegaConf.to_yaml(own)}"
            files[path.parent.parent / kind / path.name] = "\n".join([*comments, text])
    files[path] = "\n".join(lines) + "\n"
    for file, text in files.items():
        check_file(file)
        write(file, text)
    return list(files)


def usage(path: Path, name: str) -> str:
    """The arguments that use a preset."""
    folder = path.parent.parent
    here = folder.resolve() == conf.folder().resolve()
    return f"{conf.RECIPE}={name}" if here else f"--config-dir {folder} {conf.RECIPE}={name}"
