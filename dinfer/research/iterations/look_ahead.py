"""Blocks with a look ahead: a token is committed where it leaves the other masks surest (Info-Gain)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.iterations.sweep import BlockSweep
from dinfer.core.kernels.random import uniform
from dinfer.core.registry import ITERATIONS, option
from dinfer.core.step.contracts import BlockView, ModelSpec
from dinfer.research.abilities.branches import LooksAhead


@ITERATIONS.register("look_ahead")
@dataclass(frozen=True, kw_only=True)
class LookAhead(BlockSweep, LooksAhead):
    """blockwise; where the decoder commits nothing, the next forward tries up to `branches` tokens.

    One is the surest, at the others positions are drawn by c / `heat` + Gumbel noise. The one is committed that leaves
    the least mean entropy at all other masks, its own counted too. Use it with decoder=when_sure, whose `steps` make it
    try sets. Such a step computes `branches` + 1 rows. The published programs may leave masks.
    """

    paper = "Info-Gain, github.com/yks23/Information-Gain-Sampler"

    branches: int = option(8, "tokens that are tried", least=1, most=16)
    heat: float = option(0.2, "of the draws of positions; 0: the surest alone")
    stop: Literal["block", "cut", "fill", "off"] = option(  # type: ignore[assignment]  # one more than its base has
        "block",
        "at a stop token: finish its 'block'; 'cut' once all before it is decoded; 'fill' up with EOS; 'off': go on",
    )
    own_entropy: bool = option(True, "count the entropy of the token's own position; false: the variant lookum")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None:
            return "iteration=look_ahead compares what is still masked, and this model has no mask token."
        if self.fills and spec.eos_id is None:
            return "iteration.stop=fill writes EOS, and this model has none. Use iteration.stop=off."
        return super().incompatibility(spec)

    @property
    def fills(self) -> bool:
        return self.stop == "fill"

    def worth(self, value_BX: Tensor, masked_BX: Tensor, token_B: Tensor) -> Tensor:
        raise NotImplementedError("candidates are judged by all masks of a forward")

    def opens(
        self, open_BX: Tensor, stopped_B: Tensor, start_B: Tensor, end_B: Tensor, next_B: Tensor, length_B: Tensor
    ) -> Tensor:
        return torch.zeros_like(stopped_B)

    def present(self, alone_B: Tensor) -> Tensor:
        return alone_B

    def draws(self, view: BlockView) -> Tensor:
        """Uniform numbers. [R, J - 1, L]"""
        which_J = -1 - torch.arange(1, self.branches, device=view.pos_RL.device)
        return uniform(
            view.seed_R[:, None, None], view.pos_RL[:, None], view.forward_R[:, None, None], which_J[:, None]
        )

    def offers(self, confidence_RL: Tensor, view: BlockView, share_R1: Tensor, size: int) -> Tensor:
        score_R1L = confidence_RL[:, None].double()
        scores = [score_R1L]
        if self.branches > 1 and self.heat:
            noise_RJL = -torch.log(-torch.log(self.draws(view).float() + 1e-10) + 1e-10)
            scores.append((score_R1L.float() / self.heat + noise_RJL).double())
        score_RJL = torch.cat(scores, 1).masked_fill(confidence_RL[:, None] < 0, float("-inf"))
        best_RJL, place_RJL = score_RJL.sort(dim=-1, descending=True, stable=True)
        which_Q = torch.arange(size, device=share_R1.device)
        set_RJQ = place_RJL[..., :size].masked_fill(best_RJL[..., :size] == float("-inf"), -1)
        set_RJQ = set_RJQ.masked_fill((which_Q >= share_R1)[:, None], -1)
        sorted_RJQ = set_RJQ.sort(-1).values
        same_RJJ = (sorted_RJQ[:, :, None] == sorted_RJQ[:, None]).all(-1).tril(-1)
        set_RJQ = set_RJQ.masked_fill(same_RJJ.any(-1)[..., None], -1)
        none_RJQ = torch.full_like(set_RJQ[:, :1], -1).expand(-1, self.branches - set_RJQ.shape[1], -1)
        return torch.cat((set_RJQ, none_RJQ), 1)
