"""Options: the fields of a component, their types and ranges.

A component is a frozen dataclass: its fields are its configuration, and it owns no mutable state.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

EXACT = 2**53  # per-request options are columns of one float64 tensor, which holds integers up to here


_hints = cache(get_type_hints)  # it compiles every annotation anew


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option as `dinfer list` shows it."""

    name: str
    default: Any
    help: str
    per_request: bool
    hint: Any  # the declared type, such as `float` or `Literal["a", "b"] | None`


class UnknownName(ValueError):
    """No component, option or command of that name; the message gives the nearest and lists all."""


def option(default: Any, help: str, *, least: float = 0, most: float = math.inf, per_request: bool = False) -> Any:
    """A dataclass field that is an option of a component, which refuses numbers outside `[least, most]`, NaN included.

    `per_request=True` lets each request bring its own value: it must be an int or a float, and the component reads
    it from the view it is given, never from `self`. Only decoders and samplings are given one.
    """
    if per_request and type(default) not in (int, float):
        raise TypeError(f"a per-request option must default to an int or a float, not {default!r}")
    range_ = {"least": least, "most": most}
    return dataclasses.field(default=default, metadata={"help": help, "per_request": per_request, "range": range_})


def options_of(component: Any) -> list[OptionInfo]:
    """The options of a component or of its class, in the order of definition."""
    hints = _hints(component if isinstance(component, type) else type(component))
    return [
        OptionInfo(f.name, f.default, f.metadata.get("help", ""), f.metadata.get("per_request", False), hints[f.name])
        for f in dataclasses.fields(component)
    ]


def values_of(component: Any) -> dict[str, Any]:
    """The options of a component by name, in the order of definition."""
    return {field.name: getattr(component, field.name) for field in dataclasses.fields(component)}


def changed(component: Any) -> dict[str, Any]:
    """The options of a component that are not at their defaults."""
    values = values_of(component)
    return {info.name: values[info.name] for info in options_of(component) if values[info.name] != info.default}


def brief(component: Any) -> str:
    """The class of a component, and its options that are not at their defaults."""
    return f"{type(component).__name__}({', '.join(f'{name}={value!r}' for name, value in changed(component).items())})"


def check_range(kind: str, component: Any, *names: str, least: float, most: float = math.inf, what: str = "") -> None:
    """Raises ValueError for a field of a dataclass outside `[least, most]`, NaN included; for its `__post_init__`.

    None passes. In the message, `kind` stands before the name, and `what` before the range.
    """
    allowed = f"between {least} and {most}" if most < math.inf else f"at least {least}" if least else "0 or more"
    for name in names:
        value = getattr(component, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{kind}{'.' if kind else ''}{name}={value} must be {what}{allowed}")


def check_options(kind: str, component: Any) -> None:
    """`check_range` for all options of a component that are numbers."""
    values = values_of(component)
    for field in dataclasses.fields(component):
        value = values[field.name]
        if type(value) is int and abs(value) > EXACT:
            raise ValueError(f"{kind}.{field.name}={value} is too large: at most 2**53 can be held exactly.")
        if "range" in field.metadata and type(value) in (int, float):
            check_range(kind, component, field.name, **field.metadata["range"])


def unknown(kind: str, got: object, known: list[str]) -> UnknownName:
    """The error for an unknown name. It suggests the nearest name and lists all."""
    close = difflib.get_close_matches(str(got), known, 1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UnknownName(f"unknown {kind} {got!r}.{hint} Known: {', '.join(known) or 'none'}.")


def typed(hints: Mapping[str, Any], values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """The values as their type hints want them: 1 may stand for 1.0. ValueError for another type, after `prefix`."""
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{prefix}{name}={value!r} must be {_words(hints[name])}")
    return {name: float(value) if hints[name] is float else value for name, value in values.items()}


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(item, parts[0]) for item in value)
    if dict in (origin, hint):
        return isinstance(value, dict) and all(_fits(item, part) for part in parts[1:] for item in value.values())
    return type(value) is hint or (type(value), hint) == (int, float) or hint not in (int, float, bool, str, type(None))


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, parts))
    if origin is tuple:
        return f"a list, each {_words(parts[0])}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "names and values"}
    return words.get(origin or hint, "null")
