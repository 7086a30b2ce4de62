"""What decoders need to know of the logits, in one pass over the vocabulary."""

import torch
from torch import Tensor

from dinfer.core.stats import Draw, TokenStats
from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.random import gumbel


def token_stats(
    logits_RLV: Tensor, mask_id: int | None, dtype: torch.dtype, *, entropy: bool = False, margin: bool = False,
    best: bool = False, draw: Draw | None = None, wanted_RL: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """The statistics, with the softmax taken in `dtype` or the logits' own, whichever is wider.

    With a `draw`, probabilities are those of its belief, and the token is the best of its scores. A `mask_id` of None
    is one of a token that has no probability. `wanted_RL`: at other positions, everything is 0.
    """
    if use_triton(logits_RLV, "token_stats") and (draw is None or use_triton(logits_RLV, "draw")):
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
    score_RLV = logits_RLV if draw is None else _scores(draw)
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


def _scores(draw: Draw) -> Tensor:
    """The largest is the token that was drawn. float64 [R, L, V]"""
    token_V = torch.arange(draw.logits_RLV.shape[-1], device=draw.logits_RLV.device)
    counters = draw.seed_R[:, None, None], draw.pos_RL[..., None], draw.step_R[:, None, None], token_V
    return draw.logits_RLV.to(torch.float64) + draw.scale_R1[..., None] * gumbel(*counters)
