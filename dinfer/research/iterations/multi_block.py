"""Several blocks at once: the next block opens before the last one is finished (D2F, Diffulex, d3LLM).

* multi_block: Finished blocks leave in order (D2F, arXiv:2508.09192).
* dmax: A new token is fed as a mixture with the mask, by its probability (DMax, as in Diffulex).
* lopa: Several versions of the blocks, of which the surest is kept (LoPA).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import BlockSweep
from dinfer.core.kernels.canvas import padded, span
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import BlockAfter, ModelSpec, Moved, RowCursors, State
from dinfer.core.step.mixins import Branches, Edits, Feeds, Paces
from dinfer.core.step.model import Model
from dinfer.research.kernels.blocks import decoded_share, forced_blocks, slide_blocks


@ITERATIONS.register("multi_block")
@dataclass(frozen=True, kw_only=True)
class MultiBlock(BlockSweep, Paces):
    """Decodes up to `blocks` neighbouring blocks in the same forwards. Finished blocks leave in order.

    Blocks open one by one. With force=first and add_at=0 all `blocks` are open at once, as in d3LLM without a cache.
    A block that leaves keeps its place for one step more, which makes its keys final. After a stop token no block
    opens, and the row ends when the blocks up to that token are finished. With blocks=1 it is blockwise.

    D2F and d3LLM use align=false, Diffulex on block-causal models align=true. It needs a model that tolerates
    unfinished blocks before the one that it decodes.
    """

    paper = "D2F, arXiv:2508.09192"
    refusals = (
        *BlockSweep.refusals,
        Refusal(
            "{iteration} asks how much of a block is predicted again, and {decoder} never looks at decoded tokens.",
            iteration=Trait(
                lambda iteration: iteration.stable_at > 0, "`iteration.stable_at`", instead="iteration.stable_at=0"
            ),
            decoder=Trait(lambda decoder: not isinstance(decoder, Edits), "a decoder that does not edit"),
        ),
    )

    blocks: int = option(2, "blocks that are decoded at once, at most", least=1, most=64)
    add_at: float = option(0.1, "open the next block once this share of the last one is decoded", most=1)
    stable_at: float = option(0.0, "and this share of its tokens is predicted again; with decoders that edit", most=1)
    force_at: float = option(
        0.95, "commit a token at every step once this share of the block before is decoded", most=1
    )
    force: Literal["each", "first"] = option(
        "each", "which blocks that `force_at` names must commit: each of them, or the first with masks (d3LLM)"
    )

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if not spec.encoder:
            return None
        return "{iteration} finishes blocks one by one, and this model's encoder must read all of them at once."

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        start, end = super().first_region(prompt, length)
        opens = self.blocks > 1 and start < prompt and (prompt - start) / (end - start) >= self.add_at
        opens = opens and not self.stable_at  # nothing has been predicted again yet
        return start, min(start + self.block * self.blocks if self.at_once else end + self.block * opens, length)

    @property
    def at_once(self) -> bool:
        """Whether a new block counts as decoded enough for the next one to open: all that may open do so at once."""
        return self.force == "first" and self.add_at == self.stable_at == 0

    def must_progress(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor:
        first = self.force == "first"
        return forced_blocks(
            open_BKL, lanes.start_B, lanes.end_B, block=self.block, force_at=self.force_at, first=first
        )

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        stable_BK = self.stability(lanes, after, state) if self.stable_at else None
        moved = slide_blocks(
            lanes, after, stable_BK, self.holds(lanes, state), grid=self.grid, add_at=self.add_at,
            stable_at=self.stable_at, stop=self.stop,
        )  # fmt: skip
        if not self.at_once:
            return moved
        start_B, entered_BK = moved.start_B, moved.entered_BK
        end_B = torch.minimum(start_B + self.block * self.blocks, lanes.length_B)
        end_B = torch.where(entered_BK.any(-1), end_B, moved.end_B)
        first_BK = start_B[:, None] + self.block * torch.arange(self.blocks, device=end_B.device)
        return replace(moved, end_B=end_B, entered_BK=(entered_BK.cumsum(-1) > 0) & (first_BK < end_B[:, None]))

    def holds(self, lanes: RowCursors, state: State) -> Tensor | None:
        """Rows in which no block opens now. bool [B]; None: none"""
        return None

    def stability(self, lanes: RowCursors, after: BlockAfter, state: State) -> Tensor:
        """The share of the tokens decoded before the step that it predicted again; 1 of none. float64 [B, K]"""
        view, stats = after.view, after.stats
        decoded_RL = ~view.masked_RL & ~view.given_RL
        again_RL = decoded_RL & (stats.token_RL == view.tokens_RL) & ~stats.declined_RL
        count_R = decoded_RL.sum(-1)
        stable_R = torch.where(count_R > 0, again_RL.sum(-1).to(torch.float64) / count_R.clamp_min(1), 1.0)
        return stable_R.view(after.finished_BK.shape)


@ITERATIONS.register("dmax")
@dataclass(frozen=True, kw_only=True)
class DMaxSweep(MultiBlock, Feeds):
    """multi_block that feeds a token committed with probability c as c E[token] + (1 - c) E[mask].

    From the next step of its block on, the token is fed as it is. With `rescale` the mixture has the length
    c |E[token]| + (1 - c) |E[mask]|. With mix=topk a token is instead fed with other likely tokens at every step:
    E[token] + weight * sum of p_k E[k] over the `top` most likely. The cache keeps the keys of the mixtures. This is
    for models trained so, with decoder=dmax; other decoders run too.
    """

    paper = "DMax, github.com/SJTU-DENG-Lab/Diffulex"
    scores: ClassVar[Literal["window", "adjusted", "none"]] = "adjusted"
    mixes: ClassVar[bool] = True

    mix: Literal["confidence", "topk"] = option("confidence", "what a token is mixed with: the mask, or likely tokens")
    rescale: bool = option(True, "with mix=confidence: as long as its two parts")
    top: int = option(1, "with mix=topk: how many of the most likely tokens", least=1, most=64)
    weight: float = option(0.3, "with mix=topk: of their sum")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None:
            return "iteration=dmax mixes tokens with the mask token, and this model has none."
        return super().incompatibility(spec)

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        """By position, the last being scratch: the probability of what stands there, 0 of masks and of the prompt."""
        belief_S = torch.zeros(()).expand(length + 1)
        if self.mix == "confidence":
            return {"belief": belief_S}
        likely_SX = torch.zeros((), dtype=torch.int64).expand(length + 1, self.top)
        return {"belief": belief_S, "likely": likely_SX, "weight": torch.zeros(()).expand(length + 1, self.top)}

    def embed(self, model: Model, tokens_BW: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> Tensor:
        x_BWD = model.embed(tokens_BW)
        at_BW = padded(pos_BW, state["belief"].shape[1] - 1)
        belief_BW1 = state["belief"].gather(1, at_BW)[..., None].to(x_BWD.dtype)
        if self.mix == "topk":
            index_BWX = at_BW[..., None].expand(-1, -1, self.top)
            likely_BWX, weight_BWX = (state[name].gather(1, index_BWX) for name in ("likely", "weight"))
            sum_BWD = torch.zeros_like(x_BWD)
            for k in range(self.top):
                sum_BWD = sum_BWD + weight_BWX[..., k, None].to(x_BWD.dtype) * model.embed(likely_BWX[..., k])
            return torch.where(belief_BW1 > 0, x_BWD + sum_BWD, x_BWD)
        mask_D = model.embed(torch.full_like(tokens_BW[:1, :1], model.spec.mask))[0, 0]
        mixed_BWD = belief_BW1 * x_BWD + (1 - belief_BW1) * mask_D
        if self.rescale:
            length_BW1 = belief_BW1 * x_BWD.norm(dim=-1, keepdim=True) + (1 - belief_BW1) * mask_D.norm()
            mixed_BWD = mixed_BWD * (length_BW1 / mixed_BWD.norm(dim=-1, keepdim=True).clamp_min(1e-12))
        return torch.where((belief_BW1 > 0) & (belief_BW1 < 1), mixed_BWD, x_BWD)

    def observe(self, model: Model, logits_BWV: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> None:
        if self.mix == "confidence":
            return
        chance_BWX, likely_BWX = logits_BWV.float().softmax(-1).topk(self.top, dim=-1)
        index_BWX = padded(pos_BW, state["belief"].shape[1] - 1)[..., None].expand(-1, -1, self.top)
        state["likely"].scatter_(1, index_BWX, likely_BWX)
        state["weight"].scatter_(1, index_BWX, self.weight * chance_BWX)

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        open_BX, at_BX = after.open_BKL.flatten(1), self.places(lanes, after, state)
        held_BX = state["belief"].gather(1, at_BX) > 0
        belief_BX = self.belief(after.stats.confidence_RL.view(open_BX.shape).float(), held_BX)
        blank_BX = open_BX | after.given_BKL.flatten(1)
        state["belief"].scatter_(1, at_BX, belief_BX.masked_fill(blank_BX, 0))
        return super().advance(lanes, after, state)

    def places(self, lanes: RowCursors, after: BlockAfter, state: State) -> Tensor:
        """Where in the state the positions of the active blocks are. [B, K * L]"""
        width, scratch = after.open_BKL.flatten(1).shape[1], state["belief"].shape[1] - 1
        return padded(span(lanes.start_B, lanes.end_B, width), scratch)

    def belief(self, confidence_BX: Tensor, held_BX: Tensor) -> Tensor:
        """The probability of the token at each position: of one committed now; 1 if the token stood there before."""
        return torch.where(held_BX, 1.0, confidence_BX)


@ITERATIONS.register("lopa")
@dataclass(frozen=True, kw_only=True)
class Lopa(MultiBlock, Branches):
    """multi_block with lookahead: each forward also runs `branches` versions of the open blocks.

    A version has one more token, one of the surest that the last step left open. The version whose remaining masks are
    surest is kept, and the decoder commits by its logits. So a token may be committed below the threshold, if it makes
    others surer. This is not lossless. A version costs as many rows as the open blocks have, so it pays at batch 1,
    where rows are free.

    The worth of a version is the mean of `by` over its remaining masks, or over the worst `part` of them. With `trust`,
    the score of its added token counts too. A version without masks is worth 1.
    """

    paper = "LoPA, github.com/zhijie-group/LoPA"

    branches: int = option(3, "versions beside the present state", least=1, most=16)
    by: Literal["confidence", "margin", "entropy"] = option("entropy", "what says how sure a mask is; entropy: less it")
    part: float = option(1.0, "look at this part of the masks, the least sure; 0: at the least sure one", most=1)
    trust: float = option(0.0, "weight of the added token's own score, 1 for the present state", most=1)
    stay: bool = option(True, "the present state is a version, too; else only where there is no other")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None:
            return "iteration=lopa compares what is still masked, and this model has no mask token."
        return super().incompatibility(spec)

    def worth(self, value_BX: Tensor, masked_BX: Tensor, token_B: Tensor) -> Tensor:
        sorted_BX = value_BX.double().masked_fill(~masked_BX, float("inf")).sort(-1).values
        masks_B = masked_BX.sum(-1)
        count_B1 = (masks_B.double() * self.part).floor().clamp_min(1)[:, None]
        low_BX = torch.arange(sorted_BX.shape[1], device=masks_B.device) < count_B1
        mean_B = sorted_BX.masked_fill(~low_BX, 0).sum(-1) / count_B1[:, 0]
        return self.trust * token_B + (1 - self.trust) * torch.where(masks_B > 0, mean_B, 1.0)

    def opens(
        self, open_BX: Tensor, stopped_B: Tensor, start_B: Tensor, end_B: Tensor, next_B: Tensor, length_B: Tensor
    ) -> Tensor:
        open_BKL = open_BX.view(len(open_BX), self.blocks, -1)
        active_B = -((start_B - end_B) // open_BKL.shape[2])
        share_BK = decoded_share(open_BKL, start_B, end_B, open_BKL.shape[2])
        enough_B = share_BK.gather(1, (active_B - 1).clamp(0, self.blocks - 1)[:, None])[:, 0] >= self.add_at
        return enough_B & (active_B < self.blocks) & (next_B < length_B) & ~(stopped_B & (self.stop != "off"))

    def present(self, alone_B: Tensor) -> Tensor:
        return torch.ones_like(alone_B) if self.stay else alone_B
