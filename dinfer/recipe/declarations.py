"""Reads names, options and docstrings of components without importing torch: it runs class statements, not methods.

So the source is the one place that states them. If the classes of a module need more than annotated fields, the module
is imported instead.
"""

from __future__ import annotations  # `compile` inherits it, so that no type of a class has to be there

import ast
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Packages of what components derive from.
CONTRACTS = ("dinfer.step", "dinfer.abilities")


class Unreadable(Exception):
    """The module registers something in another way than by a decorator of a class statement."""


class Contract:
    """Stands for the contracts that components derive from. They have no options."""

    paper = ""


def declared(package: str, registry: str, scope: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, type] | None]]:
    """The modules of a package, and the classes that each registers in `registry`; None for one to be imported.

    `scope`: what class statements may name, beside each other.
    """
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations is not None
    trees: dict[str, ast.Module | None] = {}
    for path in found.submodule_search_locations:
        for module in pkgutil.iter_modules([path]):
            source = Path(path, f"{module.name}.py")
            readable = source.is_file()
            trees[f"{package}.{module.name}"] = ast.parse(source.read_text(encoding="utf-8")) if readable else None
    classes: dict[str, dict[str, type]] = {}
    for name, tree in trees.items():
        try:
            yield name, None if tree is None else _registered(tree, registry, _classes(name, trees, scope, classes))
        except Unreadable:
            yield name, None


def _classes(
    module: str, trees: Mapping[str, ast.Module | None], scope: Mapping[str, Any], done: dict[str, dict[str, type]]
) -> dict[str, type]:
    """The classes that a module has or imports from its package, as far as `scope` is all that they need."""
    tree = trees.get(module)
    if module in done or tree is None:
        return done.get(module, {})
    found: dict[str, type] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            classes = _classes(node.module or "", trees, scope, done)
            for name in (alias.name for alias in node.names):
                if name in classes or (node.module or "").startswith(CONTRACTS):
                    found[name] = classes.get(name) or type(name, (Contract,), {})
        elif isinstance(node, ast.ClassDef):
            names = {**scope, **found}
            try:
                exec(compile(ast.Module([_fields(node)], []), "declaration", "exec"), names)
                found[node.name] = names[node.name]
            except NameError:
                found.pop(node.name, None)
        else:  # a class within a condition, say, is one that only running the module defines
            for inner in ast.walk(node):
                if isinstance(inner, ast.ClassDef):
                    found.pop(inner.name, None)
    done[module] = found
    return found


def _fields(node: ast.ClassDef) -> ast.ClassDef:
    """The class with its docstring and its options alone."""
    body: list[ast.stmt] = [ast.Expr(ast.Constant(ast.get_docstring(node, clean=False) or ""))]
    for statement in node.body:
        match statement:
            case ast.Assign([ast.Name(name)]) if name == "paper":
                body.append(statement)
            case ast.AnnAssign(annotation=hint) if "ClassVar" not in ast.dump(hint):
                body.append(statement)
    kept = [one for one in node.decorator_list if "dataclass" in ast.dump(one)]
    return ast.fix_missing_locations(ast.ClassDef(node.name, node.bases, node.keywords, body, kept))


def _registered(tree: ast.Module, registry: str, classes: Mapping[str, type]) -> dict[str, type]:
    """The classes by the names that their decorators give them. Raises Unreadable."""
    found: dict[str, type] = {}
    calls = {node for node in ast.walk(tree) if isinstance(node, ast.Call) and _registers(node)}
    for node in tree.body:
        for call in calls & {*node.decorator_list} if isinstance(node, ast.ClassDef) else ():
            match call:
                case ast.Call(ast.Attribute(ast.Name(owner)), [ast.Constant(str(key))]) if owner == registry:
                    assert isinstance(node, ast.ClassDef)
                    if node.name not in classes:
                        raise Unreadable
                    found[key] = classes[node.name]
                    calls.remove(call)
    if calls:
        raise Unreadable
    return found


def _registers(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "register"
