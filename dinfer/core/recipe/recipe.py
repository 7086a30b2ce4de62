"""Puts a model and four components together. Refuses those that do not fit, before any work."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any, Self

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import TEXT_BEHIND
from dinfer.core.refusals import COMPONENTS, Refusal, Trait, refused
from dinfer.core.registry import brief, check_types, options_of, unknown
from dinfer.core.step.blame import blaming
from dinfer.core.step.contracts import CachePolicy, Component, Decoder, Iteration, Phase
from dinfer.core.step.mixins import MIXINS, Aligned, RefreshesWithin, Slides
from dinfer.core.step.model import Model, Parts, Sampling
from dinfer.core.step.request import Request, Resolved
from dinfer.core.step.shape import Extra, Sampled, Versioned, extras_of

REFUSALS = (  # beside those of abilities and components
    Refusal(
        "{iteration} moves on without entering a block, and {cache} refreshes keys only as a block is entered.",
        iteration=Slides,
        cache=Trait(
            lambda cache: not (isinstance(cache, RefreshesWithin) and cache.refreshes_within),
            "a cache that refreshes on entering a block alone",
        ),
    ),
    Refusal(
        "{iteration} counts blocks from position 0, as align=true does, and this model counts attention blocks from "
        "the prompt's end.",
        model=Trait(lambda model: model.spec.prompt_block, "a model whose attention blocks begin behind the prompt"),
        iteration=Trait(
            lambda iteration: isinstance(iteration, Aligned) and iteration.alignment > 1, "blocks with `align=true`"
        ),
    ),
    Refusal(
        "there is text behind a gap, but this model reads from left to right: it would fill the gap without having "
        "seen that text.",
        model=Trait(lambda model: model.spec.causal_block is not None, "a model that reads from left to right"),
        request=TEXT_BEHIND,
    ),
)
SEEDS = 2**53
USUAL = "standard"  # the sampling of a recipe that names none


class IncompatibleRecipe(ValueError):
    """The components cannot work together; the message says which, why, and what to use instead."""


@dataclass(frozen=True)
class Recipe(Parts):
    """A model with an iteration, a decoder, a cache and a sampling."""

    sampling: Sampling = field(default_factory=lambda: COMPONENTS["sampling"].build(USUAL))

    @cached_property
    def abilities(self) -> tuple[type[Any], ...]:
        return ABILITIES.ordered()

    @cached_property
    def answers(self) -> tuple[type[Any], ...]:
        return tuple(kind for ability in self.abilities for kind in ability.answers)

    def __post_init__(self) -> None:
        for kind, part in self.by_kind.items():
            if kind != "model":
                check_types(kind, part)
                check_methods(kind, part)
        with blaming(self.by_kind):
            object.__setattr__(self, "iteration", self.iteration.fitted(self.model.spec))
        with blaming(self.by_kind):
            if (reason := self.refused()) is not None:
                raise IncompatibleRecipe(reason)

    @property
    def by_kind(self) -> dict[str, Any]:
        """The model and the components."""
        return {kind: getattr(self, kind) for kind in ("model", *COMPONENTS)}

    def refused(self, **more: Any) -> str | None:
        """Why the components cannot work together, and what to use instead; None: they can.

        `more`: the runtime that they are to work with, or another decoder or sampling. What does not depend on these
        was found when the recipe was made.
        """
        changed = more.keys() if more else None
        return refused(all_refusals(), self.by_kind | more, changed)

    @property
    def parts(self) -> str:
        """The components and their options in a line; of the sampling's many, those that are not at their defaults."""
        return f"{self.iteration}, {self.decoder}, {self.cache}, {brief(self.sampling)}"

    def __repr__(self) -> str:
        return f"Recipe({self.model.spec.family}, {self.parts})"

    def extras(self, request: Request) -> tuple[Extra, ...]:
        """What a request needs of its steps."""
        given = self.sampling_of(request.options)
        sampled = (
            [Sampled(self.sampling.top_candidates(given, self.model.spec.vocab))] if self.sampling.asks(given) else []
        )
        asked = (ability.adds_for(self, request) for ability in self.abilities)
        return extras_of([*sampled, *(extra for extra in asked if extra is not None)])

    def largest(self, candidates: int) -> tuple[Extra, ...]:
        """The extras of steps that have memory of their own. `candidates`: the most of a step, `runtime.speculate`."""
        count = self.facts.versions or candidates
        return (Versioned(count),) if count else ()

    def guided(self, options: Resolved) -> bool:
        """Whether a request with these options has a second branch, without the prompt."""
        return self.values(options).get("sampling.guidance", 0) > 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that its steps may have."""
        return Phase.PREFILL, Phase.FULL, Phase.WINDOW, *self.facts.phases

    @property
    def alignment(self) -> int:
        """Active blocks begin and end at multiples of this, counted from where attention blocks are counted from."""
        iteration = self.iteration
        if self.model.spec.prompt_block:
            return iteration.block
        return iteration.alignment if isinstance(iteration, Aligned) else 1

    def resolve(self, given: Mapping[str, Any]) -> Resolved:
        """Checks the options that one request sets for itself: once, for all who are given what it returns.

        `given` names options as "threshold", or as "decoder.threshold" where two components have one of that name.
        Each value is validated by the component itself. Raises ValueError.
        """
        values: dict[str, Any] = {**self.request_options}
        chosen: dict[str, dict[str, Any]] = {}
        for key, value in given.items():
            names = [full for full in values if key in (full, full.split(".")[1])]
            if not names:
                raise unknown("per-request option", key, [*values])
            if len(names) > 1:
                raise ValueError(f"per-request option {key!r} is ambiguous: write one of {', '.join(names)}")
            kind, name = names[0].split(".")
            if name in chosen.setdefault(kind, {}):
                raise ValueError(f"per-request option {names[0]} is given twice")
            if type(value) is bool or not isinstance(value, type(values[names[0]]) | int):
                raise ValueError(f"{names[0]}={value!r:.80} must be of type {type(values[names[0]]).__name__}")
            chosen[kind][name] = values[names[0]] = value
        usual: dict[str, Any] = {"decoder": self.decoder, "sampling": self.sampling}
        parts = {kind: replace(usual[kind], **own) for kind, own in chosen.items()}  # the component checks them
        if parts and (reason := self.refused(**parts)) is not None:
            raise IncompatibleRecipe(reason)
        return Resolved({name: float(value) for name, value in values.items()}, self, usual | parts)

    def seeded(self, options: Resolved, seed: int) -> Resolved:
        """The options with another seed, if the sampling has one."""
        values, own = self.values(options), {"sampling.seed": float(seed % SEEDS)}
        return replace(options, values={**values, **own}) if own.keys() <= values.keys() else options

    def over(self, model: Model) -> Self:
        """The same recipe with another model of the same shape, such as the loaded one in place of a described one."""
        if model.spec != self.model.spec:
            return replace(self, model=model)
        found = copy(self)  # what was found to go together does
        object.__setattr__(found, "model", model)
        return found


def all_refusals() -> tuple[Refusal, ...]:
    """What cannot go together, whatever the components say themselves."""
    return *REFUSALS, *(refusal for ability in ABILITIES.ordered() for refusal in ability.refusals)


def check_methods(kind: str, part: Component) -> None:
    """Raises TypeError for what a component defines in vain, since nobody would ask it for that."""
    for info in options_of(part):
        if info.per_request and kind in ("iteration", "cache"):
            raise TypeError(
                f"{kind}.{info.name} of {type(part).__name__} is declared with per_request=True, but only "
                "decoders and samplings are given a request's own options. Leave per_request out."
            )
    for mixin in MIXINS.get(kind, ()):
        lost = sorted(name for name in {*vars(mixin)} & {*dir(part)} if not name.startswith("_"))
        if lost and not isinstance(part, mixin):
            raise TypeError(
                f"{type(part).__name__} defines `{lost[0]}`, which only {mixin.__name__} are asked for: "
                f"derive from {mixin.__name__} too"
            )


def compose(model: Model, *, iteration: Any, decoder: Any, cache: Any, sampling: Any = USUAL) -> Recipe:
    """A recipe from components, registered or not, names, or mappings `{"name": ..., option: ...}`."""
    return Recipe(
        model,
        _part(Iteration, iteration),
        _part(Decoder, decoder),
        _part(CachePolicy, cache),
        _part(Sampling, sampling),
    )


def _part(base: type[Component], given: Any) -> Any:
    """A component as it is, if it is one of this kind, else what the registry makes of it."""
    if not isinstance(given, base):
        return COMPONENTS[base.kind].build(given)
    if not is_dataclass(given):
        raise TypeError(
            f"the {base.kind} {type(given).__name__} must be a dataclass, whose fields are its options: put "
            "@dataclass(frozen=True, kw_only=True) above it."
        )
    return given
