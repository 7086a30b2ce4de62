"""Whatever the logits, the loop ends and keeps its promises: random streams, through every recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.matrix import engine_for, general, settings_of
from support.models import EOS, MASK, VOCAB, fitted
from support.scripted import Scripted

from dinfer.core.engine.errors import NonFiniteLogits
from dinfer.core.engine.request import Request, Update, Wants
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS, options_of
from dinfer.core.step.cursors import Phase
from dinfer.core.step.mixins import Edits, Grows, Moves, Verifies
from dinfer.core.step.window import first_phase

KINDS = ("sharp", "flat", "ties", "constant", "mask_wins", "mask_alone", "holes", "one_token", "stops", "huge", "tiny")


def stream(kind: str, seed: int) -> torch.Tensor:
    """Logits [5 calls, 7 positions, V]; the primes make them fall on other positions at every block."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(5, 7, VOCAB, generator=generator, dtype=torch.float64)
    match kind:
        case "sharp":
            return table * 8
        case "flat":
            return table * 1e-3
        case "ties":
            return table.round()
        case "constant":
            return torch.zeros_like(table)
        case "mask_wins":
            table[..., MASK] = 30.0
        case "mask_alone":  # every other probability underflows to 0
            table[..., MASK] = 1e5
        case "holes":
            return table.masked_fill(torch.rand(table.shape, generator=generator) < 0.9, -math.inf).index_fill(
                -1, torch.tensor([seed % MASK]), 0.5
            )
        case "one_token":
            return torch.full_like(table, -math.inf).index_fill(-1, torch.tensor([seed % MASK]), 1.0)
        case "stops":
            table[..., EOS] = 3.0
        case "huge":
            return table * 1e300
        case "tiny":
            return table * 5e-324
    return table


@dataclass(frozen=True)
class Case:
    """A recipe over a scripted model, and a batch."""

    recipe: Recipe
    requests: list[Request]


@st.composite
def cases(draw: st.DrawFn, decoder: dict[str, Any]) -> Case:
    block = draw(st.integers(1, 9))
    spec = fitted(Scripted(torch.zeros(1, 1, VOCAB)), decoder["name"]).spec
    verifies = issubclass(DECODERS.get(decoder["name"]), Verifies)  # it needs a model that can write token by token
    masks = {} if verifies or DECODERS.build(decoder).incompatibility(spec) is None else {"mask_id": None}
    model = Scripted(
        stream(draw(st.sampled_from(KINDS)), draw(st.integers(0, 10_000))),
        shift=0 if verifies else draw(st.sampled_from([0, 0, 1])),
        causal_block=draw(st.sampled_from([1, block] if verifies else [None, 1, block])),
        **masks,
    )
    iteration: dict[str, Any] = {"name": draw(st.sampled_from(general(ITERATIONS)))}
    for info in options_of(ITERATIONS.get(iteration["name"])):
        if type(info.default) is bool:
            iteration[info.name] = draw(st.booleans())
        elif info.name == "block":
            iteration["block"] = block
    cache = dict(draw(st.sampled_from(settings_of(CACHES))))
    model = fitted(model, decoder["name"])
    try:
        recipe = compose(model, iteration=iteration, decoder=decoder, cache=cache)
    except IncompatibleRecipe:
        grows = issubclass(DECODERS.get(decoder["name"]), Grows)
        iteration = {"name": "full"} if grows else {"name": "blockwise", "block": block}
        recipe = compose(model, iteration=iteration, decoder=decoder, cache="none")
    requests = [
        Request.behind(
            [1 + i] * draw(st.integers(1, 12)), draw(st.integers(1, 25)), recipe.resolve(_options(draw, recipe))
        )
        for i in range(draw(st.integers(1, 3)))
    ]
    return Case(recipe, requests)


def _options(draw: st.DrawFn, recipe: Recipe) -> dict[str, Any]:
    chosen = {}
    for name, default in recipe.request_options.items():
        if name.startswith("sampling."):  # logits that are no distribution any more are a fault; see test_sampling
            continue
        value = draw(st.floats(0, 1) if isinstance(default, float) else st.integers(0, 40))
        try:
            recipe.resolve({name: value})
        except ValueError:
            continue
        chosen[name] = value
    return chosen


# New tokens, each in a block of its own. Each of its 40 edits may mask the token again, and a step fills it again.
LIMIT = 25 * (1 + 2 * 40)


def run(case: Case) -> dict[int, list[Update]]:
    updates: dict[int, list[Update]] = {i: [] for i in range(len(case.requests))}
    for update in engine_for(case.recipe, rows=2, page=4).run(case.requests, Wants(snapshots=True)):
        updates[update.index].append(update)
        assert len(updates[update.index]) <= LIMIT, "does not end"
    return updates


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("name", general(DECODERS))
@examples(25)
@given(st.data())
def test_invariants_hold_for_any_logits(name: str, data: st.DataObject) -> None:
    decoder = data.draw(st.sampled_from([s for s in settings_of(DECODERS) if dict(s)["name"] == name]))
    case = data.draw(cases(dict(decoder)))
    for index, updates in run(case).items():
        _check_row(case, case.requests[index], updates, issubclass(DECODERS.get(name), Edits))


def _check_row(case: Case, request: Request, updates: list[Update], edits: bool) -> None:
    prompt = len(request.prompt)
    tokens, masked = request.prompt + [MASK] * request.new_tokens, [False] * prompt + [True] * request.new_tokens
    decoded, has_mask = 0, case.recipe.model.spec.mask_id is not None  # else a block may take steps without a commit
    start = case.recipe.iteration.first_region(prompt, prompt + request.new_tokens)[0]
    prefill = first_phase(case.recipe.cache, case.recipe.model.spec, start) == Phase.PREFILL
    for update in updates:
        assert update.tokens is not None and update.masked is not None
        assert update.tokens[:prompt] == request.prompt
        start, end = update.region
        for i, (was, now) in enumerate(zip(masked, update.masked, strict=True)):
            assert was or not now or edits, "a decoded position was masked again"
            if has_mask:
                assert (update.tokens[i] == MASK) == now, "the mask token stands exactly where nothing is decoded"
            if was != now:
                assert start <= i < end, "a commit outside of the active region"
            if not was and not edits:  # an editing decoder may rewrite, and mask again what it decoded
                assert update.tokens[i] == tokens[i], "a committed token changed"
        commits = sum(masked) - sum(update.masked)
        decoded += commits
        # The decoder counts steps without a commit itself, or a step is two passes.
        counts = isinstance(case.recipe.decoder, Moves | Verifies)
        filled = sum(was and not now for was, now in zip(masked, update.masked, strict=True))
        if has_mask and any(masked[start:end]) and not counts and not (prefill and update.forwards == 1):
            assert filled >= 1, "a row that must progress did not"  # an edit may mask others again in the same step
        tokens, masked = update.tokens, update.masked
    completion = updates[-1].completion
    assert completion is not None and completion.counts.committed == decoded
    if has_mask and not edits:
        assert (
            completion.counts.forwards <= request.new_tokens * (1 + isinstance(case.recipe.decoder, Verifies)) + prefill
        )
    assert not has_mask or MASK not in completion.canvas
    assert all(now or token == final for token, now, final in zip(tokens, masked, completion.canvas, strict=True))
    if not completion.stopped:
        assert not any(masked)


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("name", general(DECODERS))
@examples(10)
@given(st.data())
def test_the_same_logits_give_the_same_tokens(name: str, data: st.DataObject) -> None:
    """No state is left over: the second run of one engine equals the first."""
    case = data.draw(cases({"name": name}))
    engine = engine_for(case.recipe)
    seen = []
    for _ in range(2):
        case.recipe.model.calls = 0
        seen.append([(u.index, u.tokens, u.region, u.full) for u in engine.run(case.requests, Wants(snapshots=True))])
    assert seen[0] == seen[1]


@pytest.mark.rest(but=10)
@pytest.mark.parametrize("cache", general(CACHES))
@pytest.mark.parametrize("bad", ["nan", "inf", "nothing", "only_mask"])
@examples(10)
@given(call=st.integers(0, 4), seed=st.integers(0, 1000))
def test_logits_that_are_not_finite_are_named(bad: str, cache: str, call: int, seed: int) -> None:
    """One bad position of one forward; the error says which request and which step."""
    table = stream("sharp", seed)[:, :1].repeat(1, 64, 1)
    table[..., [EOS, MASK]] = -50.0
    position = 4 + call
    table[:, position] = 0.0  # the least confident one, so still masked when it breaks
    match bad:
        case "nan":
            table[call, position, seed % VOCAB] = math.nan
        case "inf":
            table[call, position, seed % VOCAB] = math.inf
        case "nothing":
            table[call, position] = -math.inf
        case "only_mask":
            table[call, position] = -math.inf
            table[call, position, MASK] = 1.0
    one_by_one = {"name": "fixed", "steps": 16}
    model = Scripted(table, causal_block=16 if cache in ("block", "narrow_block") else None)
    recipe = compose(model, iteration={"name": "blockwise", "block": 16}, decoder=one_by_one, cache=cache)
    requests = [Request.behind([1], 20, recipe.resolve({}))]
    for update in _until_fault(recipe, requests, step=call + 1):
        assert update.completion is None


def _until_fault(recipe: Recipe, requests: list[Request], step: int) -> list[Update]:
    updates = []
    with pytest.raises(NonFiniteLogits, match=rf"request 0: .*denoise step {step},"):
        for update in engine_for(recipe).run(requests):
            updates.append(update)
    return updates


def test_bad_logits_where_nothing_is_masked_do_no_harm() -> None:
    """The prompt's own logits are not used for anything."""
    table = stream("sharp", 1)[:, :1].expand(-1, 64, -1).clone()
    table[:, :3] = math.nan
    table[:, :, EOS] = -50.0
    recipe = compose(
        Scripted(table), iteration={"name": "blockwise", "block": 8, "align": True}, decoder="threshold", cache="none"
    )
    case = Case(recipe, [Request.behind([1, 2, 3], 10, recipe.resolve({}))])
    assert run(case)[0][-1].completion is not None
