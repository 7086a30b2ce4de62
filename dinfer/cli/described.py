"""What components are, without importing them: from a table, `components.json`, that a tool has written.

So a command says at once what there is. A module that the table does not have, or whose sources have changed since, is
imported instead.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal, cast

import dinfer
from dinfer.core.registry import Description, OptionInfo

TABLE = Path(__file__).with_name("components.json")
TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "None": None}


@cache
def table() -> dict[str, Any]:
    """What `python -m tools.component_pages` has written of each module, for as long as its sources are the same."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}


def digest(sources: Sequence[str]) -> str:
    """Of these files, by their paths below the package; empty if one is not there."""
    try:
        return hashlib.blake2b(b"".join(map(_source, sources)), digest_size=8).hexdigest()
    except OSError:
        return ""


@cache
def _source(path: str) -> bytes:
    return Path(dinfer.__path__[0], path).read_bytes()


def described(module: str, kind: str) -> dict[str, Description] | None:
    """The components of that kind in a module; None for a module that is to be imported."""
    known = table().get(module)
    if known is None or known["digest"] != digest(known["sources"]):
        return None
    return {
        name: Description(summary, paper, tuple(_option(*each) for each in options))
        for name, (summary, paper, options) in known.get(kind, {}).items()
    }


def _option(name: str, default: Any, help: str, per_request: bool, hint: Any) -> OptionInfo:
    return OptionInfo(name, tuple(default) if isinstance(default, list) else default, help, per_request, _type(hint))


def _type(said: Any) -> Any:
    """A type as the table has it: a name, or a list of a kind and what is in it."""
    if isinstance(said, str):
        return TYPES[said]
    kind, *parts = said
    if kind == "Literal":
        return cast(Any, Literal)[tuple(parts)]
    return GenericAlias(tuple, (_type(parts[0]), ...)) if kind == "tuple" else reduce(or_, map(_type, parts))
