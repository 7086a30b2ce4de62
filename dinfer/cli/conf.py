"""Finds the folder `conf`, and composes configurations of it and of overrides with Hydra. Explains Hydra's errors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError

import dinfer.recipe.presets as presets
from dinfer.loading.files import GGUF, SMALL, local, locate
from dinfer.recipe.presets import folder
from dinfer.recipe.registry import REGISTRIES, Registry, UnknownName, unknown

HINTS = {
    "model": " A folder, a GGUF file or a hub name such as 'GSAI-ML/LLaDA-8B-Instruct' is good too.",
    "hydra/launcher": " Launchers of clusters need an extra: pip install 'dinfer[cluster]'.",
}


def parse(text: str) -> Override:
    """An override as Hydra understands it. Raises ValueError."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{text!r} is not a valid override ({reason}); quote special characters: \"name='value'\""
        ) from error


@contextmanager
def explained() -> Iterator[None]:
    """Raises a ValueError where Hydra does not know a name or a choice."""
    try:
        yield
    except MissingConfigException as error:
        file = error.missing_cfg_file or ""
        group, _, name = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
        if not name or error.options is None:
            raise
        hint = HINTS.get(group, "").format(name=name)
        raise UnknownName(f"{unknown(group, name, sorted(error.options))}{hint}") from error
    except ConfigCompositionException as error:
        cause = error.__cause__
        if not isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
            raise
        raise unknown_setting(str(cause.full_key), cause.parent_node) from error


def components(config: DictConfig) -> dict[str, dict[str, Any]]:
    """The components of a configuration. Raises ValueError for an option that is unknown or not of its type."""
    found = {}
    for registry in REGISTRIES:
        part = config.get(registry.kind)
        if not isinstance(part, DictConfig):
            raise ValueError(f"the configuration has no {registry.kind}: choose one with {registry.kind}=NAME")
        found[registry.kind] = tree_of(part, resolve=True)
        registry.check(found[registry.kind])
    return found


def tree_of(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    """A node and all below it, as plain dicts and lists."""
    try:
        tree = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except InterpolationResolutionError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{error.full_key}: {reason}. ${{...}} stands for another setting; write \\${{...}} for a text"
        ) from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def unknown_setting(key: str, parent: Any) -> UnknownName:
    """The error for a key that the node of the configuration above it does not have."""
    prefix, _, name = key.rpartition(".")
    tree = tree_of(parent, resolve=False) if isinstance(parent, DictConfig) else {}
    if not prefix:
        return unknown("setting", name, sorted(dotted(tree)))
    known = [sibling for sibling in tree if sibling != "name"]
    if "name" in tree:
        return unknown(f"option of {prefix} {tree['name']!r}:", name, known)
    return unknown(f"setting of {prefix}:", name, known)


def dotted(tree: dict[Any, Any], prefix: str = "") -> list[str]:
    """The full names of nested settings, but for Hydra's own and the names of components."""
    names: list[str] = []
    for key, value in tree.items():
        if f"{prefix}{key}" != "hydra" and not (prefix and key == "name"):
            names += [f"{prefix}{key}", *(dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return names


GROUPS: dict[str, Registry] = {registry.kind: registry for registry in REGISTRIES}
PRIMARY = "config"  # what every command's configuration includes
RECIPE = "recipe"  # the group of presets that choose several components at once
VERSION = "1.3"  # of Hydra, whose defaults hold
OPTIONS = "{}_options"  # the choice of a family without its recipe, which presets begin with


def searched(folders: Sequence[str]) -> str:
    """The value of `hydra.searchpath` that adds a user's folders. Raises ValueError."""
    for extra in folders:
        if not Path(extra).is_dir():
            raise ValueError(f"--config-dir {extra}: there is no such folder")
    paths = [str(Path(folder).resolve()).replace("\\", "\\\\").replace("'", "\\'") for folder in folders]
    return "[" + ",".join(f"'file://{path}'" for path in paths) + "]"


def read(path: Path) -> dict[str, Any]:
    """A YAML file as it stands, interpolations unresolved. Raises ValueError."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping of names to values")
    return {str(key): value for key, value in content.items()}


@cache
def publish() -> None:
    """Registers with Hydra what has no file in `conf`: the components with their options, and all presets.

    A model brings its recipe. So does a family, with the options of the model under another name.
    """
    store = partial(ConfigStore.instance().store, provider="dinfer")
    for kind, registry in GROUPS.items():
        for name in registry.names():
            node: dict[str, Any] = {"name": name}
            node |= {info.name: info.default for info in registry.describe(name).options}
            bare = name if kind != "model" else OPTIONS.format(name)
            store(group=kind, name=bare, node=node)
            if kind == "model":
                store(group=kind, name=name, node={"defaults": [bare, *brought(presets.of_family(name)), "_self_"]})
    for kind, named in presets.components().items():
        for name, options in named.items():
            base, own = options["of"], {key: value for key, value in options.items() if key != "of"}
            store(group=kind, name=name, node={"defaults": [base, "_self_"], **own})
    for name, preset in presets.presets().items():
        own = {key: value for key, value in preset.model.items() if key != "name"}
        bare = OPTIONS.format(preset.model["name"])
        store(group="model", name=name, node={"defaults": [bare, *brought(preset.recipe), "_self_"], **own})


def brought(recipe: Mapping[str, str]) -> list[dict[str, str]]:
    """The entries of Hydra's defaults list by which a model chooses the other components."""
    return [{f"override /{kind}@_global_.{kind}": name} for kind, name in recipe.items()]


def model_named(override: str) -> list[str]:
    """`model=FOLDER`, `model=FILE.gguf` and `model=HUB_NAME` as overrides that Hydra takes; others as they are."""
    given, _, name = override.partition("=")
    if (
        given != "model"
        or name in presets.presets()
        or not ("/" in name or name.endswith(GGUF) or local(name).is_dir())
    ):
        return [override]
    if (found := presets.named(name)) is None:
        from dinfer.loading.checkpoint import family_of, read_config

        found = presets.chosen(name, family_of(read_config(locate(name, wanted=SMALL))))
    quoted = str(found.model["checkpoint"]).replace("\\", "\\\\").replace("'", "\\'")
    return [f"model={found.name}", f"model.checkpoint='{quoted}'"]


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


@cache
def choices(kind: str) -> list[str]:
    """All that may be chosen for a component."""
    with session() as loader:
        return [name for name in loader.get_group_options(kind) if not name.endswith(OPTIONS.format(""))]


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
