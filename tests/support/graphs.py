"""CUDA graphs without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dinfer.recipe.recipe import Recipe
from dinfer.step.shape import StepShape


class Device:
    """Runs nothing, and notes the shapes of the steps that each rank would run, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, short: int | None) -> None:
        """`short`: the rank that has no memory for a graph."""
        self.rank, self.short = 0, short
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
        if self.rank == self.short:
            raise RuntimeError("out of memory")
        self._recording, rank = [], self.rank
        held = self._recording
        try:
            yield
        finally:
            self._recording = None
        graph.replay = lambda: self.ran[rank].extend(held)
