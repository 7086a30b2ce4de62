"""An error ends the requests that it concerns. The others get what they would get alone, and the engine goes on."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, launched_ahead, outcome
from support.models import tiny_model

import dinfer.core.kernels.dispatch
from dinfer.core.caches.window import DualCache
from dinfer.core.engine.batch import Batch, CanvasReader, CursorCopy
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.errors import StalledRow
from dinfer.core.engine.request import Request, Update
from dinfer.core.engine.row import Row
from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.scheduler import Scheduler
from dinfer.core.memory import PoolSize
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState
from dinfer.core.step.window import width_of
from dinfer.formats.holding import quantize
from dinfer.lab.bounds import greedy, log_likelihoods

BAD = 21  # the length of the request that something goes wrong with
GOOD = [Request.behind([1, 2, 3], 14), Request.behind([4, 5], 11), Request.behind([6, 7, 8, 9], 16)]
BROKEN = Request.behind([9, 8, 7, 6, 5], BAD - 5)


def recipe_of(cache: Any = "dual") -> Recipe:
    return compose(tiny_model(), iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache=cache)


def alone(requests: Sequence[Request]) -> list[tuple]:
    recipe = recipe_of()
    return [outcome(completions(engine_for(recipe), [request])[0]) for request in requests]


@cache
def wanted() -> list[tuple]:
    """What the good requests give."""
    return alone(GOOD)


def serve(engine: Engine) -> list[Update]:
    updates: list[Update] = []
    while engine.busy:
        updates += engine.step()
    return updates


def results(updates: Sequence[Update]) -> dict[int, Any]:
    """The outcome or the error of every request."""
    found: dict[int, Any] = {}
    for update in updates:
        assert update.index not in found, "nothing comes after the end"
        if update.error is not None or update.completion is not None:
            found[update.index] = update.error or outcome(update.completion)
    return found


def fails_for_one(patch: pytest.MonkeyPatch, owner: Any, name: str, concerns: Callable[..., bool]) -> None:
    """The method raises for the bad request alone."""
    right = getattr(owner, name)

    def method(*given: Any, **named: Any) -> Any:
        if concerns(*given, **named):
            raise MemoryError(f"no memory in {name}")
        return right(*given, **named)

    patch.setattr(owner, name, method)


PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "shared pages": (Batch, "claim", lambda batch, row: row.request.length == BAD),
    "admission": (BatchState, "admit", lambda state, recipe, entries: BAD in [e.request.length for e in entries]),
    "plan": (Scheduler, "update", lambda scheduler, row: row.request.length == BAD),
    "plan ahead": (Scheduler, "prepare", lambda scheduler, row: row.request.length == BAD),
    "publication": (Batch, "publish", lambda batch, row: row.request.length == BAD),
    "departure": (Batch, "leave", lambda batch, row: row.request.length == BAD),
    "answer": (Row, "answer", lambda row, *given: row.request.length == BAD),
}


@pytest.mark.rest(but=7)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_one_request_ends_it_alone(place: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    want = wanted()
    engine = engine_for(recipe_of(), rows=3)
    engine = launched_ahead(engine) if ahead else engine
    for _ in range(2):  # slots and pages are there again
        with monkeypatch.context() as patch:
            fails_for_one(patch, *PLACES[place])
            names = [engine.add(request) for request in (GOOD[0], BROKEN, GOOD[1], GOOD[2], BROKEN)]
            found = results(serve(engine))
        assert [found[names[i]] for i in (0, 2, 3)] == want
        assert all(isinstance(found[names[i]], MemoryError) for i in (1, 4))
        assert engine.occupancy()["pages_free"] == engine.occupancy()["pages"]
    assert completions(engine, [BROKEN])[0].counts.tokens >= 0


@contextmanager
def failing(model: Any, at: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model raises in one forward."""
    forward, calls = type(model).forward, 0

    def broken(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("CUDA error: no kernel image is available")
        return forward(self, *given)

    with patch.context() as inside:
        inside.setattr(type(model), "forward", broken)
        yield


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_of_a_step_ends_its_rows_and_those_that_wait_go_on(
    at: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*GOOD, *GOOD]
    want = alone(requests)
    engine = engine_for(recipe_of(), rows=2)
    engine = launched_ahead(engine) if ahead else engine
    with failing(engine.recipe.model, at, monkeypatch):
        names = [engine.add(request) for request in requests]
        found = results(serve(engine))
    errors = [i for i, name in enumerate(names) if isinstance(found[name], RuntimeError)]
    assert 1 <= len(errors) <= 2
    assert all(found[name] == want[i] for i, name in enumerate(names) if i not in errors)
    assert engine.occupancy()["pages_free"] == engine.occupancy()["pages"]
    assert [outcome(c) for c in completions(engine, requests)] == want


def test_an_error_that_the_device_reports_late_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, want, read, calls = engine_for(recipe_of(), rows=2), wanted(), CanvasReader.read, 0

    def broken(self: CanvasReader, asked: CursorCopy) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return read(self, asked)

    monkeypatch.setattr(CanvasReader, "read", broken)
    names = [engine.add(request) for request in GOOD]
    found = results(serve(engine))
    assert [type(found[name]) for name in names[:2]] == [RuntimeError] * 2 and found[names[2]] == want[2]


def test_an_interrupt_within_a_step_ends_its_rows_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left half done is not gone on with. A caller in another thread is told."""
    engine, want = engine_for(recipe_of(), rows=2), wanted()
    names = [engine.add(request) for request in GOOD]
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.recipe.model), "forward", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    found = results(serve(engine))
    assert all("KeyboardInterrupt() came within a step" in str(found[name]) for name in names[:2])
    assert found[names[2]] == want[2]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_no_step_moves_is_stalled(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if host and device disagreed, and no step were as wide as the window."""
    monkeypatch.setattr("dinfer.core.engine.row.STALL_LIMIT", 9)
    monkeypatch.setattr("dinfer.core.engine.scheduler.width_of", lambda *given: width_of(*given) - 1)
    engine = engine_for(recipe_of(DualCache()))
    engine = launched_ahead(engine) if ahead else engine
    name = engine.add(GOOD[0])
    rounds, updates = 0, []
    while engine.busy:
        rounds += 1
        assert rounds < 12
        updates += engine.step()
    (error,) = results(updates).values()
    assert isinstance(error, StalledRow) and f"request {name}: 9 steps without a commit" in str(error)
    assert "window of DualCache fits no step" in str(error)
    assert engine.occupancy()["pages_free"] == engine.occupancy()["pages"]


def test_a_batch_that_no_step_is_planned_for_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(recipe_of())
    engine.add(GOOD[0])
    monkeypatch.setattr(engine.loop.scheduler, "plan", lambda rows, in_flight=False: [])
    (error,) = results(serve(engine)).values()
    assert isinstance(error, StalledRow)


def test_the_old_state_is_freed_before_a_larger_one_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, alloc = engine_for(recipe_of()), BatchState.alloc
    completions(engine, GOOD)
    old, alive = weakref.ref(engine.runner.state.kv.k_JPTGE), []

    def watched(*given: Any, **named: Any) -> BatchState:
        gc.collect()
        alive.append(old() is not None)
        return alloc(*given, **named)

    monkeypatch.setattr("dinfer.core.engine.worker.BatchState.alloc", watched)
    long = [Request.behind([1, 2], 90)]
    got = [outcome(c) for c in completions(engine, long)]
    assert alive == [False]
    assert got == alone(long)


def small_memory(pages: int, patch: pytest.MonkeyPatch) -> None:
    """Memory for so many pages of 16 positions."""
    alloc = BatchState.alloc

    def limited(recipe: Recipe, size: PoolSize, **named: Any) -> BatchState:
        if size.pages > pages:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return alloc(recipe, size, **named)

    patch.setattr("dinfer.core.engine.worker.BatchState.alloc", limited)


def test_where_memory_is_short_fewer_requests_run_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_memory(8, monkeypatch)
    engine, requests = engine_for(recipe_of()), [Request.behind([i, 2], 20) for i in range(6)]
    want = alone(requests)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert [outcome(c) for c in completions(engine, requests)] == want
    assert engine.loop.batch.room.pages <= 8
    assert [message for message in caplog.messages if "fewer requests run at a time" in message] == caplog.messages[:1]


def test_a_request_that_no_memory_holds_ends_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    small_memory(8, monkeypatch)
    engine, want = engine_for(recipe_of()), wanted()
    names = [engine.add(request) for request in (GOOD[0], Request.behind([1, 2], 200), GOOD[1], GOOD[2])]
    found = results(serve(engine))
    assert isinstance(found[names[1]], torch.OutOfMemoryError)
    assert [found[names[i]] for i in (0, 2, 3)] == want


def test_eight_threads_get_their_own_results() -> None:
    recipe = recipe_of()
    pipe = Pipeline(recipe, None, Runtime(rows=3))
    prompts = [[[1 + i, 2, 3 + j] for j in range(1 + i % 3)] for i in range(8)]
    want = [[r.canvas for r in Pipeline(recipe, None, Runtime()).generate_ids(p, max_new_tokens=12)] for p in prompts]
    got: dict[int, list[list[list[int]]]] = {}
    start = threading.Barrier(8)

    def caller(i: int) -> None:
        start.wait()
        got[i] = [[r.canvas for r in pipe.generate_ids(prompts[i], max_new_tokens=12)] for _ in range(3)]

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert got == {i: [want[i]] * 3 for i in range(8)}
    assert not pipe.engine.busy


def test_a_thread_whose_request_fails_does_not_disturb_another() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.embedding.weight[37] = float("nan")
    recipe = compose(model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    pipe, failures, answers = Pipeline(recipe, None, Runtime(rows=4)), [], []

    def caller(token: int) -> None:
        for _ in range(4):
            try:
                answers.append(pipe.generate_ids([[token, 2]], max_new_tokens=12)[0].canvas)
            except RuntimeError as error:
                failures.append(type(error).__name__)

    threads = [threading.Thread(target=caller, args=(token,)) for token in (1, 37, 1, 37)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert failures == ["NonFiniteLogits"] * 8
    assert len(answers) == 8 and len({*map(tuple, answers)}) == 1


def test_runs_that_end_within_a_step_free_their_place_after_it() -> None:
    """As when the garbage collector finds an abandoned run just then."""
    engine, closed = engine_for(recipe_of()), False
    abandoned = engine.run(GOOD)
    next(abandoned)

    @contextmanager
    def closing(shape: StepShape, slots: Sequence[int]) -> Iterator[None]:
        nonlocal closed
        yield
        abandoned.close()
        closed = True

    engine.runner.observer = closing
    assert [outcome(c) for c in completions(engine, GOOD)] == wanted()
    assert closed and not engine.busy and engine.occupancy()["pages_free"] == engine.occupancy()["pages"]


def test_steps_run_with_the_engines_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocation, admission, launches and the read of the cursors. Not run on a second card by this test."""
    current: list[torch.device] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        try:
            yield
        finally:
            current.pop()

    seen: list[torch.device] = []

    def watched(owner: Any, name: str) -> None:
        right = getattr(owner, name)

        def method(*given: Any, **named: Any) -> Any:
            seen.append(current[-1])
            return right(*given, **named)

        monkeypatch.setattr(owner, name, method)

    monkeypatch.setattr("dinfer.core.engine.engine.on_device", on_device)
    for owner, name in (
        (BatchState, "alloc"),
        (BatchState, "admit"),
        (CanvasReader, "request"),
        (CanvasReader, "read"),
    ):
        watched(owner, name)
    engine = engine_for(recipe_of())
    engine.device = torch.device("cuda", 1)
    watched(engine.runner, "launch")
    completions(engine, GOOD)
    assert len(seen) > 6 and {*seen} == {torch.device("cuda", 1)} and not current


def test_a_device_is_made_the_current_one_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or nullcontext())
    with dinfer.core.kernels.dispatch.on_device(torch.device("cpu")):
        assert asked == []
    with dinfer.core.kernels.dispatch.on_device(torch.device("cuda", 1)):
        assert asked == [torch.device("cuda", 1)]


def test_a_network_that_is_called_directly_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(dinfer.core.kernels.dispatch, "on_device", lambda device: asked.append(device) or nullcontext())
    model = tiny_model(dtype=torch.float32)
    model.score([[1, 2, 3]])
    log_likelihoods(model, [([1], [2, 3])], samples=2)
    greedy(model, [([1], [2])])
    quantize(model, "int8")
    assert asked == [model.device] * 4


def test_one_failing_request_of_a_list_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.core.engine.row.STALL_LIMIT", 9)
    engine = engine_for(recipe_of(DualCache()))
    with monkeypatch.context() as narrow, pytest.raises(StalledRow):
        narrow.setattr("dinfer.core.engine.scheduler.width_of", lambda *given: width_of(*given) - 1)
        completions(engine, GOOD)
    assert not engine.busy
    assert [outcome(c) for c in completions(engine, GOOD)] == wanted()
