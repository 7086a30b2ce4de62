"""Candidate states save forwards and change nothing else: not a token, not the step in which it was committed."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.matrix import (
    SAMPLE,
    Combination,
    completions,
    engine_for,
    general,
    launched_ahead,
    may_speculate,
    over_shared_model,
    varied_options,
)
from support.models import UNIFORM, tiny_model

import dinfer.core.step.step
from dinfer.core.engine.request import Completion, Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import DECODERS
from dinfer.core.step.commits import Commits
from dinfer.core.step.cursors import BlockView, RowCursors
from dinfer.core.step.mixins import Edits, Verifies
from dinfer.core.step.shape import StepShape

BLOCK = 8
ALLOWED = [c for c in SAMPLE if may_speculate(over_shared_model(c))]


def recipe_of(
    decoder: Any = "threshold", cache: Any = "dual", *, variant: str = "bidirectional", seed: int = 0
) -> Recipe:
    iteration = {"name": "blockwise", "block": BLOCK}
    return compose(tiny_model(variant, seed=seed), iteration=iteration, decoder=decoder, cache=cache)


def requests_of(recipe: Recipe) -> list[Request]:
    """Some take the most likely token, some draw."""
    requests = []
    for i, (prompt, new) in enumerate([([1, 2, 3, 4, 5], 19), (list(range(10, 31)), 13), ([7] * 8, 8)]):
        options = varied_options(recipe, i)
        options.pop("sampling.guidance", None)
        requests.append(Request.behind(prompt, new, recipe.resolve(options)))
    return requests


def said(completion: Completion) -> dict[str, Any]:
    """All of a completion but what it cost. The denoise steps are not among the costs."""
    counts = asdict(completion.counts)
    steps = counts["forwards"] + counts["hits"] - counts["prefills"]
    left = {name: counts[name] for name in ("prefills", "refreshes", "committed", "tokens")}
    return left | {"canvas": completion.canvas, "output": completion.output, "steps": steps}


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("combination", ALLOWED[::3], ids=str)
def test_candidates_change_nothing_but_forwards(combination: Combination) -> None:
    """In batches, on pages of any size, with rounds that are launched before the last one is looked at."""
    recipe = combination.recipe()
    requests = requests_of(recipe)
    want = completions(engine_for(recipe), requests)
    for engine in (
        engine_for(recipe, speculate=3),
        launched_ahead(engine_for(recipe, rows=2, page=3, speculate=2, favour="throughput")),
    ):
        got = completions(engine, requests)
        for one, other in zip(want, got, strict=True):
            if not engine.runtime.throughput:
                assert said(one) == said(other)
            assert (one.canvas, one.output, one.counts.committed) == (
                other.canvas,
                other.output,
                other.counts.committed,
            )
            assert other.counts.forwards - other.counts.prefills <= one.counts.forwards - one.counts.prefills


def states(
    recipe: Recipe, request: Request, patch: pytest.MonkeyPatch, **runtime: Any
) -> tuple[dict[int, Any], Completion]:
    """The active blocks after each denoise step of a request. To the right of the canvas they hold scratch."""
    found: dict[int, Any] = {}
    real = dinfer.core.step.step.commit

    def commit(canvas: Any, lanes: RowCursors, view: BlockView, *rest: Any) -> Commits:
        commits = real(canvas, lanes, view, *rest)
        if lanes.live_B[0]:
            step = int(lanes.steps_B[0])
            assert step not in found
            tokens_RL = commits.tokens_RL.masked_fill(view.pos_RL < 0, -1)
            found[step] = (int(lanes.start_B[0]), tokens_RL.tolist(), commits.open_RL.tolist())
        return commits

    with patch.context() as inner:
        inner.setattr("dinfer.core.step.step.commit", commit)
        (completion,) = completions(engine_for(recipe, **runtime), [request])
    return found, completion


@given(st.data())
@examples(15)
def test_every_step_commits_what_it_would_commit_without(data: st.DataObject) -> None:
    """Decoders, caches, models and seeds of samplings, one request at a time: the same states in the same order."""
    variant = data.draw(st.sampled_from(["bidirectional", "shifted", "block_causal", "causal"]))
    own: list[Any] = ["block", "block"] if "causal" in variant else [{"name": "prefix", "suffix": 3}]
    cache = data.draw(st.sampled_from(["dual", "vicinity", "prefix", "none", *own]))
    name = data.draw(
        st.sampled_from([name for name in general(DECODERS) if not issubclass(DECODERS.get(name), Verifies)])
    )
    seed, count = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 8))
    try:
        recipe = recipe_of(name, cache, variant=variant, seed=seed % 7)
    except IncompatibleRecipe:
        recipe = recipe_of("threshold", cache, variant=variant, seed=seed % 7)
    options: dict[str, float] = (
        {} if isinstance(recipe.decoder, Edits) else {"sampling.temperature": data.draw(st.sampled_from([0.0, 0.7]))}
    )
    request = Request.behind([1 + seed % 5, 3, 9], 2 * BLOCK + 3, recipe.resolve(options | {"sampling.seed": seed}))
    patch = pytest.MonkeyPatch()
    want, plain = states(recipe, request, patch)
    got, fast = states(recipe, request, patch, speculate=count)
    assert got == want and said(fast) == said(plain)
    assert fast.counts.forwards <= plain.counts.forwards


def test_a_chain_of_hits_takes_one_forward() -> None:
    """One token a step, in the order of confidence: logits that depend on nothing are guessed without a miss."""
    recipe = recipe_of({"name": "fixed", "steps": BLOCK})
    with torch.no_grad():
        for name, weight in recipe.model.named_parameters():
            if "out" in name or "down" in name:  # nothing reaches a position but its own token
                weight.zero_()
    request = Request.behind([1, 2, 3], 2 * BLOCK, recipe.resolve({}), stops=False)
    (plain,), (fast,) = (completions(engine_for(recipe, speculate=count), [request]) for count in (0, 16))
    assert said(fast) == said(plain) and plain.counts.hits == 0
    # In each block: a pass over the canvas, then one whose candidates have up to six more tokens.
    assert (plain.counts.forwards, fast.counts.forwards) == (2 * BLOCK, 2 * 2)


def tried(shapes: list[StepShape]) -> set[int]:
    """The numbers of candidates of steps."""
    return {shape.versions for shape in shapes}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"cache": "adaptive"}, "cache=adaptive does not. Use cache=.*dual"),
        ({"cache": "delayed"}, "cache=delayed does not. Use cache=.*dual"),
        ({"iteration": "smooth"}, "What iteration=smooth feeds"),
        ({"variant": UNIFORM}, "needs a model with a mask token"),
    ],
)
def test_recipes_that_candidates_would_change_are_refused(parts: dict[str, Any], reason: str) -> None:
    chosen = {"variant": "bidirectional", "iteration": {"name": "blockwise", "block": BLOCK}, "cache": "none"} | parts
    model = tiny_model(chosen.pop("variant"))
    with pytest.raises(IncompatibleRecipe, match=reason):
        engine_for(compose(model, decoder="threshold", **chosen), speculate=2)


def test_a_guided_request_is_refused() -> None:
    recipe = recipe_of()
    engine = engine_for(recipe, speculate=2)
    with pytest.raises(ValueError, match=r"sampling\.guidance .* Use sampling\.guidance=0, or runtime\.speculate=0"):
        engine.add(Request.behind([1], 4, recipe.resolve({"guidance": 0.5})))


@pytest.mark.parametrize("count", [-1, 17, 2.0, "all", True])
def test_a_number_of_candidates_that_makes_no_sense_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=r"runtime\.speculate="):
        Runtime(speculate=count)
