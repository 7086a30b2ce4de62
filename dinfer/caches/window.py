"""Cache policies that recompute one contiguous window around the active region.

| name   | window              | refreshed         | keys seen |
| none   | whole canvas        | every step        | all       |
| prefix | [start, length)     | on entering block | all       |
| dual   | [start, end)        | on entering block | all       |

A refresh is a pass over the whole canvas, which decodes too. Keys and values outside the window stay as the last
refresh left them: exact for none, an approximation for bidirectional models otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.canvas import span
from dinfer.protocols import CachePolicy, Lanes, ModelSpec, Moved, Phase, State, StepShape, Window
from dinfer.registry import CACHES, option


@dataclass(frozen=True, kw_only=True)
class WindowCache(CachePolicy):
    """`[start - back, end + ahead)`; `ahead` None reaches to the end of the canvas. Never refreshes.

    Where logits predict the next token (`spec.shift`), the window lies one position to the left, as in dInfer: the
    last position of the block decodes nothing in it, and is computed with the next block.
    """

    back: ClassVar[int] = 0
    ahead: ClassVar[int | None] = 0

    def width(self, spec: ModelSpec, start: int, end: int, length: int) -> int:
        stop = length if self.ahead is None else max(min(end + self.ahead - spec.shift, length), 1)
        return stop - max(start - max(self.back, spec.shift), 0)

    def window(self, lanes: Lanes, spec: ModelSpec, shape: StepShape) -> Window:
        if shape.phase == Phase.FULL:
            first_B, stop_B = torch.zeros_like(lanes.start_B), lanes.length_B
        else:
            first_B = (lanes.start_B - max(self.back, spec.shift)).clamp_min(0)
            stop_B = lanes.length_B
            if self.ahead is not None:
                stop_B = torch.minimum(lanes.end_B + self.ahead - spec.shift, lanes.length_B).clamp_min(1)
        pos_BX = span(lanes.start_B, lanes.end_B, shape.blocks * shape.block)
        logits_BX = torch.where(pos_BX >= 0, (pos_BX - spec.shift).clamp_min(0) - first_B[:, None], -1)
        return Window(span(first_B, stop_B, shape.width), logits_BX.view(-1, shape.block))

    def visible(self, lanes: Lanes) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(lanes.length_B), lanes.length_B

    def next_phase(self, lanes: Lanes, moved: Moved, phase: Phase, state: State) -> Tensor:
        return torch.full_like(lanes.phase_B, int(Phase.WINDOW))


@CACHES.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCache(WindowCache):
    """Recomputes the whole canvas at every step. Exact, and the yardstick for every other policy."""

    paper = "LLaDA, arXiv:2502.09992"
    reuses = False

    def next_phase(self, lanes: Lanes, moved: Moved, phase: Phase, state: State) -> Tensor:
        return torch.full_like(lanes.phase_B, int(Phase.FULL))


@dataclass(frozen=True, kw_only=True)
class RefreshedCache(WindowCache):
    """A window whose surroundings are refreshed on entering a block, and every so many sweeps."""

    interval: int = option(0, "also refresh after so many window passes since the request began; 0: never")

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"cache.interval={self.interval} must be 0 (never) or more")

    def fresh_state(self, spec: ModelSpec) -> State:
        return {"sweeps": torch.zeros((), dtype=torch.int64)} if self.interval else {}

    def next_phase(self, lanes: Lanes, moved: Moved, phase: Phase, state: State) -> Tensor:
        stale_B = moved.entered_B
        if self.interval:
            # A refresh and the window pass that follows it count as one sweep, as in dInfer.
            swept_B = moved.entered_B if phase == Phase.FULL else torch.ones_like(stale_B)
            state["sweeps"] += swept_B
            stale_B = stale_B | (swept_B & (state["sweeps"] % self.interval == 0))
        return torch.where(stale_B, int(Phase.FULL), int(Phase.WINDOW))


@CACHES.register("prefix")
@dataclass(frozen=True, kw_only=True)
class PrefixCache(RefreshedCache):
    """Keeps the keys and values before the active block; recomputes the block and all behind it."""

    paper = "Fast-dLLM, arXiv:2505.22618"
    ahead = None


@CACHES.register("dual")
@dataclass(frozen=True, kw_only=True)
class DualCache(RefreshedCache):
    """Keeps the keys and values before and behind the active block; recomputes the block alone."""

    paper = "Fast-dLLM, arXiv:2505.22618"
