"""Tokens that do not look at one another go together (DAWN)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.research.abilities.following import Heeds, Looks


@DECODERS.register("dawn")
@dataclass(frozen=True, kw_only=True)
class Dawn(Decoder, Heeds):
    """Commits tokens that are sure, or look at a sure decoded one, and of others those that do not look at each other.

    They have c >= threshold, induced and low_threshold; of the last the best go first, and none that looks at one of
    both first kinds. To look is to attend by `edge`; what gets more than `sink` on average is left out.
    """

    paper = "DAWN, github.com/lizhuo-luo/DAWN"
    precision = "float64"

    threshold: float = option(0.9, "of sure tokens", most=1)
    induced: float = option(0.7, "of tokens that look at a sure one", most=1)
    low_threshold: float = option(0.7, "of others", most=1)
    edge: float = option(0.07, "least attention that counts", least=0.0, most=1)
    sink: float = option(0.01, "most attention from all", most=1)
    layers: int = option(4, "the last so many layers", least=1)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        raise NotImplementedError("dawn decides by the attention of a forward: see heed")

    def heed(self, stats: TokenStats, view: BlockView, looks: Looks) -> Proposal:
        score_RL, masked_RL = stats.top_RL, view.masked_RL
        sees_RLS = (looks.paid_RLS >= self.edge) & (looks.got_RS <= self.sink)[:, None]
        pos_S = torch.arange(sees_RLS.shape[2], device=masked_RL.device)
        last_R1 = view.pos_RL.amax(-1, keepdim=True)
        anchors_RS = ~looks.open_RS & (looks.top_RS >= self.threshold) & (pos_S <= last_R1)
        at_RLL = view.pos_RL.clamp_min(0)[:, None].expand(-1, masked_RL.shape[1], -1)
        sees_RLL = sees_RLS.gather(2, at_RLL) & (view.pos_RL >= 0)[:, None]
        sees_RLL = sees_RLL & ~torch.eye(masked_RL.shape[1], dtype=torch.bool, device=masked_RL.device)
        sure_RL = masked_RL & (score_RL >= self.threshold)
        induced_RL = masked_RL & (score_RL >= self.induced) & (sees_RLS & anchors_RS[:, None]).any(-1)
        behind_RL = (sees_RLL & (sure_RL & induced_RL)[:, None]).any(-1)
        free_RL = masked_RL & (score_RL >= self.low_threshold) & ~(sure_RL | induced_RL | behind_RL)
        commit_RL = sure_RL | induced_RL | apart(score_RL, free_RL, sees_RLL | sees_RLL.mT)
        return Proposal(commit_RL & ~stats.declined_RL)


def apart(score_RL: Tensor, free_RL: Tensor, joined_RLL: Tensor) -> Tensor:
    """The best of the free positions, and again the best that is joined to none before. bool [R, L]"""
    place_L, chosen_RL = torch.arange(score_RL.shape[1], device=score_RL.device), torch.zeros_like(free_RL)
    for _ in range(score_RL.shape[1]):
        best_R1 = score_RL.masked_fill(~free_RL, -1).argmax(-1, keepdim=True)
        best_RL = (place_L == best_R1) & free_RL
        near_RL = joined_RLL.gather(1, best_R1[..., None].expand(-1, 1, len(place_L)))[:, 0]
        chosen_RL, free_RL = chosen_RL | best_RL, free_RL & ~best_RL & ~near_RL
    return chosen_RL
