"""Five name -> component tables, and the fields that make a component's options.

A component is a frozen dataclass: its fields are its configuration, and it owns no mutable state.
A module registers its components when it is imported. A registry finds the modules itself, in the folders of its name
in `dinfer.core` and in layers, so no central list is edited. Other distributions add components through entry points in
the groups `dinfer.model`, `dinfer.iteration`, `dinfer.decoder`, `dinfer.cache` and `dinfer.sampling`.

A layer may know names, options and docstrings without importing torch (`described.py`). Other modules are imported.
"""

import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import pkgutil
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakValueDictionary

from dinfer.core.provided import homes, packages

EXACT = 2**53  # per-request options are columns of one float64 tensor, which holds integers up to here
T = TypeVar("T", bound=type)
entry_points = cache(importlib.metadata.entry_points)
_hints = cache(get_type_hints)  # it compiles every annotation anew


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option as `dinfer list` shows it."""

    name: str
    default: Any
    help: str
    per_request: bool
    hint: Any  # the declared type, such as `float` or `Literal["a", "b"] | None`


@dataclass(frozen=True, slots=True)
class Description:
    """A component as `dinfer list` shows it."""

    summary: str  # the first line of the docstring
    paper: str
    options: tuple[OptionInfo, ...]


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
    """The values as their type hints want them; ValueError for one of another type, named with `prefix`.

    The values come from a command line or a configuration file, so 1 may stand for 1.0, and a word for a number.
    """
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{prefix}{name}={value!r} must be {_words(hints[name])}")
    return {name: float(value) if hints[name] is float else value for name, value in values.items()}


def check_types(kind: str, component: Any) -> None:
    """Raises ValueError for an option of another type than declared, in a component that Python code built itself.

    A registry has checked what it builds. A component with a `__post_init__` of its own may have left out that of
    `Component`.
    """
    if Registry.built.get(id(component)) is component:
        return
    typed({info.name: info.hint for info in options_of(component)}, values_of(component), prefix=f"{kind}.")
    check_options(kind, component)


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(item, parts[0]) for item in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint or hint not in (int, bool, str, type(None))


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, parts))
    if origin is tuple:
        return f"a list, each {_words(parts[0])}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}.get(hint, "null")


class Chosen(dict[str, Any]):
    """A mapping `{"name": ..., option: ...}` that a registry has checked. Nobody changes it."""


class Registry(Generic[T]):
    """`Registry("decoder", "dinfer.core.decoders", ...)` holds every component of these packages by name.

    A module that a layer describes is imported when a component of it is needed.
    """

    built: ClassVar[WeakValueDictionary[int, Any]] = WeakValueDictionary()  # all that any has built, by identity

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind = kind
        self.packages = packages
        self._table: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A class decorator. Raises ValueError for a name that another class has."""

        def add(cls: T) -> T:
            known = self._table.setdefault(name, cls)
            if known is not cls:
                raise ValueError(
                    f"{self.kind} {name!r} is already {known.__module__}.{known.__qualname__}: take another name, or "
                    f"call {self.kind.upper()}S.unregister({name!r}) first"
                )
            return cls

        return add

    def unregister(self, name: str) -> None:
        """Frees the name of a class that was registered, for a notebook that defines the class anew."""
        self._table.pop(name, None)

    @cached_property
    def _written(self) -> dict[str, tuple[str, Description]]:
        """The module and the description of what a layer describes. Imports the other modules."""
        layers = [importlib.import_module(f"dinfer.{home}.described") for home in homes("described.py")]
        found: dict[str, tuple[str, Description]] = {}
        for package in self.packages:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
                answers = (layer.described(module.name, self.kind) for layer in layers)
                told = next((answer for answer in answers if answer is not None), None)
                if told is None:
                    importlib.import_module(module.name)
                found |= {name: (module.name, description) for name, description in (told or {}).items()}
        return found

    @cached_property
    def _installed(self) -> importlib.metadata.EntryPoints:
        """Components of other distributions."""
        return entry_points().select(group=f"dinfer.{self.kind}")

    def names(self) -> list[str]:
        return sorted({*self._written, *self._installed.names, *self._table})

    def name_of(self, component: Any) -> str:
        """The name that a component's class is registered under, or else that of the class."""
        names = (name for name in self.names() if self.get(name) is type(component))
        return next(names, type(component).__name__)

    def called(self, component: Any) -> str:
        """How a message names a component: as `kind=name`, which is how it is written on the command line."""
        return f"{self.kind}={self.name_of(component)}"

    def get(self, name: str) -> T:
        """The class of that name. Raises UnknownName."""
        if name not in self.names():
            raise unknown(self.kind, name, self.names())
        if name in self._written:
            importlib.import_module(self._written[name][0])  # it registers the class, and refuses another of its name
        for entry in self._installed.select(name=name):
            self.register(name)(entry.load())
        return self._table[name]

    def describe(self, name: str) -> Description:
        """Summary, paper and options of a component, which is not imported for that. Raises UnknownName."""
        if name in self._written and name not in self._table:
            return self._written[name][1]
        cls: Any = self.get(name)
        return Description(inspect.cleandoc(cls.__doc__ or "").split("\n")[0], cls.paper, tuple(options_of(cls)))

    def check(self, config: Mapping[str, Any]) -> Chosen:
        """The name and the options of `{"name": ..., option: ...}`. Raises ValueError for a name, an option or a type.

        Whether values are in range, the component says when it is built.
        """
        if isinstance(config, Chosen):
            return config
        given = dict(config)
        if "name" not in given:
            raise ValueError(f"{self.kind} needs a `name`, one of: {', '.join(self.names())}")
        name = given.pop("name")
        hints = {info.name: info.hint for info in self.describe(name).options}
        for key in given:
            if key not in hints:
                raise unknown(f"option of {self.kind} {name!r}:", key, list(hints))
        return Chosen({"name": name, **typed(hints, given, prefix=f"{self.kind}.")})

    def build(self, config: Mapping[str, Any] | str | Any) -> Any:
        """A component from its name, from a mapping `{"name": ..., option: ...}`, or as it is."""
        if isinstance(config, str):
            config = {"name": config}
        if isinstance(config, Mapping):
            options = dict(self.check(config))
            made = self.get(options.pop("name"))(**options)
            self.built[id(made)] = made
            return made
        if isinstance(config, tuple(self._table.values())):
            return config
        raise TypeError(f"{self.kind} must be a name, a mapping or a {self.kind} component, not {config!r}")


MODELS: Registry = Registry("model", *packages("models"))
ITERATIONS: Registry = Registry("iteration", *packages("iterations"))
DECODERS: Registry = Registry("decoder", *packages("decoders"))
CACHES: Registry = Registry("cache", *packages("caches"))
SAMPLINGS: Registry = Registry("sampling", *packages("sampling"))
REGISTRIES: tuple[Registry, ...] = (MODELS, ITERATIONS, DECODERS, CACHES, SAMPLINGS)
