"""Reads names, options and docstrings of components without importing torch: from the literals in their source.

So the source is the one place that states them. If a module needs more than literals to say its options, it is imported
instead.
"""

import ast
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal, cast

CONTRACTS = ("dinfer.step.", "dinfer.abilities.")  # modules of what components derive from, which has no options
TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}


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


def declared(package: str, registry: str) -> Iterator[tuple[str, Classes | None]]:
    """The modules of a package, and the classes that each registers in `registry`; None for one to be imported."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations is not None
    trees: dict[str, ast.Module | None] = {}
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
                if name in known or source.startswith(CONTRACTS):
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
            given = {each.arg: _literal(each.value) for each in keywords}
            return OptionInfo(name, _literal(default), _literal(text), given.get("per_request", False), hint)
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
