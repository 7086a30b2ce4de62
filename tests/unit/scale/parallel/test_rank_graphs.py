"""Which graph a step replays, also with several ranks, of which one may lack memory for it. The device is simulated."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs import Device
from support.models import tiny_model
from support.thread_ranks import ThreadRanks

from dinfer.core.abilities.reports import Reported
from dinfer.core.engine.runtime import BatchSize, Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.ranks.split import Rank
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import StepShape
from dinfer.core.step.told import Level
from dinfer.scale.parallel.leader_worker import LeadingWorker, shape_of
from dinfer.speed.graphs import WORTH

BLOCK = 8


class Ranks:
    """The other rank as rank 0's worker sees it: it does what it is told, at once."""

    def __init__(self, recipe: Recipe, runtime: Runtime, device: Device) -> None:
        self.turn, self.models, self.forgotten = threading.RLock(), {0: recipe.ranks}, list[Any]()
        self.worker, self._device = Worker(recipe, runtime), device

    def number(self) -> int:
        return 0

    def check(self) -> None:
        pass

    def together(self, name: str, *given: Any, work: Callable[[], Any]) -> Any:
        if name == "open":
            self.worker.open(BatchSize(*given[1:]))
        return work(), []

    def tell(self, name: str, *given: Any) -> None:
        assert name == "launch"
        shape, slots, run = json.loads(json.dumps(given))[1:]
        self._device.rank = 1
        self.worker.launch(shape_of(shape), slots, shape_of(run))
        self._device.rank = 0


@pytest.mark.parametrize("short", [None, 0, 1])
def test_a_graph_stands_in_on_all_ranks_alike(short: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server warms up with drafts, and text then needs no graph of its own, even if one rank lacks memory for it."""
    device, model = Device(monkeypatch, short), tiny_model()
    model.join(ThreadRanks(Rank(0, 2)))
    recipe = compose(model, iteration={"name": "blockwise", "block": BLOCK}, decoder="threshold", cache="dual")
    runtime = Runtime(graphs=True, tensor_parallel=2)
    ranks: Any = Ranks(recipe, runtime, device)
    worker = LeadingWorker(recipe, runtime, ranks)
    worker.open(BatchSize(slots=4, length=64, block=BLOCK, pages=16))
    drafts = StepShape(Phase.WINDOW, 3, BLOCK, 1, BLOCK, 4, (Reported(Level.DRAFTS),))
    text = replace(drafts, extras=())
    for shape in (drafts, drafts, drafts, text, text, text):
        worker.launch(shape, [0, 1, 2])
    assert device.ran[0] == device.ran[1], "each would wait for a sum that the other does not compute"
    assert worker.runner.captured == (short != 0)
    assert device.ran[0][-1].extras == (text if short == 0 else drafts).extras


@pytest.mark.parametrize(("seconds", "stands_in", "short"), [(0.6, 7, None), (0.0, WORTH, None), (0.6, 7, 0)])
def test_a_larger_graph_stands_in_until_its_vain_positions_took_as_long_as_a_capture(
    seconds: float, stands_in: int, short: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture takes a second here. A step of 8 rows for 6 computes a quarter in vain: 0.15 of its 0.6 seconds.

    If the capture then fails, as memory is `short`, the larger graph stands in again.
    """

    class Clock:
        def __init__(self, device: object) -> None:
            self.found: list[tuple[StepShape, float]] = []

        @contextmanager
        def around(self, shape: StepShape) -> Iterator[None]:
            self.found.append((shape, seconds))
            yield

        def read(self) -> list[tuple[StepShape, float]]:
            found, self.found = self.found, []
            return found

    monkeypatch.setattr("dinfer.speed.graphs.StepClock", Clock)
    monkeypatch.setattr("dinfer.speed.graphs.time", SimpleNamespace(perf_counter=itertools.count().__next__))
    device = Device(monkeypatch, None)
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": BLOCK}, decoder="threshold", cache="dual")
    worker = Worker(recipe, Runtime(graphs=True))
    worker.open(BatchSize(slots=8, length=512, block=BLOCK, pages=256))
    full = StepShape(Phase.FULL, 8, 512, 1, BLOCK, 32)
    for _ in range(2):
        worker.launch(full, [*range(8)])
    device.ran[0].clear()
    device.short = short
    for _ in range(WORTH + 2):
        worker.launch(replace(full, lanes=6), [*range(6)])
    later = WORTH + 2 - stands_in
    own = [6] * (later + 1) if short is None else [6, 6] + [8] * (later - 1)
    assert [shape.lanes for shape in device.ran[0]] == [8] * stands_in + own, "one more, before the capture"


def test_ranks_without_a_leader_do_alike_however_long_things_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decided by its own clock: one took the graph of four rows for one, the other did not, and both hung."""
    device, model = Device(monkeypatch, None), tiny_model()
    model.join(ThreadRanks(Rank(0, 2)))
    recipe = compose(model, iteration={"name": "blockwise", "block": BLOCK}, decoder="threshold", cache="dual")
    three = StepShape(Phase.WINDOW, 3, BLOCK, 1, BLOCK, 4)
    four = replace(three, lanes=4)  # as which three run
    for device.rank, seconds in enumerate((1e-6, 10.0)):
        worker = Worker(recipe, Runtime(graphs=True, tensor_parallel=2))
        worker.open(BatchSize(slots=4, length=64, block=BLOCK, pages=16))
        monkeypatch.setattr("dinfer.speed.graphs.StepClock.read", lambda clock, s=seconds: [(four, s)])
        for lanes in (3, 3, 1, 1, 1):
            worker.launch(replace(three, lanes=lanes), [*range(lanes)])
    assert device.ran[0] == device.ran[1]


def test_a_larger_graph_stands_in_while_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in flight wait for no compiler. A step that nothing can stand in for does."""
    compiler = SimpleNamespace(done=False, waited=list[int](), ready=lambda shape: compiler.done)
    compiler.compile = lambda shape: compiler.waited.append(shape.lanes)
    device = Device(monkeypatch, None)
    monkeypatch.setattr("dinfer.speed.graphs.StepClock", lambda device: SimpleNamespace(read=list, around=nullcontext))
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": BLOCK}, decoder="threshold", cache="dual")
    worker = Worker(recipe, Runtime(graphs=True))
    worker.open(BatchSize(slots=8, length=512, block=BLOCK, pages=256))
    worker.runner.compiler = compiler  # type: ignore[assignment]
    full = StepShape(Phase.FULL, 8, 512, 1, BLOCK, 32)
    for shape in (full, full, *[replace(full, lanes=1)] * (WORTH + 2)):
        worker.launch(shape, [*range(shape.lanes)])
    assert {shape.lanes for shape in device.ran[0]} == {8}
    compiler.done = True
    worker.launch(replace(full, lanes=1), [0])
    assert device.ran[0][-1].lanes == 1
    assert compiler.waited == [8, 8, 1], "the last one returns at once"
