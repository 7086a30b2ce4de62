"""Launches denoising steps, eagerly or as CUDA graphs captured on first use, one per `StepShape`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dinfer.compose import Recipe
from dinfer.protocols import Phase, StepShape
from dinfer.state import BatchState
from dinfer.step import denoise_step


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slot_B: Tensor  # the graph reads its slots here
    lanes: list[int]  # what it holds


class Launcher:
    """Steps over one `BatchState`. With graphs, shapes are rounded up to buckets, so that few are captured."""

    def __init__(self, recipe: Recipe, state: BatchState, *, graphs: bool) -> None:
        self.recipe, self.state, self.graphs = recipe, state, graphs
        self._captured: dict[StepShape, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    def bucket(self, shape: StepShape) -> StepShape:
        """The shape that is run for `shape`: itself, or with graphs the next larger one of few."""
        if not self._replays(shape):
            return shape
        page, capacity = self.state.kv.page, self.state.canvas.capacity
        pages = min(-(-shape.pages * page // 128) * 128 // page, self.state.kv.table_NP.shape[1])
        wide = shape.width if shape.width <= 64 else min(-(-shape.width // 64) * 64, capacity)
        lanes = 1 << (shape.lanes - 1).bit_length()
        return replace(shape, lanes=lanes, width=wide, pages=pages)

    def _replays(self, shape: StepShape) -> bool:
        """Whether it runs as a graph. A prefill does not: of any width, once a request, it would be captured anew."""
        return self.graphs and shape.phase != Phase.PREFILL

    def launch(self, shape: StepShape, slots: list[int]) -> None:
        """One step of `shape` (rounded up) on these slots; returns before the device is done."""
        shape = self.bucket(shape)
        lanes = slots + [self.state.canvas.scratch] * (shape.lanes - len(slots))
        if not self._replays(shape):
            slot_B = torch.tensor(lanes, dtype=torch.int64).to(self.state.canvas.tokens_NS.device)
            denoise_step(self.recipe, self.state, shape, slot_B)
            return
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
        captured = self._captured[shape]
        if captured.lanes != lanes:
            captured.slot_B.copy_(torch.tensor(lanes, dtype=torch.int64))
            captured.lanes = lanes
        captured.graph.replay()

    def _capture(self, shape: StepShape) -> _Captured:
        """Captures the step while every lane is scratch, so that neither warm-up nor capture changes a request."""
        device = self.state.canvas.tokens_NS.device
        slot_B = torch.full((shape.lanes,), self.state.canvas.scratch, dtype=torch.int64, device=device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            denoise_step(self.recipe, self.state, shape, slot_B)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            denoise_step(self.recipe, self.state, shape, slot_B)
        return _Captured(graph, slot_B, [self.state.canvas.scratch] * shape.lanes)
