"""What components say of themselves, read from their source: names and options are known without importing torch.

A source file is the one place where a description is written, so nothing can be out of date. A module whose source
says it in another way than a plain class statement (a computed default, a registration in a function) is not
understood here (`Unreadable`); the registry then imports it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

CONTRACTS = "dinfer.core.protocols"  # its classes have no options


class Unreadable(Exception):
    """The source does not say it in a way that can be read without running it."""


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
    """A registered component, as `dinfer list` shows it."""

    summary: str  # the first line of the docstring
    paper: str
    remark: str
    options: tuple[OptionInfo, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of components that is not imported yet."""

    name: str
    registered: Mapping[str, Description]


def modules(package: str, registry: str) -> Iterator[Module | str]:
    """The modules of a package with what they register in `registry`; the bare name of one that cannot be read."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations is not None
    trees: dict[str, ast.Module] = {}
    for path in found.submodule_search_locations:
        for module in pkgutil.iter_modules([path]):
            source = Path(path, f"{module.name}.py")
            if source.is_file():
                trees[f"{package}.{module.name}"] = ast.parse(source.read_text(encoding="utf-8"))
            else:
                yield f"{package}.{module.name}"
    for name in trees:
        try:
            yield Module(name, dict(_registered(name, trees, registry)))
        except Unreadable:
            yield name


def _registered(name: str, trees: Mapping[str, ast.Module], registry: str) -> Iterator[tuple[str, Description]]:
    calls = [node for node in ast.walk(trees[name]) if _register_call(node)]
    for node in trees[name].body:
        if not isinstance(node, ast.ClassDef):
            continue
        for call in filter(_register_call, node.decorator_list):
            calls.remove(call)
            match call:
                case ast.Call(ast.Attribute(ast.Name(owner)), [ast.Constant(str(key))]) if owner == registry:
                    yield key, _description(name, node, trees)
                case _:
                    raise Unreadable
    if calls:
        raise Unreadable


def _register_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register"


def _description(name: str, node: ast.ClassDef, trees: Mapping[str, ast.Module]) -> Description:
    line = list(_line_of_descent(name, node, trees))  # the farthest ancestor first
    options: dict[str, OptionInfo] = {}
    texts = {"paper": "", "remark": ""}
    for cls in line:
        for statement in cls.body:
            match statement:
                case ast.Assign([ast.Name(text)], value) if text in texts:
                    texts[text] = _literal(value)
                case ast.AnnAssign(ast.Name(field), hint) if _is_dataclass(cls) and "ClassVar" not in ast.dump(hint):
                    options[field] = _option(field, hint, statement.value)
    summary = inspect.cleandoc(ast.get_docstring(node) or "").split("\n")[0]
    return Description(summary, **texts, options=tuple(options.values()))


def _line_of_descent(name: str, node: ast.ClassDef, trees: Mapping[str, ast.Module]) -> Iterator[ast.ClassDef]:
    """The class behind its ancestors; those of the contracts, which have no options, are left out."""
    if len(node.bases) > 1 or not isinstance(node.bases[0] if node.bases else ast.Name("object"), ast.Name):
        raise Unreadable
    for base in node.bases:
        assert isinstance(base, ast.Name)
        home = _home(name, base.id, trees[name])
        if home != CONTRACTS:
            body = trees[home].body if home in trees else []
            parents = [cls for cls in body if isinstance(cls, ast.ClassDef) and cls.name == base.id]
            if len(parents) != 1:
                raise Unreadable
            yield from _line_of_descent(home, parents[0], trees)
    yield node


def _home(name: str, imported: str, tree: ast.Module) -> str:
    """The module that a name of this module comes from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and imported in [alias.asname or alias.name for alias in node.names]:
            return node.module or ""
    return name


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _option(name: str, hint: ast.expr, value: ast.expr | None) -> OptionInfo:
    match value:
        case ast.Call(ast.Name("option"), [default, help], keywords):
            given = {keyword.arg: _literal(keyword.value) for keyword in keywords}
            per_request = given.pop("per_request", False)
            if given:
                raise Unreadable
            return OptionInfo(name, _literal(default), _literal(help), per_request, _hint(hint))
        case _:
            raise Unreadable


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise Unreadable from error


def _hint(node: ast.expr) -> Any:
    try:
        return eval(compile(ast.Expression(node), "hint", "eval"), {"Literal": Literal})
    except NameError as error:
        raise Unreadable from error
