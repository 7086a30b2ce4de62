"""Every legal recipe on every kind of model: rows do not notice each other, nor how their steps are launched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.host import Host
from support.matrix import (
    COMBINATIONS,
    ILLEGAL,
    LEGAL,
    NEW,
    SAMPLE,
    Combination,
    completions,
    covering,
    engine_for,
    every_recipe,
    outcome,
    refusal,
    requests_for,
)
from support.models import MASK, tiny_model

from dinfer.core.decoders.schedule import Fixed
from dinfer.core.engine.request import Request
from dinfer.core.iterations.sweep import Blockwise
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.registry import option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


def alone(combination: Combination) -> list[tuple]:
    """What each request gives in an engine of its own."""
    recipe = combination.recipe()
    return [outcome(completions(engine_for(recipe), [request])[0]) for request in requests_for(recipe)]


@pytest.mark.rest(but=9)
@every_recipe()
def test_rows_notice_neither_each_other_nor_the_schedule(combination: Combination) -> None:
    """What a request gives alone it gives beside others of other lengths and options, and however it is launched."""
    recipe = combination.recipe()
    want = alone(combination)
    requests = requests_for(recipe)
    for request, (canvas, *_) in zip(requests, want, strict=True):
        assert canvas[: len(request.prompt)] == request.prompt
        assert recipe.model.spec.mask_id is None or MASK not in canvas

    engine = engine_for(recipe, rows=3, page=4)  # a queue for too few slots, then slots and pages that were used
    assert [outcome(c) for c in completions(engine, requests)] == want
    assert [outcome(c) for c in completions(engine, requests[::-2])] == want[::-2]

    # Random phases, groups of slots with rows in other phases, scratch lanes, wider windows, shuffled pages.
    with torch.inference_mode():
        host = Host(recipe, requests, seed=len(str(combination)))
        before = host.addresses()
        host.run_at_random()
    assert host.canvases() == [canvas for canvas, *_ in want]
    assert host.forwards() == [row[3] for row in want]  # a step in another phase is not a forward
    assert host.addresses() == before


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("combination", SAMPLE[::13], ids=str)
@pytest.mark.parametrize("page", [1, 3, 64])
def test_page_size_changes_nothing(combination: Combination, page: int) -> None:
    recipe = combination.recipe()
    assert [outcome(c) for c in completions(engine_for(recipe, page=page), requests_for(recipe))] == alone(combination)


def test_the_matrix_is_not_trivial() -> None:
    """The tests above mean something only if recipes differ, commits come in parallel and answers are not constant."""
    found = {str(c): alone(c) for c in [c for c in SAMPLE if c.variant == "bidirectional"][::5]}
    assert len({str(rows) for rows in found.values()}) > len(found) // 2
    threshold = alone(next(c for c in LEGAL if str(c) == "bidirectional-blockwise-threshold-none"))
    forwards, committed = sum(row[3] for row in threshold), sum(row[5] for row in threshold)
    assert 1.15 * forwards < committed < 6 * forwards
    assert sum(len(set(row[0][-new:])) > 2 for row, new in zip(threshold, NEW, strict=True)) >= 3
    stopped = [row[2] for rows in found.values() for row in rows]
    assert len(stopped) // 10 < sum(stopped) < len(stopped)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_illegal_recipes_say_why(every: bool, record_property: Callable[[str, object], None]) -> None:
    """A refusal without a remedy is no help. The counts are shown when the tests end (see conftest.py)."""
    reasons = {refusal(c) for c in (ILLEGAL if every else covering(ILLEGAL))}
    legal, all_of = (Counter(c.variant for c in some) for some in (LEGAL, COMBINATIONS))
    counts = ", ".join(f"{name} {legal[name]} of {all_of[name]}" for name in all_of)
    record_property("summary", f"composition matrix: {len(LEGAL)} legal recipes, {len(ILLEGAL)} refused; {counts}")
    assert len(reasons) > 3 and len(LEGAL) > len(COMBINATIONS) // 3
    assert [reason for reason in reasons if not re.search(r"Use \w+|must be \w+", str(reason))] == []


def test_options_of_one_request_do_not_reach_another() -> None:
    combination = next(c for c in LEGAL if str(c) == "bidirectional-blockwise-threshold-none")
    recipe = combination.recipe()
    prompt = list(range(1, 9))
    low, high = (Request.behind(prompt, 24, recipe.resolve({"threshold": value})) for value in (0.0, 1.0))
    one, other = completions(engine_for(recipe), [low, high])
    assert 2 * one.counts.forwards < other.counts.forwards


def test_a_block_that_does_not_fit_is_refused_with_those_that_do() -> None:
    for block, fitting in ((6, "iteration.block=4 or 8"), (3, "iteration.block=4")):
        with pytest.raises(IncompatibleRecipe, match=f"Use {fitting}."):
            compose(
                tiny_model("block_causal"),
                iteration={"name": "blockwise", "block": block},
                decoder="fixed",
                cache="none",
            )


@dataclass(frozen=True, kw_only=True)
class Last(Decoder):
    """The last masked position: a component of a library's user, registered nowhere."""

    many: int = option(1, "so many at a step", per_request=True)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        rank_RL = view.masked_RL.flip(-1).cumsum(-1).flip(-1)
        return Proposal(view.masked_RL & (rank_RL <= view.options["many"]))


def test_a_component_need_not_be_registered() -> None:
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": 8}, decoder=Last(many=2), cache="none")
    one, other = completions(
        engine_for(recipe), [Request.behind([1, 2], 8, recipe.resolve(given)) for given in ({}, {"many": 8})]
    )
    assert (one.counts.forwards, other.counts.forwards) == (4, 1)


def test_options_of_a_component_built_in_python_are_checked_too() -> None:
    with pytest.raises(ValueError, match=r"decoder\.score='bogus' must be 'low_confidence' or 'random'"):
        compose(tiny_model(), iteration="blockwise", decoder=Fixed(score="bogus"), cache="none")  # type: ignore[arg-type]


def test_a_component_that_is_no_dataclass_is_refused() -> None:
    class Plain(Blockwise):
        pass

    class Bare(Decoder):
        def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
            return Proposal(view.masked_RL)

    compose(tiny_model(), iteration=Plain(), decoder="fixed", cache="none")
    with pytest.raises(TypeError, match="decoder Bare must be a dataclass"):
        compose(tiny_model(), iteration="blockwise", decoder=Bare(), cache="none")
    with pytest.raises(TypeError, match="decoder must be a name"):
        compose(tiny_model(), iteration="blockwise", decoder=Blockwise(), cache="none")


def test_only_decoders_and_samplings_have_options_of_a_request() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hasty(Blockwise):
        haste: float = option(0.5, "of each request", per_request=True)

    with pytest.raises(TypeError, match=r"iteration\.haste of Hasty is declared with per_request=True"):
        compose(tiny_model(), iteration=Hasty(), decoder="fixed", cache="none")
