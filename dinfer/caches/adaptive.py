"""Adaptive caching: refresh prompt and response at intervals, and in between the positions that move (dLLM-Cache).

arXiv:2506.06295. Published settings: prompt interval 50 to 100, response interval 5 to 8, ratio 0.25.

The published cache works inside every layer: it projects the values of all response tokens at every step, and
recomputes the `ratio` of them whose values have moved most. Here a position is computed in all layers or in none, so
its movement is estimated. Whenever a position is computed, the cosine distance of its last-layer values from those
before, divided by the steps between, is its rate. The positions with the largest rate times the steps since are chosen.
Before all others come those whose token has changed since. Nothing but keys and values is kept.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.abilities.watching import Watches
from dinfer.kernels.canvas import padded
from dinfer.recipe.registry import CACHES, check_range, option
from dinfer.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.step.plan import SHARES
from dinfer.step.window import CanvasRows, Chooses

FARTHEST = 2.0  # the largest cosine distance
GRAIN = 2.0**20  # distances are told apart down to one part in this


@CACHES.register("adaptive")
@dataclass(frozen=True, kw_only=True)
class AdaptiveCache(CachePolicy, Chooses, Watches):
    """Recomputes the active block, and the share `ratio` of the other response positions that move most.

    It recomputes the whole response every `response_interval` steps of a request, and the prompt too every
    `prompt_interval` steps. Entering a block causes no refresh. dLLM-Cache chooses among all response positions. This
    cache always computes the active block, whose logits are needed, and chooses the others by the drift of last-layer
    values. Use it for long prompts and short answers.
    """

    paper = "dLLM-Cache, arXiv:2506.06295"

    prompt_interval: int = option(100, "steps after which everything is recomputed; 0: only the first step does")
    response_interval: int = option(7, "steps after which the whole response is recomputed; 0: never")
    ratio: float = option(0.25, "share of the response, beside the active block, that other steps recompute")

    def __post_init__(self) -> None:
        check_range("cache", self, "prompt_interval", "response_interval", least=0)
        check_range("cache", self, "ratio", least=0, most=1)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        zeros_S = torch.zeros((), dtype=torch.int64).expand(length + 1)
        return {
            "rate": torch.ones(()).expand(length + 1),  # distance per step, as last measured
            "when": zeros_S - 1,  # the forward at which the position was last computed
            "seen": zeros_S - 1,  # the token it held then
        }

    def plan(self, phase: Phase) -> WindowPlan:
        if phase == Phase.FULL:
            return WindowPlan(None, None, unseen=True, chosen=True)
        return WindowPlan(
            0, None, response=True, unseen=True, chosen=True, share=round(self.ratio * SHARES),
            every=self.response_interval,
        )  # fmt: skip

    def choose(self, lanes: RowCursors, rows: CanvasRows, spec: ModelSpec, phase: Phase, state: State) -> Tensor:
        tokens_BS = rows.tokens_BS
        pos_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        prompt_B1, length_B1, forwards_B1 = (t[:, None] for t in (lanes.prompt_B, lanes.length_B, lanes.forwards_B))
        active_BS = (pos_S >= lanes.start_B[:, None] - spec.shift) & (pos_S < lanes.end_B[:, None])
        inside_BS = pos_S < length_B1
        if phase == Phase.FULL:
            flags_BS = inside_BS
        else:
            others_BS = inside_BS & (pos_S >= prompt_B1) & ~active_BS
            drift_BS = state["rate"] * (forwards_B1 - state["when"]) + FARTHEST * (tokens_BS != state["seen"])
            order_BS = drift_BS.masked_fill(~others_BS, -1.0).sort(dim=-1, descending=True, stable=True).indices
            most_B1 = self.plan(phase).allowance(length_B1 - prompt_B1, forwards_B1)
            chosen_BS = torch.zeros_like(others_BS).scatter(1, order_BS, (pos_S < most_B1).expand_as(order_BS))
            flags_BS = active_BS | (chosen_BS & others_BS)
        state["seen"].copy_(torch.where(flags_BS, tokens_BS, state["seen"]))
        return flags_BS

    def observe(self, pos_BW: Tensor, old_BWX: Tensor, new_BWX: Tensor, lanes: RowCursors, state: State) -> None:
        index_BW = padded(pos_BW, state["when"].shape[1] - 1)
        steps_BW = (lanes.forwards_B[:, None] - state["when"].gather(1, index_BW)).clamp_min(1)
        distance_BW = 1 - F.cosine_similarity(old_BWX, new_BWX, dim=-1).clamp_max(1)
        # Rounded, or values that did not change at all would be ranked by rounding errors.
        distance_BW = (distance_BW * GRAIN).round() / GRAIN
        state["rate"].scatter_(1, index_BW, (distance_BW / steps_BW).to(state["rate"].dtype))
        state["when"].scatter_(1, index_BW, lanes.forwards_B[:, None].expand_as(index_BW))

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor | bool:
        return (lanes.forwards_B + 1) % self.prompt_interval == 0 if self.prompt_interval else False
