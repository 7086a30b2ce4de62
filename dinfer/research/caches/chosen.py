"""Cache policies that recompute single positions of the canvas, wherever they are.

* delayed: A decoded token's keys are kept one step after it was decoded (dKV-Cache, arXiv:2505.15781).
* adaptive: Refresh prompt and response at intervals, and in between the positions that move (dLLM-Cache).
* d2cache: Recompute masks that are about to be decoded, and tokens that others attend to (d2Cache, arXiv:2509.23094).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.abilities.traits import HELD
from dinfer.core.kernels.canvas import padded
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.refusals import Refusal
from dinfer.core.registry import CACHES, option
from dinfer.core.step.contracts import CachePolicy, ModelSpec, Moved, Phase, RowCursors, State, WindowPlan
from dinfer.core.step.mixins import CanvasRows, Chooses, LeavesDecoded, LeavesMasks, RefreshesWithin
from dinfer.core.terms.plan import SHARES
from dinfer.research.abilities.following import Followed, Follows, Watches
from dinfer.research.kernels.blocks import density


# Keys change most in the step after the token appears, the first one that sees it. Published: dKV-Cache-Decode with a
# refresh every 8 steps, dKV-Cache-Greedy with one every 2 and a local window of 4. d3LLM (arXiv:2601.07568) waits
# longer where several blocks are open, since what stands around a token is not final either.
@CACHES.register("delayed")
@dataclass(frozen=True, kw_only=True)
class DelayedCache(CachePolicy, Chooses, LeavesDecoded, RefreshesWithin):
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
    delay: int = option(1, "steps after which a decoded token's keys are kept", least=1)
    around: int = option(2, "greedy: positions recomputed on either side of a token that was just decoded")

    @property
    def refreshes_within(self) -> bool:
        return self.interval > 0

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


FARTHEST = 2.0  # the largest cosine distance
DISTANCE_STEPS = 2.0**20  # distances are told apart down to one part in this


# Published settings: prompt interval 50 to 100, response interval 5 to 8, ratio 0.25.
# The published cache works inside every layer: it projects the values of all response tokens at every step, and
# recomputes the `ratio` of them whose values have moved most. Here a position is computed in all layers or in none, so
# its movement is estimated. Whenever a position is computed, the cosine distance of its last-layer values from those
# before, divided by the steps between, is its rate. The positions with the largest rate times the steps since are
# chosen. Before all others come those whose token has changed since. Nothing but keys and values is kept.
@CACHES.register("adaptive")
@dataclass(frozen=True, kw_only=True)
class AdaptiveCache(CachePolicy, Chooses, Watches, RefreshesWithin):
    """Recomputes the active block, and the share `ratio` of the other response positions that move most.

    It recomputes the whole response every `response_interval` steps of a request, and the prompt too every
    `prompt_interval` steps. Entering a block causes no refresh. dLLM-Cache chooses among all response positions. This
    cache always computes the active block, whose logits are needed, and chooses the others by the drift of last-layer
    values. Use it for long prompts and short answers.
    """

    paper = "dLLM-Cache, arXiv:2506.06295"

    prompt_interval: int = option(100, "steps after which everything is recomputed; 0: only the first step does")
    response_interval: int = option(7, "steps after which the whole response is recomputed; 0: never")
    ratio: float = option(0.25, "share of the response, beside the active block, that other steps recompute", most=1)

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
        distance_BW = (distance_BW * DISTANCE_STEPS).round() / DISTANCE_STEPS
        state["rate"].scatter_(1, index_BW, (distance_BW / steps_BW).to(state["rate"].dtype))
        state["when"].scatter_(1, index_BW, lanes.forwards_B[:, None].expand_as(index_BW))

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> Tensor | bool:
        return (lanes.forwards_B + 1) % self.prompt_interval == 0 if self.prompt_interval else False


FAR = 2**40  # behind every position
ATTENTION_STEPS = 2**22  # shares of attention are told apart down to one part in this


# Published names: current_k is `masks`, rollout_p is `mass`, inflate_w is `bridge`.
@CACHES.register("d2cache")
@dataclass(frozen=True, kw_only=True)
class D2Cache(CachePolicy, Chooses, Follows, LeavesDecoded, LeavesMasks, RefreshesWithin):
    """After one full pass, recomputes the tokens decoded last, the `masks` surest masks, and attended positions.

    Masks of the active block come first. The confidence of a mask is measured in the full pass and weighted by the
    share of decoded positions around it (`sigma`). Attended positions are the other positions that receive most
    attention, rolled out over all layers, up to the share `mass` of it. All others keep their keys, and a mask that is
    not computed is not decoded. `share` limits what a step computes beside the active block: it leaves out the
    positions that receive least attention.

    A vector goes through the attention of all layers, where the reference multiplies matrices. So the two may choose
    differently among positions whose attention differs in the last bit alone.
    """

    paper = "d2Cache, arXiv:2509.23094"
    refusals = (
        Refusal("{cache} computes the surest masks, and sampling.leftmost decodes the first ones alone.",
                cache=Follows, sampling=HELD),
    )  # fmt: skip

    masks: int = option(32, "masks recomputed at every step; at least one is of the active block")
    mass: float = option(0.1, "share of all attention whose receivers are recomputed", most=1)
    sigma: float = option(10.0, "reach of the weight by decoded neighbours, in positions; 0: no such weight", most=256)
    bridge: int = option(0, "largest distance of two recomputed positions between which all others are recomputed too")
    score: Literal["low_confidence", "margin"] = option(
        "low_confidence", "confidence of a mask: probability, as the decoder weighs it, or lead over the second token"
    )
    share: float | None = option(
        0.5, "largest share of the response that is computed beside the block; null: all", most=1
    )

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if not spec.attention_block:
            return None
        return (
            "cache=d2cache chooses among positions that all see each other, and this model's attention is causal "
            "between blocks."
        )

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        number = torch.zeros(())
        return {
            "sure": number.expand(length + 1),
            "attention": number.expand(length + 1),
            "open": torch.zeros((), dtype=torch.bool).expand(length + 1),  # before the step that was last
            "region": torch.zeros(2, dtype=torch.int64),  # of that step
        }

    def plan(self, phase: Phase) -> WindowPlan:
        free = phase == Phase.FULL or self.share is None
        return WindowPlan(None, None, chosen=True, share=None if free else round((self.share or 0) * SHARES))

    def choose(self, lanes: RowCursors, rows: CanvasRows, spec: ModelSpec, phase: Phase, state: State) -> Tensor:
        open_BS = rows.open_BS
        pos_S = torch.arange(open_BS.shape[1], device=open_BS.device)
        inside_BS = pos_S < lanes.length_B[:, None]
        open_BS = open_BS & inside_BS
        full = phase == Phase.FULL
        flags_BS = inside_BS if full else self.chosen(lanes, open_BS, inside_BS, spec.shift, state)
        state["open"].copy_(open_BS)
        state["region"].copy_(torch.stack((lanes.start_B, lanes.end_B), 1))
        return flags_BS

    def chosen(self, lanes: RowCursors, open_BS: Tensor, inside_BS: Tensor, shift: int, state: State) -> Tensor:
        """The positions of a window pass. bool [B, S + 1]"""
        pos_S, prompt_B1 = torch.arange(open_BS.shape[1], device=open_BS.device), lanes.prompt_B[:, None]
        asked_BS = self.masks_to_decode(lanes, open_BS, state)
        fresh_BS = state["open"] & ~open_BS
        first_BS = asked_BS & (pos_S == prompt_B1)
        told_BS = F.pad((asked_BS & ~first_BS if shift else asked_BS)[:, shift:], (0, shift))
        base_BS = fresh_BS | told_BS
        other_BS = inside_BS & ~base_BS
        attention_BS = state["attention"].masked_fill(~other_BS, 0.0)
        attention_BS = attention_BS / attention_BS.sum(-1, keepdim=True).clamp_min(1e-9)
        order_BS = attention_BS.masked_fill(~other_BS, -1.0).sort(dim=-1, descending=True, stable=True).indices
        sum_BS = attention_BS.gather(1, order_BS).cumsum(-1)
        taken_BS = (sum_BS <= self.mass) | (pos_S == 0)
        flags_BS = base_BS | (torch.zeros_like(base_BS).scatter(1, order_BS, taken_BS) & other_BS)
        if shift:  # the last position of the prompt is computed for its logits alone
            flags_BS = torch.where(pos_S == prompt_B1 - 1, first_BS.any(-1, keepdim=True), flags_BS)
            told_BS = told_BS | (flags_BS & (pos_S == prompt_B1 - 1))
        if self.bridge:
            left_BS = torch.where(flags_BS, pos_S, -FAR).cummax(-1).values
            right_BS = torch.where(flags_BS, pos_S, FAR).flip(-1).cummin(-1).values.flip(-1)
            flags_BS = flags_BS | ((right_BS - left_BS <= self.bridge) & inside_BS)
        if self.share is None:
            return flags_BS
        first_B1, new_B1 = (lanes.start_B - shift).clamp_min(0)[:, None], (lanes.length_B - lanes.prompt_B)[:, None]
        room_B1 = lanes.end_B[:, None] - first_B1 + self.plan(Phase.WINDOW).allowance(new_B1, lanes.forwards_B[:, None])
        first_BS = told_BS & (told_BS.cumsum(-1) == 1)  # of the active block; without a mask no step decodes
        rank_BS = attention_BS + 2.0 * base_BS + 4.0 * first_BS - 8.0 * ~flags_BS
        order_BS = rank_BS.sort(dim=-1, descending=True, stable=True).indices
        return flags_BS & torch.zeros_like(flags_BS).scatter(1, order_BS, (pos_S < room_B1).expand_as(order_BS))

    def masks_to_decode(self, lanes: RowCursors, open_BS: Tensor, state: State) -> Tensor:
        """The surest masks, those of the block of the last step first, and one of the active block. bool [B, S + 1]

        Of several active blocks the first that has masks must commit one, so the first mask of all is among them.
        """
        pos_S, prompt_B1 = torch.arange(open_BS.shape[1], device=open_BS.device), lanes.prompt_B[:, None]
        place_BS = pos_S + prompt_B1  # from here on, positions count from the first generated one
        there_BS, index_BS = place_BS < lanes.length_B[:, None], place_BS.clamp_max(len(pos_S) - 1)
        left_BS = open_BS.gather(1, index_BS) & there_BS
        last_BS = (place_BS >= state["region"][:, :1]) & (place_BS < state["region"][:, 1:])
        block_BS = state["open"].gather(1, index_BS) & there_BS & last_BS
        active_BS = left_BS & (place_BS >= lanes.start_B[:, None]) & (place_BS < lanes.end_B[:, None])
        score_BS = state["sure"].gather(1, index_BS)
        if self.sigma:
            from_BS = torch.where(there_BS, place_BS, -1)
            score_BS = score_BS * density(there_BS & ~left_BS, from_BS, lanes.prompt_B, lanes.length_B, self.sigma)
        score_BS = score_BS + 2.0 * block_BS

        kth_BS = left_BS & (left_BS.cumsum(-1) == self.masks)
        last_B1 = (lanes.length_B - lanes.prompt_B)[:, None] - 1
        kth_B1 = torch.where(kth_BS, pos_S, last_B1).amin(-1, keepdim=True)
        size_B1 = block_BS.sum(-1, keepdim=True).clamp_min(1)
        end_B1 = (torch.div(kth_B1, size_B1, rounding_mode="floor") + 1) * size_B1
        start_B1 = torch.where(block_BS, pos_S, FAR).amin(-1, keepdim=True)
        near_BS = left_BS & (pos_S >= start_B1) & (pos_S < end_B1)
        asked_BS = near_BS & (descending_rank(score_BS.masked_fill(~near_BS, -1.0)) < self.masks)
        if lanes.step_BK.shape[1] > 1:
            asked_BS = asked_BS | (active_BS & (active_BS.cumsum(-1) == 1))
        best_BS = active_BS & (descending_rank(score_BS.masked_fill(~active_BS, -1.0)) == 0)
        asked_BS = asked_BS | (best_BS & ~(asked_BS & active_BS).any(-1, keepdim=True))
        return asked_BS.gather(1, (pos_S - prompt_B1).clamp_min(0)) & (pos_S >= prompt_B1)

    def follow(
        self, attend: Followed, confidence: Callable[[], Tensor], pos_BW: Tensor, lanes: RowCursors, shift: int,
        phase: Phase, state: State,
    ) -> None:  # fmt: skip
        size = state["attention"].shape[1]
        index_BW, there_BW = padded(pos_BW, size - 1), pos_BW >= 0
        # Column sums of the product over the layers of (attention + identity) / 2, from the last layer to the first.
        flow_BS = (torch.arange(size, device=pos_BW.device) < lanes.length_B[:, None]).float()
        for layer in reversed(range(attend.layers)):
            half_BW = flow_BS.gather(1, index_BW) * there_BW / 2
            flow_BS = flow_BS.scatter_add(1, index_BW, -half_BW)
            got_BS = attend.received(layer, half_BW)[:, :size]
            flow_BS = flow_BS + F.pad(got_BS, (0, size - got_BS.shape[1]))
        # Rounded, or the order of what receives the same would be that of rounding errors.
        state["attention"].copy_((flow_BS / flow_BS.sum(-1, keepdim=True) * ATTENTION_STEPS).round() / ATTENTION_STEPS)
        if phase == Phase.FULL:
            told_BW = padded(torch.where(there_BW, pos_BW + shift, -1), size - 1)
            state["sure"].scatter_(1, told_BW, confidence().to(state["sure"].dtype))

    def needs_full_pass(self, lanes: RowCursors, moved: Moved, phase: Phase, state: State) -> bool:
        return False
