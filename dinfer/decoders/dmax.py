"""Fill masks from the left as far as all are sure, and rewrite every decoded token (DMax, as Diffulex has it)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.abilities.pacing import Edits
from dinfer.recipe.registry import DECODERS, check_probability, option
from dinfer.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


@DECODERS.register("dmax")
@dataclass(frozen=True, kw_only=True)
class DMax(Decoder, Edits):
    """Fills the masks before the first one with c < threshold, at least the first; rewrites every decoded token.

    A decoded token becomes the most likely one, whatever its probability. A block is finished after a step that begins
    without masks, that changes nothing, or that has c >= finish_at at all masks. This is for models trained to revise
    their tokens, with iteration=dmax, which feeds them mixtures of token and mask.
    """

    paper = "DMax, github.com/SJTU-DENG-Lab/Diffulex"

    threshold: float = option(0.5, "least probability of a mask that is filled", per_request=True)
    finish_at: float = option(0.9, "a step that fills every mask at this probability finishes the block")

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold", "finish_at")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        low_RL = view.masked_RL & (stats.top_RL < view.bar(view.options["threshold"]))
        place_RL = view.masked_RL.cumsum(-1)
        fill_RL = view.masked_RL & ((low_RL.cumsum(-1) == 0) | (place_RL <= view.at_least(1)))
        changed_RL = self.judged(view) & ((stats.token_RL != view.tokens_RL) | stats.declined_RL)
        decoded_RL = ~view.masked_RL & ~view.given_RL
        write_RL = (fill_RL | (changed_RL & decoded_RL)) & ~stats.declined_RL
        busy_R = (fill_RL | changed_RL).any(-1) & ~(self.confidence(stats, view) >= self.finish_at).all(-1)
        return Proposal(write_RL, busy_R=busy_R, remask_RL=decoded_RL & stats.declined_RL)

    def judged(self, view: BlockView) -> Tensor:
        """Decoded positions at which a change of the token keeps the block from being finished. bool [R, L]"""
        return ~view.masked_RL & ~view.given_RL

    def confidence(self, stats: TokenStats, view: BlockView) -> Tensor:
        """The confidence of each position in deciding whether the block is finished. [R, L]"""
        return torch.where(view.masked_RL, stats.top_RL, 1.0)
