"""Confidence threshold: commit every token whose probability reaches it (Fast-dLLM, arXiv:2505.22618)."""

from dataclasses import dataclass

from torch import Tensor

from dinfer.core.kernels.selection import commit_kernel, descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.core.terms.stats import Quota


@DECODERS.register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(Decoder):
    """Commits the masked positions with c_i >= threshold, and in any case the `least` most confident.

    c_i is the probability of the most likely token at position i. A position stays masked if its most likely token is
    the mask. This is the simplest rule, and hard to beat: try it first. With `relax`, the threshold is multiplied by
    1 - relax * (1 - r), where r is the share of positions that are still masked (Streaming-dLLM).
    """

    paper = "Fast-dLLM, arXiv:2505.22618"

    threshold: float = option(0.9, "least probability of a commit", most=1, per_request=True)
    least: int = option(1, "commit at least so many tokens a step", least=1, per_request=True)
    relax: float = option(0.0, "by which part the threshold falls as the block fills up", most=1)
    horizon: int = option(0, "with relax: positions right of the block that count as masks of it")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        threshold_R1 = view.options["threshold"]
        if self.relax:
            threshold_R1 = threshold_R1 * (1 - self.relax * (1 - self.left(view)))
        bar_R1, least_R1 = view.bar(threshold_R1), view.at_least(view.options["least"])
        return Proposal(confident(stats, view.masked_RL, bar_R1, least=least_R1))

    def left(self, view: BlockView) -> Tensor:
        """The share of masks in the block and the (at most) `horizon` positions to its right. [R, 1]"""
        size_R1 = (view.pos_RL >= 0).sum(-1, keepdim=True)
        behind_R1 = view.length_R[:, None] - view.pos_RL[:, :1] - size_R1
        ahead_R1 = behind_R1.clamp_max(self.horizon)
        return (view.masked_RL.sum(-1, keepdim=True) + ahead_R1).double() / (size_R1 + ahead_R1)


def confident(
    stats: TokenStats, masked_RL: Tensor, bar_R1: Tensor, *, least: Tensor | Quota | int, above: bool = False
) -> Tensor:
    """Masks whose probability reaches the bar (`above`: exceeds it), and the `least` most probable ones. bool [R, L]

    A mask stays where the mask token is the most likely.
    """
    if (kernel := commit_kernel(masked_RL)) is not None:  # the lines below in one launch
        return kernel.confident(stats, masked_RL, bar_R1, least, above=above)[0]
    count_R1 = least.tokens() if isinstance(least, Quota) else least
    score_RL, bar_R1 = stats.top_RL.masked_fill(~masked_RL, -1.0), bar_R1.to(stats.confidence_RL.dtype)
    sure_RL = score_RL > bar_R1 if above else score_RL >= bar_R1
    return (sure_RL | (descending_rank(score_RL) < count_R1)) & masked_RL & ~stats.declined_RL
