"""Self-verification: the leading run of a draft is committed as far as the model confirms it token by token (S2D2)."""

import math
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.abilities.adjusting import Adjusts
from dinfer.abilities.verification import Verifies
from dinfer.kernels.random import uniform
from dinfer.kernels.selection import descending_rank
from dinfer.kernels.timesteps import Quota
from dinfer.recipe.registry import DECODERS, check_probability, check_range, option
from dinfer.step.contracts import BlockView, Decoder, Large, ModelSpec, Proposal, State, TokenStats

PART_BINS = 2  # bins of the bandit for how much of the block is decoded, and for its entropy


@DECODERS.register("s2d2")
@dataclass(frozen=True, kw_only=True)
class S2D2(Decoder, Adjusts, Verifies):
    """Drafts all masks of a block, and commits the first run of them as far as a second pass confirms it.

    p is the probability of a draft token in the first pass. q is its probability in the second pass, where a position
    sees only the draft before it. From the left, a token is accepted if a uniform number (a function of seed, position
    and step) is below min(1, q / p). The first rejected one becomes the token with the largest q - p. Then the best
    masks fill up the quota of the step, as in `fixed`. A verified step costs two forwards. It is not lossless: verified
    tokens are those of block size 1, which suits models such as SDAR.

    `route` says which steps are verified: "span" those whose run has `min_span` masks; "score" those whose expected
    number of accepted tokens (`estimator`, `scale`), less `penalty`, reaches `floor`; "hysteresis" switches on above
    `on` and off below `off`; "bandit" learns by UCB from length, progress and entropy.

    Each running request keeps p, a float32 per position of the block and vocabulary entry.
    """

    paper = "S2D2, github.com/phymhan/S2D2"

    steps: int = option(32, "steps per block; each has an equal quota of the block length", per_request=True)
    threshold: float = option(0.85, "fill up with all above this probability; 1: none is", per_request=True)
    order: Literal["dynamic", "static", "sequential"] = option(
        "dynamic", "what fills up: the best and all above the threshold, the best alone, or the leftmost"
    )
    sure: bool = option(False, "verified steps commit all above the threshold too, even if their quota is met")

    route: Literal["span", "score", "hysteresis", "bandit"] = option("span", "which steps are verified")
    min_span: int = option(1, "verify no shorter run of masks")
    unsure: bool = option(False, "with route=span: shorter runs too, where fewer masks are above the threshold")
    estimator: Literal["margin", "entropy", "confidence", "soft_margin", "soft_entropy", "renyi"] = option(
        "margin",
        "chance that a token is accepted: 1 if its lead over the second is above `scale`, 1 if its entropy is below "
        "`scale`; its probability ^ scale, its lead * scale, exp(-scale * entropy), or the sum of p^2",
    )
    scale: float = option(0.05, "of the estimator")
    penalty: float = option(1.0, "tokens that the second pass must gain")
    per_sure: bool = option(False, "the penalty is for each mask above the threshold, which need no second pass")
    floor: float = option(0.0, "with route=score: least score of a step that is verified")
    on: float = option(0.0, "with route=hysteresis: verify from a score above this on")
    off: float = option(0.0, "with route=hysteresis: until a score below this")
    exploration: float = option(1.0, "with route=bandit: weight of what is not known")
    span_bins: int = option(2, "with route=bandit: bins for the length of the run")
    entropy_of: Literal["span", "masked"] = option("span", "with route=bandit: whose entropy: of the run, or all masks")

    tempering: float = option(1.0, "power of q / p")
    least_ratio: float | None = option(None, "also accept tokens of the run with at least this q / p; null: none")
    all_runs: bool = option(False, "with least_ratio: and of other runs")
    resample: bool = option(True, "the first token that is not accepted is replaced; else it is committed as it is")

    def __post_init__(self) -> None:
        check_probability("decoder", self, "threshold")
        check_range("decoder", self, "steps", "min_span", least=1)
        check_range("decoder", self, "span_bins", least=1, most=1024)
        check_range("decoder", self, "scale", "exploration", "tempering", "least_ratio", least=0)
        scores = "penalty", "floor", "on", "off"
        check_range("decoder", self, *scores, least=-sys.float_info.max, most=sys.float_info.max)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropy", "margin")

    @property
    def refuses(self) -> tuple[str, ...]:
        return ("temperature", "repetition_penalty", "eos_last")  # p is of the most likely token

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.encoder or not spec.causal_block or spec.mask_id is None:
            return "decoder=s2d2 asks the model to write token by token, as block-causal ones do with block size 1."
        if spec.shift or (spec.experts and spec.experts.capacity):
            why = "logits predict the next token" if spec.shift else "experts are those of a whole block"
            return f"decoder=s2d2 verifies each position by its own mask, and this model's {why}."
        return None

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        zero, none = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        return {
            "draft": none.expand(block),
            "chance": Large(torch.zeros(()).expand(block, spec.vocab)),
            "on": Large(torch.zeros((), dtype=torch.bool)),
            "trials": Large(zero),
            "arms": Large(zero.expand(self.span_bins * PART_BINS**2, 2, 2)),  # whether verified; count, sum of rewards
            "bucket": Large(none),
        }

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        state["chance"].write(logits_RLV.float().softmax(-1))
        state["draft"].copy_(logits_RLV.argmax(-1))
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        span_RL, sure_RL = first_run(view.masked_RL), self.sure_masks(stats.top_RL, view)
        verify_R = self.routes(stats, view, state, span_RL, sure_RL)
        commit_RL = self.filled(torch.zeros_like(sure_RL), stats.top_RL, view)
        if self.route == "bandit":
            self.learn(state, commit_RL.sum(-1), ~verify_R, verified=False)
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
        if self.route == "bandit":
            self.learn(state, commit_RL.sum(-1), torch.ones_like(commit_RL[:, 0]), verified=True)
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
        if self.route == "span":
            enough_R = sure_R >= view.masked_RL.sum(-1).clamp_max(self.min_span)
            return (length_R >= self.min_span) | (~enough_R if self.unsure else torch.zeros_like(enough_R))
        entropy_RL = stats.stat("entropy") / math.log(state["chance"].table_NX.shape[-1])
        if self.route == "bandit":
            return self.explored(entropy_RL, view, state, span_RL)
        run_RL = torch.where(span_RL, self.estimated(stats, entropy_RL, state), torch.ones_like(entropy_RL))
        expected_R = (run_RL.cumprod(-1) * span_RL).sum(-1)
        score_R = expected_R - self.penalty * (sure_R if self.per_sure else 1)
        if self.route == "score":
            return score_R >= self.floor
        was_R = state["on"].read() & (view.forward_R > 0)
        on_R = torch.where(was_R, score_R >= self.off, score_R > self.on)
        state["on"].write(on_R)
        return on_R

    def estimated(self, stats: TokenStats, entropy_RL: Tensor, state: State) -> Tensor:
        """The chance that each draft token is accepted, in [0, 1]. [R, L]"""
        match self.estimator:
            case "margin":
                chance_RL = stats.stat("margin") > self.scale
            case "entropy":
                chance_RL = entropy_RL < self.scale
            case "confidence":
                chance_RL = stats.top_RL.pow(self.scale)
            case "soft_margin":
                chance_RL = self.scale * stats.stat("margin")
            case "soft_entropy":
                chance_RL = (-self.scale * entropy_RL).exp()
            case "renyi":
                chance_RL = state["chance"].read().square().sum(-1)
        return chance_RL.to(entropy_RL.dtype).clamp(0, 1)

    def explored(self, entropy_RL: Tensor, view: BlockView, state: State, span_RL: Tensor) -> Tensor:
        """Whether to verify, by upper confidence bounds of what it gained in such steps of the request. bool [R]"""
        first_R = view.forward_R == 0
        trials_R = state["trials"].read().masked_fill(first_R, 0) + 1
        arms_RX22 = state["arms"].read().masked_fill(first_R[:, None, None, None], 0)
        block_R, chosen_RL = (view.pos_RL >= 0).sum(-1), span_RL if self.entropy_of == "span" else view.masked_RL
        parts = (
            (span_RL.sum(-1) - 1) / (block_R - 1).clamp_min(1),
            (view.quota_R - view.masked_RL.sum(-1)) / block_R,
            (entropy_RL * chosen_RL).sum(-1) / chosen_RL.sum(-1).clamp_min(1),
        )
        bucket_R = torch.zeros_like(block_R)
        for part_R, bins in zip(parts, (self.span_bins, PART_BINS, PART_BINS), strict=True):
            bucket_R = bucket_R * bins + (part_R * bins).to(torch.int64).clamp(0, bins - 1)
        own_R122 = bucket_R[:, None, None, None].expand(-1, 1, 2, 2)
        count_R2, sum_R2 = arms_RX22.gather(1, own_R122)[:, 0].unbind(-1)
        bonus_R2 = self.exploration * (trials_R.log()[:, None] / count_R2).sqrt()
        value_R2 = torch.where(count_R2 > 0, sum_R2 / count_R2 + bonus_R2, math.inf)
        for name, value in (("trials", trials_R), ("arms", arms_RX22), ("bucket", bucket_R)):
            state[name].write(value)
        return value_R2[:, 1] >= value_R2[:, 0]

    def learn(self, state: State, gained_R: Tensor, took_R: Tensor, *, verified: bool) -> None:
        """Counts the tokens per forward of rows that were, or were not, verified."""
        arms_RX22, bucket_R = state["arms"].read(), state["bucket"].read()
        bucket_X = torch.arange(arms_RX22.shape[1], device=bucket_R.device)
        here_RX = ((bucket_X == bucket_R[:, None]) & took_R[:, None]).to(arms_RX22.dtype)
        arms_RX22[:, :, int(verified), 0] += here_RX
        arms_RX22[:, :, int(verified), 1] += here_RX * (gained_R / (1 + verified))[:, None]
        state["arms"].write(arms_RX22)


def first_run(masked_RL: Tensor) -> Tensor:
    """The first run of masks in each row. bool [R, L]"""
    before_RL = masked_RL.roll(1, -1)
    before_RL[:, 0].fill_(False)
    return masked_RL & ((masked_RL & ~before_RL).cumsum(-1) == 1)
