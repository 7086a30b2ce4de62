"""Blocks with a look ahead: a token is committed where it leaves the other masks surest (Info-Gain)."""

from dataclasses import dataclass

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
    the least mean entropy at all other masks, its own entropy counted too. Use it with decoder=when_sure. Such a step
    computes `branches` + 1 rows. The published program may leave masks.
    """

    paper = "Info-Gain, github.com/yks23/Information-Gain-Sampler"

    branches: int = option(8, "tokens that are tried", least=1, most=16)
    heat: float = option(0.2, "of the draws of positions; 0: the surest alone")
    own_entropy: bool = option(True, "count the entropy of the token's own position; false: the variant lookum")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None or spec.shift:
            return "iteration=look_ahead reads each mask's own logits, and this model's predict other positions."
        return super().incompatibility(spec)

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

    def offers(self, confidence_RL: Tensor, view: BlockView) -> Tensor:
        best_R1 = confidence_RL.argmax(-1, keepdim=True)
        if self.branches == 1 or not self.heat:
            return torch.cat((best_R1, torch.full_like(best_R1, -1).expand(-1, self.branches - 1)), 1)
        noise_RJL = -torch.log(-torch.log(self.draws(view).float() + 1e-10) + 1e-10)
        score_RJL = (confidence_RL / self.heat)[:, None] + noise_RJL
        score_RJL = score_RJL.masked_fill(confidence_RL[:, None] < 0, float("-inf"))
        place_RJ = torch.cat((best_R1, score_RJL.argmax(-1)), 1)
        same_RJJ = (place_RJ[:, :, None] == place_RJ[:, None]).tril(-1)
        return place_RJ.masked_fill(same_RJJ.any(-1), -1)
