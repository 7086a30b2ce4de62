"""Delayed caching: a decoded token's keys are kept one step after it was decoded (dKV-Cache, arXiv:2505.15781).

Keys change most in the step after the token appears, the first one that sees it. Published: dKV-Cache-Decode with a
refresh every 8 steps, dKV-Cache-Greedy with one every 2 and a local window of 4. d3LLM (arXiv:2601.07568) waits longer
where several blocks are open, since what stands around a token is not final either.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.abilities.pacing import LeavesDecoded
from dinfer.recipe.registry import CACHES, check_range, option
from dinfer.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.step.window import CanvasRows, Chooses


@CACHES.register("delayed")
@dataclass(frozen=True, kw_only=True)
class DelayedCache(CachePolicy, Chooses, LeavesDecoded):
    """Recomputes masks and the tokens that the last `delay` steps decoded; others keep their keys until a refresh.

    With `decode` it recomputes every mask of the canvas. With `greedy` it recomputes the masks of the active block and
    the neighbours of tokens decoded last. Keys are refreshed when a row enters a block, and after every `interval`
    steps in it. Decoders that edit refuse it: decoded positions are not computed, so they have no logits.

    In the published code the second pass of every block is a full pass too. Its greedy variant draws the next position
    in advance and recomputes that one instead of the masks of the block. A step is as wide as its widest row, so
    `decode` costs as much as `prefix`, and `greedy` a little more than `dual`.
    """

    paper = "dKV-Cache, arXiv:2505.15781"

    variant: Literal["decode", "greedy"] = option("decode", "recompute all masks, or those of the active block")
    interval: int = option(8, "steps in a block after which keys are refreshed; 0: only on entering it")
    delay: int = option(1, "steps after which a decoded token's keys are kept")
    around: int = option(2, "greedy: positions recomputed on either side of a token that was just decoded")

    def __post_init__(self) -> None:
        check_range("cache", self, "interval", "around", least=0)
        check_range("cache", self, "delay", least=1)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"age": torch.tensor(self.delay).expand(length + 1)}  # steps that have seen each token; masks: 0

    def plan(self, phase: Phase) -> WindowPlan:
        if phase == Phase.FULL:
            return WindowPlan(None, None, chosen=True)
        back, ahead = (0, None) if self.variant == "decode" else (self.around, self.around)
        return WindowPlan(back, ahead, chosen=True)

    def choose(self, lanes: RowCursors, rows: CanvasRows, spec: ModelSpec, phase: Phase, state: State) -> Tensor:
        open_BS = rows.open_BS
        pos_S = torch.arange(open_BS.shape[1], device=open_BS.device)
        active_BS = (pos_S >= lanes.start_B[:, None]) & (pos_S < lanes.end_B[:, None])
        fresh_BS = ~open_BS & (state["age"] < self.delay)
        state["age"].copy_((state["age"] + ~open_BS).clamp_max(self.delay) * ~open_BS)
        asked_BS = open_BS & active_BS
        # Logits of a mask may stand one position before it.
        flags_BS = fresh_BS | asked_BS | F.pad(asked_BS[:, spec.shift :], (0, spec.shift))
        if self.variant == "decode":
            flags_BS = flags_BS | open_BS
        elif self.around:
            near_BS = F.max_pool1d(fresh_BS[:, None].float(), 2 * self.around + 1, 1, self.around)[:, 0] > 0
            flags_BS = flags_BS | near_BS
        return torch.ones_like(flags_BS) if phase == Phase.FULL else flags_BS

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor:
        if not self.interval:
            return moved.entered_B
        return moved.entered_B | ((lanes.step_BK.amax(-1) + 1) % self.interval == 0)
