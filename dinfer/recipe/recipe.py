"""Puts a model and four components together. Refuses those that do not fit, before any work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dinfer.abilities.adjusting import Adjusts
from dinfer.abilities.branches import branches_of
from dinfer.abilities.candidates import RecomputesEveryKey
from dinfer.abilities.feeding import Feeds, scores_of
from dinfer.abilities.following import Follows
from dinfer.abilities.holding import LeavesMasks
from dinfer.abilities.pacing import Aligned, AsksStability, Edits, Grows, LeavesDecoded, Moves, Paces, Pads
from dinfer.abilities.table import ABILITIES
from dinfer.abilities.verification import Verifies
from dinfer.abilities.watching import Watches
from dinfer.parallel.ranks import ALONE, Ranks
from dinfer.recipe.registry import (
    CACHES,
    DECODERS,
    ITERATIONS,
    SAMPLINGS,
    Registry,
    brief,
    check_types,
    options_of,
    unknown,
    values_of,
)
from dinfer.step.ability import Ability
from dinfer.step.canvas import ACTIVE
from dinfer.step.contracts import CachePolicy, Component, Decoder, Iteration, Large, Phase
from dinfer.step.model import Divided, Model
from dinfer.step.parts import RequestOption, Sampling
from dinfer.step.shape import Extra, Sampled, extras_of
from dinfer.step.window import Chooses

# What components derive from, to be asked for their methods.
MIXINS: dict[str, tuple[type, ...]] = {
    "decoder": (Adjusts, Verifies), "cache": (Chooses, Watches, Follows), "iteration": (Feeds, Paces, Pads),
}  # fmt: skip
EXACT = 2**53  # per-request options are columns of one float64 tensor, which holds integers up to here


class IncompatibleRecipe(ValueError):
    """The components cannot work together; the message says which, why, and what to use instead."""


@dataclass(frozen=True)
class Recipe:
    """A model with an iteration, a decoder, a cache and a sampling."""

    model: Model
    iteration: Iteration
    decoder: Decoder
    cache: CachePolicy
    sampling: Sampling = field(default_factory=lambda: SAMPLINGS.build("standard"))

    def __post_init__(self) -> None:
        spec = self.model.spec
        check_types("iteration", self.iteration)
        object.__setattr__(self, "iteration", self.iteration.fitted(spec))
        silent_parts = {"iteration": self.iteration, "cache": self.cache}
        parts = {**silent_parts, "decoder": self.decoder, "sampling": self.sampling}
        for kind, part in parts.items():
            check_types(kind, part)
        for kind, silent in silent_parts.items():
            for info in options_of(silent):
                if info.per_request:
                    raise TypeError(
                        f"{kind}.{info.name} of {type(silent).__name__} is declared with per_request=True, but only "
                        "decoders and samplings are given a request's own options. Leave per_request out."
                    )
        for kind, mixins in MIXINS.items():
            for mixin in mixins:
                lost = sorted(name for name in {*vars(mixin)} & {*dir(parts[kind])} if not name.startswith("_"))
                if lost and not isinstance(parts[kind], mixin):
                    raise TypeError(
                        f"{type(parts[kind]).__name__} defines `{lost[0]}`, which only {mixin.__name__} are asked for: "
                        f"derive from {mixin.__name__} too"
                    )
        for part in parts.values():
            if (reason := part.incompatibility(spec)) is not None:
                raise IncompatibleRecipe(reason)
        if isinstance(self.decoder, Edits) and isinstance(self.cache, LeavesDecoded):
            raise IncompatibleRecipe(
                f"{DECODERS.called(self.decoder)} judges decoded tokens by their logits, which "
                f"{CACHES.called(self.cache)} does not compute. Use cache=dual, prefix or adaptive, or a decoder that "
                "does not edit, such as threshold."
            )
        reads = isinstance(self.decoder, Adjusts) or "entropy" in self.decoder.needs
        if isinstance(self.cache, LeavesMasks) and reads:
            raise IncompatibleRecipe(
                f"{CACHES.called(self.cache)} leaves masks out, and {DECODERS.called(self.decoder)} would take what is "
                "not computed there for certain. Use cache=dual, or decoder=threshold, factor or calibrated."
            )
        if self.cache.plan(Phase.WINDOW).front and (self.iteration.blocks > 1 or scores_of(self.iteration) != "none"):
            raise IncompatibleRecipe(
                f"{CACHES.called(self.cache)} computes the first masks of one block, fed as tokens and masks, and "
                f"{ITERATIONS.called(self.iteration)} reads more. Use iteration=block_diffusion or blockwise, or "
                "cache=block or dual."
            )
        if isinstance(self.decoder, Grows) and (self.iteration.block or self.iteration.blocks > 1):
            raise IncompatibleRecipe(
                f"{DECODERS.called(self.decoder)} lengthens the canvas as it decodes, so its block must span the "
                "whole generation. Use iteration=full."
            )
        large = any(isinstance(value, Large) for value in self.decoder.fresh_state(spec, 1).values())
        single = isinstance(self.decoder, Edits | Verifies) or large
        if branches_of(self.iteration) and (single or isinstance(self.cache, Watches | LeavesDecoded)):
            whose = DECODERS.called(self.decoder) if single else CACHES.called(self.cache)
            raise IncompatibleRecipe(
                f"{ITERATIONS.called(self.iteration)} runs versions of the active blocks side by side, and "
                f"{whose} can follow one alone. Use iteration=multi_block, or decoder=threshold with cache=dual, block "
                "or none."
            )
        if isinstance(self.decoder, Verifies) and (self.iteration.blocks > 1 or scores_of(self.iteration) != "none"):
            raise IncompatibleRecipe(
                f"{DECODERS.called(self.decoder)} verifies the draft of one block, fed as tokens and masks. Use "
                "iteration=block_diffusion or blockwise."
            )
        if isinstance(self.decoder, Verifies) and not isinstance(self.cache, RecomputesEveryKey):
            raise IncompatibleRecipe(
                f"{DECODERS.called(self.decoder)} writes the keys of its draft, and {CACHES.called(self.cache)} may "
                "keep them. Use cache=block or none."
            )
        block, attention = self.iteration.block, spec.causal_block
        if attention and block and block % attention and attention % block:
            below = block // attention * attention
            fitting = " or ".join(str(fit) for fit in (below, below + attention) if fit)
            raise IncompatibleRecipe(
                f"iteration.block={block} must be a multiple of the model's attention block, {attention}, or divide "
                f"it. Use iteration.block={fitting}."
            )
        if isinstance(self.decoder, Moves) and scores_of(self.iteration) != "none":
            raise IncompatibleRecipe(
                f"{DECODERS.called(self.decoder)} moves tokens, and {ITERATIONS.called(self.iteration)} remembers what "
                "it expects at each position. Use iteration=block_diffusion or multi_block."
            )
        asks = isinstance(self.iteration, AsksStability) and self.iteration.reads_stability
        if asks and not isinstance(self.decoder, Edits):
            raise IncompatibleRecipe(
                f"{ITERATIONS.called(self.iteration)} asks how much of a block is predicted again, and "
                f"{DECODERS.called(self.decoder)} never looks at decoded tokens. Use iteration.stable_at=0, or a "
                "decoder that edits, such as joint_threshold."
            )
        if spec.prompt_block and isinstance(self.iteration, Aligned) and self.iteration.grain > 1:
            raise IncompatibleRecipe(
                f"{ITERATIONS.called(self.iteration)} counts blocks from position 0, and this model counts its "
                "attention blocks from the prompt's end. Use iteration=blockwise or multi_block with align=false."
            )
        if values_of(self.iteration).get("stop") == "cut" and isinstance(self.decoder, Edits):
            raise IncompatibleRecipe(
                f"iteration.stop=cut ends a row while {DECODERS.called(self.decoder)} may still edit what it decoded. "
                "Use iteration.stop=block."
            )
        self._check(
            {f"{kind}.{name}": value for kind, part in parts.items() for name, value in values_of(part).items()}
        )

    @property
    def parts(self) -> str:
        """The components and their options in a line; of the sampling's many, those that are not at their defaults."""
        return f"{self.iteration}, {self.decoder}, {self.cache}, {brief(self.sampling)}"

    def __repr__(self) -> str:
        return f"Recipe({self.model.spec.family}, {self.parts})"

    def _check(self, values: Mapping[str, Any]) -> None:
        """Raises IncompatibleRecipe for options that the components together cannot honour, or no tensor can hold."""
        for name, value in values.items():
            if isinstance(value, int) and abs(value) > EXACT:
                raise IncompatibleRecipe(f"{name}={value} is too large: at most 2**53 can be held exactly.")
        spec = self.model.spec
        if spec.mask_id is None and values.get("sampling.guidance", 0) > 0:
            raise IncompatibleRecipe(
                "sampling.guidance masks the prompt in a second branch, and this model has no mask token. Leave it 0."
            )
        verifies = isinstance(self.decoder, Verifies)
        if (verifies or branches_of(self.iteration)) and values.get("sampling.guidance", 0) > 0:
            whose = DECODERS.called(self.decoder) if verifies else ITERATIONS.called(self.iteration)
            raise IncompatibleRecipe(
                f"{whose} needs further lanes for one branch, and guidance takes two. Leave sampling.guidance at 0."
            )
        if isinstance(self.cache, Follows) and values.get("sampling.guidance", 0) > 0:
            raise IncompatibleRecipe(
                f"{CACHES.called(self.cache)} follows the attention of one branch, and guidance takes two. Leave "
                "sampling.guidance at 0, or use cache=dual."
            )
        if scores_of(self.iteration) != "none" and values.get("sampling.guidance", 0) > 0:
            raise IncompatibleRecipe(
                f"{ITERATIONS.called(self.iteration)} feeds what it expects at the masks, and a branch without the "
                "prompt would expect other things. Leave sampling.guidance at 0, or use iteration=blockwise."
            )
        drafts = isinstance(self.decoder, Verifies | Moves) or spec.mask_id is None
        if drafts and values.get("sampling.leftmost", 0):
            raise IncompatibleRecipe(
                f"sampling.leftmost={values['sampling.leftmost']} holds masks back, and "
                f"{DECODERS.called(self.decoder)} drafts all of a block. Leave it at 0, or use decoder=threshold with "
                "a model that has a mask token."
            )
        for name in (*self.decoder.refuses, *(["eos_last"] if isinstance(self.decoder, Edits) else [])):
            neutral = self.sampling.neutral.get(name)
            if values.get(f"sampling.{name}", neutral) != neutral:
                raise IncompatibleRecipe(
                    f"{DECODERS.called(self.decoder)} cannot honour sampling.{name}="
                    f"{values[f'sampling.{name}']}. Leave it at {neutral}, or use decoder=threshold."
                )

    def check(self, options: Sequence[float]) -> None:
        """Raises ValueError unless `resolve` may have returned these options. The last ones may be left out."""
        if type(options) is not list or len(options) > len(self.request_options):
            names = ", ".join(f"{o.kind}.{o.name}" for o in self.request_options)
            raise ValueError(
                f"a request's options={options!r:.80} must be a list of at most {len(self.request_options)} numbers, "
                f"as Recipe.resolve returns it: {names}"
            )
        given: dict[str, Any] = {}
        for o, value in zip(self.request_options, options, strict=False):
            whole = type(o.default) is int and type(value) is float and value.is_integer()
            if type(value) is bool or value != o.default:
                given[f"{o.kind}.{o.name}"] = int(value) if whole else value
        self.resolve(given)

    def sampling_of(self, options: Sequence[float]) -> dict[str, float]:
        """The sampling options, of what `resolve` returned; those left out at its end have their defaults."""
        count = len(options)
        return {name: options[i] if i < count else default for i, name, default in self._sampling_options}

    @cached_property
    def _sampling_options(self) -> list[tuple[int, str, float]]:
        """Place among the request's options, name and default."""
        return [(i, o.name, o.default) for i, o in enumerate(self.request_options) if o.kind == "sampling"]

    def asks(self, options: Sequence[float], more: Mapping[str, Any] = MappingProxyType({})) -> tuple[Extra, ...]:
        """What a request with these options needs of its steps. `more`: see `dinfer.step.state.Entry`."""
        given = self.sampling_of(options)
        sampled = (
            [Sampled(self.sampling.top_candidates(given, self.model.spec.vocab))] if self.sampling.asks(given) else []
        )
        asked = (ability.asks(self, options, more) for ability in self.abilities)
        return extras_of([*sampled, *(extra for extra in asked if extra is not None)])

    def guided(self, options: Sequence[float]) -> bool:
        """Whether a request with these options has a second branch, without the prompt."""
        return self.sampling_of(options).get("guidance", 0) > 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that its steps may have."""
        return tuple(phase for phase in ACTIVE if phase != Phase.VERIFY or isinstance(self.decoder, Verifies))

    @property
    def abilities(self) -> tuple[type[Ability], ...]:
        """The optional features that its steps may have."""
        return ABILITIES

    @property
    def ranks(self) -> Ranks:
        """The ranks that divide the model among them."""
        return self.model.ranks if isinstance(self.model, Divided) else ALONE

    @property
    def grain(self) -> int:
        """Active blocks begin and end at multiples of this, counted from where attention blocks are counted from."""
        iteration = self.iteration
        if self.model.spec.prompt_block:
            return iteration.block
        return iteration.grain if isinstance(iteration, Aligned) else 1

    @property
    def scores_open(self) -> bool:
        """Whether the logits of open positions are all that a step without a draw or guidance needs.

        A row for which there is no room repeats its step. A cache that watches values change must not see that.
        """
        decoder = self.decoder
        reads = isinstance(decoder, Adjusts | Edits) or scores_of(self.iteration) != "none"
        return not reads and not isinstance(self.cache, Watches) and not isinstance(self.cache, Follows)

    @cached_property
    def request_options(self) -> tuple[RequestOption, ...]:
        parts: tuple[tuple[str, Component], ...] = (("decoder", self.decoder), ("sampling", self.sampling))
        return tuple(
            RequestOption(kind, info.name, values_of(part)[info.name])
            for kind, part in parts
            for info in options_of(part)
            if info.per_request
        )

    def resolve(self, given: Mapping[str, Any]) -> list[float]:
        """The value of every per-request option for one request, in the order of `request_options`.

        `given` names options as "threshold", or as "decoder.threshold" where two components have one of that name.
        Each value is validated by the component itself.
        """
        known = [f"{o.kind}.{o.name}" for o in self.request_options]
        values = {name: o.default for name, o in zip(known, self.request_options, strict=True)}
        chosen: set[str] = set()
        for key, value in given.items():
            names = [name for name in known if key in (name, name.split(".")[1])]
            if not names:
                raise unknown("per-request option", key, known)
            if len(names) > 1:
                raise ValueError(f"per-request option {key!r} is ambiguous: write one of {', '.join(names)}")
            if names[0] in chosen:
                raise ValueError(f"per-request option {names[0]} is given twice")
            chosen.add(names[0])
            kind, name = names[0].split(".")
            if type(value) is bool or not isinstance(value, type(values[names[0]]) | int):
                raise ValueError(f"{names[0]}={value!r:.80} must be of type {type(values[names[0]]).__name__}")
            part: Component = self.decoder if kind == "decoder" else self.sampling
            replace(part, **{name: value})  # type: ignore[type-var]  # raises what the component raises
            values[names[0]] = value
        self._check(values)
        return [float(v) for v in values.values()]


def compose(model: Model, *, iteration: Any, decoder: Any, cache: Any, sampling: Any = "standard") -> Recipe:
    """A recipe from components, registered or not, names, or mappings `{"name": ..., option: ...}`."""
    return Recipe(
        model,
        _part(ITERATIONS, Iteration, iteration),
        _part(DECODERS, Decoder, decoder),
        _part(CACHES, CachePolicy, cache),
        _part(SAMPLINGS, Sampling, sampling),
    )


def _part(registry: Registry, base: type, given: Any) -> Any:
    """A component as it is, if it is one of this kind, else what the registry makes of it."""
    if not isinstance(given, base):
        return registry.build(given)
    if not is_dataclass(given):
        raise TypeError(
            f"the {registry.kind} {type(given).__name__} must be a dataclass, whose fields are its options: put "
            "@dataclass(frozen=True, kw_only=True) above it."
        )
    return given
