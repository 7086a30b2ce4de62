"""The configuration folder: where it is, which choices each group has, which settings there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from dinfer.core.registry import REGISTRIES, Registry, options_of

GROUPS: dict[str, Registry] = {registry.kind: registry for registry in REGISTRIES}
PRIMARY = "config"  # what every command's configuration includes
RECIPE = "recipe"  # the group of presets that choose several components at once


def folder() -> Path:
    """`dinfer/conf` of an installed wheel, else `conf` of the checkout."""
    installed = Path(str(resources.files("dinfer") / "conf"))
    return installed if installed.is_dir() else installed.parents[1] / "conf"


@dataclasses.dataclass(frozen=True)
class Schema:
    """The settings of one command; `extra` is a further configuration folder of the user's."""

    command: str
    extra: Path | None = None

    @classmethod
    def of(cls, config: DictConfig) -> Schema:
        """The schema of a running Hydra application."""
        sources = config.hydra.runtime.config_sources
        extra = [Path(source.path) for source in sources if source.provider == "command-line"]
        return cls(config.hydra.job.config_name, next(iter(extra), None))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that are no components, with their defaults, nested as in YAML."""
        merged: dict[str, Any] = {}
        for name in (PRIMARY, self.command):
            merged |= read(folder() / f"{name}.yaml")
        return {key: value for key, value in merged.items() if key not in ("defaults", "hydra")}

    @cached_property
    def _listed(self) -> dict[str, str]:
        """The choices in the defaults lists of the command and of what it includes."""
        found: dict[str, str] = {}
        for name in (PRIMARY, self.command):
            found |= choices_in(read(folder() / f"{name}.yaml"))
        return found

    def chosen(self, given: Mapping[str, str]) -> dict[str, str]:
        """The choice of each component, given what is chosen explicitly, a recipe among it.

        Presets of models bring components along; those of recipes weigh more, and what is given most.
        """
        named = self._listed | {**given}
        model = self.brought("model", named["model"])
        recipe = self.brought(RECIPE, named.get(RECIPE, "null"))
        return {kind: ({**self._listed, **model, **recipe, **given})[kind] for kind in GROUPS}

    @property
    def defaults(self) -> dict[str, str]:
        """The choice of each component that holds unless overridden."""
        return self.chosen({})

    @cached_property
    def recipes(self) -> list[str]:
        """The presets of several components at once, such as `dinfer tune` writes."""
        return sorted({path.stem for base in self._folders for path in (base / RECIPE).glob("*.yaml")})

    @property
    def _folders(self) -> list[Path]:
        return [base for base in (self.extra, folder()) if base is not None]

    def brought(self, group: str, name: str) -> dict[str, str]:
        """The choices of components that a preset brings along."""
        files = [base / group / f"{name}.yaml" for base in self._folders]
        found = choices_in(next((read(path) for path in files if path.is_file()), {}))
        return {kind: choice for kind, choice in found.items() if kind in GROUPS}

    @property
    def roots(self) -> list[str]:
        groups = {path.name for base in self._folders for path in base.iterdir() if path.is_dir()}
        return sorted({*GROUPS, *groups, *self.settings, "hydra"})

    @property
    def words(self) -> list[str]:
        """The names of everything that can be set: settings, components, and the options of all components."""
        options = {
            info.name for registry in GROUPS.values() for n in registry.names() for info in options_of(registry.get(n))
        }
        return sorted({*self.roots, *options})

    def choices(self, kind: str) -> dict[str, str]:
        """Every choice of a component, and the registered name that it is a choice of."""
        found = {name: name for name in GROUPS[kind].names()}
        for base in (folder(), self.extra):
            if base is not None and (base / kind).is_dir():
                found |= {path.stem: self._component(path) for path in sorted((base / kind).glob("*.yaml"))}
        return dict(sorted(found.items()))

    def options(self, kind: str, choice: str) -> list[str]:
        cls = GROUPS[kind].get(self.choices(kind)[choice])
        return [info.name for info in options_of(cls)]

    def _component(self, path: Path) -> str:
        """The registered name in a YAML, or in the one that it builds on."""
        content = read(path)
        bases = [entry for entry in content.get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
        if "name" not in content and bases:
            base = path.parent / f"{bases[0]}.yaml"
            return self._component(base if base.is_file() else folder() / path.parent.name / base.name)
        return str(content.get("name", path.stem))


def choices_in(content: dict[str, Any]) -> dict[str, str]:
    """What a defaults list chooses: of `override /decoder@_global_.decoder: fixed`, that the decoder is fixed."""
    entries = [entry for entry in content.get("defaults", []) if isinstance(entry, dict)]
    return {
        key.removeprefix("override ").lstrip("/").partition("@")[0]: str(value)
        for entry in entries
        for key, value in entry.items()
    }


def read(path: Path) -> dict[str, Any]:
    """A YAML file as it stands, interpolations unresolved."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping of names to values")
    return {str(key): value for key, value in content.items()}


def publish_components() -> None:
    """Gives Hydra the components that have no YAML here: those that other distributions registered."""
    for kind, registry in GROUPS.items():
        for name in registry.names():
            if not (folder() / kind / f"{name}.yaml").is_file():
                values = {info.name: info.default for info in options_of(registry.get(name))}
                ConfigStore.instance().store(name=name, group=kind, node={"name": name, **values})
