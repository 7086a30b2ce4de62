"""Revocable decoding: commit many tokens, and mask the doubtful ones again (WINO, arXiv:2507.18578).

Published: threshold 0.6 to let tokens in, 0.9 for them to stay; of n masks at most min(max(int(0.7 n), 5), 20) enter
at a step.

The published code appends a shadow mask token for every position of the block. A shadow sees all tokens but the one at
its own position, so a token is judged by the probability that it has without itself. Attention is an interval here
(`kernels.attention`), which cannot leave one position out. So this decoder judges a token while the model sees it.
Models tend to repeat what they see: the test finds tokens that the context contradicts, and hardly those that are
unlikely.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.abilities.adjusting import Adjusts
from dinfer.abilities.pacing import Edits
from dinfer.kernels.selection import descending_rank
from dinfer.recipe.registry import DECODERS, check_range, option
from dinfer.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats


@DECODERS.register("wino")
@dataclass(frozen=True, kw_only=True)
class Wino(Decoder, Edits, Adjusts):
    """Commits c_i > threshold, else the best one; masks decoded tokens with p(token) < keep_threshold again.

    p(token) is the probability of a decoded token at its own position, where the model sees it. The published method
    hides it there. Tokens are masked again only in a step that commits more than one, the least probable first, and
    fewer than it commits. (With the published bound, the number of commits of the step before, a block may never end.)
    """

    paper = "WINO, arXiv:2507.18578"
    precision = "float64"

    threshold: float = option(0.6, "commit masks above this", per_request=True)
    keep_threshold: float = option(0.9, "mask decoded tokens below this again", per_request=True)
    share: float = option(0.7, "commit at most this share of the masks", per_request=True)
    fewest: int = option(5, "but at least this number", per_request=True)
    most: int = option(20, "and at most this number", per_request=True)

    def __post_init__(self) -> None:
        check_range("decoder", self, "threshold", "keep_threshold", "share", least=0, most=1)
        check_range("decoder", self, "fewest", "most", least=1)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"own": torch.zeros((), dtype=torch.float64).expand(block)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        prob_RLV = logits_RLV.double().softmax(-1)
        state["own"].copy_(prob_RLV.gather(-1, view.tokens_RL[..., None])[..., 0])
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = stats.top_RL.masked_fill(~view.masked_RL, -1.0)
        masks_R1 = view.masked_RL.sum(-1, keepdim=True)
        limit_R1 = (masks_R1.to(torch.float32) * view.options["share"].to(torch.float32)).to(torch.int64)
        limit_R1 = torch.minimum(torch.maximum(limit_R1, view.options["fewest"]), view.options["most"])
        rank_RL = descending_rank(score_RL)
        enter_RL = ((score_RL > view.bar(view.options["threshold"])) & (rank_RL < limit_R1)) | (
            rank_RL < view.at_least(1)
        )
        enter_RL &= view.masked_RL & ~stats.declined_RL
        doubtful_RL = (state["own"] < view.options["keep_threshold"]) & ~view.masked_RL & ~view.given_RL
        worst_RL = (-state["own"]).masked_fill(~doubtful_RL, float("-inf"))
        leave_RL = doubtful_RL & (descending_rank(worst_RL) < enter_RL.sum(-1, keepdim=True) - 1)
        return Proposal(enter_RL, remask_RL=leave_RL)
