"""What decoders need to know of the logits, in one pass over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenStats:
    """The proposed token of every position. All [R, L]."""

    token_RL: Tensor  # int64, the most likely token but the mask token; ties go to the lowest id
    confidence_RL: Tensor  # its probability under the whole distribution, mask token included
    mask_confidence_RL: Tensor  # the probability of the mask token
    entropy_RL: Tensor | None = None  # of the whole distribution, in nats; if asked for
    margin_RL: Tensor | None = None  # the largest probability less the second largest; if asked for

    def of(self, name: str) -> Tensor:
        """A further statistic, "entropy" or "margin". Raises KeyError if the decoder's `needs` do not name it."""
        value = {"entropy": self.entropy_RL, "margin": self.margin_RL}[name]
        if value is None:
            raise KeyError(f"{name!r} was not computed: name it in the decoder's `needs`")
        return value

    @property
    def top_RL(self) -> Tensor:
        """The largest probability, the mask token's included."""
        return torch.maximum(self.confidence_RL, self.mask_confidence_RL)

    @property
    def declined_RL(self) -> Tensor:
        """The mask token itself is the most likely: the model would rather wait."""
        return self.mask_confidence_RL > self.confidence_RL

    @property
    def finite_RL(self) -> Tensor:
        """False where the logits held a NaN or +inf, or nothing but -inf for every token but the mask."""
        return self.confidence_RL.isfinite()


def token_stats(
    logits_RLV: Tensor, mask_id: int, dtype: torch.dtype, *, entropy: bool = False, margin: bool = False
) -> TokenStats:
    """The statistics, with the softmax taken in `dtype` or the logits' own, whichever is wider."""
    dtype = torch.promote_types(logits_RLV.dtype, dtype)
    logits_RLV = logits_RLV.to(dtype, copy=True)
    prob_RLV = logits_RLV.softmax(-1)
    entropy_RL = torch.special.entr(prob_RLV).sum(-1) if entropy else None
    margin_RL = None
    if margin:
        first, second = prob_RLV.topk(2, -1).values.unbind(-1)
        margin_RL = first - second
    logits_RLV[..., mask_id].fill_(float("-inf"))
    token_RL = logits_RLV.argmax(-1)
    nothing_RL = logits_RLV.gather(-1, token_RL[..., None])[..., 0] == float("-inf")
    confidence_RL = prob_RLV.gather(-1, token_RL[..., None])[..., 0].masked_fill(nothing_RL, float("nan"))
    return TokenStats(token_RL, confidence_RL, prob_RLV[..., mask_id], entropy_RL, margin_RL)
