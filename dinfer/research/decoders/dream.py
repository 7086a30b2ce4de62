"""Dream's schedule of noise levels, and its four ways to choose positions (Dream, arXiv:2508.15487)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.kernels.random import uniform
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats

NEAR = 2  # steps by which rounding may move the first step that commits a token


# Published: `diffusion_generate` with steps=512, eps=1e-3, alg="origin", alg_temp=0; its examples take alg="entropy".
@DECODERS.register("dream")
@dataclass(frozen=True, kw_only=True)
class Dream(Decoder):
    """Lowers the noise t from 1 to eps in `steps` steps; step i commits the int(n (1 - t_{i+1} / t_i)) best of n masks.

    t = linspace(1, eps, steps + 1), and the last step commits all. Steps are counted in each block: with iteration
    `full`, as published, the whole canvas is one. `origin` commits each mask with probability 1 - t_{i+1} / t_i
    instead. The mask token takes part, and where it wins the position stays masked.

    Steps that commit nothing are skipped: the tokens are those of the reference, in fewer forwards. If the mask token
    wins at every chosen position, the best other position is committed.
    """

    paper = "Dream, arXiv:2508.15487"

    steps: int = option(512, "noise levels from 1 to eps, in each block", least=1, per_request=True)
    alg: Literal["origin", "maskgit_plus", "topk_margin", "entropy"] = option(
        "entropy", "what comes first: chance, probability, lead over the second token, or low entropy"
    )
    alg_temp: float = option(0.0, "draw positions from softmax(score / alg_temp); 0: the best", per_request=True)
    eps: float = option(0.001, "the last noise level", per_request=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eps < 1:
            raise ValueError(f"decoder.eps={self.eps} must be between 0 and 1")

    @property
    def needs(self) -> tuple[str, ...]:
        return {"entropy": ("entropy",), "topk_margin": ("margin",)}.get(self.alg, ())

    @property
    def refuses(self) -> tuple[str, ...]:
        return () if self.alg == "maskgit_plus" else ("eos_last",)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"level": torch.zeros((), dtype=torch.int64)}

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        chosen_RL, level_R1 = (self.by_chance if self.alg == "origin" else self.by_score)(stats, view, state["level"])
        state["level"].copy_(level_R1[:, 0] + 1)
        return Proposal(chosen_RL & view.masked_RL & ~stats.declined_RL)

    def by_score(self, stats: TokenStats, view: BlockView, level_R: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of the next step that commits any, and which step that is. [R, L], [R, 1]"""
        steps_R1, eps_R1 = view.options["steps"], view.options["eps"]
        masks_R1 = view.masked_RL.sum(-1, keepdim=True)
        # n h / t_i reaches 1 where t_i = 1 - i h falls to n h. Around there, the published float32 arithmetic decides.
        inverse_R1 = steps_R1 / (1 - eps_R1)
        about_R1 = (inverse_R1 - masks_R1).ceil().to(torch.int64)
        near_C = torch.arange(-NEAR, NEAR + 1, device=about_R1.device)
        level_RC = torch.minimum(torch.maximum(level_R[:, None], about_R1 + near_C), steps_R1 - 1)
        level_RC = torch.cat((level_R[:, None].clamp_max(steps_R1 - 1), level_RC), 1)
        now_RC, then_RC = (linear_timesteps(level_RC + i, steps_R1, eps_R1) for i in (0, 1))
        count_RC = (masks_R1.to(torch.float32) * (1 - then_RC / now_RC)).to(torch.int64)
        count_RC = torch.where(level_RC == steps_R1 - 1, masks_R1, count_RC)
        # Levels ascend, so the first with a commit is that of the lowest index; the last candidate if there is none.
        first_R1 = (count_RC > 0).to(torch.int64).argmax(-1, keepdim=True)
        score_RL = self.scores(stats, view).masked_fill(~view.masked_RL, float("-inf"))
        return descending_rank(score_RL) < count_RC.gather(1, first_R1), level_RC.gather(1, first_R1)

    def scores(self, stats: TokenStats, view: BlockView) -> Tensor:
        """The larger the better; with alg_temp, so perturbed that the k best are k draws without replacement. [R, L]"""
        score_RL = stats.surest("margin" if self.alg == "topk_margin" else self.alg)
        # Gumbel noise: its k largest sums are k draws one after the other (Kool et al., arXiv:1903.06059).
        gumbel_RL = -uniform(view.seed_R[:, None], view.pos_RL, view.forward_R[:, None]).log().neg().log()
        warm_R1 = view.options["alg_temp"]
        drawn_RL = score_RL / torch.where(warm_R1 > 0, warm_R1, 1.0) + gumbel_RL
        return torch.where(warm_R1 > 0, drawn_RL, score_RL.to(torch.float64))

    def by_chance(self, stats: TokenStats, view: BlockView, level_R: Tensor) -> tuple[Tensor, Tensor]:
        """As `by_score`: a mask is committed at the first noise level that is not above its own draw."""
        steps_R1, eps_R1 = view.options["steps"], view.options["eps"]
        draw_RL = self.draws(view).masked_fill(~view.masked_RL, 0.0)
        highest_R1 = draw_RL.amax(-1, keepdim=True)
        about_R1 = ((1 - highest_R1) * steps_R1 / (1 - eps_R1)).ceil().to(torch.int64) - 1
        level_R1 = torch.minimum(torch.maximum(about_R1, level_R[:, None]), steps_R1 - 1)
        noise_R1 = linear_timesteps(level_R1 + 1, steps_R1, eps_R1).masked_fill(level_R1 == steps_R1 - 1, 0.0)
        return draw_RL >= torch.minimum(noise_R1.to(torch.float64), highest_R1), level_R1

    def draws(self, view: BlockView) -> Tensor:
        """The noise level at which each position is committed, uniform in (0, 1). float64 [R, L]"""
        return uniform(view.seed_R[:, None], view.pos_RL)


def linear_timesteps(index: Tensor, steps: Tensor, eps: Tensor) -> Tensor:
    """Element `index` of `torch.linspace(1, eps, steps + 1)`. float32, of the broadcast shape

    Samplers round a number of tokens down, so one bit may cost a token. linspace counts from the nearer end and rounds
    the multiply-add once. float64 holds the product exactly, so it gives the same bits.
    """
    eps32 = eps.to(torch.float32)
    width = ((eps32 - 1) / steps.to(torch.float32)).to(torch.float64)
    early = 1 + width * index
    late = eps32.to(torch.float64) - width * (steps - index)
    return torch.where(index < torch.div(steps + 1, 2, rounding_mode="floor"), early, late).to(torch.float32)
