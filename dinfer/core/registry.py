"""Five name -> component tables.

A module registers its components when it is imported. A registry finds the modules itself, in the folders of its name
in `dinfer.core` and in layers, so no central list is edited. Other distributions add components through entry points in
the groups `dinfer.model`, `dinfer.iteration`, `dinfer.decoder`, `dinfer.cache` and `dinfer.sampling`.

A layer may know names, options and docstrings without importing torch (`described.py`). Other modules are imported.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakValueDictionary

from dinfer.core.options import (  # noqa: F401, components import both from here
    OptionInfo,
    UnknownName,
    brief,
    changed,
    check_options,
    check_range,
    option,
    options_of,
    typed,
    unknown,
    values_of,
)  # fmt: skip
from dinfer.core.provided import homes, packages

T = TypeVar("T", bound=type)
entry_points = cache(importlib.metadata.entry_points)


@dataclass(frozen=True, slots=True)
class Description:
    """A component as `dinfer list` shows it."""

    summary: str  # the first line of the docstring
    paper: str
    options: tuple[OptionInfo, ...]


def check_types(kind: str, component: Any) -> None:
    """Raises ValueError for an option of another type than declared, in a component that Python code built itself.

    A registry has checked what it builds. A component with a `__post_init__` of its own may have left out that of
    `Component`.
    """
    if Registry.built.get(id(component)) is component:
        return
    typed({info.name: info.hint for info in options_of(component)}, values_of(component), prefix=f"{kind}.")
    check_options(kind, component)


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
