"""Plans of causal models that decode in parallel: I-DLM, Nemotron-Labs-Diffusion and WeDLM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dinfer.core.sampling.gumbel import StandardSampling, nucleus
from dinfer.core.step.contracts import BlockView, Decoder, ModelSpec
from dinfer.core.step.model import Options
from dinfer.core.terms.stats import Draw, VocabularySlice
from dinfer.families.decoders.isd import ISD
from tests.parity.golden import Fields, Skip
from tests.parity.plans import Plan


@dataclass(frozen=True, kw_only=True)
class RecordedSampling(StandardSampling):
    """Draws the first token whose cumulated share exceeds a recorded number: of a row, its step and a position.

    -1 stands for all positions of a step.
    """

    draws: dict[tuple[int, int, int], float]

    def draw(
        self, logits_RLV: Tensor, count_RV: Tensor, view: BlockView, options: Options, spec: ModelSpec, top: int,
        columns: VocabularySlice,
    ) -> Draw:  # fmt: skip
        whole = torch.ones_like(options["top_p"])  # top_p is of what top_k leaves, in these references
        draw = super().draw(logits_RLV, count_RV, view, {**options, "top_p": whole}, spec, top, columns)
        none = torch.zeros_like(options["top_k"])
        cut_RLV = nucleus(draw.logits_RLV, {**options, "top_k": none}, spec.mask_id, spec.vocab, columns)
        draw = replace(draw, logits_RLV=cut_RLV)
        share_RLV = draw.logits_RLV.double().softmax(-1).cumsum(-1)
        drawn_RL = (share_RLV <= recorded(self.draws, view)[..., None]).sum(-1).clamp_max(spec.vocab - 1)
        only_RLV = torch.full_like(draw.logits_RLV, -1e9).scatter(-1, drawn_RL[..., None], 0.0)
        return replace(draw, logits_RLV=only_RLV, scale_R1=torch.zeros_like(draw.scale_R1))


@dataclass(frozen=True, kw_only=True)
class HeatedSampling(StandardSampling):
    """Confidences of a tempered distribution, and its most likely token."""

    heat: float

    def asks(self, options: Mapping[str, float]) -> bool:
        return True

    def adjust(
        self, logits_RLV: Tensor, view: BlockView, options: Options, spec: ModelSpec, columns: VocabularySlice
    ) -> Tensor:
        return super().adjust(logits_RLV, view, options, spec, columns) / self.heat


def recorded(draws: dict[tuple[int, int, int], float], view: BlockView) -> Tensor:
    """The recorded numbers of the positions of a view; 0.5 where nothing was drawn. float64 [R, L]"""
    rows = zip(view.seed_R.tolist(), view.forward_R.tolist(), view.pos_RL.tolist(), strict=True)
    found = [
        [draws.get((row, step, pos), draws.get((row, step, -1), 0.5)) for pos in pos_L] for row, step, pos_L in rows
    ]
    return torch.tensor(found, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class RecordedISD(ISD):
    """ISD whose numbers for acceptance and for corrections are recorded."""

    accepts: dict[tuple[int, int, int], float]
    corrections: dict[tuple[int, int, int], float]

    def draws(self, view: BlockView, which: int) -> Tensor:
        return recorded(self.corrections if which else self.accepts, view)


def _recorded_isd(options: dict[str, Any], doc: Fields, prompts: list[list[int]], new_tokens: int) -> Decoder:
    accepts, corrections = {}, {}
    for row, rounds in enumerate(doc.take("rounds")):
        for step, each in enumerate(rounds, 1):
            corrections[row, step, -1] = each.get("residual_draw", 0.5)
            for place, draw in enumerate(each.get("accept_draws", ())):
                accepts[row, step, each["cached"] + 1 + place] = draw
    options = {name: value for name, value in options.items() if name != "name"}
    return RecordedISD(**options, accepts=accepts, corrections=corrections)


def _isd_draws(doc: Fields) -> RecordedSampling:
    draws: dict[tuple[int, int, int], float] = {}
    for row, rounds in enumerate(doc.take("rounds")):
        draws[row, 0, -1] = rounds[0]["first_token_draw"]
        draws |= {(row, step, -1): each["token_draw"] for step, each in enumerate(rounds, 1) if "token_draw" in each}
    return RecordedSampling(draws=draws)


def _isd(doc: Fields, prompts: list[list[int]], params: Fields) -> Plan:
    """I-DLM's IDLMBlockN."""
    stride, heat = params.take("gen_block_size"), params.take("temperature")
    drawn, verified = heat > 0, params.take("verify_num_specs", 0)
    decoder: dict[str, Any] = {"name": "isd", "stride": stride, "verified": verified}
    options: dict[str, Any] = {}
    if drawn:
        options = {"temperature": heat, "top_k": params.take("top_k"), "top_p": params.take("top_p")}
        decoder |= {"accept": "ratio", "alpha": params.take("verify_alpha", 1.0)}
    sure = params.take("confidence_accept_threshold", 0.0)
    if not params.take("use_spec_verify", True):
        decoder |= {"accept": "sure", "sure": sure} if sure else {"accept": "all"}
    if params.take("fast_verify", False):
        top = params.take("fast_verify_topk")
        decoder |= {"accept": "top", "top": [*(params.take("fast_verify_topk_per_spec", None) or ()), top]}
    decoder["correct"] = params.take("output_correction", False)
    sliding = {"name": "sliding", "block": 2 * stride - 1}
    return Plan(
        sliding, decoder, {"name": "block_at_once"}, params.take("max_new_tokens"), options=options, cut=True,
        adapted=params.take("conditional_lora", False),
        drawn=_recorded_isd if drawn else None, sampled=_isd_draws if drawn else None,
    )  # fmt: skip


def _blocks(doc: Fields, prompts: list[list[int]], params: Fields) -> Plan:
    """Nemotron's `generate`: blocks behind the first token that a causal pass gives."""
    new_tokens, block, threshold = (params.take(name) for name in ("max_new_tokens", "block_length", "threshold"))
    if params.take("temperature") or params.take("max_thinking_tokens") is not None:
        raise Skip("Nemotron: limits of thinking are not there yet")
    iteration = {"name": "seeded", "block": block}
    decoder = {"name": "threshold", "threshold": threshold}
    if threshold is None:
        decoder = {"name": "fixed", "steps": block}
    return Plan(iteration, decoder, {"name": "block_at_once"}, new_tokens, cut=True, padding=1)


def _linear_spec(doc: Fields, prompts: list[list[int]], params: Fields) -> Plan:
    """Nemotron's `linear_spec_generate`, which may go beyond what was asked for."""
    params.take("max_new_tokens")
    block, threshold, heat = (params.take(name) for name in ("block_length", "threshold", "temperature"))
    if params.take("max_thinking_tokens", None) is not None:
        raise Skip("Nemotron: the reference forces the end of thinking again in every round, a defect")
    new_tokens = len(doc.take("output_ids")[0]) - len(prompts[0])
    return Plan(
        {"name": "seeded_drafts", "block": block}, {"name": "linear_spec", "threshold": threshold},
        {"name": "block_at_once"}, new_tokens, cut=True, adapted=params.take("draft_adapter", False),
        options={"temperature": heat}, sampled=_spec_draws if heat else None,
    )  # fmt: skip


def _spec_draws(doc: Fields) -> RecordedSampling:
    draws: dict[tuple[int, int, int], float] = {}
    for step, each in enumerate(doc.items("forwards")):
        shift = each.take("attention") == "causal"
        at = each.take("cached") + shift if step else len(each.take("input")[0])
        draws |= {(0, step, at + i): u for i, u in enumerate(each.take("token_draws"))}
    return RecordedSampling(draws=draws)


def _window(doc: Fields, prompts: list[list[int]], params: Fields) -> Plan:
    """WeDLM's engine. Its top_p keeps a token at which the mass is reached, to the last bit."""
    block, new_tokens, heat = (params.take(name) for name in ("wedlm_window_size", "max_tokens", "temperature"))
    decoder = {"name": "near_entropy", "bound": params.take("wedlm_entropy_threshold") or 0.0}
    decoder["penalty"] = params.take("wedlm_pos_penalty_factor")
    options = {"temperature": heat, "top_p": params.take("top_p", 1.0), "top_k": params.take("top_k", 0)}
    return Plan(
        {"name": "sliding", "block": block, "whole": True}, decoder, {"name": "block"}, new_tokens, options=options,
        cut=True, padding=block - 1, sampled=_window_draws if heat else None,
    )  # fmt: skip


def _window_draws(doc: Fields) -> RecordedSampling:
    draws: dict[tuple[int, int, int], float] = {}
    for row, steps in enumerate(doc.take("steps")):
        for step, each in enumerate(steps):
            fed, mask_id = zip(each["input"], each["positions"], strict=True), doc.take("mask_id")
            masks = sorted(pos for token, pos in fed if token == mask_id)
            draws |= {(row, step, pos): u for pos, u in zip(masks, each.get("token_draws", ()), strict=False)}
    return RecordedSampling(draws=draws)


def _window_blocks(doc: Fields, prompts: list[list[int]], params: Fields) -> Plan:
    """WeDLM's generate for transformers, without keys."""
    block, new_tokens, heat = (params.take(name) for name in ("block_size", "max_new_tokens", "temperature"))
    threshold = params.take("confidence_threshold")
    decoder = {"name": "threshold", "threshold": threshold} if threshold else {"name": "fixed", "steps": block}
    sampled = None if heat == 1 else partial(HeatedSampling, heat=heat)
    return Plan(
        {"name": "blockwise", "block": block, "stop": "off"}, decoder, {"name": "none"}, new_tokens,
        sampled=sampled and (lambda doc: sampled()), padded_with=152,
    )  # fmt: skip


ALGORITHMS: dict[str, Callable[[Fields, list[list[int]], Fields], Plan]] = {
    "idlm_isd": _isd,
    "nemotron_generate": _blocks,
    "nemotron_linear_spec": _linear_spec,
    "wedlm_window": _window,
    "wedlm_blocks": _window_blocks,
}
