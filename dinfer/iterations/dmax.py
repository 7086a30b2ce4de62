"""Several blocks at once; a new token is fed as a mixture with the mask, by its probability (DMax, as in Diffulex)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dinfer.abilities.feeding import Feeds
from dinfer.iterations.multi_block import MultiBlock
from dinfer.kernels.canvas import padded, span
from dinfer.recipe.registry import ITERATIONS, check_range, option
from dinfer.step.contracts import BlockAfter, ModelSpec, Moved, RowCursors, State
from dinfer.step.model import Model


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
    top: int = option(1, "with mix=topk: how many of the most likely tokens")
    weight: float = option(0.3, "with mix=topk: of their sum")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("iteration", self, "top", least=1, most=64)
        check_range("iteration", self, "weight", least=0)

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
