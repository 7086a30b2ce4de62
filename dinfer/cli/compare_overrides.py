"""`compare.NAME=VALUE`: a second recipe that differs from the first in what is named so."""

import re
from typing import Any

from hydra.core.hydra_config import HydraConfig

from dinfer.cli import conf
from dinfer.cli.explain import parse
from dinfer.core.registry import unknown

_CHANGE = re.compile(r"compare(?:\.(?P<change>[^=]+=.*)|=.*)", re.DOTALL)
MAY_DIFFER = (*conf.GROUPS, "max_new_tokens")


def taken_out(words: list[str]) -> tuple[list[str], list[str]]:
    """The words without those that begin with `compare.`, and the overrides that these are. Raises ValueError."""
    found = {word: match for word in words if (match := _CHANGE.fullmatch(word))}
    for word, match in found.items():
        if not match["change"]:
            raise ValueError(f"{word!r} does not say what to change: write compare.decoder=NAME or compare.cache=NAME")
    return [word for word in words if word not in found], [match["change"] for match in found.values()]


def changed(command: str, changes: list[str]) -> dict[str, Any]:
    """The running command's configuration with the changes.

    Where they choose a component, the first recipe's options of that component do not hold. Raises ValueError.
    """
    keys = [parse(change).key_or_group for change in changes]
    for key in keys:
        if (root := key.partition(".")[0]) not in MAY_DIFFER:
            raise unknown("setting to compare:", root, list(MAY_DIFFER))
    given = HydraConfig.get().overrides.task
    kept = [text for text in given if parse(text).key_or_group.partition(".")[0] not in {*keys} & {*conf.GROUPS}]
    return conf.compose(command, [*kept, *changes])
