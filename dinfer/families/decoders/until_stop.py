"""A fixed number of tokens a step, none behind a stop token (LLaDA-V)."""

from dataclasses import dataclass, replace

import torch

from dinfer.core.decoders.schedule import Fixed
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Proposal, State, TokenStats


@DECODERS.register("until_stop")
@dataclass(frozen=True, kw_only=True)
class UntilStop(Fixed):
    """`fixed` that, once a token of `stops` is decoded, first decodes all before it."""

    paper = "LLaDA-V, github.com/ML-GSAI/LLaDA-V"

    stops: tuple[int, ...] = option((), "token ids")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        decided_RL, ends_RL = ~view.masked_RL & ~view.given_RL, torch.zeros_like(view.masked_RL)
        for stop in self.stops:
            ends_RL = ends_RL | (decided_RL & (view.tokens_RL == stop))
        before_RL = view.masked_RL & (ends_RL.cumsum(-1) == 0)
        free_RL = torch.where(before_RL.any(-1, keepdim=True), before_RL, view.masked_RL)
        return super().select(stats, replace(view, masked_RL=free_RL), state)
