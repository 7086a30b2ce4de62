"""Requests enter, wait, leave and are cancelled between steps; what each gives depends on nothing but itself."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
import torch
from support.matrix import (
    BLOCK_CACHED,
    LEGAL,
    SAMPLE,
    Combination,
    completions,
    engine_for,
    launched_ahead,
    observed,
    outcome,
    over_shared_model,
    requests_for,
)
from support.models import tiny_model, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode

from dinfer.core.abilities.reports import Reported
from dinfer.core.engine.batch import CanvasReader, CursorCopy
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.errors import NonFiniteLogits
from dinfer.core.engine.request import Completion, Request, Update, Wants
from dinfer.core.engine.row import StepWidth
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.contracts import Phase
from dinfer.core.step.request import DEFAULTS
from dinfer.core.step.shape import KeysOnly, Sampled, StepShape
from dinfer.core.step.step import denoise_step
from dinfer.core.terms.spec import ExpertSpec
from dinfer.speed.abilities.open_positions import OpenOnly, scores_open
from dinfer.speed.graphs import SPARE, bucket, stand_in
from dinfer.speed.grouping import FREE, Group, free_positions, grouped
from dinfer.speed.settling import settling

POISON = 37
CAUSAL = ("drafts", "two_modes")  # families that write the keys of a block as they decode it


def block_recipe() -> Recipe:
    model = tiny_model("block_causal")
    with torch.no_grad():
        model.embedding.weight[POISON] = float("nan")
        model.head.weight[POISON] = 0  # never the best, as some other logit is positive
    return compose(model, iteration={"name": "block_diffusion", "block": 8}, decoder="threshold", cache="block")


def alone(recipe: Recipe, requests: list[Request]) -> list[Completion]:
    return [completions(engine_for(recipe), [request])[0] for request in requests]


def tokens_and_steps(completion: Completion) -> tuple:
    """All that may not depend on the batch: passes that only compute keys may."""
    counts = completion.counts
    return completion.canvas, completion.output, completion.stopped, counts.forwards - counts.prefills, counts.committed


def serve(engine: Engine) -> dict[int, Completion]:
    """Steps until nothing is left to do."""
    done = {}
    while engine.busy:
        done |= {u.index: u.completion for u in engine.step() if u.completion is not None}
    return done


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("combination", SAMPLE[::7], ids=str)
def test_arrivals_at_any_time_change_nothing(combination: Combination) -> None:
    recipe, random = combination.recipe(), Random(len(str(combination)))
    requests = requests_for(recipe)
    want = {i: outcome(c) for i, c in enumerate(alone(recipe, requests))}
    engine = engine_for(recipe, rows=2, page=4, max_length=64)
    found: dict[int, Completion] = {}
    order = random.sample(range(len(requests)), len(requests))
    names = {}
    while order or engine.busy:
        if order and (not engine.busy or random.random() < 0.4):
            index = order.pop()
            names[engine.add(requests[index])] = index
        found |= {names[u.index]: u.completion for u in engine.step() if u.completion is not None}
    assert {i: outcome(c) for i, c in found.items()} == want


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("combination", SAMPLE[3::11], ids=str)
def test_the_same_logits_in_float32_give_the_same_tokens(
    combination: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a batch may change is how the network rounds: here its rounding is taken away, and nothing else."""
    recipe = combination.recipe()
    requests, logits = requests_for(recipe), type(recipe.model).logits
    monkeypatch.setattr(
        type(recipe.model),
        "logits",
        lambda model, h_BWD: ((logits(model, h_BWD) * 2**10).round() / 2**10).float().to(h_BWD.dtype),
    )
    want = [outcome(completion) for completion in alone(recipe, requests)]
    assert [outcome(completion) for completion in completions(engine_for(recipe, rows=3), requests)] == want


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("combination", [one for one in BLOCK_CACHED if str(one).split("-")[0] not in CAUSAL], ids=str)
def test_large_batches_settle_finished_blocks_in_passes_of_their_own(
    combination: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it always paid: no step is wider than what it decodes."""
    recipe = combination.recipe()
    requests = requests_for(recipe)
    want = alone(recipe, requests)
    monkeypatch.setattr("dinfer.speed.grouping.settling_pays", lambda *rows: True)
    monkeypatch.setattr("dinfer.speed.settling.settling_pays", lambda *rows: True)
    engine = engine_for(recipe, rows=4, favour="throughput")
    shapes, got = observed(engine), completions(engine, requests)
    assert [tokens_and_steps(c) for c in got] == [tokens_and_steps(c) for c in want]
    assert any(shape.extra(KeysOnly) for shape in shapes)
    assert sum(c.counts.prefills for c in got) > sum(c.counts.prefills for c in want)


@pytest.mark.rest(but=6)
@pytest.mark.parametrize("combination", [c for c in SAMPLE if scores_open(over_shared_model(c))][::3], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_the_head_runs_on_open_positions_alone(
    combination: Combination, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large batches do, and with room for fewer than there are: then some rows sit the step out."""
    recipe = combination.recipe()
    requests = [
        replace(request, options=DEFAULTS) for request in requests_for(recipe)
    ]  # steps with a draw need all logits
    want = alone(recipe, requests)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", 1)
    shapes: list[StepShape] = []

    def short(recipe: Recipe, state: object, shape: StepShape, slot_B: torch.Tensor) -> None:
        if late and (extra := shape.extra(OpenOnly)) is not None:
            shape = shape.adding(OpenOnly(max(extra.count * 2 // 3, shape.blocks * shape.block)))
        shapes.append(shape)
        denoise_step(recipe, state, shape, slot_B)

    monkeypatch.setattr("dinfer.core.engine.runner.denoise_step", short)
    got = completions(engine_for(recipe, rows=4), requests)
    assert [tokens_and_steps(c) for c in got] == [tokens_and_steps(c) for c in want]
    plain = [shape for shape in shapes if not any(extra.whole_logits for extra in shape.extras)]
    assert (
        any(shape.extra(OpenOnly) for shape in plain) or not plain
    )  # without a cache, lopa has branches in every step


@pytest.mark.parametrize("block", [4, 8])
def test_models_whose_logits_predict_the_next_token_need_both_blocks(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last logits of the block before decode the first position, so there is nothing to settle first."""
    model = tiny_model("block_causal", causal_block=8, shift=1)
    recipe = compose(model, iteration={"name": "block_diffusion", "block": block}, decoder="threshold", cache="block")
    requests = requests_for(recipe)
    want = alone(recipe, requests)
    monkeypatch.setattr("dinfer.speed.grouping.settling_pays", lambda *rows: True)
    monkeypatch.setattr("dinfer.speed.settling.settling_pays", lambda *rows: True)
    got = completions(engine_for(recipe, rows=4, favour="throughput"), requests)
    assert [outcome(c) for c in got] == [outcome(c) for c in want]


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("positions", [1, 5, 9, 16])
@pytest.mark.parametrize("combination", [BLOCK_CACHED[0], SAMPLE[3]], ids=str)
def test_steps_are_cut_to_so_many_positions(
    combination: Combination, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = combination.recipe()
    requests = requests_for(recipe)
    want = alone(recipe, requests)
    engine = engine_for(recipe, positions=positions)
    shapes, got = observed(engine), completions(engine, requests)
    assert [tokens_and_steps(c) for c in got] == [tokens_and_steps(c) for c in want]
    assert all(shape.lanes == 1 or shape.lanes * shape.width <= positions for shape in shapes)
    unit = recipe.model.spec.causal_block or 1
    assert all(shape.width <= max(positions, unit) for shape in shapes if shape.phase == Phase.PREFILL)


@pytest.mark.parametrize("positions", [20, 40])
@pytest.mark.parametrize(
    ("variant", "iteration", "decoder", "runtime"),
    [
        ("bidirectional", {"name": "blockwise", "block": 8}, "threshold", {"speculate": 4}),
        ("bidirectional", {"name": "lopa", "blocks": 2, "block": 4}, "threshold", {}),
        ("drafts", {"name": "sliding", "block": 4, "stop": "off"}, {"name": "isd", "rejected": "branches"}, {}),
    ],
)  # fmt: skip
def test_versions_of_rows_are_among_the_positions_of_a_step(
    variant: str, iteration: dict[str, Any], decoder: Any, runtime: dict[str, Any], positions: int
) -> None:
    cache = "block" if variant == "drafts" else "dual"
    recipe = compose(tiny_model(variant), iteration=iteration, decoder=decoder, cache=cache)
    requests = [Request.behind([3 + i, 7], 24, recipe.resolve({})) for i in range(6)]
    whole, cut = engine_for(recipe, **runtime), engine_for(recipe, positions=positions, **runtime)
    before, want = observed(whole), completions(whole, requests)
    shapes, got = observed(cut), completions(cut, requests)
    assert [one.output for one in got] == [one.output for one in want]

    def large(shapes: list[StepShape]) -> list[StepShape]:
        computed = [(one, one.lanes * (1 + one.versions) * one.width) for one in shapes if one.lanes > 1]
        return [one for one, count in computed if count > positions]

    assert large(before) and not large(shapes) and any(shape.versions for shape in shapes)


def test_a_long_prompt_does_not_hold_up_rows_that_decode() -> None:
    recipe = block_recipe()
    engine = engine_for(recipe, positions=16, max_length=256)
    short, long = Request.behind([1, 2, 3], 40, recipe.resolve({})), Request.behind([5] * 200, 8, recipe.resolve({}))
    names = engine.add(short), engine.add(long)
    rounds = [{u.index: u.phase for u in engine.step()} for _ in range(12)]
    assert all(names[0] in phases for phases in rounds[1:])
    assert [phases[names[1]] for phases in rounds] == [Phase.PREFILL] * 12


def test_prefills_of_equal_work_are_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their rows will draw: a prefill draws nothing, so it needs no graph of its own."""
    recipe = block_recipe()
    given = [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.5}]
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", 1)
    prefills: list[StepShape] = []
    for options in given:
        engine = engine_for(recipe)
        shapes = observed(engine)
        completions(engine, [Request.behind([*range(1, 10)], 8, recipe.resolve(options))])
        prefills += [shape for shape in shapes if shape.phase == Phase.PREFILL]
    assert len(prefills) == len(given) and len(set(prefills)) == 1


@pytest.mark.parametrize("pages", [18, 21, 40])
def test_requests_wait_for_pages(pages: int) -> None:
    recipe = LEGAL[0].recipe()
    requests = requests_for(recipe)
    engine = engine_for(recipe, page=4, pages=pages)
    assert [outcome(c) for c in completions(engine, requests)] == [outcome(c) for c in alone(recipe, requests)]
    assert engine.occupancy()["pages_free"] == pages


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("after", range(8))
def test_cancelled_requests_leave_slots_and_pages(after: int) -> None:
    """Whether they wait, are prefilled or decode; those beside them and behind them in the queue do not notice."""
    recipe = block_recipe()
    requests = [Request.behind([i, i + 1] * 6, 14 + i, recipe.resolve({})) for i in range(5)]
    want = [outcome(c) for c in alone(recipe, requests)]
    engine = engine_for(recipe, rows=2, page=4, max_length=64, positions=8)
    if not after:
        assert engine.cancel(engine.add(requests[0])) and not engine.busy
    names = [engine.add(request) for request in requests]
    done = {}
    for _ in range(after):
        done |= {u.index: u.completion for u in engine.step() if u.completion is not None}
    cancelled = [name for name in names[::2] if engine.cancel(name)]
    assert len(cancelled) == 3 - sum(name in done for name in names[::2])
    assert not any(engine.cancel(name) for name in cancelled)
    done |= serve(engine)
    kept = {name: want[i] for i, name in enumerate(names) if name not in cancelled}
    assert {name: outcome(c) for name, c in done.items()} == kept
    assert engine.occupancy()["pages_free"] == 2 * 16 and not engine.busy
    again = engine.add(requests[0])
    assert again not in names and outcome(serve(engine)[again]) == want[0]


def test_a_row_at_fault_leaves_alone() -> None:
    recipe = block_recipe()
    good, bad = Request.behind([1, 2, 3], 20, recipe.resolve({})), Request.behind([POISON, 3], 20, recipe.resolve({}))
    engine = engine_for(recipe)
    names = [engine.add(request) for request in (good, bad, good)]
    updates = []
    while engine.busy:
        updates += engine.step()
    errors = {u.index: u.error for u in updates if u.error is not None}
    assert [*errors] == [names[1]] and isinstance(errors[names[1]], NonFiniteLogits)
    done = [u.completion for u in updates if u.completion is not None]
    assert [outcome(c) for c in done] == [outcome(c) for c in alone(recipe, [good])] * 2


def test_updates_say_how_far_a_request_is() -> None:
    recipe = block_recipe()
    engine = engine_for(recipe)
    engine.add(Request.behind([1, 2, 3], 20, recipe.resolve({})), Wants(snapshots=True))
    engine.add(Request.behind([4, 5, 6], 20, recipe.resolve({})))
    updates = []
    while engine.busy:
        updates += engine.step()
    for index in (0, 1):
        own = [u for u in updates if u.index == index]
        blocks = [u.blocks for u in own]
        assert blocks == sorted(blocks) and blocks[-1] >= 1 and own[-1].completion is not None
        assert all((u.tokens is not None) == (index == 0) for u in own)


@pytest.mark.parametrize("share", [False, True])
def test_rounds_launched_before_the_last_is_looked_at_change_no_update(
    share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With requests that come and go, fail, are cancelled and looked at."""
    recipe = block_recipe()
    requests = [Request.behind([i, i + 1] * (1 + i), 9 + i, recipe.resolve({})) for i in range(9)]
    requests[4] = Request.behind([POISON, 3], 20, recipe.resolve({}))

    def said(update: Update) -> tuple:
        done = None if update.completion is None else outcome(update.completion)
        return update.forwards, update.phase, update.region, update.tokens, update.blocks, done, type(update.error)

    def alone(i: int) -> list[tuple]:
        engine = engine_for(recipe)
        engine.add(requests[i], Wants(snapshots=i % 3 == 0))
        return [said(update) for _ in range(99) if engine.busy for update in engine.step()]

    engine = engine_for(recipe, rows=3, page=4, pages=40, max_length=64, share=share)
    engine = launched_ahead(engine)
    found: dict[int, list[tuple]] = {i: [] for i in range(9)}
    for i, request in enumerate(requests):
        assert engine.add(request, Wants(snapshots=i % 3 == 0)) == i
        for _ in range(i % 3):
            for update in engine.step():
                found[update.index].append(said(update))
    while engine.busy:
        for update in engine.step():
            found[update.index].append(said(update))
        if found[7]:
            engine.cancel(7)
    want = {i: alone(i) for i in range(9)}
    want[7] = want[7][: len(found[7])]
    assert found == want and found[7] and issubclass(found[4][-1][-1], NonFiniteLogits)
    assert engine.occupancy()["pages_free"] == 40


def test_what_will_never_fit_is_refused_at_once() -> None:
    recipe = block_recipe()
    long = Request.behind([1] * 60, 8, recipe.resolve({}))
    with pytest.raises(ValueError, match=r"68 positions exceeds runtime\.max_length=64"):
        engine_for(recipe, max_length=64).add(long)
    with pytest.raises(ValueError, match=r"needs 5 pages .* there are 4: raise runtime\.pages"):
        completions(engine_for(recipe, pages=4), [long])
    guided = LEGAL[0].recipe()
    request = Request.behind([1] * 60, 8, guided.resolve({"guidance": 1.0}))
    with pytest.raises(ValueError, match=r"needs 10 pages"):
        engine_for(guided, pages=9).add(request)


def test_runs_and_single_steps_each_get_their_own() -> None:
    recipe = block_recipe()
    engine, requests = engine_for(recipe), [Request.behind([i, 2], 12 + i, recipe.resolve({})) for i in range(4)]
    want = [outcome(c) for c in alone(recipe, requests)]
    names = [engine.add(request) for request in requests[:2]]
    got, done = {}, {}
    for update in engine.run(requests[2:]):
        if update.completion is not None:
            got[update.index] = outcome(update.completion)
        done |= {u.index: u.completion for u in engine.step() if u.completion is not None}
    done |= serve(engine)
    assert [outcome(done[name]) for name in names] + [got[0], got[1]] == want
    abandoned = engine.run(requests)
    next(abandoned)
    assert not engine.cancel(0) and engine.busy  # a number of `add`, and of a request that has finished
    abandoned.close()
    assert not engine.busy and engine.occupancy()["pages_free"] == engine.occupancy()["pages"]


def test_room_that_was_asked_for_is_there_from_the_first_request_on() -> None:
    recipe = block_recipe()
    engine = engine_for(recipe, rows=3, max_length=100)
    requests = [Request.behind([1] * n, 100 - n, recipe.resolve({})) for n in (5, 50, 99)]
    names = [engine.add(requests[0])]
    engine.step()
    state = engine.runner.state
    names += [engine.add(request) for request in requests[1:]]
    assert len(engine.step()) == 3
    serve(engine)
    assert engine.runner.state is state


def rows(widths: dict[int, int], narrow: int | None = None) -> dict[int, StepWidth]:
    return {slot: StepWidth(width, narrow) for slot, width in widths.items()}


def planned(widths: dict[int, int], narrow: int | None = None, limit: int = 8192, phase: Phase = Phase.WINDOW):
    return grouped(phase, rows(widths, narrow), free=FREE, limit=limit, unit=32)


def test_rows_share_a_step_unless_padding_costs_more_than_another() -> None:
    assert planned({}) == []
    assert planned({3: 64}) == [Group([3], 64)]
    assert planned({2: 64, 0: 32, 1: 32}) == [Group([2, 0, 1], 64)]  # order and all
    many = {slot: 64 if slot % 8 == 0 else 32 for slot in range(16)}
    narrow, wide = planned(many)
    assert wide == Group([0, 8], 64) and narrow.width == 32 and sorted(narrow.slots + wide.slots) == [*many]
    assert planned(dict.fromkeys(range(64), 32)) == [Group([*range(64)], 32)]
    assert planned({0: 10, 1: 500, 2: 2000}) == [Group([0, 1], 500), Group([2], 2000)]
    assert planned(many, narrow=32) == [Group([*range(16)], 32, keys_only=True)]
    assert planned({0: 64, 1: 32}, narrow=32) == [Group([0, 1], 64)]
    assert planned(dict.fromkeys(range(16), 64), narrow=32) == [Group([*range(16)], 64)]  # all would lose a step


def test_steps_that_settle_are_planned_where_few_rows_enter_a_block() -> None:
    def step(few: int, rest: int) -> list[Group]:
        chances = dict(enumerate([1.0] * few + [0.0] * rest))
        return settling(dict.fromkeys(chances, 32), chances, free=FREE, limit=8192)

    assert step(0, 64) == step(16, 48) == [Group([*range(64)], 32, keys_only=True)]
    assert step(17, 47) == step(0, 1) == step(0, 0) == []
    assert step(64, 0) == step(60, 4) == [Group([*range(64)], 64)], "nearly all enter"
    assert step(6, 0) == [], "few rows are not guessed about"
    assert settling({0: None, 1: None}, {0: 0.0, 1: 0.0}, free=1, limit=8192) == [], "these cannot settle"


def test_steps_are_cut_evenly_and_prefills_from_the_oldest_on() -> None:
    cut = planned(dict.fromkeys(range(9), 100), limit=400)
    assert [len(step.slots) for step in cut] == [3, 3, 3]
    assert planned({0: 500}, limit=400) == [Group([0], 500)]
    prompts = {4: 96, 2: 64, 7: 640, 1: 32}
    assert planned(prompts, limit=200, phase=Phase.PREFILL) == [Group([4, 2], 96)]
    assert planned({7: 640, 1: 32}, limit=200, phase=Phase.PREFILL) == [Group([7], 192)]
    assert planned({7: 640}, limit=8, phase=Phase.PREFILL) == [Group([7], 32)]


@pytest.mark.parametrize("width,padding", [(32, 1), (512, 1 / 3)])
def test_graphs_are_few_with_little_padding_where_it_costs(width: int, padding: float) -> None:
    shapes = [StepShape(Phase.WINDOW, lanes, width, 1, 32, 64) for lanes in range(1, 9)]
    lanes = [bucket(shape, 16, 128, 2048, 40).lanes for shape in shapes]
    assert all(n <= got <= n * (1 + padding) for n, got in enumerate(lanes, 1))
    assert len({*lanes}) <= 6


def test_a_captured_shape_stands_in_where_it_does_the_same_and_hardly_more() -> None:
    shape = StepShape(Phase.WINDOW, 16, 32, 1, 32, 8, (OpenOnly(64),))
    more = ({"lanes": 24}, {"pages": 16}, {"width": 40}, {"extras": ()}, {"extras": (OpenOnly(64), Reported(1))})
    able = [replace(shape, **other) for other in more]
    assert all(other.holds(shape) and not shape.holds(other) for other in able)
    unable = [
        replace(shape, **other)
        for other in (
            {"lanes": 8, "width": 64},
            {"extras": (OpenOnly(32),)},
            {"extras": (OpenOnly(64), Sampled())},
            {"phase": Phase.FULL},
            {"extras": (OpenOnly(64), Reported(2))},
        )
    ]
    assert not any(other.holds(shape) for other in unable)
    assert stand_in(shape, unable, {}, inf) == shape
    assert stand_in(shape, [able[0], able[2]], {}, 0) == able[2]
    larger = replace(shape, lanes=64)
    assert stand_in(shape, [replace(shape, lanes=int(16 * SPARE) + 1)], {}, 1) == shape, "nobody knows what it takes"
    assert stand_in(shape, [larger], {larger: 0.04}, 0.03) == larger, "three quarters of it are computed in vain"
    assert stand_in(shape, [larger], {larger: 0.04}, 0.029) == shape
    whole = replace(shape, width=12, extras=())
    fits = [count for count in (191, 192) if replace(larger, width=12, extras=(OpenOnly(count),)).holds(whole)]
    assert fits == [192], "a step without a number of open positions may have as many as it computes"
    narrow = shape.adding(KeysOnly())
    assert not replace(narrow, width=40).holds(narrow), "wider rows would decode"


def test_a_batch_that_reads_more_weights_computes_more_for_the_same_time() -> None:
    dense = tiny_spec()
    assert free_positions(dense) == FREE
    experts = ExpertSpec(experts=64, chosen=4, width=48)
    assert 4 * FREE < free_positions(replace(dense, experts=experts)) <= 16 * FREE


@pytest.mark.parametrize("order", ["behind", "between"])
def test_a_request_that_waits_for_keys_of_another_holds_up_nobody(order: str) -> None:
    """Samples of one prompt share its keys, which the first of them computes."""
    recipe = block_recipe()
    sample, other = (
        Request.behind([*range(1, 21)], 8, recipe.resolve({})),
        Request.behind([30, 31], 8, recipe.resolve({})),
    )
    requests = [sample, sample, other] if order == "behind" else [sample, sample, other, sample]
    engine = engine_for(recipe, rows=4, page=4, pages=64, max_length=64, share=True)
    for request in requests:
        engine.add(request)
    first, cached = dict[int, int](), dict[int, int]()
    for number in range(99):
        for update in engine.step() if engine.busy else ():
            first.setdefault(update.index, number)
            cached[update.index] = update.cached
    assert first[2] == first[0] == 0 and cached[0] == cached[2] == 0
    assert all(first[i] > 0 and cached[i] > 0 for i in range(len(requests)) if i not in (0, 2))


def test_occupancy_may_be_asked_while_a_round_closes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(block_recipe())
    completions(engine, [Request.behind([1, 2], 8)])
    held = iter([engine.loop.batch])  # type: ignore[union-attr]
    monkeypatch.setattr(type(engine.loop), "batch", property(lambda loop: next(held, None)), raising=False)
    assert engine.occupancy()["pages"] > 0 and next(held, None) is None


def test_what_is_remembered_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.core.step.state.SHAPES", 3)
    engine = engine_for(block_recipe())
    shapes = observed(engine)
    completions(engine, [Request.behind([1] * (3 + 7 * i), 8 * (1 + i % 3)) for i in range(8)])
    assert len(set(shapes)) > 3 >= len(engine.runner.state.resolved)


def test_a_completion_tells_decoded_tokens_from_what_fills_up() -> None:
    """A stop token that was decoded is one; positions behind it, which an early end left open, are not."""
    network = tiny_model()
    with torch.no_grad():
        network.head.weight.copy_(torch.zeros_like(network.head.weight))  # all logits are equal: the lowest id is taken
    network.spec = replace(network.spec, eos_id=0, stop_ids=(0,))
    recipe = compose(network, iteration={"name": "blockwise", "block": 4}, decoder="threshold", cache="none")
    (done,) = completions(engine_for(recipe), [Request.behind([1, 2], 12)])
    assert done.canvas == [1, 2] + [0] * 12 and done.stopped
    assert done.decoded == [False] * 2 + [True] * 4 + [False] * 8 and sum(done.decoded) == done.counts.committed


class Operators(TorchDispatchMode):
    """The operators of torch that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_reading_cursors_wakes_no_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index of a few thousand numbers waits for all of them, which takes milliseconds where a host is busy."""
    recipe = over_shared_model(SAMPLE[0])
    operators, read = Operators(), CanvasReader.read

    def seen(reader: CanvasReader, asked: CursorCopy) -> Any:
        with operators:
            return read(reader, asked)

    monkeypatch.setattr(CanvasReader, "read", seen)
    completions(engine_for(recipe), requests_for(recipe)[:2])
    assert operators.names and not [name for name in operators.names if name.startswith("aten.index")]
