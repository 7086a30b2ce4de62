"""Every combination of registered components with every kind of model. New components are picked up by themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations as combinations_of
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import selection
from support.models import UNIFORM, VARIANTS, fitted, tiny_model

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Completion, Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.recipe.recipe import USUAL, IncompatibleRecipe, Recipe, all_refusals, compose
from dinfer.core.refusals import first_refusal
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS, SAMPLINGS, Registry, options_of
from dinfer.core.step.shape import StepShape

BLOCK = 8
TOKEN_COUNTS = Path(__file__).parents[1] / "configs" / "token_counts.json"

# Options that make a component do something on a tiny model, set where a component has them.
SMALL: dict[str, Any] = {
    "block": BLOCK, "threshold": 0.5, "steps": 3, "low_threshold": 0.4, "initial": 4, "window": 5, "expansion": 3,
    "eos_tokens": 3,
}  # fmt: skip
# Further settings under which a component behaves like another one; each is run as a component of its own.
ALSO: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("iteration", "blockwise"): [{"align": True, "stop": "off"}, {"stop": "cut"}],
    ("cache", "prefix"): [{"suffix": 3}],
    ("cache", "d2cache"): [{"masks": 3, "mass": 0.3, "bridge": 2, "share": 0.25}],
    ("cache", "dual"): [{"interval": 3}],
    ("cache", "narrow_block"): [{"ahead": 2, "back": 1}],
    ("cache", "narrow_dual"): [{"ahead": 2, "back": 1}],
    ("cache", "delayed"): [{"variant": "greedy", "interval": 2}],
    ("cache", "adaptive"): [{"prompt_interval": 5, "response_interval": 3, "ratio": 0.5}],
    ("decoder", "threshold"): [{"least": 2}, {"relax": 0.6, "horizon": 3}],
    ("decoder", "entropy_bound"): [{"limits": "each"}],
    ("decoder", "calibrated"): [{"frequencies": str(TOKEN_COUNTS), "sigma": 0.0}],
    ("decoder", "prophet"): [{"sub_block": 3, "answer": 2, "early": 2.0, "mid": 1.0, "late": 0.5}],
    ("decoder", "dream"): [{"alg": "origin"}, {"alg": "topk_margin", "alg_temp": 0.5}],
}


@dataclass(frozen=True)
class Combination:
    """One point of the product; `str` of it is its test id."""

    variant: str
    iteration: tuple[tuple[str, Any], ...]
    decoder: tuple[tuple[str, Any], ...]
    cache: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "-".join([self.variant, *(_label(part) for part in (self.iteration, self.decoder, self.cache))])

    def recipe(self, model: Any = None, **model_fields: Any) -> Recipe:
        model = tiny_model(self.variant, **model_fields) if model is None else model
        model = fitted(model, dict(self.decoder)["name"])
        axes = (ITERATIONS, self.iteration), (DECODERS, self.decoder), (CACHES, self.cache)
        return compose(model, **{registry.kind: built(registry, setting) for registry, setting in axes})


@cache
def built(registry: Registry, setting: tuple[tuple[str, Any], ...]) -> Any:
    """A component, which owns no tensor: all recipes may share it."""
    return registry.build(dict(setting))


def _label(config: tuple[tuple[str, Any], ...]) -> str:
    name, *rest = (str(value) if key == "name" else f"{key}={value}" for key, value in config)
    rest = [text if "/" not in text else text.split("=")[0] for text in rest]  # no path in an id
    return name + "".join(f",{text}" for text in rest if not text.startswith(tuple(f"{key}=" for key in SMALL)))


def settings_of(registry: Registry, names: Sequence[str] | None = None) -> list[tuple[tuple[str, Any], ...]]:
    """The settings of these components; None: of all but those of single families."""
    found = []
    for name in general(registry) if names is None else names:
        own = {info.name for info in options_of(registry.get(name))}
        small = {key: value for key, value in SMALL.items() if key in own}
        for extra in [{}, *ALSO.get((registry.kind, name), [])]:
            found.append((("name", name), *(small | extra).items()))
    return found


PAIRS = ("look_ahead", "when_sure")  # an iteration and a decoder that are there for each other


def general(registry: Registry) -> list[str]:
    """The components that are not there for a single family, or for one other component."""
    names = [name for name in registry.names() if name not in PAIRS]
    return [name for name in names if not registry.get(name).__module__.startswith("dinfer.families.")]


def combinations() -> list[Combination]:
    """The whole product of components as `SMALL` sets them; of the further settings of `ALSO`, those of iterations
    with every decoder and the dual cache, of decoders with every cache, of caches with every iteration."""
    axes = [settings_of(registry) for registry in (ITERATIONS, DECODERS, CACHES)]
    plain = [[setting for setting in axis if not _further(setting)] for axis in axes]
    blockwise, threshold, dual = (
        [setting for setting in axis if dict(setting)["name"] == name]
        for axis, name in zip(plain, ("blockwise", "threshold", "dual"), strict=True)
    )
    points = [*product(*plain)]
    points += product([s for s in axes[0] if _further(s)], plain[1], dual)
    points += product(blockwise, [s for s in axes[1] if _further(s)], plain[2])
    points += product(plain[0], threshold, [s for s in axes[2] if _further(s)])
    return [Combination(variant, *point) for variant, point in product([*VARIANTS, UNIFORM], points)] + of_families()


def of_families() -> list[Combination]:
    """What is there for single families, which would only be refused with most of the rest."""
    points = {
        "drafts": product(["sliding"], ["isd"], ["block", "block_at_once", "none"]),
        "two_modes": [
            *product(["seeded"], ["threshold", "fixed"], ["block", "none"]),
            *product(["seeded_drafts"], ["linear_spec"], ["block", "block_at_once"]),
        ],
        "fed_order": product(["sliding", "blockwise"], ["near_entropy", "threshold"], ["block", "none"]),
        "bidirectional": [("sliding", "threshold", "none"), *product(["look_ahead"], ["when_sure"], ["none", "dual"])],
        "block_causal": [("look_ahead", "when_sure", "block")],
    }

    def setting(registry: Registry, name: str) -> tuple[tuple[str, Any], ...]:
        return settings_of(registry, [name])[0]

    return [
        Combination(variant, setting(ITERATIONS, iteration), setting(DECODERS, decoder), setting(CACHES, cache))
        for variant, some in points.items()
        for iteration, decoder, cache in some
    ]


def _further(setting: tuple[tuple[str, Any], ...]) -> bool:
    return not {key for key, _ in setting} <= {"name", *SMALL}


COMBINATIONS = combinations()
USUAL_SAMPLING = SAMPLINGS.build(USUAL)


@cache
def _model_of(variant: str) -> Any:
    return tiny_model(variant)


@cache
def composes(combination: Combination) -> bool:
    """Whether nothing stands in its way. What to use instead, which `refusal` says, takes long to find."""
    return first_refusal(all_refusals(), parts_of(combination)) is None


def parts_of(combination: Combination) -> dict[str, Any]:
    """What `compose` makes a recipe of, over a model that all combinations of a variant share."""
    model = fitted(_model_of(combination.variant), dict(combination.decoder)["name"])
    iteration = built(ITERATIONS, combination.iteration).fitted(model.spec)
    decoder, cache = built(DECODERS, combination.decoder), built(CACHES, combination.cache)
    return {"model": model, "iteration": iteration, "decoder": decoder, "cache": cache, "sampling": USUAL_SAMPLING}


def over_shared_model(combination: Combination) -> Recipe:
    """To ask what a recipe is, without a model of its own. Who runs it leaves the model as it is."""
    return combination.recipe(_model_of(combination.variant))


def refusal(combination: Combination) -> str | None:
    try:
        over_shared_model(combination)
    except IncompatibleRecipe as error:
        return str(error)
    return None


def may_speculate(recipe: Recipe) -> bool:
    return recipe.refused(runtime=Runtime(speculate=1)) is None


def covering(points: list[Combination]) -> list[Combination]:
    """A part of `points` in which every pair of settings that occurs in `points` occurs, greedily chosen."""

    def pairs(point: Combination) -> set[Any]:
        axes = (point.variant, point.iteration, point.decoder, point.cache)
        return {(i, axes[i], j, axes[j]) for i, j in combinations_of(range(len(axes)), 2)}

    left = set().union(*map(pairs, points))
    chosen = []
    for point in sorted(points, key=lambda p: hashlib.blake2b(str(p).encode()).digest()):
        if new := pairs(point) & left:
            chosen.append(point)
            left -= new
    return chosen


LEGAL = [c for c in COMBINATIONS if composes(c)]
ILLEGAL = [c for c in COMBINATIONS if not composes(c)]
OF_ONE = of_families()
SAMPLE = covering([c for c in LEGAL if c not in OF_ONE]) + OF_ONE
BLOCK_CACHED = [c for c in SAMPLE if dict(c.cache)["name"] == "block" and dict(c.iteration)["name"] != "full"]


def every_recipe() -> pytest.MarkDecorator:
    """The pairwise sample of legal recipes; with `--every-recipe` all of them."""
    return pytest.mark.parametrize("combination", LEGAL if selection.every_recipe else SAMPLE, ids=str)


# Prompt and generation lengths: shorter than a block, a block exactly, no multiple of anything, many blocks.
PROMPTS = [[1, 2, 3, 4, 5], list(range(10, 31)), [7] * 8, [36], list(range(5, 18))]
NEW = [19, 13, 8, 21, 3]


def requests_for(recipe: Recipe) -> list[Request]:
    return [
        Request.behind(prompt, new, recipe.resolve(varied_options(recipe, i)))
        for i, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True))
    ]


def varied_options(recipe: Recipe, index: int) -> dict[str, Any]:
    """Options that differ from request to request, as far as the components accept the values."""
    chosen: dict[str, Any] = {}
    for name, default in recipe.request_options.items():
        if name.startswith("sampling.") and index not in (1, 4):  # rows that draw stand beside rows that do not
            continue
        value = (0.9, 0.3, 0.6, 0.45, 0.75)[index % 5] if isinstance(default, float) else 1 + index % 4
        try:
            recipe.resolve({name: value})
        except ValueError:
            continue
        chosen[name] = value
    return chosen


def engine_for(recipe: Recipe, **runtime: Any) -> Engine:
    return Engine(recipe, Runtime(**runtime))


def launched_ahead(engine: Engine) -> Engine:
    """The engine with each round launched before the last one is looked at, as with graphs, but of eager steps."""
    engine.loop.ahead = True
    return engine


def observed(engine: Engine) -> list[StepShape]:
    """The shapes of the steps that the engine launches from now on."""
    shapes: list[StepShape] = []

    def observer(shape: StepShape, slots: Sequence[int]) -> AbstractContextManager[None]:
        shapes.append(shape)
        return nullcontext()

    engine.runner.observer = observer
    return shapes


def completions(engine: Engine, requests: list[Request]) -> list[Completion]:
    found = {u.index: u.completion for u in engine.run(requests) if u.completion is not None}
    return [found[i] for i in range(len(requests))]


def outcome(completion: Completion) -> tuple[Any, ...]:
    """All of a completion but the time it took."""
    c = completion.counts
    return completion.canvas, completion.output, completion.stopped, c.forwards, c.refreshes, c.committed, c.tokens
