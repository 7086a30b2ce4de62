"""A canvas that grows: adds masks where the model is unsure and predicts no end (DAEDAL, arXiv:2508.00819).

Published for LLaDA: initial=64, max_new_tokens=2048, window=32, threshold=0.9, low_threshold=0.1, expansion=8,
eos_threshold=0.5, growth_threshold=0.9, eos_tokens=32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.abilities.pacing import Grows
from dinfer.kernels.canvas import moved
from dinfer.kernels.selection import descending_rank
from dinfer.recipe.registry import DECODERS, option
from dinfer.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats


@DECODERS.register("daedal")
@dataclass(frozen=True, kw_only=True)
class Daedal(Decoder, Grows):
    """Finds a length first, then decodes window after window and adds masks; max_new_tokens is the greatest length.

    Let e be the sum of EOS probabilities over the last `eos_tokens` positions at which EOS is offered, divided by
    eos_tokens. The canvas begins with `initial` masks, and gains `expansion` more while e < eos_threshold. Then
    eos_tokens / 2 EOS tokens are put behind it. From then on each step commits all positions of a window of `window`
    positions with c > threshold, or the best one. If e < growth_threshold, the mask with the least c < low_threshold
    becomes `expansion` masks. Positions beyond the greatest length are dropped. When a window has no masks, the next
    one begins. A position that the mask token wins is the best one only if all are such.
    """

    paper = "DAEDAL, arXiv:2508.00819"

    initial: int = option(64, "masks at first", least=1, per_request=True)
    window: int = option(32, "positions that are decoded before those to their right", least=1, per_request=True)
    threshold: float = option(0.9, "commit every token more probable than this", most=1, per_request=True)
    low_threshold: float = option(
        0.1, "add masks at a position less sure than this; 0: never", most=1, per_request=True
    )
    expansion: int = option(8, "masks in place of one", least=1, per_request=True)
    eos_threshold: float = option(0.5, "the length is found once e reaches this", per_request=True)
    growth_threshold: float = option(0.9, "add no masks once e reaches this", per_request=True)
    eos_tokens: int = option(32, "EOS predictions that e is the mean of", least=1, per_request=True)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is not None:
            return None
        return "decoder=daedal puts masks in, and this model has no mask token."

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {
            "fixed": torch.zeros((), dtype=torch.bool),  # the length has been looked for
            "window": torch.zeros((), dtype=torch.int64),
            "eos": torch.tensor(spec.eos_id),
        }

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        place_L = torch.arange(view.pos_RL.shape[1], device=view.pos_RL.device)
        start_R1, most_R1 = view.pos_RL[:, :1], (view.pos_RL >= 0).sum(-1, keepdim=True)
        length_R1, fixed_R1 = view.length_R[:, None] - start_R1, state["fixed"][:, None].clone()
        there_RL, eos_R1 = place_L < length_R1, state["eos"][:, None]
        end_R1 = self.end_in_sight(stats, there_RL, eos_R1, view)
        more_R1, asked_R1 = view.options["expansion"], view.options["eos_tokens"]

        # Until the length is fixed, nothing is decoded; then, what may come to be behind it is EOS.
        longer_R1 = ~fixed_R1 & (end_R1 < view.options["eos_threshold"]) & (length_R1 < most_R1)
        fixing_R1 = ~fixed_R1 & ~longer_R1
        grown_R1 = length_R1 + torch.where(longer_R1, more_R1, torch.div(asked_R1, 2, rounding_mode="floor"))

        first_R1 = state["window"][:, None]
        window_RL = view.masked_RL & there_RL & (place_L >= first_R1) & (place_L < first_R1 + view.options["window"])
        commit_RL = self.sure(stats, window_RL & fixed_R1, view)
        low_RL = window_RL & ~commit_RL & (stats.top_RL < view.options["low_threshold"]) & fixed_R1
        low_RL = low_RL & (end_R1 < view.options["growth_threshold"]) & (length_R1 < most_R1)
        split_RL = low_RL & (descending_rank((-stats.top_RL).masked_fill(~low_RL, -2.0)) == 0)
        added_R1 = (more_R1 - 1) * split_RL.any(-1, keepdim=True)
        at_R1 = torch.where(split_RL, place_L, len(place_L)).amin(-1, keepdim=True)
        source_RL = torch.where(place_L > at_R1 + added_R1, place_L - added_R1, -1)
        source_RL = torch.where(place_L <= at_R1, place_L, source_RL)

        size_R1 = torch.minimum(torch.where(fixed_R1, length_R1 + added_R1, grown_R1), most_R1)
        commit_RL = moved(commit_RL, source_RL, False)
        left_RL = moved(view.masked_RL, source_RL, True) & ~commit_RL & (place_L >= first_R1) & (place_L < size_R1)
        next_R1 = torch.where(left_RL, place_L, place_L[-1]).amin(-1, keepdim=True) - first_R1
        skipped_R1 = torch.div(next_R1, view.options["window"], rounding_mode="floor").clamp_min(0) * fixed_R1
        state["window"] += (skipped_R1 * view.options["window"])[:, 0]
        state["fixed"] |= fixing_R1[:, 0]
        behind_RL = fixing_R1 & view.masked_RL & (place_L >= length_R1)
        return Proposal(
            torch.where(fixed_R1, commit_RL, behind_RL),
            torch.where(fixed_R1, moved(stats.token_RL, source_RL, -1), eos_R1),
            source_RL=source_RL,
            length_R=(start_R1 + size_R1)[:, 0],
        )

    def end_in_sight(self, stats: TokenStats, there_RL: Tensor, eos_R1: Tensor, view: BlockView) -> Tensor:
        """e, the mean probability of the last EOS predictions. [R, 1]"""
        ends_RL = there_RL & ~view.given_RL & (stats.token_RL == eos_R1) & ~stats.declined_RL
        rank_RL = ends_RL.flip(-1).cumsum(-1).flip(-1)
        asked_R1 = view.options["eos_tokens"]
        last_RL = ends_RL & (rank_RL <= asked_R1)
        return torch.where(last_RL, stats.confidence_RL, 0).sum(-1, keepdim=True) / asked_R1

    def sure(self, stats: TokenStats, window_RL: Tensor, view: BlockView) -> Tensor:
        """The positions of the window to commit: those above the threshold, else the best one."""
        token_RL = window_RL & ~stats.declined_RL
        sure_RL = token_RL & (stats.confidence_RL > view.bar(view.options["threshold"]))
        best_RL = token_RL & (descending_rank(stats.confidence_RL.masked_fill(~token_RL, -1.0)) == 0)
        rest_RL = stats.confidence_RL / (1 - stats.mask_confidence_RL)  # where the mask token is certain, no number
        rest_RL = rest_RL.nan_to_num(0.0, 0.0, 0.0).masked_fill(~window_RL, -1.0)
        last_RL = window_RL & (descending_rank(rest_RL) == 0)
        found_RL = torch.where(token_RL.any(-1, keepdim=True), best_RL, last_RL)
        return torch.where(sure_RL.any(-1, keepdim=True), sure_RL, found_RL)
