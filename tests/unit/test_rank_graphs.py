"""Which graph a step of several ranks replays. The device is simulated: a capture may fail on one rank alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.thread_ranks import ThreadRanks

from dinfer.core.canvas import Phase
from dinfer.core.protocols import StepShape
from dinfer.core.recipe import Recipe, compose
from dinfer.core.spec import Rank
from dinfer.core.told import Told
from dinfer.engine.leading import LeadingWorker, shape_of
from dinfer.engine.room import Room
from dinfer.engine.runtime import Runtime
from dinfer.engine.worker import Worker

BLOCK = 8


class Device:
    """Runs nothing, and notes the shapes of the steps that each rank would run, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, short: int | None) -> None:
        """`short`: the rank that has no memory for a graph."""
        self.rank, self._short = 0, short
        self.ran: dict[int, list[StepShape]] = {0: [], 1: []}
        self._recording: list[StepShape] | None = None
        stream = SimpleNamespace(wait_stream=lambda other: None)
        simulated: dict[str, Any] = {
            "graph_pool_handle": object, "CUDAGraph": SimpleNamespace, "graph": self._capture,
            "Stream": lambda device: stream, "current_stream": lambda device: stream, "stream": nullcontext,
            "get_sync_debug_mode": int, "set_sync_debug_mode": lambda mode: None,
        }  # fmt: skip
        for name, thing in simulated.items():
            monkeypatch.setattr(torch.cuda, name, thing)
        monkeypatch.setattr("dinfer.engine.runner.denoise_step", self._step)

    def _step(self, recipe: Recipe, state: Any, shape: StepShape, slot_B: torch.Tensor) -> None:
        assert len(slot_B) == shape.lanes
        (self.ran[self.rank] if self._recording is None else self._recording).append(shape)

    @contextmanager
    def _capture(self, graph: Any, **how: Any) -> Iterator[None]:
        if self.rank == self._short:
            raise RuntimeError("out of memory")
        self._recording, rank = [], self.rank
        held = self._recording
        try:
            yield
        finally:
            self._recording = None
        graph.replay = lambda: self.ran[rank].extend(held)


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
            self.worker.open(Room(*given[1:]))
        return work(), []

    def tell(self, name: str, *given: Any) -> None:
        assert name == "launch"
        shape, slots, run = json.loads(json.dumps(given))[1:]
        self._device.rank = 1
        self.worker.launch(shape_of(tuple(shape)), slots, shape_of(tuple(run)))
        self._device.rank = 0


@pytest.mark.parametrize("short", [None, 0, 1])
def test_a_graph_stands_in_on_all_ranks_alike(short: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server warms up with drafts, and text then needs no graph of its own, even if one rank lacks memory for it."""
    device, model = Device(monkeypatch, short), tiny_model()
    model.join(ThreadRanks(Rank(0, 2)))
    recipe = compose(model, iteration={"name": "blockwise", "block": BLOCK}, decoder="threshold", cache="dual")
    runtime = Runtime(graphs=True, tensor_parallel=2)
    ranks: Any = Ranks(recipe, runtime, device)
    worker = LeadingWorker(recipe, runtime, ranks, recipe)
    worker.open(Room(slots=4, length=64, block=BLOCK, branches=1, pages=16))
    drafts = StepShape(Phase.WINDOW, 3, BLOCK, 1, BLOCK, 4, told=Told.DRAFTS)
    text = replace(drafts, told=Told.NOTHING)
    for shape in (drafts, drafts, drafts, text, text, text):
        worker.launch(shape, [0, 1, 2])
    assert device.ran[0] == device.ran[1], "each would wait for a sum that the other does not compute"
    assert worker.runner.captured == (short != 0)
    assert device.ran[0][-1].told == (Told.NOTHING if short == 0 else Told.DRAFTS)
