"""Rewrites Hydra's errors: they name what is unknown, the nearest known name, and all names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from dinfer.recipe.registry import REGISTRIES, UnknownName, unknown

HINTS = {
    "model": " A folder or hub name is given as model.checkpoint={name}.",
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
    tree = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
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
