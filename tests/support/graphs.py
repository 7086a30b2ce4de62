"""CUDA graphs without a device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.shape import StepShape


class Device:
    """Runs nothing, and notes the shapes of the steps that each rank would run, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, short: int | None) -> None:
        """`short`: the rank that has no memory for a graph."""
        self.rank, self.short = 0, short
        self.ran: dict[int, list[StepShape]] = {0: [], 1: []}
        self.recording: list[StepShape] | None = None
        stream = SimpleNamespace(wait_stream=lambda other: None)
        simulated: dict[str, Any] = {
            "graph_pool_handle": object, "CUDAGraph": lambda: Graph(self), "mem_get_info": lambda device: (1, 1),
            "Stream": lambda device: stream, "current_stream": lambda device: stream, "stream": nullcontext,
            "get_sync_debug_mode": int, "set_sync_debug_mode": lambda mode: None,
        }  # fmt: skip
        for name, thing in simulated.items():
            monkeypatch.setattr(torch.cuda, name, thing)
        for module in ("dinfer.core.engine.runner", "dinfer.speed.graphs"):
            monkeypatch.setattr(f"{module}.denoise_step", self._step)

    def _step(self, recipe: Recipe, state: Any, shape: StepShape, slot_B: torch.Tensor) -> None:
        assert len(slot_B) == shape.lanes
        (self.ran[self.rank] if self.recording is None else self.recording).append(shape)


class Graph:
    """Of the simulated device: notes the steps of its capture, and runs them again."""

    def __init__(self, device: Device) -> None:
        self._device, self._rank = device, device.rank
        self._held = list[StepShape]()

    def capture_begin(self, pool: Any, *, capture_error_mode: str) -> None:
        if self._rank == self._device.short:
            raise RuntimeError("out of memory")
        self._device.recording = self._held

    def capture_end(self) -> None:
        self._device.recording = None

    def replay(self) -> None:
        self._device.ran[self._rank].extend(self._held)
