"""Which token a position is offered: the most likely one, or one that is drawn, by adding Gumbel noise to the logits.

argmax(l / T + g) with independent standard Gumbel noise g is a draw from softmax(l / T). The noise of a token is a
function of (seed, position, step, token) and of nothing else: no sample depends on the batch it ran in, on its slot
or on launch order, and a restart gives it again.

Whatever is asked for, the mask token takes part in the draw; where it is drawn, the position stays masked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dinfer.core.kernels.random import noise
from dinfer.core.registry import SAMPLINGS, check_range, option
from dinfer.core.step.contracts import BlockView, ModelSpec
from dinfer.core.step.model import Options, Sampling
from dinfer.core.terms.stats import Draw, VocabularySlice

LEAST, MOST = 1e-3, 1e3  # of numbers that logits are divided by or multiplied with, which then stay finite
CUTS: dict[str, float] = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}  # which leave the distribution as it is


@SAMPLINGS.register("standard")
@dataclass(frozen=True, kw_only=True)
class StandardSampling(Sampling):
    """Draws from softmax(logits / T) cut to the top_k most likely tokens and to the nucleus of mass top_p.

    Confidences are those of the model's own distribution, as in LLaDA: at T = 1, without cuts and penalties. So how a
    token is drawn does not change how sure a decoder is of it. Both cuts ignore the mask token and keep it in the
    draw. With temperature 0 or top_k 1 the most likely token is taken.
    """

    paper = "LLaDA, arXiv:2502.09992"
    neutral: ClassVar[dict[str, float]] = {
        **CUTS, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "min_tokens": 0, "ban_eos": 0,
        "eos_last": 0,
    }  # fmt: skip
    by_parts = True

    temperature: float = option(0.0, "0: take the most likely token; else draw", per_request=True)
    seed: int = option(
        -1, "of the random numbers; -1: another for each request that draws", least=-1, most=2**53 - 1, per_request=True
    )
    repetition_penalty: float = option(
        1.0, "divides positive logits of tokens that the canvas holds, and multiplies negative ones",
        least=LEAST, most=MOST, per_request=True,
    )  # fmt: skip
    ban_eos: int = option(0, "1: never offer the EOS token (LLaDA's logits_eos_inf)", most=1, per_request=True)
    eos_last: int = option(
        0, "1: commit stop tokens last, by taking their confidence as 0 (LLaDA's confidence_eos_eot_inf)",
        most=1, per_request=True,
    )  # fmt: skip
    guidance: float = option(
        0.0, "s of classifier-free guidance: l' + (s + 1) (l - l'), with l' the logits without prompt; 0: off",
        most=MOST, per_request=True,
    )  # fmt: skip
    suppress: tuple[int, ...] = option((), "tokens that are never offered")
    suppress_mask: bool = option(
        False, "take the mask token as impossible, so that positions where it is the most likely are committed too"
    )
    precision: Literal["float32", "float64"] | None = option(
        None, "of the softmax behind confidences; null: as the decoder was published"
    )
    top_k: int = option(0, "size of the top-k candidate set; 0: unrestricted", per_request=True)
    top_p: float = option(1.0, "draw from the fewest tokens whose mass reaches this", per_request=True)
    min_p: float = option(
        0.0, "draw from tokens at least so many times as likely as the likeliest", most=1, per_request=True
    )
    frequency_penalty: float = option(
        0.0, "lowers a token's logit by this for each time that the canvas holds it", least=-2, most=2, per_request=True
    )
    presence_penalty: float = option(
        0.0, "lowers the logits of tokens that the canvas holds", least=-2, most=2, per_request=True
    )
    min_tokens: int = option(0, "tokens of the answer before which no stop token is offered", per_request=True)
    leftmost: int = option(0, "commit only the first so many masks of each active block; 0: any", per_request=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "suppress", tuple(self.suppress))
        if self.temperature != 0:
            check_range("sampling", self, "temperature", least=LEAST, most=MOST, what="0 (the most likely token), or ")
        if not all(type(token) is int and token >= 0 for token in self.suppress):
            raise ValueError(f"sampling.suppress={list(self.suppress)} must be token ids")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p} must be above 0, and at most 1 (all tokens)")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        wrong = next((t for t in self.suppress if t >= spec.vocab or t == spec.mask_id), None)
        if wrong is None:
            return None
        return (
            f"sampling.suppress: {wrong} is no token of this model's vocabulary of {spec.vocab}, or the mask token, "
            "which is never committed anyway. Leave it out."
        )

    def asks(self, options: Mapping[str, float]) -> bool:
        return super().asks({**options, **CUTS} if self.greedy(options) else options)

    def top_candidates(self, options: Mapping[str, float], vocab: int) -> int:
        if self.greedy(options):
            return 0
        if options["top_k"]:
            return min(int(options["top_k"]), vocab)
        return vocab if options["top_p"] < 1 else int(options["min_p"] > 0)

    def greedy(self, options: Mapping[str, float]) -> bool:
        """Whether temperature and cuts leave the most likely token alone, so that they change nothing."""
        return options["temperature"] == 0 or options["top_k"] == 1

    def adjust(
        self, logits_RLV: Tensor, view: BlockView, options: Options, spec: ModelSpec, columns: VocabularySlice
    ) -> Tensor:
        logits_RLV = logits_RLV.clone()
        columns.fill(logits_RLV, *self.suppress)
        rule_out(columns.at(logits_RLV, spec.eos_id), options["ban_eos"])
        early_RL = view.pos_RL < view.prompt_R[:, None] + options["min_tokens"]
        rule_out(columns.at(logits_RLV, *spec.stop_ids), early_RL)
        return logits_RLV

    def draw(
        self, logits_RLV: Tensor, count_RV: Tensor, view: BlockView, options: Options, spec: ModelSpec, top: int,
        columns: VocabularySlice,
    ) -> Draw:  # fmt: skip
        belief_RLV = logits_RLV.clone()
        put_last(columns.at(belief_RLV, *spec.stop_ids), options["eos_last"])
        logits_RLV = logits_RLV.to(torch.promote_types(logits_RLV.dtype, torch.float32))
        penalty_R11 = options["repetition_penalty"][..., None].to(logits_RLV.dtype)
        lowered_RLV = torch.where(logits_RLV > 0, logits_RLV / penalty_R11, logits_RLV * penalty_R11)
        seen_R1V = count_RV[:, None] > 0
        logits_RLV = torch.where(seen_R1V, lowered_RLV, logits_RLV)
        for name, times_R1V in (("frequency_penalty", count_RV[:, None]), ("presence_penalty", seen_R1V)):
            logits_RLV = logits_RLV - options[name][..., None].to(logits_RLV.dtype) * times_R1V
        drawn_R1 = (options["temperature"] > 0) & (options["top_k"] != 1)
        divisor_R1 = torch.where(drawn_R1, options["temperature"], 1.0).to(logits_RLV.dtype)
        logits_RLV = logits_RLV / divisor_R1[..., None]
        logits_RLV = nucleus(logits_RLV, options, spec.mask_id, top, columns)
        noisy_R1 = drawn_R1 | (options["eos_last"] > 0)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            noisy_R1 = noisy_R1 | (options[name] != self.neutral[name])
        return Draw(
            belief_RLV, logits_RLV, drawn_R1.to(torch.float64), noisy_R1, view.seed_R, view.pos_RL, view.forward_R
        )

    def noise(self, seed: Tensor, pos: Tensor, step: Tensor, vocab: int) -> Tensor:
        return noise(seed, pos, step, vocab)


def rule_out(tokens: Iterable[Tensor], flag: Tensor) -> None:
    """Gives tokens probability 0 where `flag` [R, 1] or [R, L] asks for it: their logits [R, L] change in place."""
    for logits_RL in tokens:
        logits_RL.masked_fill_(flag > 0, float("-inf"))


def put_last(tokens: Iterable[Tensor], flag: Tensor) -> None:
    """Gives tokens next to no probability, in place as `rule_out`. Where nothing else is left, it stays finite."""
    for logits_RL in tokens:
        least = max(torch.finfo(logits_RL.dtype).min, torch.finfo(torch.float32).min) / 2
        logits_RL.copy_(torch.where(flag > 0, logits_RL.clamp_max(least), logits_RL))


def nucleus(
    logits_RLV: Tensor, options: Mapping[str, Tensor], mask_id: int | None, top: int, columns: VocabularySlice
) -> Tensor:
    """The logits, -inf outside the `top_k` most likely tokens (0: all) and outside the nucleus of mass `top_p`, and
    where a token is less than `min_p` times as likely as the most likely one.

    The nucleus is the smallest set of most likely tokens with a probability of at least `top_p`. Of equal tokens the
    lowest id comes first. The mask token counts in neither set and keeps its logit. [R, L, V]

    `top`: how many of the most likely tokens are sorted; every row's cut must lie among them. 0: no row has a cut.
    `columns`: the tokens that the logits belong to. If they are one rank's, `top` is less than `columns.most`, and each
    rank sends `top` + 1 numbers a position: its largest logits and the logarithm of its mass.
    """
    if not top:
        return logits_RLV
    others_RLV, masks = logits_RLV.clone(), () if mask_id is None else (mask_id,)
    columns.fill(others_RLV, *masks)
    if top < others_RLV.shape[-1]:
        best_RLX = others_RLV.topk(top, -1).values
    else:
        best_RLX = others_RLV.sort(dim=-1, descending=True).values
    mass_RL1, told_NRLX = others_RLV.logsumexp(-1, keepdim=True), best_RLX[None]
    if columns.all_gather is not None:
        told_NRLX, mass_NRL1 = columns.all_gather(torch.cat((best_RLX, mass_RL1), -1)).tensor_split((top,), -1)
        best_RLX = told_NRLX.movedim(0, -2).flatten(-2).topk(top, -1).values
        mass_RL1 = mass_NRL1.logsumexp(0)
    prob_RLX = (best_RLX - mass_RL1).exp()
    before_RLX = prob_RLX.cumsum(-1) - prob_RLX
    place_X = torch.arange(best_RLX.shape[-1], device=logits_RLV.device)
    top_k_R11, top_p_R11, min_p_R11 = (options[name][..., None] for name in ("top_k", "top_p", "min_p"))
    # The first is always in: rounding may have left something "before" it.
    keep_RLX = (place_X == 0) | (before_RLX < top_p_R11) | (top_p_R11 >= 1)
    count_RL1 = (keep_RLX & ((place_X < top_k_R11) | (top_k_R11 == 0))).sum(-1, keepdim=True)
    least_RL1 = best_RLX.gather(-1, count_RL1 - 1)
    above_RLV, equal_RLV = others_RLV > least_RL1, others_RLV == least_RL1
    # What is above the cut is among the best of its rank. Of equals, those of earlier ranks come first.
    room_RL1 = count_RL1 - (told_NRLX > least_RL1).sum((0, -1))[..., None]
    room_RL1 = room_RL1 - (told_NRLX[: columns.rank] == least_RL1).sum((0, -1))[..., None]
    kept_RLV = above_RLV | (equal_RLV & (equal_RLV.cumsum(-1) <= room_RL1))
    kept_RLV = kept_RLV | ((top_k_R11 == 0) & (top_p_R11 >= 1))
    kept_RLV &= others_RLV >= best_RLX[..., :1] + min_p_R11.log().to(others_RLV.dtype)
    columns.fill(kept_RLV, *masks, value=True)
    return logits_RLV.masked_fill(~kept_RLV, float("-inf"))
