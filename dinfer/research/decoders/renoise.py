"""Uniform renoising: keep sure tokens as a draft, draw all others anew, commit the canvas as a whole (DiffusionGemma).

The entropy bound is EB-Sampler's (arXiv:2505.24857). Facts of the algorithm: transformers 5.23, `diffusion_gemma`,
whose published settings the defaults are, and SGLang, `Gemma4Renoise`. There tokens are drawn: set
sampling.temperature=1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats
from dinfer.core.step.mixins import Adjusts, Drafts


@DECODERS.register("renoise")
@dataclass(frozen=True, kw_only=True)
class Renoise(Decoder, Adjusts, Drafts):
    """Drafts the surest positions with sum of H before them <= bound; the others get uniform noise until the next step.

    At step s = 0, 1, ... of a canvas, logits are divided by T = t_min + (t_max - t_min) * (steps - s) / steps. H is the
    entropy of a position after that, in nats. Drafts are the tokens that the sampling offers (published: drawn at
    sampling.temperature=1), and each step chooses them anew. The whole canvas is committed to the most likely tokens,
    which no penalty changes, when these have stayed the same for `stability` steps and the mean of H is below
    `confidence`, or after `steps` steps. This is for models of uniform noise, which have no mask token.
    """

    paper = "DiffusionGemma (transformers 5.23), with EB-Sampler's bound, arXiv:2505.24857"
    needs = ("entropy", "best")
    refuses = ("eos_last",)  # it does not look at confidences

    # The engine ends a row that gains nothing for 256 steps.
    steps: int = option(48, "steps that a canvas takes at most", least=1, most=255, per_request=True)
    bound: float = option(0.1, "joint entropy of the drafts that may be ignored, in nats", per_request=True)
    # Logits divided by these stay finite.
    t_min: float = option(0.4, "temperature after the last step", least=1e-3, most=1e3, per_request=True)
    t_max: float = option(0.8, "temperature at the first step", least=1e-3, most=1e3, per_request=True)
    confidence: float = option(0.005, "mean entropy below which a stable canvas is done, in nats", per_request=True)
    stability: int = option(1, "steps for which the most likely tokens must have stayed the same; 0: none", most=255)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None:
            return None
        return (
            "decoder=renoise puts uniform noise where nothing is decoded, and this model was trained with a mask token "
            "there."
        )

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        best: State = {"best": torch.full((self.stability, block), -1)} if self.stability else {}
        return {"draft": torch.full((block,), -1), **best}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        wide = torch.promote_types(logits_RLV.dtype, torch.float32)
        low_R1, high_R1, steps_R1 = (view.options[name].to(wide) for name in ("t_min", "t_max", "steps"))
        left_R1 = steps_R1 - view.step_R[:, None].to(wide)
        return logits_RLV.to(wide) / (low_R1 + (high_R1 - low_R1) * left_R1 / steps_R1)[..., None]

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        entropy_RL, best_RL = stats.stat("entropy"), stats.stat("best")
        sorted_RL, order_RL = entropy_RL.masked_fill(~view.masked_RL, float("inf")).sort(dim=-1, stable=True)
        before_RL = sorted_RL.cumsum(-1) - sorted_RL
        fits_RL = (before_RL <= view.options["bound"]) & sorted_RL.isfinite()
        draft_RL = torch.zeros_like(fits_RL).scatter(1, order_RL, fits_RL)

        total_R1 = entropy_RL.masked_fill(~view.masked_RL, 0.0).sum(-1, keepdim=True)
        done_R1 = total_R1 < view.options["confidence"] * view.masked_RL.sum(-1, keepdim=True)
        if self.stability:
            same_RL = (state["best"] == best_RL[:, None]).all(1) | ~view.masked_RL
            done_R1 = done_R1 & same_RL.all(-1, keepdim=True)
            state["best"].copy_(torch.cat((state["best"][:, 1:], best_RL[:, None]), 1))
        done_R1 = done_R1 | (view.step_R[:, None] + 1 >= view.options["steps"])
        state["draft"].copy_(torch.where(draft_RL, stats.token_RL, -1))
        return Proposal(view.masked_RL & done_R1, best_RL, waits_R=~done_R1[:, 0])
