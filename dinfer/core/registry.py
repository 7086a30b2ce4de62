"""Five name -> component tables, and the fields that make a component's options.

A component is a frozen dataclass: its fields are its configuration, and it owns no mutable state.
A module registers its components when it is imported. A registry finds the modules itself, in the folders of its name
in `dinfer.core` and in layers, so no central list is edited. Other distributions add components through entry points in
the groups `dinfer.model`, `dinfer.iteration`, `dinfer.decoder`, `dinfer.cache` and `dinfer.sampling`.

Names, options and docstrings are read without importing torch: from the literals in the source, the one place that
states them. If a module needs more than literals to say its options, it is imported instead.
"""

import ast
import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import pkgutil
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import GenericAlias
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dinfer.core.provided import packages

CONTRACTS = re.compile(r"dinfer\.(core\.step|\w+\.abilities)\.")  # of what components derive from, without options
TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
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


class Unreadable(Exception):
    """The module says something of a component in another way than by literals of a class statement."""


Classes = dict[str, Description]


def declared(packages: Sequence[str], registry: str) -> Iterator[tuple[str, Classes | None]]:
    """The modules of these packages, and the classes that each registers in `registry`; None for one to be imported."""
    trees: dict[str, ast.Module | None] = {}
    for package in packages:
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations is not None
        for path in found.submodule_search_locations:
            for module in pkgutil.iter_modules([path]):
                source = Path(path, f"{module.name}.py")
                readable = source.is_file()
                trees[f"{package}.{module.name}"] = ast.parse(source.read_text(encoding="utf-8")) if readable else None
    for name, tree in trees.items():
        try:
            yield name, None if tree is None else _registered(tree, registry, _classes(name, trees))
        except Unreadable:
            yield name, None


def _classes(module: str, trees: Mapping[str, ast.Module | None]) -> Classes:
    """The classes that a module has or imports from its package, as far as they can be read."""
    found: Classes = {}
    tree = trees.get(module)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            known = _classes(source, trees)
            for name in (alias.name for alias in node.names):
                if name in known or CONTRACTS.match(source):
                    found[name] = known.get(name, Description("", "", ()))
        elif isinstance(node, ast.ClassDef):
            bases = found.copy()
            found.pop(node.name, None)
            with suppress(Unreadable):
                found[node.name] = _described(node, bases)
    return found


def _described(node: ast.ClassDef, known: Classes) -> Description:
    """What a class says of itself, with the options of its bases. Raises Unreadable."""
    paper = ""
    options: dict[str, OptionInfo] = {}
    for base in reversed(node.bases):
        if not isinstance(base, ast.Name) or base.id not in known:
            raise Unreadable
        paper = known[base.id].paper or paper
        options |= {info.name: info for info in known[base.id].options}
    fields = any("dataclass" in ast.dump(each) for each in node.decorator_list)
    for statement in node.body:
        match statement:
            case ast.Assign([ast.Name("paper")], value):
                paper = _literal(value)
            case ast.AnnAssign(ast.Name(name), hint, value) if fields and "ClassVar" not in ast.dump(hint):
                options[name] = _option(name, _type(hint), value)
    return Description(inspect.cleandoc(ast.get_docstring(node) or "").split("\n")[0], paper, tuple(options.values()))


def _option(name: str, hint: Any, value: ast.expr | None) -> OptionInfo:
    match value:
        case ast.Call(ast.Name("option"), [default, text], keywords):
            per_request = any(each.arg == "per_request" and _literal(each.value) for each in keywords)
            return OptionInfo(name, _literal(default), _literal(text), per_request, hint)
        case None:
            raise Unreadable
    return OptionInfo(name, _literal(value), "", False, hint)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise Unreadable from error


def _type(node: ast.expr) -> Any:
    match node:
        case ast.Name(name) if name in TYPES:
            return TYPES[name]
        case ast.Constant(None):
            return None
        case ast.BinOp(left, ast.BitOr(), right):
            return _type(left) | _type(right)
        case ast.Subscript(ast.Name("Literal"), values):
            return cast(Any, Literal)[_literal(values)]
        case ast.Subscript(ast.Name("tuple"), ast.Tuple([item, ast.Constant(kind)])) if kind is ...:
            return GenericAlias(tuple, (_type(item), ...))
    raise Unreadable


def _registered(tree: ast.Module, registry: str, classes: Classes) -> Classes:
    """The classes by the names that their decorators give them. Raises Unreadable."""
    found: Classes = {}
    for node in tree.body:
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            match decorator:
                case ast.Call(ast.Attribute(ast.Name(owner), "register"), [name]) if owner == registry:
                    assert isinstance(node, ast.ClassDef)
                    if node.name not in classes:
                        raise Unreadable
                    found[_literal(name)] = classes[node.name]
    if len(found) < sum(isinstance(node, ast.Attribute) and node.attr == "register" for node in ast.walk(tree)):
        raise Unreadable
    return found


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

    A component with a `__post_init__` of its own may have left out that of `Component`.
    """
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


class Registry(Generic[T]):
    """`Registry("decoder", "dinfer.core.decoders", ...)` holds every component of these packages by name.

    Names and descriptions are read from the source. A module is imported when a component of it is needed.
    """

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind = kind
        self._packages = packages
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
        """The module and the description of what can be read from the source. Imports the modules that cannot be."""
        found: dict[str, tuple[str, Description]] = {}
        for module, registered in declared(self._packages, f"{self.kind.upper()}S"):
            if registered is None:
                importlib.import_module(module)
            found |= {name: (module, description) for name, description in (registered or {}).items()}
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

    def check(self, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The name and the options of `{"name": ..., option: ...}`. Raises ValueError for a name, an option or a type.

        Whether values are in range, the component says when it is built.
        """
        given = dict(config)
        if "name" not in given:
            raise ValueError(f"{self.kind} needs a `name`, one of: {', '.join(self.names())}")
        name = given.pop("name")
        hints = {info.name: info.hint for info in self.describe(name).options}
        for key in given:
            if key not in hints:
                raise unknown(f"option of {self.kind} {name!r}:", key, list(hints))
        return name, typed(hints, given, prefix=f"{self.kind}.")

    def build(self, config: Mapping[str, Any] | str | Any) -> Any:
        """A component from its name, from a mapping `{"name": ..., option: ...}`, or as it is."""
        if isinstance(config, str):
            config = {"name": config}
        if isinstance(config, Mapping):
            name, options = self.check(config)
            return self.get(name)(**options)
        if isinstance(config, tuple(self._table.values())):
            return config
        raise TypeError(f"{self.kind} must be a name, a mapping or a {self.kind} component, not {config!r}")


MODELS: Registry = Registry("model", *packages("models"))
ITERATIONS: Registry = Registry("iteration", *packages("iterations"))
DECODERS: Registry = Registry("decoder", *packages("decoders"))
CACHES: Registry = Registry("cache", *packages("caches"))
SAMPLINGS: Registry = Registry("sampling", *packages("sampling"))
REGISTRIES: tuple[Registry, ...] = (MODELS, ITERATIONS, DECODERS, CACHES, SAMPLINGS)
