"""Writes docs/components/*.md: one page for each registry, from the components' docstrings and options, and one of
what cannot go together, from what abilities and components refuse. And dinfer/cli/components.json, from which commands
know components without importing them.

    python -m tools.component_pages

A test fails if they differ from the code.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from dinfer.cli.commands.list import ROLES
from dinfer.cli.described import TABLE, digest
from dinfer.core.recipe.recipe import all_refusals
from dinfer.core.refusals import COMPONENTS, Trait
from dinfer.core.registry import CACHES, DECODERS, MODELS, REGISTRIES, OptionInfo, Registry, options_of
from dinfer.core.step.window import exact as exact_with
from dinfer.core.terms.spec import AttentionLayout

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "components"
RESULTS = ROOT / "benchmarks" / "results"
CONTRACTS = re.compile(r"dinfer\.(core\.step|\w+\.abilities)\.")  # of what components derive from, without options
BLOCK = 32  # length of an attention block, to ask caches whether they are exact
# Ideas in the order of the page, and components by idea. A component that is not here comes last.
IDEAS = {
    "decoder": {
        "Sure tokens first": "threshold hierarchical factor entropy_bound credit calibrated klass dawn",
        "A fixed number of steps": "fixed dream prophet",
        "Second thoughts: edit, mask again, verify": "joint_threshold insert_delete dmax remasking wino s2d2",
        "A length that grows": "daedal",
        "Noise instead of masks": "renoise",
    },
    "iteration": {
        "One block after the other": "blockwise block_diffusion smooth self_conditioned",
        "Several blocks at once": "multi_block dmax lopa",
        "No blocks": "full",
    },
    "cache": {
        "Exact": "none block",
        "A window around the active block": "dual prefix vicinity",
        "Chosen positions": "delayed adaptive d2cache",
        "A window around the first mask": "narrow_block narrow_dual",
    },
}
# The result file that has a component at its defaults, where it is not the first one.
EVERYTHING = "tiny-everything-h200"
MEASURED = {
    "joint_threshold": "tiny-llada2-quality", "s2d2": "tiny-llada2-further-cpu", "block": "tiny-llada2-quality",
    "calibrated": "tiny-further-prior-cpu", "prophet": "tiny-further-more-cpu", "daedal": "tiny-further-more-cpu",
    "d2cache": "tiny-further-more-cpu", "when_sure": "tiny-looking-cpu",
    "dmax": "multi-block-tiny-llada2-multi-block-h200",
    "insert_delete": "multi-block-tiny-llada2-insert-delete-cpu",
}  # fmt: skip


def page(registry: Registry) -> str:
    """One registry as Markdown."""
    kind, role = registry.kind, ROLES[registry.kind]
    groups = {
        idea: [name for name in names.split() if name in registry.names()]
        for idea, names in IDEAS.get(kind, {}).items()
    }
    rest = [name for name in registry.names() if not any(name in names for names in groups.values())]
    groups |= {"Others" if groups else "": rest} if rest else {}
    parts = [
        f"# {kind.capitalize()}s",
        f"{role[0].upper()}{role[1:]}. `dinfer list {kind}` shows the same. "
        "A star marks options that may differ from request to request.",
    ]
    if registry in (DECODERS, CACHES):
        parts.append(table(registry, [name for names in groups.values() for name in names]))
    if common := shared(registry):
        parts += [f"Options of several {kind}s:", rows(list(common.values()))]
    for idea, names in groups.items():
        parts += [f"## {idea}"] if idea else []
        parts += [section(registry, name, set(common), "###" if idea else "##") for name in names]
    return "\n\n".join(parts) + "\n"


def table(registry: Registry, names: list[str]) -> str:
    """What each component gives on a model in the box."""
    head = [registry.kind, "accuracy", "tokens a forward", "with"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    lines += [f"| {' | '.join([f'[`{name}`](#{name})', *measured(registry, name)])} |" for name in names]
    rest = "`cache=none`" if registry is DECODERS else "`decoder=threshold`"
    return "\n".join(lines) + (
        "\n\nMeasured on 500 held-out problems with options at their defaults ([Results](../results.md)): on `tiny` "
        f"with `iteration=blockwise` and {rest}, unless said. -: not measured."
    )


def measured(registry: Registry, name: str) -> list[str]:
    """Accuracy, tokens per forward, and the recipe: the component at its defaults, a cache with `threshold`."""
    file = MEASURED.get(name, EVERYTHING)
    decoder, caches = (name, ("none", "dual", "block")) if registry is DECODERS else ("threshold", (name,))
    usual = {info.name: info.default for info in options_of(DECODERS.get(decoder))}
    for cache in caches:
        for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]:
            given = dict(part.split("=") for part in row["options"].split())
            if (row["decoder"], row["cache"]) == (decoder, cache) and all(
                str(usual[key]) == given[key] for key in given
            ):
                model = re.sub(r"^multi-block-|-(everything|quality|further|prior|more|looking|h200|cpu)", "", file)
                recipe = [model, row["iteration"], *([row["cache"]] if registry is DECODERS else [])]
                usual_recipe = recipe == ["tiny", "blockwise", "none"][: len(recipe)]
                shown = "" if usual_recipe else ", ".join(f"`{part}`" for part in recipe)
                return [f"{row['accuracy']:.1f}%", f"{row['tpf']:.2f}", shown]
    return ["-", "-", ""]


def owner(cls: type, name: str) -> type:
    """The class that declares an option of a component."""
    return next(base for base in cls.__mro__ if name in inspect.get_annotations(base))


def shared(registry: Registry) -> dict[str, OptionInfo]:
    """Options that several components have from a class that is no component itself."""
    classes = [registry.get(name) for name in registry.names()]
    found: dict[str, list[OptionInfo]] = {}
    for cls in classes:
        for info in options_of(cls):
            if owner(cls, info.name) not in classes:
                found.setdefault(info.name, []).append(info)
    return {
        name: infos[0] for name, infos in found.items() if len(infos) > 1 and all(info == infos[0] for info in infos)
    }


def section(registry: Registry, name: str, common: set[str], level: str) -> str:
    """One component: what it is, its source and options."""
    cls = registry.get(name)
    summary, _, more = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    family = inspect.cleandoc(importlib.import_module(cls.__module__).__doc__ or "").partition("\n\n")[0]
    lines = [f"{level} `{name}`", *([re.sub(r" \([^()]*\)\.$", ".", family)] if registry is MODELS else []), summary]
    lines.append(more)
    if cls.paper:
        lines.append(f"Source: {cls.paper}.")
    if registry is CACHES:
        lines.append(exactness(cls()))
    parents = {base: n for n in registry.names() if (base := registry.get(n)) is not cls and issubclass(cls, base)}
    classes = [registry.get(each) for each in registry.names()]
    inherited = {info.name for info in options_of(cls) if owner(cls, info.name) not in classes}
    own = [info for info in options_of(cls) if info.name not in common & inherited]
    own = [info for info in own if owner(cls, info.name) not in parents]
    if own:
        lines.append(rows(own))
    taken = [f"`{info.name}`" for info in options_of(cls) if info.name in common & inherited]
    lines += [f"Takes {', '.join(taken)} too."] if taken else []
    lines += [f"Takes the options of `{parent}` too." for parent in parents.values()]
    return "\n\n".join(line for line in lines if line)


def rows(options: list[OptionInfo]) -> str:
    """Options with their defaults, as a list."""
    stars = {True: r"\*", False: ""}
    defaults = {info.name: "null" if info.default is None else info.default for info in options}
    return "\n".join(f"* `{i.name}={defaults[i.name]}`{stars[i.per_request]}: {i.help}" for i in options)


def exactness(cache: Any) -> str:
    """The models for which a cache changes no token."""
    kinds = {
        "every model": (0, 0), "block-causal models": (BLOCK, 1), "block-causal models in whole blocks": (BLOCK, BLOCK),
        "causal models": (1, 1),
    }  # fmt: skip
    exact = [
        kind
        for kind, (block, alignment) in kinds.items()
        if exact_with(cache, AttentionLayout(0, block, False), alignment)
    ]
    if exact[:1] == ["every model"]:
        exact = exact[:1]
    elif "block-causal models" in exact:
        exact.remove("block-causal models in whole blocks")
    return f"Exact for {' and for '.join(exact)}." if exact else "An approximation for every model."


def refusals() -> str:
    """What cannot go together, as Markdown."""
    named = {
        f"{kind} `{name}`": registry.get(name) for kind, registry in COMPONENTS.items() for name in registry.names()
    }
    own = [(refusal, name) for name, cls in named.items() for refusal in cls.refusals]
    lines = [
        "# What cannot go together",
        "",
        "Such a combination is refused before any work. The error says why, and which components go with the rest. A "
        "component also refuses models that it cannot work with, and decoders the options of the sampling that they "
        "cannot honour.",
        "",
        "| this | not with |",
        "| --- | --- |",
    ]
    found: dict[str, dict[str, None]] = {}
    for refusal, whose in (*((refusal, "") for refusal in all_refusals()), *own):
        one, other, *_ = [*(words for words in (side(*item) for item in refusal.sides.items()) if words), whose]
        found.setdefault(one, {})[other] = None
        found.setdefault(other, {})[one] = None
    for one in sorted(found, key=lambda one: -len(found[one])):  # each pair once, where most others are refused
        others = [*found[one]]
        for other in others:
            found.get(other, {}).pop(one, None)
        lines += [f"| {one} | {'; '.join(others)} |"] if others else []
    return "\n".join(lines) + "\n"


def side(kind: str, trait: Trait) -> str:
    """One side of a refusal: in its own words, or the components that have it; none, where all have it."""
    if trait.says:
        return trait.says
    every = COMPONENTS[kind].names()
    names = [name for name in every if trait.has(COMPONENTS[kind].get(name)())]
    others = [name for name in every if name not in names]
    fewer, words = (others, f"every {kind} but") if len(others) < len(names) else (names, kind)
    return f"{words} {', '.join(f'`{name}`' for name in fewer)}" if others else ""


def pages() -> dict[Path, str]:
    written = {FOLDER / f"{registry.kind}.md": page(registry) for registry in REGISTRIES}
    return written | {FOLDER / "refusals.md": refusals()}


def components() -> dict[str, Any]:
    """The table of `dinfer.cli.described`: by module its sources, their digest, and its components by kind."""
    found: dict[str, Any] = {}
    for registry in REGISTRIES:
        classes = {name: registry.get(name) for name in registry.names()}
        for package in registry.packages:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                name = f"{package}.{module.name}"
                own = {key: cls for key, cls in classes.items() if cls.__module__ == name}
                bases = {base.__module__ for cls in own.values() for base in cls.__mro__}
                others = {base for base in bases if base.startswith("dinfer.") and not CONTRACTS.match(base)}
                modules = [name, *sorted(others - {name})]
                sources = [f"{one.removeprefix('dinfer.').replace('.', '/')}.py" for one in modules]
                entry = found.setdefault(name, {"sources": sources, "digest": digest(sources)})
                if own:
                    entry[registry.kind] = {key: entry_of(cls) for key, cls in own.items()}
    return found


def entry_of(cls: Any) -> list[Any]:
    """The summary, the paper and the options of a component."""
    summary = inspect.cleandoc(cls.__doc__ or "").split("\n")[0]
    return [summary, cls.paper, [[o.name, o.default, o.help, o.per_request, type_(o.hint)] for o in options_of(cls)]]


def type_(hint: Any) -> Any:
    """A type as the table has it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ["Literal", *parts]
    if origin is tuple:
        return ["tuple", type_(parts[0])]
    if origin in (Union, types.UnionType):
        return ["|", *map(type_, parts)]
    return "None" if hint is type(None) else hint.__name__


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(components().items())]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
