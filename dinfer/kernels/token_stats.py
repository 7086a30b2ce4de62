"""What decoders need to know of the logits, in one pass over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.random import gumbel


@dataclass(frozen=True, slots=True)
class TokenStats:
    """The proposed token of every position. All [R, L]."""

    token_RL: Tensor  # int64, the most likely token but the mask token; ties go to the lowest id
    confidence_RL: Tensor  # its probability under the whole distribution, mask token included
    mask_confidence_RL: Tensor  # the probability of the mask token
    entropy_RL: Tensor | None = None  # of the whole distribution, in nats; if asked for
    margin_RL: Tensor | None = None  # the largest probability less the second largest; if asked for
    best_RL: Tensor | None = None  # int64, the most likely token but the mask token, whatever was drawn; if asked for
    mask_drawn_RL: Tensor | None = None  # bool: the mask token was drawn; None: nothing was

    def of(self, name: str) -> Tensor:
        """A further statistic, "entropy", "margin" or "best". Raises KeyError if the decoder's `needs` lack it."""
        value = {"entropy": self.entropy_RL, "margin": self.margin_RL, "best": self.best_RL}[name]
        if value is None:
            raise KeyError(f"{name!r} was not computed: name it in the decoder's `needs`")
        return value

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenStats:
        """The same with every statistic that is there changed."""
        there = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(stat_RL) for name, stat_RL in there.items() if stat_RL is not None})

    @property
    def top_RL(self) -> Tensor:
        """The largest probability, the mask token's included; where tokens are drawn, that of what was drawn."""
        if self.mask_drawn_RL is not None:
            return torch.where(self.mask_drawn_RL, self.mask_confidence_RL, self.confidence_RL)
        return torch.maximum(self.confidence_RL, self.mask_confidence_RL)

    @property
    def declined_RL(self) -> Tensor:
        """The mask token itself is the most likely, or was drawn: the model would rather wait."""
        if self.mask_drawn_RL is not None:
            return self.mask_drawn_RL
        return self.mask_confidence_RL > self.confidence_RL

    @property
    def finite_RL(self) -> Tensor:
        """False where the logits held a NaN or +inf, or nothing but -inf for every token but the mask."""
        return self.confidence_RL.isfinite()


@dataclass(frozen=True, slots=True)
class Draw:
    """What a sampler makes of the logits: the token is the best by `logits` + `scale` times Gumbel noise, which is a
    function of (seed, position, step, token). Rows that are not noisy get what they would get without a sampler."""

    belief_RLV: Tensor  # logits of the distribution that confidences are taken of
    logits_RLV: Tensor  # of the one that is drawn from
    scale_R1: Tensor  # float64, 0: the most likely token
    noisy_R1: Tensor  # bool: probabilities do not say whether the mask token won
    seed_R: Tensor
    pos_RL: Tensor
    step_R: Tensor

    def scores(self) -> Tensor:
        """The largest is the token that was drawn. float64 [R, L, V]"""
        token_V = torch.arange(self.logits_RLV.shape[-1], device=self.logits_RLV.device)
        counters = self.seed_R[:, None, None], self.pos_RL[..., None], self.step_R[:, None, None], token_V
        return self.logits_RLV.to(torch.float64) + self.scale_R1[..., None] * gumbel(*counters)


def token_stats(
    logits_RLV: Tensor, mask_id: int | None, dtype: torch.dtype, *, entropy: bool = False, margin: bool = False,
    best: bool = False, draw: Draw | None = None, wanted_RL: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """The statistics, with the softmax taken in `dtype` or the logits' own, whichever is wider.

    With a `draw`, probabilities are those of its belief, and the token is the best of its scores. A `mask_id` of None
    is one of a token that has no probability. `wanted_RL`: at other positions, everything is 0.
    """
    if use_triton(logits_RLV):
        from dinfer.kernels.triton.token_stats import token_stats as kernel

        found = kernel(
            logits_RLV, mask_id, dtype, draw=draw, wanted_RL=wanted_RL, entropy=entropy, margin=margin, best=best
        )
        return TokenStats(*found)  # type: ignore[arg-type]
    logits_RLV = logits_RLV if draw is None else draw.belief_RLV
    dtype = torch.promote_types(logits_RLV.dtype, dtype)
    logits_RLV = logits_RLV.to(dtype, copy=True)
    prob_RLV = logits_RLV.softmax(-1)
    entropy_RL = torch.special.entr(prob_RLV).sum(-1) if entropy else None
    margin_RL = None
    if margin:
        first, second = prob_RLV.topk(2, -1).values.unbind(-1)
        margin_RL = first - second
    score_RLV = logits_RLV if draw is None else draw.scores()
    mask_score_RL = None if mask_id is None else score_RLV[..., mask_id].clone()
    if mask_id is not None:
        for scores in (score_RLV, logits_RLV) if best and draw is not None else (score_RLV,):
            scores[..., mask_id].fill_(float("-inf"))
    token_RL = score_RLV.argmax(-1)
    top_RL = score_RLV.gather(-1, token_RL[..., None])[..., 0]
    confidence_RL = prob_RLV.gather(-1, token_RL[..., None])[..., 0]
    confidence_RL = confidence_RL.masked_fill(top_RL == float("-inf"), float("nan"))
    mask_confidence_RL = torch.zeros_like(confidence_RL) if mask_id is None else prob_RLV[..., mask_id]
    drawn_RL = None
    if draw is not None:
        drawn_RL = mask_confidence_RL > confidence_RL
        if mask_score_RL is not None:
            drawn_RL = torch.where(draw.noisy_R1, mask_score_RL > top_RL, drawn_RL)
    best_RL = logits_RLV.argmax(-1) if best else None
    stats = TokenStats(token_RL, confidence_RL, mask_confidence_RL, entropy_RL, margin_RL, best_RL, drawn_RL)
    return stats if wanted_RL is None else stats.each(lambda stat_RL: stat_RL.masked_fill(~wanted_RL, 0))
