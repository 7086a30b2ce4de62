"""Finds the folder `conf`, and composes configurations of it and of overrides with Hydra."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dinfer.cli.explain import components, explained, tree_of
from dinfer.recipe.registry import REGISTRIES, Registry

GROUPS: dict[str, Registry] = {registry.kind: registry for registry in REGISTRIES}
PRIMARY = "config"  # what every command's configuration includes
RECIPE = "recipe"  # the group of presets that choose several components at once
VERSION = "1.3"  # of Hydra, whose defaults hold


def folder() -> Path:
    """`dinfer/conf` of an installed wheel, else `conf` of the checkout."""
    installed = Path(str(resources.files("dinfer") / "conf"))
    return installed if installed.is_dir() else installed.parents[1] / "conf"


def searched(extra: str) -> str:
    """The value of `hydra.searchpath` that adds a user's folder. Raises ValueError."""
    if not Path(extra).is_dir():
        raise ValueError(f"--config-dir {extra}: there is no such folder")
    quoted = str(Path(extra).resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"['file://{quoted}']"


def read(path: Path) -> dict[str, Any]:
    """A YAML file as it stands, interpolations unresolved. Raises ValueError."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping of names to values")
    return {str(key): value for key, value in content.items()}


@cache
def publish() -> None:
    """Registers with Hydra what has no file in `conf`: the components with their options, and small presets."""
    store = ConfigStore.instance().store
    for kind, registry in GROUPS.items():
        for name in registry.names():
            options = {info.name: info.default for info in registry.describe(name).options}
            store(group=kind, name=name, node={"name": name, **options}, provider="dinfer")
    for kind, presets in read(folder() / "presets.yaml").items():
        for name, preset in presets.items():
            base, options = preset.pop("of"), preset
            store(group=kind, name=name, node={"defaults": [base, "_self_"], **options}, provider="dinfer")


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Hydra with our configuration; within another session, that one."""
    publish()
    running = GlobalHydra.instance()
    if running.is_initialized():
        yield running.config_loader()
        return
    with hydra.initialize_config_dir(version_base=VERSION, config_dir=str(folder())):
        yield GlobalHydra.instance().config_loader()


@dataclass(frozen=True, slots=True)
class Preset:
    """What a choice of `model` composes into."""

    options: dict[str, Any]  # of the model, its family as `name`
    recipe: dict[str, str]  # the choice of each other component


@cache
def preset(model: str) -> Preset:
    """What `model=NAME` means. Raises ValueError."""
    with session(), explained():
        config = hydra.compose(PRIMARY, [f"model={model}"], return_hydra_config=True)
    chosen = config.hydra.runtime.choices
    return Preset(components(config)["model"], {kind: chosen[kind] for kind in GROUPS if kind != "model"})


@cache
def choices(kind: str) -> list[str]:
    """All that may be chosen for a component."""
    with session() as loader:
        return loader.get_group_options(kind)


def compose(name: str, overrides: list[str]) -> dict[str, Any]:
    """The configuration of a command with these overrides, in a session. Raises ValueError."""
    with explained():
        return values_of(hydra.compose(name, overrides))


def values_of(config: DictConfig) -> dict[str, Any]:
    """The settings, with components that are complete. Raises ValueError."""
    components(config)
    return tree_of(config, resolve=True)


def chosen(kind: str) -> str:
    """What the running command's configuration chooses of a group, by name."""
    return str(HydraConfig.get().runtime.choices[kind])


def with_recipe(command: str, recipe: str) -> dict[str, Any]:
    """The running command's configuration with another preset of components. Raises ValueError."""
    given = HydraConfig.get().overrides  # those of Hydra hold the folder of --config-dir
    return compose(command, [*given.hydra, *given.task, f"{RECIPE}={recipe}"])
