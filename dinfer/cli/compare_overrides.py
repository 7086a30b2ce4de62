"""`compare.NAME=VALUE`: a second recipe that differs from the first in what is named so."""

from __future__ import annotations

import re
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dinfer.cli.conf import GROUPS, Schema
from dinfer.cli.names import check, parse
from dinfer.core.registry import unknown

_CHANGE = re.compile(r"compare(?:\.(?P<change>[^=]+=.*)|=.*)", re.DOTALL)
MAY_DIFFER = (*GROUPS, "max_new_tokens")


def taken_out(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without those that begin with `compare.`, and the overrides that these are. Raises ValueError."""
    end = args.index("--") if "--" in args else len(args)
    found = {arg: match for arg in args[:end] if (match := _CHANGE.fullmatch(arg))}
    for arg, match in found.items():
        if not match["change"]:
            raise ValueError(f"{arg!r} does not say what to change: write compare.decoder=NAME or compare.cache=NAME")
    return [arg for arg in args[:end] if arg not in found] + args[end:], [m["change"] for m in found.values()]


def changed(schema: Schema, changes: list[str]) -> dict[str, Any]:
    """The running command's configuration with the changes.

    Where they choose a component, the first recipe's options of that component do not hold. Raises ValueError.
    """
    parsed = [parse(text) for text in changes]
    for change in parsed:
        root = change.key_or_group.partition(".")[0]
        if root not in MAY_DIFFER:
            raise unknown("setting to compare:", root, list(MAY_DIFFER))
    chosen = {change.key_or_group for change in parsed} & set(GROUPS)
    given = list(HydraConfig.get().overrides.task)
    kept = [text for text in given if parse(text).key_or_group.partition(".")[0] not in chosen]
    check([*kept, *changes], schema, multirun=False)
    config = hydra.compose(schema.command, overrides=[*kept, *changes])
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in values.items()}  # type: ignore[union-attr]
