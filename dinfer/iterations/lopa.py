"""Several blocks at once, and several versions of them, of which the surest is kept (LoPA)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.abilities.branches import Branches
from dinfer.iterations.multi_block import MultiBlock
from dinfer.kernels.advance import decoded_share
from dinfer.recipe.registry import ITERATIONS, check_range, option
from dinfer.step.contracts import ModelSpec, TokenStats


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

    branches: int = option(3, "versions beside the present state")
    by: Literal["confidence", "margin", "entropy"] = option("entropy", "what says how sure a mask is; entropy: less it")
    part: float = option(1.0, "look at this part of the masks, the least sure; 0: at the least sure one")
    trust: float = option(0.0, "weight of the added token's own score, 1 for the present state")
    stay: bool = option(True, "the present state is a version, too; else only where there is no other")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("iteration", self, "branches", least=1, most=16)
        check_range("iteration", self, "part", "trust", least=0, most=1)

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.by == "confidence" else (self.by,)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None:
            return "iteration=lopa compares what is still masked, and this model has no mask token."
        return super().incompatibility(spec)

    def value(self, stats: TokenStats) -> Tensor:
        if self.by == "confidence":
            return stats.top_RL
        return stats.stat("margin") if self.by == "margin" else -stats.stat("entropy")

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
