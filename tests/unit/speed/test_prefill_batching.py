"""Prefills that wait for one another: how many gather, for how long at most, and at what cost; the same tokens."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.matrix import BLOCK_CACHED, Combination, completions, engine_for, observed, outcome, requests_for

from dinfer.core.step.contracts import Phase
from dinfer.speed.grouping import PrefillBatching

FREE, PROMPT, WIDTH = 1800, 512, 32


def simulated(gathering: PrefillBatching, decoding: int, apart: float, rounds: int = 20_000) -> tuple[list[int], float]:
    """How many rows each prefill had, and what waiting and reading weights cost, in positions a round."""
    random, waiting, sizes, cost = Random(0), 0, [], 0.0
    for _ in range(rounds):
        came = sum(random.random() < 1 / (4 * apart) for _ in range(4))
        waiting += came
        if gathering.holds(came, [PROMPT] * waiting, [WIDTH] * decoding):
            cost += waiting * (FREE + decoding * WIDTH) / decoding
        elif waiting:
            sizes.append(waiting)
            cost += FREE
            waiting = 0
    return sizes, cost / rounds


@pytest.mark.parametrize("apart", [1, 3.5, 10])
@pytest.mark.parametrize("decoding", [32, 64, 256])
def test_as_many_gather_as_cost_least(decoding: int, apart: float) -> None:
    sizes, cost = simulated(PrefillBatching(FREE, 10**6), decoding, apart)
    value = (FREE + decoding * WIDTH) / decoding
    best = (2 * FREE / (apart * value)) ** 0.5
    mean = sum(sizes) / len(sizes)
    assert max(0.7 * best, 1) <= mean <= max(1.3 * best, 2)
    assert cost < FREE / apart


@given(st.integers(1, 60), st.integers(1, 200), st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4000))
def test_none_waits_for_longer_than_rows_decode(waiting: int, decoding: int, before: list[int], free: int) -> None:
    gathering = PrefillBatching(free, 10**6)
    for came in before:
        gathering.holds(came, [], [WIDTH] * decoding)
    held = 0
    while gathering.holds(0 if held else waiting, [PROMPT] * waiting, [WIDTH] * decoding):
        held += 1
        assert held <= decoding
    assert gathering.debt == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_where_nothing_decodes_or_a_step_is_full_none_waits(before: list[int]) -> None:
    gathering = PrefillBatching(FREE, 8 * PROMPT)
    for came in before:
        assert not gathering.holds(came, [PROMPT] * came, [])
        assert not gathering.holds(came, [PROMPT] * (8 + came), [WIDTH] * 200)


def test_few_that_decode_do_not_let_others_wait() -> None:
    sizes, _ = simulated(PrefillBatching(FREE, 10**6), 4, 20)
    assert sum(sizes) / len(sizes) < 1.1


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("combination", BLOCK_CACHED[::2], ids=str)
@pytest.mark.parametrize("share", [False, True])
def test_tokens_are_the_same_and_prefills_share_steps(
    combination: Combination, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it always paid to wait for a third."""
    recipe = combination.recipe()
    requests = [request for request in requests_for(recipe) for _ in range(2)]
    want = [outcome(completions(engine_for(recipe), [request])[0]) for request in requests]
    monkeypatch.setattr(PrefillBatching, "holds", lambda self, came, waiting, decoding: decoding and len(waiting) < 3)
    engine = engine_for(recipe, rows=5, favour="throughput", share=share)
    shapes = observed(engine)
    got, left = {}, requests[::-1]
    while left or engine.busy:
        if left:
            engine.add(left.pop())
        got |= {u.index: outcome(u.completion) for u in engine.step() if u.completion is not None}
    tokens = slice(3 if share else None)  # the number of forwards depends on what is shared
    assert [got[i][tokens] for i in range(len(want))] == [some[tokens] for some in want]
    assert any(shape.phase == Phase.PREFILL and shape.lanes > 1 for shape in shapes)
