"""Writes docs/components/*.md, one page for each registry, from the components' docstrings and options.

    python -m tools.component_pages

A test fails if the pages differ from the code.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from dinfer.cli.commands.list import ROLES
from dinfer.recipe.registry import CACHES, REGISTRIES, Registry, options_of

FOLDER = Path(__file__).parents[1] / "docs" / "components"
BLOCK = 32  # length of an attention block, to ask caches whether they are exact


def page(registry: Registry) -> str:
    """One registry as Markdown."""
    role = ROLES[registry.kind]
    parts = [
        f"# {registry.kind.capitalize()}s",
        f"{role[0].upper()}{role[1:]}. Written by `python -m tools.component_pages`; `dinfer list {registry.kind}` "
        "shows the same.",
    ]
    for name in registry.names():
        parts.append(section(registry, name))
    return "\n\n".join(parts) + "\n"


def section(registry: Registry, name: str) -> str:
    """One component: what it is, its source, formula and options."""
    cls = registry.get(name)
    module = inspect.cleandoc(importlib.import_module(cls.__module__).__doc__ or "").split("\n\n")[0]
    lines = [f"## `{name}`", module.replace("\n", " "), inspect.cleandoc(cls.__doc__ or "")]
    if cls.paper:
        lines.append(f"Source: {cls.paper}.")
    if registry is CACHES:
        lines.append(exactness(cls()))
    if options := options_of(cls):
        rows = ["| option | default | per request | |", "| --- | --- | --- | --- |"]
        for info in options:
            default = "null" if info.default is None else info.default
            rows.append(f"| `{info.name}` | `{default}` | {'yes' if info.per_request else ''} | {info.help} |")
        lines.append("\n".join(rows))
    return "\n\n".join(lines)


def exactness(cache: Any) -> str:
    """The models for which a cache changes no token."""
    kinds = {
        "every model": (0, 0), "block-causal models": (BLOCK, 1), "block-causal models in whole blocks": (BLOCK, BLOCK),
        "causal models": (1, 1),
    }  # fmt: skip
    exact = [kind for kind, (block, grain) in kinds.items() if cache.exact((0, block, False), grain)]
    if exact[:1] == ["every model"]:
        exact = exact[:1]
    elif "block-causal models" in exact:
        exact.remove("block-causal models in whole blocks")
    return f"Exact for {' and for '.join(exact)}." if exact else "An approximation for every model."


def pages() -> dict[Path, str]:
    return {FOLDER / f"{registry.kind}.md": page(registry) for registry in REGISTRIES}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
