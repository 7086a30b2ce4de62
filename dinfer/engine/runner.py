"""Launches denoising steps, eagerly or as CUDA graphs, one per `StepShape`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from dinfer.core.protocols import StepShape
from dinfer.core.recipe import Recipe
from dinfer.core.state import BatchState
from dinfer.core.step import denoise_step
from dinfer.kernels.upload import upload

SHARES = 8  # of the positions of active blocks: the sizes that the number of those with logits is rounded up to

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slot_B: Tensor  # the graph reads its slots here
    lanes: list[int]  # what they hold


class Launcher:
    """Steps over one `BatchState`. With graphs, shapes are rounded up to buckets, so that few are captured.

    A shape runs eagerly when it first comes up and is captured when it does again: what is needed once, such as the
    width of some prompt, costs no capture. All graphs share one memory pool. A step that cannot be captured, for a
    component that waits for the device, runs eagerly for good, and a warning says why.
    """

    def __init__(self, recipe: Recipe, state: BatchState, *, graphs: bool) -> None:
        self.recipe, self.state, self.graphs = recipe, state, graphs
        self.refused: dict[StepShape, str] = {}  # shapes that cannot be captured, and why
        self._seen: set[StepShape] = set()
        self._captured: dict[StepShape, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._room = state.kv.page, state.kv.table_NP.shape[1], state.canvas.capacity, recipe.model.spec.vocab

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    def bucket(self, shape: StepShape) -> StepShape:
        """The shape that is run for `shape`: itself, or with graphs the next larger one of few."""
        return bucket(shape, *self._room) if self.graphs else shape

    def launch(self, shape: StepShape, slots: list[int]) -> None:
        """One step of `shape` (rounded up) on these slots; returns before the device is done."""
        shape = self.bucket(shape)
        lanes = slots + [self.state.canvas.scratch] * (shape.lanes - len(slots))
        captured = self._graph(shape) if self.graphs else None
        if captured is None:
            slot_B = torch.tensor(lanes).to(self.state.canvas.tokens_NS.device)
            denoise_step(self.recipe, self.state, shape, slot_B)
            return
        if captured.lanes != lanes:
            upload(captured.slot_B, torch.tensor(lanes))
            captured.lanes = lanes
        captured.graph.replay()

    def _graph(self, shape: StepShape) -> _Captured | None:
        """The graph of a shape that has come up before; None: run it eagerly."""
        if shape in self._captured:
            return self._captured[shape]
        if shape in self.refused:
            return None
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        try:
            self._captured[shape] = self._capture(shape)
        except RuntimeError as error:  # of CUDA's; a graph's failure is no reason to fail the request
            self.refused[shape] = str(error).strip().split("\n")[0]
            self._pool = torch.cuda.graph_pool_handle()  # the old one may still count as being recorded to
            logger.warning("%s runs eagerly, not as a CUDA graph: %s", shape, self.refused[shape])
            return None
        return self._captured[shape]

    def _capture(self, shape: StepShape) -> _Captured:
        """Captures the step while every lane is scratch, so that neither warm-up nor capture changes a request."""
        device = self.state.canvas.tokens_NS.device
        slot_B = torch.full((shape.lanes,), self.state.canvas.scratch, dtype=torch.int64, device=device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), _no_waiting():
            denoise_step(self.recipe, self.state, shape, slot_B)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            denoise_step(self.recipe, self.state, shape, slot_B)
        return _Captured(graph, slot_B, [self.state.canvas.scratch] * shape.lanes)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raises RuntimeError where the host would wait for the device: in a capture, the error would do lasting harm."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@lru_cache(maxsize=4096)
def bucket(shape: StepShape, page: int, table: int, capacity: int, vocab: int) -> StepShape:
    """The next larger shape of few, where a row has at most `table` pages of `page` positions, and `capacity` ones."""
    pages = min(_power_of_2(-(-shape.pages * page // 128)) * 128 // page, table)
    grain = 64 if shape.width <= 1024 else 512
    wide = shape.width if shape.width <= 64 else min(-(-shape.width // grain) * grain, capacity)
    lanes = _power_of_2(shape.lanes) if shape.lanes <= 8 else -(-shape.lanes // 8) * 8
    if wide > 64 and shape.lanes <= lanes * 3 // 4:  # lanes that fill up are computed too
        lanes = lanes * 3 // 4
    top = min(max(_power_of_2(shape.top_candidates), 64), vocab) if shape.top_candidates else 0
    positions = lanes * shape.blocks * shape.block
    share = -(-positions // SHARES)
    scored = -(-shape.scored // share) * share
    scored = scored if scored < positions else 0
    return replace(shape, lanes=lanes, width=wide, pages=pages, top_candidates=top, scored=scored)


def _power_of_2(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
