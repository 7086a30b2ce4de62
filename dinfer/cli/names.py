"""Checks overrides before Hydra does: a name that is not known is answered with the nearest one and all there are."""

from __future__ import annotations

import itertools
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from dinfer.cli.conf import GROUPS, RECIPE, Schema
from dinfer.core.registry import unknown


def check(overrides: list[str], schema: Schema, *, multirun: bool) -> None:
    """Raises ValueError for the first override that this command does not understand."""
    parsed = [parse(text) for text in overrides]
    given: dict[str, list[str]] = {}
    for override in parsed:
        if override.is_sweep_override() and not multirun:
            raise ValueError(f"{override.input_line} has several values: add -m for a run with each of them")
        kind = override.key_or_group
        if kind in (*GROUPS, RECIPE) and not override.is_delete():
            given[kind] = picked(override, list(schema.choices(kind) if kind in GROUPS else schema.recipes))
    # What models and recipes bring along: every pair of those that are named.
    pairs = itertools.product(*([{kind: name} for name in given[kind]] for kind in ("model", RECIPE) if kind in given))
    brought = [schema.chosen({kind: name for one in pair for kind, name in one.items()}) for pair in pairs]
    chosen = {kind: given.get(kind) or list(dict.fromkeys(one[kind] for one in brought)) for kind in GROUPS}
    for override in parsed:
        # What is added to settings that are a mapping (`+space.decoder.steps=[4,8]`) is for the command to judge.
        added = override.is_add() and isinstance(schema.settings.get(override.key_or_group.split(".")[0]), dict)
        if not added:
            check_key(override.key_or_group, chosen, schema)


def spread(overrides: list[str]) -> list[str]:
    """The overrides of a sweep, where options of components that are swept over are part of the product themselves.

    Else Hydra would set them before there are any points, in the default component, which may not have them.
    """
    swept = {one.key_or_group for one in map(parse, overrides) if one.is_sweep_override()} & set(GROUPS)
    found = []
    for text in overrides:
        one, value = parse(text), text.partition("=")[2]
        alone = one.key_or_group.partition(".")[0] in swept and "." in one.key_or_group and not one.is_sweep_override()
        found.append(f"{text.partition('=')[0]}=choice({value})" if alone and not one.is_delete() else text)
    return found


def parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{text!r} is not a valid override ({reason}); quote special characters: \"name='value'\""
        ) from error


def picked(override: Override, known: list[str]) -> list[str]:
    """The choices that an override of a group names."""
    value: Any = override.value()
    if isinstance(value, Glob):
        return value.filter(known)
    names = list(override.sweep_iterator()) if override.is_sweep_override() else [value]
    for name in names:
        if str(name) not in known:
            hint = ""
            if override.key_or_group == "model":
                hint = f" A folder or hub name is given as model.checkpoint={name}."
            raise ValueError(f"{unknown(override.key_or_group, str(name), known)}{hint}")
    return [str(name) for name in names]


def check_key(key: str, chosen: dict[str, list[str]], schema: Schema) -> None:
    """Raises UnknownName for a key that no chosen component and no setting has."""
    root, _, rest = key.replace("/", ".").partition(".")
    if root == "hydra" or (not rest and root in schema.roots):
        return
    if root in GROUPS:
        # In a sweep over components, an option goes to those that have it (`dinfer.cli.sweep_points`).
        options = sorted({name for choice in chosen[root] for name in schema.options(root, choice)})
        if rest.split(".")[0] not in ("name", *options):
            raise unknown(f"option of {root} {' or '.join(map(repr, chosen[root]))}:", rest, options)
        return
    known = dotted(schema.settings)
    if root not in schema.settings and root not in schema.roots:
        options = [f"{kind}.{name}" for kind in GROUPS for name in schema.options(kind, chosen[kind][0])]
        raise unknown("setting", key, sorted([*GROUPS, *known, *options]))
    if isinstance(schema.settings.get(root), dict) and key not in known:
        raise unknown(f"setting of {root}:", rest, [name.partition(".")[2] for name in known if name.startswith(root)])


def dotted(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """The full names of nested settings."""
    names: list[str] = []
    for key, value in settings.items():
        names += [f"{prefix}{key}", *(dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return names
