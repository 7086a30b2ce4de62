"""S2D2's options under our names, its recorded random numbers, and its variants with token-causal attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dinfer.decoders.s2d2 import S2D2
from dinfer.recipe.registry import DECODERS
from dinfer.step.contracts import BlockView
from tests.parity.golden import Fields

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
class RecordedS2D2(S2D2):
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
    _, checked = DECODERS.check(options)
    return RecordedS2D2(**checked, draws_XSL=draws_XSL.tolist())


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
