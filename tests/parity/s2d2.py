"""S2D2's options under our names, its recorded random numbers, and its variants with token-causal attention."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dinfer.core.registry import option
from dinfer.core.step.contracts import BlockView, Large, ModelSpec, Proposal, State, TokenStats
from dinfer.research.decoders.s2d2 import S2D2
from tests.parity.golden import Fields

PART_BINS = 2  # bins of the bandit for how much of the block is decoded, and for its entropy
ROUTES = {
    "mask_span_length": "span", "score_threshold": "score", "score_hysteresis": "hysteresis",
    "contextual_bandit_ucb": "bandit",
}  # fmt: skip
# Estimator: ours, and the parameter that scales it with its default.
ESTIMATORS = {
    "hard_margin_threshold": ("margin", "ssd_confidence_margin_threshold", 0.05),
    "hard_entropy_threshold": ("entropy", "ssd_entropy_threshold", None),
    "soft_confidence_power": ("confidence", "ssd_confidence_power", 1.0),
    "soft_clipped_linear_margin": ("soft_margin", "ssd_confidence_margin_coef", 1.0),
    "soft_entropy_negexp": ("soft_entropy", "ssd_entropy_temperature", 1.0),
    "soft_renyi_2_entropy": ("renyi", None, None),
}
# Ours: theirs, which may be missing.
FURTHER = {
    "min_span": "min_ssd_span_length", "unsure": "legacy_ssd_span_strategy", "penalty": "score_penalty_coef",
    "floor": "do_verify_score_threshold", "on": "hysteresis_threshold_on", "off": "hysteresis_threshold_off",
    "exploration": "ucb_beta", "span_bins": "ucb_span_length_bins", "tempering": "ssd_ratio_tempering_factor",
    "all_runs": "ssd_threshold_all_spans", "resample": "allow_resample", "sure": "always_check_high_confidence",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RoutedS2D2(S2D2):
    """The policies of S2D2's repository that decide which steps are verified.

    `route`: "span" is ours; "score" verifies steps whose expected number of accepted tokens (`estimator`, `scale`),
    less `penalty`, reaches `floor`; "hysteresis" switches on above `on` and off below `off`; "bandit" learns by UCB
    from length, progress and entropy.
    """

    route: Literal["span", "score", "hysteresis", "bandit"] = option("span", "which steps are verified")
    estimator: Literal["margin", "entropy", "confidence", "soft_margin", "soft_entropy", "renyi"] = option(
        "margin",
        "chance that a token is accepted: 1 if its lead over the second is above `scale`, 1 if its entropy is below "
        "`scale`; its probability ^ scale, its lead * scale, exp(-scale * entropy), or the sum of p^2",
    )
    scale: float = option(0.05, "of the estimator")
    penalty: float = option(1.0, "tokens that the second pass must gain")
    per_sure: bool = option(False, "the penalty is for each mask above the threshold, which need no second pass")
    floor: float = option(0.0, "with route=score: least score of a step that is verified", least=-math.inf)
    on: float = option(0.0, "with route=hysteresis: verify from a score above this on", least=-math.inf)
    off: float = option(0.0, "with route=hysteresis: until a score below this", least=-math.inf)
    exploration: float = option(1.0, "with route=bandit: weight of what is not known")
    span_bins: int = option(2, "with route=bandit: bins for the length of the run")
    entropy_of: Literal["span", "masked"] = option("span", "with route=bandit: whose entropy: of the run, or all masks")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropy", "margin")

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        zero, none = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        arms = zero.expand(self.span_bins * PART_BINS**2, 2, 2)  # whether verified; count, sum of rewards
        on = torch.zeros((), dtype=torch.bool)
        kept = {"on": Large(on), "trials": Large(zero), "arms": Large(arms), "bucket": Large(none)}
        return super().fresh_state(spec, block) | kept

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        found = super().select(stats, view, state)
        assert found.verify_R is not None
        if self.route == "bandit":
            self.learn(state, found.commit_RL.sum(-1), ~found.verify_R, verified=False)
        return found

    def verify(self, logits_RLV: Tensor, view: BlockView, state: State) -> Proposal:
        found = super().verify(logits_RLV, view, state)
        if self.route == "bandit":
            self.learn(state, found.commit_RL.sum(-1), torch.ones_like(found.commit_RL[:, 0]), verified=True)
        return found

    def routes(self, stats: TokenStats, view: BlockView, state: State, span_RL: Tensor, sure_RL: Tensor) -> Tensor:
        """Which rows are verified. bool [R]"""
        if self.route == "span":
            return super().routes(stats, view, state, span_RL, sure_RL)
        sure_R = sure_RL.sum(-1)
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


@dataclass(frozen=True, kw_only=True)
class RecordedS2D2(RoutedS2D2):
    """S2D2 whose draws are `draws_XSL`, by block from position 0, step of the block and position in it."""

    draws_XSL: list[list[list[float]]]

    def draws(self, view: BlockView, span_RL: Tensor) -> Tensor:
        draws_XSL = view.pos_RL.new_tensor(self.draws_XSL, dtype=torch.float64)
        return draws_XSL[view.pos_RL[:, 0] // view.pos_RL.shape[1], view.step_R]


def options(params: Fields) -> dict[str, Any]:
    """Our options for a run of the goldens."""
    strategy, ratio = params.take("remasking_strategy"), params.take("ssd_ratio_threshold", None)
    found: dict[str, Any] = {"name": "s2d2", "steps": params.take("denoising_steps")}
    found["order"] = strategy.removeprefix("low_confidence_")
    found["threshold"] = params.take("confidence_threshold")
    found["least_ratio"] = None if ratio is None or ratio < 0 else ratio
    found["route"] = ROUTES[params.take("do_verify_policy", "mask_span_length")]
    ours, scale, default = ESTIMATORS[params.take("token_acceptance_estimator", "hard_margin_threshold")]
    found["estimator"] = ours
    if scale is not None and (value := params.take(scale, default)) is not None:
        found["scale"] = value
    found["per_sure"] = params.take("do_verify_score_type", "difference_static") == "difference_dynamic"
    found["entropy_of"] = params.take("ucb_entropy_source", "span")
    return found | {name: params.take(theirs) for name, theirs in FURTHER.items() if theirs in params}


def recorded(options: dict[str, Any], doc: Fields, prompts: list[list[int]], new_tokens: int) -> RecordedS2D2:
    """The decoder with the draws of each step, which are those of the positions of its `span`."""
    steps = [(step, len(step.take("input"))) for step in doc.items("steps")]
    blocks, most = (1 + max(step.take(name) for step, _ in steps) for name in ("block", "step"))
    draws_XSL = torch.ones(blocks, most, steps[0][1], dtype=torch.float64)
    for step, _ in steps:
        if (drawn := step.take("draws")) is not None:
            begin, end = step.take("span")
            draws_XSL[step.take("block"), step.take("step"), begin:end] = torch.tensor(drawn, dtype=torch.float64)
    return RecordedS2D2(
        **{name: value for name, value in options.items() if name != "name"}, draws_XSL=draws_XSL.tolist()
    )


def causal(network: Any, *, draft: bool, stored: bool) -> Callable[..., Any]:
    """A forward of one row in which some tokens see no further than themselves.

    `draft`: those of a block that once stood before all its masks. `stored`: those whose keys are kept.
    """
    forward, block = network.forward, network.spec.causal_block
    mask_D = network.embed(torch.tensor([network.spec.mask], device=network.device))
    reached: dict[int, int] = {}  # beginning of a block: the position of its first mask, when that was last fed

    def narrowed(x_BWD: Tensor, attend: Any) -> Any:
        if attend.self_key_BW is not None:  # the verification is causal anyway
            return forward(x_BWD, attend)
        (pos_W,), (start_BW, end_BW) = attend.pos_BW, attend.interval_BW
        first = min(pos_W[(x_BWD[0] == mask_D).all(-1)].tolist(), default=2**30)
        reached[first // block * block] = first
        until_W = pos_W.new_tensor([reached.get(pos // block * block, 0) for pos in pos_W.tolist()])
        own_W = (draft & (pos_W < until_W)) | (stored & (pos_W < first // block * block))
        end_BW = torch.where(own_W & (pos_W >= 0), pos_W + 1, end_BW)
        return forward(x_BWD, replace(attend, interval_BW=(start_BW, end_BW)))

    return narrowed
