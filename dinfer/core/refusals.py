"""What cannot go together: abilities say it as data, and the registries say what to use instead."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from types import UnionType
from typing import Any

from dinfer.core.registry import REGISTRIES, Registry, options_of, values_of

PartsByKind = Mapping[str, Any]
"""What is to go together: model, iteration, decoder, cache, sampling, and runtime and request where they are known."""


@dataclass(frozen=True, slots=True)
class Trait:
    """What some parts of a kind have: a component as its options are, a model, a setting or a request."""

    has: Callable[[Any], bool]
    says: str = ""  # for the docs, where default options do not show which components have it
    instead: str = ""  # the setting without it, as a message says it


class Refusal:
    """Parts that cannot go together. `why` is one sentence; `{decoder}` in it is the name of the decoder."""

    def __init__(self, why: str, **sides: type | UnionType | Trait) -> None:
        """`sides`: for each kind of part what is in the way, as a base class or a trait; `recipe`: of all the parts."""
        self.why = why
        self.sides = {kind: side if isinstance(side, Trait) else _derived(side) for kind, side in sides.items()}

    def meets(self, parts: PartsByKind) -> bool:
        for kind, side in reversed(self.sides.items()):  # asked for every request with options of its own
            part = parts if kind == "recipe" else parts.get(kind)
            if part is None or not side.has(part):
                return False
        return True


def _derived(base: type | UnionType) -> Trait:
    return Trait(lambda part: isinstance(part, base))


COMPONENTS: dict[str, Registry] = {registry.kind: registry for registry in REGISTRIES if registry.kind != "model"}


def refused(table: Sequence[Refusal], parts: PartsByKind, changed: Set[str] | None = None) -> str | None:
    """Why parts cannot go together, and what to use instead; None: they can.

    `changed`: the kinds of parts that are not as they were when they could; None: all of them.
    """
    if (found := first_refusal(table, parts, changed)) is None:
        return None
    why = found.why.format(**{kind: registry.called(parts[kind]) for kind, registry in COMPONENTS.items()})
    reason, _, own = why.partition(" Use ")
    if own and _goes(table, parts, own):
        return why
    instead = [*_remedies(table, found, parts)]
    return f"{reason} Use {', or '.join(instead)}." if instead else reason


def first_refusal(table: Sequence[Refusal], parts: PartsByKind, changed: Set[str] | None = None) -> Refusal | None:
    """The first thing that stands in the way."""
    own = (refusal for kind in COMPONENTS for refusal in parts[kind].refusals)
    known = chain(_of_model(**parts), own, table, _declined(**parts))
    asked = known if changed is None else (refusal for refusal in known if not changed.isdisjoint(refusal.sides))
    return next((refusal for refusal in asked if refusal.meets(parts)), None)


def _of_model(model: Any, iteration: Any, **others: Any) -> Iterator[Refusal]:
    """What components say of the model, and blocks that do not fit its attention."""
    for kind, part in {"iteration": iteration, **others}.items():
        if kind in COMPONENTS and (why := part.incompatibility(model.spec)) is not None:
            yield Refusal(why, **{kind: Trait(lambda part: part.incompatibility(model.spec) is not None)})
    block, attention = iteration.block, model.spec.causal_block
    if attention and block and block % attention and attention % block:
        below = block // attention * attention
        fitting = " or ".join(str(fit) for fit in (below, below + attention) if fit)
        yield Refusal(
            f"iteration.block={block} must be a multiple of the model's attention block, {attention}, or divide it.",
            iteration=Trait(lambda part: part.block == block, instead=f"iteration.block={fitting}"),
        )


def _declined(decoder: Any, sampling: Any, **others: Any) -> Iterator[Refusal]:
    """The options of the sampling that the decoder cannot honour."""
    values, neutral = values_of(sampling), sampling.neutral

    def refusal(name: str) -> Refusal:
        return Refusal(
            f"{{decoder}} cannot honour sampling.{name}={values.get(name)}.",
            sampling=Trait(lambda sampling: True, instead=f"sampling.{name}={neutral.get(name)}"),
            decoder=Trait(lambda decoder: name in decoder.refuses),
        )

    return (refusal(name) for name in decoder.refuses if values.get(name) != neutral.get(name))


def _remedies(table: Sequence[Refusal], found: Refusal, parts: PartsByKind) -> Iterator[str]:
    """For each side of a refusal, the setting without it, or the components that go with the other parts.

    If none goes with all of them, two components or three that go together.
    """
    spec, alone = parts["model"].spec, False
    for kind, side in found.sides.items():
        names: list[str] = []
        if kind in COMPONENTS and not side.instead:
            others = _others(COMPONENTS[kind], parts[kind], spec)
            names = [name for name, other in others if first_refusal(table, {**parts, kind: other}) is None]
        if names:
            alone = True
            yield f"{kind}={' or '.join(part for part in (', '.join(names[:-1]), names[-1]) if part)}"
        elif side.instead and _goes(table, parts, side.instead):
            alone = True
            yield side.instead
    if not alone and (several := _together(table, {*found.sides}, parts)):
        yield several


def _together(table: Sequence[Refusal], sides: Set[str], parts: PartsByKind) -> str:
    """The fewest components that together go with the other parts, one of `sides` among them; "": there are none."""
    spec = parts["model"].spec
    others = {kind: [*_others(COMPONENTS[kind], parts[kind], spec)] for kind in ("iteration", "decoder", "cache")}
    for kinds in chain(combinations(others, 2), [tuple(others)]):
        for chosen in product(*(others[kind] for kind in kinds)) if sides & {*kinds} else ():
            changed = {**parts, **{kind: other for kind, (_, other) in zip(kinds, chosen, strict=True)}}
            if first_refusal(table, changed) is None:
                return " with ".join(f"{kind}={name}" for kind, (name, _) in zip(kinds, chosen, strict=True))
    return ""


def _goes(table: Sequence[Refusal], parts: PartsByKind, setting: str) -> bool:
    """Whether the parts go together with a setting as messages name it, such as cache.suffix=null, or cache=none."""
    named = re.match(r"(\w+)(?:\.(\w+))?=(\w+)", setting)
    if named is None or (kind := named[1]) not in COMPONENTS or kind not in parts:
        return True
    spelt = {"null": None, "None": None, "true": True, "false": False, "True": True, "False": False}
    part, value = parts[kind], spelt.get(named[3], named[3])
    with suppress(TypeError, ValueError):
        if named[2] is None:
            part = dict(_others(COMPONENTS[kind], part, parts["model"].spec)).get(named[3], part)
        else:
            part = replace(part, **{named[2]: int(value) if isinstance(value, str) and value.isdigit() else value})
        return first_refusal(table, {**parts, kind: part}) is None
    return False


def _others(registry: Registry, part: Any, spec: Any) -> Iterator[tuple[str, Any]]:
    """The other components of a kind, at their defaults but for the block length."""
    for cls in (registry.get(name) for name in registry.names()):
        own = {"block"} & {info.name for info in options_of(cls)}
        with suppress(TypeError, ValueError):  # it needs an option, or another block
            other = cls(**{name: part.block for name in own if part.block}).fitted(spec)
            if cls is not type(part):
                yield registry.name_of(other), other
