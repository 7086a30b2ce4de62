"""The configuration: where the folder `conf` is, and what Hydra makes of it and of overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from dinfer.cli.explain import explained
from dinfer.cli.sweep_points import PointsSweeper
from dinfer.core.registry import REGISTRIES, Registry

GROUPS: dict[str, Registry] = {registry.kind: registry for registry in REGISTRIES}
PRIMARY = "config"  # what every command's configuration includes
RECIPE = "recipe"  # the group of presets that choose several components at once
HYDRA = {"version_base": "1.3"}


def folder() -> Path:
    """`dinfer/conf` of an installed wheel, else `conf` of the checkout."""
    installed = Path(str(resources.files("dinfer") / "conf"))
    return installed if installed.is_dir() else installed.parents[1] / "conf"


def read(path: Path) -> dict[str, Any]:
    """A YAML file as it stands, interpolations unresolved. Raises ValueError."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping of names to values")
    return {str(key): value for key, value in content.items()}


@cache
def publish() -> None:
    """Tells Hydra what has no file in `conf`: the components with their options, small presets, and our sweeper."""
    store = ConfigStore.instance().store
    for kind, registry in GROUPS.items():
        for name in registry.names():
            options = {info.name: info.default for info in registry.describe(name).options}
            store(group=kind, name=name, node={"name": name, **options}, provider="dinfer")
    for kind, presets in read(folder() / "presets.yaml").items():
        for name, preset in presets.items():
            base, options = preset.pop("of"), preset
            store(group=kind, name=name, node={"defaults": [base, "_self_"], **options}, provider="dinfer")
    Plugins.instance().register(PointsSweeper)
    store(group="hydra/sweeper", name="dinfer", node=PointsSweeper.CONFIG, provider="dinfer")


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Hydra with our configuration, where no command runs in it."""
    publish()
    with hydra.initialize_config_dir(config_dir=str(folder()), **HYDRA):
        yield GlobalHydra.instance().config_loader()


def compose(name: str, overrides: list[str]) -> dict[str, Any]:
    """The configuration of a command with these overrides, in a session. Raises ValueError."""
    with explained():
        return values_of(hydra.compose(name, overrides))


def values_of(config: DictConfig) -> dict[str, Any]:
    """The settings, whose components have known options with values of the declared types. Raises ValueError."""
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    check_components(values)
    return {str(key): value for key, value in values.items()}


def check_components(values: Mapping[Any, Any]) -> None:
    """Raises ValueError for a component that is missing, or has an option that is unknown or of another type."""
    for kind, registry in GROUPS.items():
        if not isinstance(values.get(kind), Mapping):
            raise ValueError(f"the configuration has no {kind}: choose one with {kind}=NAME")
        registry.check(values[kind])
