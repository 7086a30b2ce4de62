"""Recorded random numbers of Dream's `origin`, as the draws that dinfer's decoder makes instead.

The reference draws anew for every mask of every step, and commits it with probability 1 - t' / t when the noise level
falls from t to t'. dinfer draws one level u for each position, and commits it once the noise is not above u. Where d
was drawn in the step that committed a position, u = t (1 - d) is that same draw: d < 1 - t' / t just where u > t'.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dinfer.core.registry import DECODERS, values_of
from dinfer.core.step.contracts import BlockView
from dinfer.research.decoders.dream import Dream
from tests.parity.golden import Fields, GoldenError


@dataclass(frozen=True, kw_only=True)
class RecordedDream(Dream):
    """Dream whose draws are `levels_BS`, of the row that a request's seed names, from the end of its prompt on."""

    levels_BS: list[list[float]]
    prompts_B: list[int]

    def draws(self, view: BlockView) -> Tensor:
        prompt_R1 = view.seed_R.new_tensor(self.prompts_B)[view.seed_R][:, None]
        levels_RS = view.seed_R.new_tensor(self.levels_BS, dtype=torch.float64)[view.seed_R]
        return levels_RS.gather(1, (view.pos_RL - prompt_R1).clamp_min(0))


def recorded(decoder: dict[str, Any], doc: Fields, prompts: list[list[int]], new_tokens: int) -> RecordedDream:
    """The decoder with the draws of each step, which are in the order of rows, then of positions."""
    draws, prompts_B = doc.rows("uniform_draws_per_step", float), [len(prompt) for prompt in prompts]
    options = {name: value for name, value in values_of(DECODERS.build(decoder)).items() if name in decoder}
    noise_S = torch.linspace(1, options["eps"], options["steps"] + 1)
    masked_BS = torch.ones(len(prompts_B), new_tokens, dtype=torch.bool)
    levels_BS = torch.zeros(len(prompts_B), new_tokens, dtype=torch.float64)
    if len(draws) != options["steps"]:
        raise GoldenError(f"uniform_draws_per_step has {len(draws)} steps, not steps={options['steps']}")
    for step, drawn in enumerate(draws):
        if len(drawn) != int(masked_BS.sum()):
            raise GoldenError(f"uniform_draws_per_step[{step}] has {len(drawn)} draws for {int(masked_BS.sum())} masks")
        chance = 1 - noise_S[step + 1] / noise_S[step] if step + 1 < len(draws) else 1.0
        draw_BS = torch.ones_like(levels_BS)
        draw_BS[masked_BS] = torch.tensor(drawn, dtype=torch.float64)
        commit_BS = masked_BS & (draw_BS < chance)
        levels_BS = torch.where(commit_BS, noise_S[step] * (1 - draw_BS), levels_BS)
        masked_BS &= ~commit_BS
    return RecordedDream(**options, levels_BS=levels_BS.tolist(), prompts_B=prompts_B)
