"""Drafts and log-probabilities: what steps tell of tokens, for those who ask."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from support.matrix import SAMPLE, Combination, completions, engine_for, launched_ahead, outcome, requests_for
from support.models import tiny_model

from dinfer.core.abilities.reports import Reporting
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request, Update, Wants
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.cursors import Phase
from dinfer.core.step.told import TOP


def recipe_of(decoder: Any = "threshold", **more: Any) -> Recipe:
    iteration = {"name": "block_diffusion", "block": 8, "stop": "off"}
    return compose(tiny_model("block_causal"), iteration=iteration, decoder=decoder, cache="block", **more)


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("combination", sorted(SAMPLE, key=str)[3::16], ids=str)
def test_who_is_told_gets_the_same_tokens(combination: Combination) -> None:
    recipe = combination.recipe()
    requests = requests_for(recipe)
    want = completions(engine_for(recipe), requests)
    told: list[list[Any]] = [[] for _ in requests]
    for update in engine_for(recipe, rows=3).run(requests, Wants(deltas="commit", drafts=True, logprobs=True)):
        assert update.new is not None and update.logprobs is not None
        assert len(update.new) == len(update.logprobs)
        told[update.index] += zip(update.new, update.logprobs, strict=True)
        if update.completion is not None:
            assert outcome(update.completion) == outcome(want[update.index])
    for request, of_row in zip(want, told, strict=True):
        assert [token for token, _ in of_row] == request.output
        assert all(entry.logprob <= entry.top[0][1] + 1e-6 for _, entry in of_row)


@pytest.mark.parametrize("ahead", [False, True])
def test_log_probabilities_are_those_of_the_step_that_commits(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache each step computes the canvas as it stands, so one more forward gives the same logits."""
    recipe = compose(
        tiny_model(), iteration={"name": "blockwise", "block": 8, "stop": "off"},
        decoder={"name": "fixed", "steps": 4}, cache="none",
    )  # fmt: skip
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    logits = type(recipe.model).logits

    def kept(model: Any, h_BWD: torch.Tensor) -> torch.Tensor:
        found = logits(model, h_BWD)
        seen.append(found[0].float().log_softmax(-1))
        return found

    monkeypatch.setattr(type(recipe.model), "logits", kept)
    engine = engine_for(recipe)
    wants = Wants(deltas="commit", logprobs=True, snapshots=True)
    updates = list((launched_ahead(engine) if ahead else engine).run([Request.behind([1, 2, 3], 16)], wants))
    step_of: dict[int, int] = {}
    for number, update in enumerate(updates):
        assert update.masked is not None
        for position, masked in enumerate(update.masked):
            if not masked:
                step_of.setdefault(position, number)
    output = updates[-1].completion.output  # type: ignore[union-attr]
    told = [entry for update in updates for entry in update.logprobs or []]
    for index, (token, entry) in enumerate(zip(output, told, strict=True)):
        position = 3 + index
        number = step_of[position]
        of_position = seen[number][position - updates[number].region[0]]
        assert entry.logprob == pytest.approx(float(of_position[token]), abs=1e-5)
        best = of_position.topk(TOP)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_log_probability_is_read_once_and_those_of_a_round_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block, a token a step: reading the block at each step would take the square of its length."""
    steps, reads = 24, list[int]()
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        if tensor.is_floating_point():
            reads.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    recipe = compose(tiny_model(), iteration="full", decoder={"name": "fixed", "steps": steps}, cache="none")
    requests = [Request.behind([1, 2, 3 + i], steps, stops=False) for i in range(3)]
    updates = list(engine_for(recipe).run(requests, Wants(deltas="commit", logprobs=True)))
    told = sum(len(update.logprobs or []) for update in updates)
    assert told == 3 * steps and sum(reads) == told * 2 * (1 + TOP) and len(reads) <= steps


@pytest.mark.parametrize("iteration", ["blockwise", "lopa"])
def test_log_probabilities_do_not_depend_on_neighbours(iteration: str) -> None:
    """Nor on whether their step works on the logits in place. A token that a branch commits has one too."""
    plain = iteration == "blockwise"
    recipe = compose(
        tiny_model(), iteration={"name": iteration, "block": 8}, decoder="entropy_bound" if plain else "threshold",
        cache="none", sampling={"name": "standard", "suppress_mask": plain},
    )  # fmt: skip
    request = Request.behind([4] * 9, 29, recipe.resolve({}))

    def told(engine: Engine, beside: list[Request]) -> list[tuple[int, Any]]:
        updates = [u for u in engine.run([request, *beside], Wants(deltas="commit", logprobs=True)) if u.index == 0]
        return [pair for u in updates for pair in zip(u.new or [], u.logprobs or [], strict=True)]

    engine = engine_for(recipe, rows=2)
    drawn = Request.behind([1, 2, 3], 29, recipe.resolve({"sampling.temperature": 0.7}))
    alone, beside = told(engine, []), told(engine, [drawn])
    assert [token for token, _ in alone] == [token for token, _ in beside] and len(alone) > 8
    for (token, one), (_, other) in zip(alone, beside, strict=True):
        assert one.logprob == pytest.approx(other.logprob) and one.logprob < 0
        assert one.logprob == pytest.approx(dict(one.top).get(token, one.logprob))


def test_drafts_show_what_is_proposed_and_what_stands() -> None:
    recipe = recipe_of({"name": "fixed", "steps": 8})
    frames: dict[int, list[Update]] = defaultdict(list)
    requests = [Request.behind([1, 2, 3], 13), Request.behind([4] * 5, 20)]
    for update in engine_for(recipe).run(requests, Wants(drafts=True, snapshots=True)):
        frames[update.index].append(update)
    for updates in frames.values():
        for update in updates:
            assert update.tokens is not None and update.masked is not None
            start, end = update.region
            shown = update.drafts[: len(update.tokens) - start]
            assert [stands for *_, stands in shown] == [not masked for masked in update.masked[start:end]]
            assert all(token == update.tokens[start + i] for i, (token, _, stands) in enumerate(shown) if stands)
            assert all(0 <= sure <= 1 for _, sure, _ in shown)
    assert any(token != 0 for token, _, stands in frames[0][0].drafts if not stands)


@pytest.mark.parametrize("favour", ["latency", "throughput"])
def test_drafts_are_never_those_of_another_request(favour: str) -> None:
    recipe = recipe_of({"name": "fixed", "steps": 8})
    engine = engine_for(recipe, rows=1, favour=favour)
    list(engine.run([Request.behind([5] * 9, 30)], Wants(drafts=True)))
    for update in engine.run([Request.behind([1] * 9, 30)], Wants(drafts=True)):
        if update.phase == Phase.PREFILL:
            assert {token for token, _, stands in update.drafts if not stands} == {-1}


def test_nobody_pays_who_does_not_ask() -> None:
    recipe = recipe_of()
    engine = engine_for(recipe)
    (update, *_) = engine.run([Request.behind([1, 2, 3], 8)], Wants(deltas="commit"))
    assert update.logprobs is None and update.active is None and update.drafts == []
    assert engine.runner.state.kept[Reporting].told is None
