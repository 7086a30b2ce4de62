"""Prompts that begin alike share pages of keys: the same tokens, fewer prefills, no page that is wrong or lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matrix import completions, engine_for, outcome
from support.models import tiny_model

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.engine.pages import PageAllocator, common, prompt_keys
from dinfer.core.engine.request import Ask, Request
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.ability import Ability

SYSTEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]


def recipe_of(block: int = 4, iteration: str = "block_diffusion", cache: str = "block") -> Recipe:
    model = tiny_model("block_causal", causal_block=block)
    return compose(model, iteration={"name": iteration, "block": 8}, decoder="threshold", cache=cache)


def requests_of(recipe: Recipe) -> list[Request]:
    tails = [[], [], [1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10, 11], [7] * 20]
    prompts = [SYSTEM + tail for tail in tails] + [SYSTEM[:9], [0, *SYSTEM]]
    return [Request.behind(prompt, 11 + i, recipe.resolve({})) for i, prompt in enumerate(prompts)]


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("page", [2, 6, 16])
@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("iteration", ["block_diffusion", "smooth"])
def test_tokens_are_the_same_and_prefills_fewer(iteration: str, block: int, page: int) -> None:
    """At once and one after the other, in any order, in whole and in pieces."""
    recipe = recipe_of(block, iteration)
    requests = requests_of(recipe)
    want = [completions(engine_for(recipe), [request])[0] for request in requests]
    engine = engine_for(recipe, rows=3, page=page, share=True, positions=16)
    order = [*range(len(requests))]
    for seed in range(2):
        got = completions(engine, [requests[i] for i in order])
        assert [c.canvas for c in got] == [want[i].canvas for i in order]
        assert engine.occupancy()["pages_free"] == engine.occupancy()["pages"]
        Random(seed).shuffle(order)
    alone = [completions(engine_for(recipe, page=page, positions=16), [request])[0] for request in requests]
    assert sum(c.counts.prefills for c in got) < sum(c.counts.prefills for c in alone)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("page", [2, 4, 6])
@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("iteration", ["block_diffusion", "smooth"])
def test_the_next_turn_shares_the_blocks_of_the_last_answer(iteration: str, block: int, page: int) -> None:
    recipe = recipe_of(block, iteration)
    engine = engine_for(recipe, rows=2, page=page, share=True, max_length=160)
    alone = engine_for(recipe, page=page, share=True, max_length=160)
    turns, shared = SYSTEM, []
    for turn in range(3):
        request = Request.behind([*turns, 7, turn], 24, recipe.resolve({}))
        (said,), (want,) = completions(engine, [request]), completions(engine_for(recipe), [request])
        assert said.canvas == want.canvas
        turns = said.canvas
        keys = prompt_keys(turns, len(turns), page, block)
        shared.append(len(engine.loop.batch.pages.published(keys)) * page)
        # All but the last block, whose keys are those of tokens that were still masked.
        assert len(turns) - shared[-1] <= 2 * 8 + page + block
    assert engine.occupancy()["pages_free"] == engine.occupancy()["pages"]
    # Keys of an answer are those that a prefill of the same text makes.
    completions(alone, [Request.behind([*turns, 1, 2, 3], 8, recipe.resolve({}))])
    count = shared[-1] // page
    keys = prompt_keys(turns, len(turns), page, block)[:count]
    held = [(e.runner.state.kv, e.loop.batch.pages.published(keys)) for e in (engine, alone)]
    assert len(held[0][1]) == len(held[1][1]) == count
    for name in ("k_JPTGE", "v_JPTGE"):
        mine, yours = (getattr(pool, name)[:, pages] for pool, pages in held)
        torch.testing.assert_close(mine, yours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", ["confidence", "topk"])
def test_keys_of_mixtures_are_not_those_of_the_answers_tokens(mix: str) -> None:
    """The next turn gives the answer as plain tokens."""
    iteration = {"name": "dmax", "block": 4, "align": True, "mix": mix, "weight": 0.9}
    recipe = compose(tiny_model("block_causal"), iteration=iteration, decoder="threshold", cache="block")
    engine = engine_for(recipe, page=4, share=True, max_length=160)
    turns = SYSTEM
    for turn in range(3):
        request = Request.behind([*turns, 7, turn], 24, stops=False)
        got, want = (completions(e, [request])[0].canvas for e in (engine, engine_for(recipe)))
        assert got == want
        turns = got


def test_shared_keys_are_those_of_a_prefill() -> None:
    recipe = recipe_of()
    engine = engine_for(recipe, rows=2, page=4, share=True)
    request = Request.behind([*SYSTEM, 1, 2, 3], 5, recipe.resolve({}))
    updates = engine.run([request, request])
    first = [next(updates).index for _ in range(2)]
    assert first == [0, 0]  # the second waits for the keys of the first
    tables = engine.runner.state.kv.table_NP[:2]
    next(updates)
    assert torch.equal(tables[0, :6], tables[1, :6]) and not (tables[0, 6:8] == tables[1, 6:8]).any()
    assert sum(1 for _ in updates) > 0


def test_without_being_asked_for_or_where_it_is_not_exact_nothing_is_shared() -> None:
    for recipe, runtime in ((recipe_of(), {}), (recipe_of(cache="dual"), {"share": True})):
        engine = engine_for(recipe, page=4, **runtime)
        requests = requests_of(recipe)
        want = [outcome(completions(engine_for(recipe), [request])[0]) for request in requests]
        for _ in range(2):
            assert [outcome(c) for c in completions(engine, requests)] == want
        assert engine.loop.batch.pages.published(prompt_keys(SYSTEM, 24, 4, 4)) == []


def test_keys_tell_apart_what_attention_sees() -> None:
    some, others = prompt_keys(SYSTEM, 24, 4, 8), prompt_keys([*SYSTEM[:13], 0, *SYSTEM[14:]], 24, 4, 8)
    assert len(some) == len({*some}) == 6 and common(some, others) == 2  # position 13 is seen from 8 on
    assert common(some, prompt_keys([*SYSTEM, 1, 2], 24, 4, 8)) == 6
    assert common(some, []) == 0


def test_keys_tell_apart_what_a_request_asks_from_where_keys_depend_on_it() -> None:
    bare, one, same, other = (
        prompt_keys(SYSTEM, 24, 4, 8, asks=asks)
        for asks in ((), [Picture("a", 13)], [Picture("a", 13)], [Picture("b", 13)])
    )
    assert one == same and common(one, bare) == common(one, other) == 2  # position 13 is seen from 8 on


@dataclass(frozen=True)
class Picture(Ask):
    """What a layer may ask: the keys from a position on depend on it."""

    name: str
    first: int = 6

    @property
    def keyed(self) -> tuple[tuple[int, bytes], ...]:
        return ((self.first, self.name.encode()),)


def test_requests_share_no_keys_that_depend_on_what_another_asks() -> None:
    class Seeing(Ability):
        answers = (Picture,)

    recipe = recipe_of()
    ABILITIES.register("seeing")(Seeing)
    try:
        engine = engine_for(recipe, page=4, share=True)
        bare = requests_of(recipe)[0]
        for asks, cached in (((), 0), ((), 24), ((Picture("a"),), 4), ((Picture("b"),), 4), ((Picture("a"),), 24)):
            *_, last = engine.run([replace(bare, asks=asks)])
            assert last.cached == cached
    finally:
        ABILITIES.unregister("seeing")


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=40))
def test_pages_are_never_lost_nor_owned_twice(events: list[tuple[int, int]]) -> None:
    pages, owners = PageAllocator(8), []
    for event, number in events:
        if event == 0 and number <= pages.free:
            owners.append(pages.claim([], number))
        elif event == 1 and owners:
            pages.release(owners.pop(number % len(owners)))
        elif event == 2 and owners and owners[-1]:
            pages.publish(bytes([number]), owners[-1][0])
        elif event == 3:
            owners.append(pages.claim(pages.published([bytes([number])]), 0))
        used = {page for owned in owners for page in owned}
        assert len(used) + pages.free == 8
    for owned in owners:
        pages.release(owned)
    assert pages.free == 8 and len(set(pages.claim([], 8))) == 8


@pytest.mark.parametrize("rows", [1, 3])
def test_a_request_with_logits_that_are_not_finite_does_not_break_those_that_begin_alike(rows: int) -> None:
    """Attention multiplies values that a position does not see by zero, which leaves a NaN."""
    model, poison = tiny_model("block_causal"), 37
    with torch.no_grad():
        model.embedding.weight[poison] = float("nan")
        model.head.weight[poison] = 0  # never the best
    recipe = compose(model, iteration={"name": "block_diffusion", "block": 8}, decoder="threshold", cache="block")
    bad, good = (Request.behind([*SYSTEM, end, *[2] * 12], 8, recipe.resolve({})) for end in (poison, 5))
    want = completions(engine_for(recipe), [good])[0].canvas
    engine, found = engine_for(recipe, rows=rows, page=8, share=True, max_length=64), dict[int, list[int]]()
    for request in (bad, good, good):
        engine.add(request)
    while engine.busy:
        found |= {u.index: u.completion.canvas for u in engine.step() if u.completion is not None}
    assert found == {1: want, 2: want}
