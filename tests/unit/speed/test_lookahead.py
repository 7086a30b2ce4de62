"""Rounds launched before it is known how the last one ended: when, and that nothing but time depends on it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import count, cycle, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.matrix import (
    BLOCK_CACHED,
    SAMPLE,
    Combination,
    completions,
    engine_for,
    launched_ahead,
    outcome,
    requests_for,
)
from support.models import tiny_model
from torch import Tensor

from dinfer.core.engine.batch import CanvasReader, CursorCopy
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Completion, Request, Wants
from dinfer.core.engine.row import Row
from dinfer.core.engine.scheduler import PlannedStep
from dinfer.core.engine.worker import Worker
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.contracts import CachePolicy, WindowPlan
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.window import place, width_of
from dinfer.research.caches.chosen import AdaptiveCache
from dinfer.speed.scheduler import MISS, FastScheduler, Lookahead, stays_open

BLOCK = 8


def recipe_of(**decoder: Any) -> Recipe:
    model = tiny_model("block_causal")
    return compose(
        model, iteration={"name": "block_diffusion", "block": BLOCK, "stop": "off"}, decoder=decoder, cache="block"
    )


def test_a_round_is_launched_before_the_host_has_looked_at_rows_that_stay_in_their_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only rows that moved on need another step, so the device waits for no more than them."""
    monkeypatch.setattr(Lookahead, "pays", False)
    recipe = recipe_of(name="threshold")
    requests = [Request.behind([5 + i] * BLOCK, 4 * BLOCK, recipe.resolve({})) for i in range(6)]
    want = [outcome(done) for done in completions(engine_for(recipe, rows=6), requests)]
    engine = launched_ahead(engine_for(recipe, rows=6))
    looked, at_launch, advance, launch = list[Row](), list[int](), Row.advance, engine.loop.worker.launch

    def advanced(row: Row, now: Cursors) -> bool:
        looked.append(row)
        return advance(row, now)

    def launched(*step: Any) -> None:
        at_launch.append(len(looked))
        launch(*step)

    monkeypatch.setattr(Row, "advance", advanced)
    monkeypatch.setattr(engine.loop.worker, "launch", launched)
    assert [outcome(done) for done in completions(engine, requests)] == want
    assert any(count % 6 for count in at_launch[:8])


class Watch:
    """How many launches there were, and how many of them came while an earlier round had not been looked at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = self.guesses = self.rounds = self.first = 0  # `first`: the launch that was the first guess
        request, read = CanvasReader.request, CanvasReader.read

        def asked(reader: CanvasReader, slots: list[int], *, blocks: bool, drafts: bool) -> CursorCopy:
            self.open, self.rounds = self.open + 1, self.rounds + 1
            self.guesses += self.open == 2
            self.first = self.first or self.rounds * (self.open == 2)
            return request(reader, slots, blocks=blocks, drafts=drafts)

        def seen(reader: CanvasReader, asked: CursorCopy) -> Any:
            found = read(reader, asked)
            self.open -= 1
            return found

        patch.setattr(CanvasReader, "request", asked)
        patch.setattr(CanvasReader, "read", seen)


def run(engine: Engine, requests: list[Request]) -> list[tuple]:
    return [outcome(completion) for completion in completions(engine, requests)]


@pytest.mark.parametrize("rows", [1, 3])
def test_guesses_are_made_where_rows_stay_and_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token a step: rows are in a block for eight steps, of which some are known to be followed by another."""
    recipe = recipe_of(name="fixed", steps=BLOCK)
    requests = [Request.behind([5, 6, 7 + i], 4 * BLOCK - 3, recipe.resolve({})) for i in range(rows)]
    want = completions(engine_for(recipe, rows=rows), requests)
    engine, watch = launched_ahead(engine_for(recipe, rows=rows)), Watch(monkeypatch)
    assert run(engine, requests) == [outcome(completion) for completion in want]
    assert watch.guesses >= 2 and watch.open == 0
    assert watch.rounds == max(completion.counts.forwards for completion in want)  # none was wrong


@pytest.mark.parametrize("rejected", ["cold", "branches"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_whose_window_slides_take_the_same_step_again(
    rows: int, rejected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a window slides, it is as wide, so that nothing waits for the host but the ends of requests."""
    iteration, decoder = {"name": "sliding", "block": 7}, {"name": "isd", "rejected": rejected}
    recipe = compose(tiny_model("drafts"), iteration=iteration, decoder=decoder, cache="block")
    requests = [Request.behind([5, 6, 7 + i], 48, recipe.resolve({})) for i in range(rows)]
    want = [done.output for done in completions(engine_for(recipe, rows=rows), requests)]
    engine, watch = launched_ahead(engine_for(recipe, rows=rows)), Watch(monkeypatch)
    assert [done.output for done in completions(engine, requests)] == want
    assert watch.first == 3  # behind the prompt and one step
    assert watch.guesses > watch.rounds / 2 and watch.open <= 1  # the step behind the last one found nobody


def test_wrong_guesses_change_nothing_and_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is taken to stay where it is, and none ever does for two steps."""
    recipe = recipe_of(name="fixed", steps=4)
    requests = [Request.behind([5, 6], 12 * BLOCK - 2, recipe.resolve({}))] * 2
    want = run(engine_for(recipe), requests)
    engine, watch = launched_ahead(engine_for(recipe)), Watch(monkeypatch)
    monkeypatch.setattr("dinfer.speed.scheduler.stays_open", lambda *row: True)
    assert run(engine, requests) == want and run(engine, requests) == want
    assert watch.guesses > 0 and watch.open == 0
    assert engine.loop.scheduler.lookahead.balance < MISS and not engine.loop.scheduler.lookahead.pays


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("combination", sorted(SAMPLE, key=str)[::8], ids=str)
def test_a_wrong_guess_is_harmless_with_any_recipe(combination: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = combination.recipe(tiny_model(combination.variant))
    requests = requests_for(recipe)
    want = run(engine_for(recipe, rows=3), requests)
    engine = launched_ahead(engine_for(recipe, rows=3))
    monkeypatch.setattr("dinfer.speed.scheduler.stays_open", lambda *row: True)
    monkeypatch.setattr("dinfer.speed.scheduler.MISS", 0)  # however often they are wrong, guesses go on
    assert run(engine, requests) == want


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("combination", BLOCK_CACHED, ids=str)
def test_where_a_row_will_be_is_guessed_of_steps_that_settle(
    combination: Combination, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = combination.recipe()
    requests = requests_for(recipe) * 2
    want = [settled(completion) for completion in completions(engine_for(recipe), requests)]
    monkeypatch.setattr("dinfer.speed.grouping.settling_pays", lambda *rows: True)
    monkeypatch.setattr("dinfer.speed.settling.settling_pays", lambda *rows: True)
    monkeypatch.setattr("dinfer.speed.abilities.open_positions.MANY", 1)
    engine = launched_ahead(engine_for(recipe, rows=4, favour="throughput"))
    assert [settled(completion) for completion in completions(engine, requests)] == want


def test_rounds_of_many_rows_are_launched_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 8)
    recipe = recipe_of(name="fixed", steps=3)
    requests = [Request.behind([5, 6, 7 + i], (3 + i) * BLOCK, recipe.resolve({})) for i in range(6)]
    want = [settled(completion) for completion in completions(engine_for(recipe, rows=6), requests)]
    engine, watch = launched_ahead(engine_for(recipe, rows=6, favour="throughput")), Watch(monkeypatch)
    assert [settled(completion) for completion in completions(engine, requests)] == want
    assert watch.guesses > watch.rounds / 4 and watch.open == 0


def settled(completion: Completion) -> tuple:
    """All that does not depend on passes that only compute keys."""
    counts = completion.counts
    return completion.canvas, counts.forwards - counts.prefills, counts.committed


def test_a_request_that_waits_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name="fixed", steps=BLOCK)
    engine, watch = launched_ahead(engine_for(recipe, rows=2, max_length=64)), Watch(monkeypatch)
    engine.add(Request.behind([5, 6], 4 * BLOCK - 2, recipe.resolve({})))
    while not watch.guesses:
        engine.step()
    late = engine.add(Request.behind([8], BLOCK - 1, recipe.resolve({})))
    engine.step()
    engine.step()
    assert late in {update.index for update in engine.step()}


def test_rounds_are_launched_ahead_though_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server under load always has a queue. A request enters in the same round as without guesses."""
    recipe = recipe_of(name="fixed", steps=BLOCK)
    requests = [Request.behind([5, 6, 7 + i], (2 + i % 3) * BLOCK - 3, recipe.resolve({})) for i in range(8)]
    watch, waiting, plan = Watch(monkeypatch), list[int](), FastScheduler.plan

    def planned(scheduler: FastScheduler, rows: Any, *, in_flight: bool = False) -> list[PlannedStep]:
        steps = plan(scheduler, rows, in_flight=in_flight)
        if in_flight and steps:
            waiting.append(engine.occupancy()["waiting"])
        return steps

    monkeypatch.setattr(FastScheduler, "plan", planned)
    found = dict[bool, tuple[list[tuple], int]]()
    for pays in (False, True):
        monkeypatch.setattr(Lookahead, "pays", pays)
        engine, before = launched_ahead(engine_for(recipe, rows=3)), watch.rounds
        found[pays] = run(engine, requests), watch.rounds - before
    assert found[True] == found[False]
    assert sum(map(bool, waiting)) > 5 and watch.open == 0


def test_a_request_enters_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name="fixed", steps=BLOCK)
    engine, read, running = launched_ahead(engine_for(recipe, rows=2, max_length=64)), CanvasReader.read, list[int]()

    def noted(reader: CanvasReader, asked: CursorCopy) -> Any:
        running.append(engine.occupancy()["running"])
        return read(reader, asked)

    monkeypatch.setattr(CanvasReader, "read", noted)
    for tokens in ([5, 6], [8]):
        engine.add(Request.behind(tokens, 2 * BLOCK, recipe.resolve({})))
        engine.step()
    assert running == [1, 2]  # when the host begins to wait


def test_the_host_looks_at_a_step_while_the_device_is_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in two phases take two steps a round. Answers are read when the next round is under way."""
    log, launch, rows = list[str](), Worker.launch, CanvasReader.canvases

    def logged(name: str, work: Any) -> Any:
        return lambda *given: (log.append(name), work(*given))[1]

    monkeypatch.setattr(Worker, "launch", logged("launch", launch))
    monkeypatch.setattr(CanvasReader, "canvases", logged("answer", rows))
    recipe = compose(
        tiny_model(), iteration={"name": "blockwise", "block": BLOCK, "stop": "off"}, cache="dual",
        decoder={"name": "fixed", "steps": 4},
    )  # fmt: skip
    requests = [Request.behind([5, 6, 7], (2 + i) * BLOCK - i, recipe.resolve({})) for i in range(4)]
    want = run(engine_for(recipe), requests)
    log.clear()
    device = SimpleNamespace(record=lambda: None, synchronize=logged("wait", lambda: None))
    monkeypatch.setattr(Worker, "event", lambda worker: device)
    assert run(launched_ahead(engine_for(recipe)), requests) == want
    assert log.count("wait") == log.count("launch")
    assert any(log[i : i + 4] == ["launch", "launch", "wait", "wait"] for i in range(len(log)))
    assert log[log.index("answer") - 1] == "launch"


def test_a_row_is_planned_when_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, planned = recipe_of(name="fixed", steps=BLOCK), list[tuple[int, ...]]()

    def noted(cache: CachePolicy, spec: Any, now: Cursors) -> int:
        planned.append((now.phase, *place(now)))
        return width_of(cache, spec, now)

    monkeypatch.setattr("dinfer.core.engine.scheduler.width_of", noted)
    run(launched_ahead(engine_for(recipe)), [Request.behind([5, 6], 4 * BLOCK - 2, recipe.resolve({}))])
    assert 0 < len(planned) == len({*planned})


@dataclass(frozen=True, kw_only=True)
class FirstWide(AdaptiveCache):
    """Keeps a prompt as the block cache does. A request without a whole block begins with a wide window."""

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None, keeps=True) if phase == Phase.PREFILL else super().plan(phase)


def test_a_row_that_enters_meanwhile_is_planned_for_its_first_step() -> None:
    """The rows that run need narrow steps, and it alone a wide one."""
    cache = FirstWide(response_interval=1000, ratio=0.0, prompt_interval=0)
    recipe = compose(
        tiny_model("block_causal"), iteration={"name": "block_diffusion", "block": BLOCK, "stop": "off"},
        decoder={"name": "fixed", "steps": 2}, cache=cache,
    )  # fmt: skip
    engine = launched_ahead(engine_for(recipe, rows=2, max_length=64))
    engine.add(Request.behind([5, 6], 4 * BLOCK - 2, recipe.resolve({})))
    engine.step()
    late = engine.add(Request.behind([8], 2 * BLOCK - 1, recipe.resolve({})))
    first = next(update for _ in range(9) for update in engine.step() if update.index == late)
    assert first.forwards == 1 and first.error is None


def test_a_cpu_needs_nothing_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's context of a stream starts CUDA, even without a stream. A card may be full or broken."""
    recipe = recipe_of(name="fixed", steps=BLOCK)
    monkeypatch.setattr(torch.cuda, "stream", fails)
    assert run(engine_for(recipe), [Request.behind([5, 6], BLOCK, recipe.resolve({}))])


def test_snapshots_show_the_canvas_after_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name="fixed", steps=BLOCK)
    request = Request.behind([5, 6], 2 * BLOCK - 2, recipe.resolve({}))
    want = [update.tokens for update in engine_for(recipe).run([request], Wants(snapshots=True))]
    engine, watch = launched_ahead(engine_for(recipe)), Watch(monkeypatch)
    assert [update.tokens for update in engine.run([request], Wants(snapshots=True))] == want
    assert watch.guesses > 0 and len(want) > BLOCK


class Interrupted:
    """Stands for CUDA events; the wait for some of them is interrupted."""

    waits = 0
    at: frozenset[int] = frozenset()

    def record(self) -> None: ...

    def synchronize(self) -> None:
        Interrupted.waits += 1
        if Interrupted.waits in Interrupted.at:
            raise KeyboardInterrupt


def interrupted_at(waits: range, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Interrupted, "waits", 0)
    patch.setattr(Interrupted, "at", frozenset(waits))
    patch.setattr(Worker, "event", lambda worker: Interrupted())


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("wait", [1, 2, 3, 4, 6, 9])
def test_after_an_interrupt_an_engine_is_as_good_as_new(wait: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name="fixed", steps=BLOCK)
    requests = [Request.behind([5, 6, 7 + i], 4 * BLOCK - 3, recipe.resolve({})) for i in range(3)]
    want = run(engine_for(recipe, rows=2), requests)
    interrupted_at(range(wait, wait + 1), monkeypatch)
    engine = launched_ahead(engine_for(recipe, rows=2))
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests)
    assert run(engine, requests[::-1]) == want[::-1]


def test_an_interrupted_step_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name="fixed", steps=BLOCK)
    requests = [Request.behind([5, 6, 7 + i], (3 + i) * BLOCK - 3, recipe.resolve({})) for i in range(3)]
    want = run(engine_for(recipe, rows=2), requests)
    interrupted_at(range(2, 99, 3), monkeypatch)
    engine, watch = launched_ahead(engine_for(recipe, rows=2)), Watch(monkeypatch)
    for request in requests:
        engine.add(request)
    found: dict[int, tuple] = {}
    while engine.busy:
        with suppress(KeyboardInterrupt):
            found |= {u.index: outcome(u.completion) for u in engine.step() if u.completion is not None}
    assert [found[i] for i in range(3)] == want
    assert watch.guesses > 0 and Interrupted.waits > 9


@pytest.mark.parametrize("place", [(Row, "read_tokens"), (CanvasReader, "request"), (CanvasReader, "read")], ids=str)
@pytest.mark.parametrize("call", [4, 9])
def test_an_interrupt_beside_the_device_spoils_no_other_request(
    place: tuple[Any, str], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes behind the work. The requests at hand may end with it; what others are told stays right."""
    recipe = compose(
        tiny_model(), iteration={"name": "blockwise", "block": BLOCK, "stop": "off"}, cache="dual",
        decoder={"name": "fixed", "steps": 4},
    )  # fmt: skip
    requests = [Request.behind([5, 6, 7 + i], (2 + i) * BLOCK - i, recipe.resolve({})) for i in range(4)]
    want, work, calls = run(engine_for(recipe), requests), getattr(*place), count()

    def interrupted(*given: Any, **named: Any) -> Any:
        done = work(*given, **named)
        if next(calls) == call:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(*place, interrupted)
    engine, told = launched_ahead(engine_for(recipe, rows=3)), dict[int, list[int]]()
    for request in requests:
        engine.add(request, Wants(deltas="commit"))
    completed = set[int]()
    while engine.busy:
        with suppress(KeyboardInterrupt):
            for update in engine.step():
                assert update.error is None or "KeyboardInterrupt" in str(update.error)
                told.setdefault(update.index, []).extend(update.new or [])
                if update.completion is not None:
                    assert outcome(update.completion) == want[update.index]
                    assert told[update.index] == update.completion.output
                    completed.add(update.index)
    assert next(calls) > call and completed


def test_an_interrupt_while_answers_are_read_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name="fixed", steps=BLOCK)
    requests = [Request.behind([5, 6, 7 + i], 2 * BLOCK - 3, recipe.resolve({})) for i in range(2)]
    want, read, reads = run(engine_for(recipe, rows=2), requests), CanvasReader.canvases, count()

    def interrupted(reader: CanvasReader, slots: list[int]) -> Tensor:
        if next(reads) == 0:
            raise KeyboardInterrupt
        return read(reader, slots)

    monkeypatch.setattr(CanvasReader, "canvases", interrupted)
    engine, found = engine_for(recipe, rows=2), dict[int, tuple]()
    for request in requests:
        engine.add(request)
    while engine.busy:
        with suppress(KeyboardInterrupt):
            found |= {u.index: outcome(u.completion) for u in engine.step() if u.completion is not None}
    assert [found[i] for i in range(2)] == want
    assert next(reads) > 1 and engine.occupancy()["pages_free"] == engine.occupancy()["pages"]


def test_room_grows_though_a_wrong_guess_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.speed.scheduler.stays_open", lambda *row: True)
    monkeypatch.setattr("dinfer.speed.scheduler.MISS", 0)
    recipe = recipe_of(name="fixed", steps=BLOCK)
    engine = launched_ahead(engine_for(recipe, rows=4))
    requests = [Request.behind([5, 6, 7 + i], 2 * BLOCK - 3, recipe.resolve({})) for i in range(4)]
    list(engine.run(requests[:1]))
    assert max(engine.occupancy()["running"] for _ in engine.run(requests)) == 4


def test_an_error_behind_a_guess_spoils_nothing_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name="fixed", steps=BLOCK)
    requests = [Request.behind([5, 6, 7 + i], (1 + i) * BLOCK - 3, recipe.resolve({})) for i in range(2)]
    want = run(engine_for(recipe, rows=2), requests)
    engine, watch = launched_ahead(engine_for(recipe, rows=2)), Watch(monkeypatch)
    monkeypatch.setattr("dinfer.speed.scheduler.stays_open", lambda *row: True)
    monkeypatch.setattr("dinfer.speed.scheduler.MISS", 0)
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(Row, "answer", fails)
        run(engine, requests)
    assert watch.guesses > 0 and watch.open == 1
    assert run(engine, requests[::-1]) == want[::-1]


def fails(*given: Any) -> None:
    raise MemoryError


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_luck_lasts_where_few_guesses_are_wrong(pattern: list[bool]) -> None:
    """The pattern over and over again; one that is wrong now and then is forgiven."""
    luck = Lookahead()
    for right in islice(cycle(pattern), 40 * MISS):
        luck.record(right)
    if all(pattern):
        assert luck.pays
        luck.record(False)
        assert luck.pays
        luck.record(False)
        assert not luck.pays
    else:
        assert not luck.pays


@given(st.integers(0, 64), st.integers(0, 64))
def test_a_row_stays_only_if_it_would_have_to_commit_more_than_ever(left: int, fastest: int) -> None:
    assert not stays_open(left, fastest) or left > fastest
