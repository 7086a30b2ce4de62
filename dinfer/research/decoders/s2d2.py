"""Self-verification: the leading run of a draft is committed as far as the model confirms it token by token (S2D2)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.kernels.random import uniform
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Large, ModelSpec, Proposal, State, TokenStats
from dinfer.core.step.mixins import Adjusts, Verifies
from dinfer.core.terms.stats import Quota


@DECODERS.register("s2d2")
@dataclass(frozen=True, kw_only=True)
class S2D2(Decoder, Adjusts, Verifies):
    """Drafts all masks of a block, and commits the first run of them as far as a second pass confirms it.

    p is the probability of a draft token in the first pass. q is its probability in the second pass, where a position
    sees only the draft before it. From the left, a token is accepted if a uniform number (a function of seed, position
    and step) is below min(1, q / p). The first rejected one becomes the token with the largest q - p. Then the best
    masks fill up the quota of the step, as in `fixed`. A verified step costs two forwards. It is not lossless: verified
    tokens are those of block size 1, which suits models such as SDAR.

    Each running request keeps p, a float32 per position of the block and vocabulary entry.
    """

    paper = "S2D2, github.com/phymhan/S2D2"
    refuses = ("temperature", "repetition_penalty", "eos_last")  # p is of the most likely token

    steps: int = option(32, "steps per block; each has an equal quota of the block length", least=1, per_request=True)
    threshold: float = option(0.85, "fill up with all above this probability; 1: none is", most=1, per_request=True)
    order: Literal["dynamic", "static", "sequential"] = option(
        "dynamic", "what fills up: the best and all above the threshold, the best alone, or the leftmost"
    )
    sure: bool = option(False, "verified steps commit all above the threshold too, even if their quota is met")

    min_span: int = option(1, "verify no shorter run of masks", least=1)
    unsure: bool = option(False, "verify shorter runs too, where fewer masks are above the threshold")
    tempering: float = option(1.0, "power of q / p")
    least_ratio: float | None = option(None, "also accept tokens of the run with at least this q / p; null: none")
    all_runs: bool = option(False, "with least_ratio: and of other runs")
    resample: bool = option(True, "the first token that is not accepted is replaced; else it is committed as it is")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.encoder or not spec.causal_block or spec.mask_id is None:
            return "decoder=s2d2 asks the model to write token by token, as block-causal ones do with block size 1."
        if spec.shift or (spec.experts and spec.experts.capacity):
            why = "logits predict the next token" if spec.shift else "experts are those of a whole block"
            return f"decoder=s2d2 verifies each position by its own mask, and this model's {why}."
        return None

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        chance_LV = torch.zeros(()).expand(block, spec.vocab)
        return {"draft": torch.zeros((), dtype=torch.int64).expand(block), "chance": Large(chance_LV)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        state["chance"].write(logits_RLV.float().softmax(-1))
        state["draft"].copy_(logits_RLV.argmax(-1))
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        span_RL, sure_RL = first_run(view.masked_RL), self.sure_masks(stats.top_RL, view)
        verify_R = self.routes(stats, view, state, span_RL, sure_RL)
        commit_RL = self.filled(torch.zeros_like(sure_RL), stats.top_RL, view)
        return Proposal(commit_RL, state["draft"], verify_R=verify_R)

    def verify(self, logits_RLV: Tensor, view: BlockView, state: State) -> Proposal:
        draft_RL, before_RLV, after_RLV = state["draft"], state["chance"].read(), logits_RLV.float().softmax(-1)
        p_RL, q_RL = (x_RLV.gather(2, draft_RL[..., None])[..., 0] for x_RLV in (before_RLV, after_RLV))
        ratio_RL = (q_RL / p_RL.clamp_min(1e-12)).pow(self.tempering).clamp_max(1)
        span_RL = first_run(view.masked_RL)
        accepted_RL = (self.draws(view, span_RL) < ratio_RL) | ~span_RL
        prefix_RL = span_RL & (accepted_RL.cumprod(-1) > 0)
        rejected_RL = span_RL & ~prefix_RL
        rejected_RL = rejected_RL & (rejected_RL.cumsum(-1) == 1)
        commit_RL = prefix_RL | rejected_RL
        if self.least_ratio is not None:
            commit_RL = commit_RL | ((ratio_RL >= self.least_ratio) & (view.masked_RL if self.all_runs else span_RL))
        if self.sure:
            commit_RL = commit_RL | self.sure_masks(p_RL, view)
        commit_RL = self.filled(commit_RL, p_RL, view)
        if not self.resample:
            return Proposal(commit_RL, draft_RL)
        place_R1V = rejected_RL.to(torch.int64).argmax(-1)[:, None, None].expand(-1, -1, before_RLV.shape[2])
        gain_RV = (after_RLV.gather(1, place_R1V) - before_RLV.gather(1, place_R1V))[:, 0]
        return Proposal(commit_RL, torch.where(rejected_RL, gain_RV.argmax(-1, keepdim=True), draft_RL))

    def draws(self, view: BlockView, span_RL: Tensor) -> Tensor:
        """Uniform numbers that the ratios must exceed. [R, L]"""
        return uniform(view.seed_R[:, None], view.pos_RL, view.forward_R[:, None])

    def sure_masks(self, p_RL: Tensor, view: BlockView) -> Tensor:
        return view.masked_RL & (p_RL > view.bar(view.options["threshold"]))

    def filled(self, commit_RL: Tensor, p_RL: Tensor, view: BlockView) -> Tensor:
        """The commits, filled up where they are fewer than the quota of the step."""
        total_R1 = (view.pos_RL >= 0).sum(-1, keepdim=True)
        share = Quota(total_R1, view.options["steps"], view.step_R[:, None])
        need_R1 = share.tokens() - commit_RL.sum(-1, keepdim=True)
        left_RL = view.masked_RL & ~commit_RL
        score_RL = -view.pos_RL.double() if self.order == "sequential" else p_RL.double()
        more_RL = descending_rank(score_RL.masked_fill(~left_RL, -math.inf)) < need_R1
        if self.order == "dynamic":
            more_RL = more_RL | self.sure_masks(p_RL, view)
        return commit_RL | (left_RL & more_RL & (need_R1 > 0))

    def routes(self, stats: TokenStats, view: BlockView, state: State, span_RL: Tensor, sure_RL: Tensor) -> Tensor:
        """Which rows are verified. bool [R]"""
        length_R, sure_R = span_RL.sum(-1), sure_RL.sum(-1)
        enough_R = sure_R >= view.masked_RL.sum(-1).clamp_max(self.min_span)
        return (length_R >= self.min_span) | (~enough_R if self.unsure else torch.zeros_like(enough_R))


def first_run(masked_RL: Tensor) -> Tensor:
    """The first run of masks in each row. bool [R, L]"""
    before_RL = masked_RL.roll(1, -1)
    before_RL[:, 0].fill_(False)
    return masked_RL & ((masked_RL & ~before_RL).cumsum(-1) == 1)
