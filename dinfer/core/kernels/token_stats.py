"""The statistics of the logits that decoders read, in one pass over the vocabulary."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import native, triton, use_triton
from dinfer.core.kernels.random import gumbel
from dinfer.core.provided import needed
from dinfer.core.terms.stats import Draw, TokenStats, VocabularySlice


def token_stats(
    logits_RLV: Tensor, mask_id: int | None, dtype: torch.dtype, *, needs: Collection[str] = (),
    draw: Draw | None = None, wanted_RL: Tensor | None = None, columns: VocabularySlice | None = None,
    drawn_RL: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """The statistics. The softmax is computed in `dtype` or the logits' own, whichever is wider.

    `needs`: which of "entropy", "margin" and "best" to compute too.
    With a `draw`, its belief gives the probabilities and its scores give the token; `drawn_RL`: only there, and
    elsewhere the belief gives it. `mask_id` None: there is no mask token, and its probability is 0. `wanted_RL`: all
    other positions get 0. `columns`: the logits are one rank's, and the statistics those of all ranks.
    """
    if use_triton(logits_RLV, "token_stats") and (draw is None or use_triton(logits_RLV, "draw")):
        return triton("token_stats").token_stats(
            logits_RLV, mask_id, dtype, needs=needs, draw=draw, wanted_RL=wanted_RL, columns=columns, drawn_RL=drawn_RL
        )
    logits_RLV = logits_RLV if draw is None else draw.belief_RLV
    dtype = torch.promote_types(logits_RLV.dtype, dtype)
    if columns is not None and columns.all_gather is not None:
        divided = needed("divided_stats", "a divided vocabulary", "scale")
        stats = divided(logits_RLV.to(dtype), mask_id, columns, needs, draw, drawn_RL)
    else:
        stats = whole(logits_RLV.to(dtype), mask_id, needs, draw, drawn_RL, wanted_RL)
    return stats if wanted_RL is None else stats.each(lambda stat_RL: stat_RL.masked_fill(~wanted_RL, 0))


def whole(
    logits_RLV: Tensor, mask_id: int | None, needs: Collection[str], draw: Draw | None, drawn_RL: Tensor | None,
    wanted_RL: Tensor | None,
) -> TokenStats:  # fmt: skip
    """The statistics where all logits are here."""
    kernels = native("token_stats", logits_RLV) if draw is None and {*needs} <= {"best"} else None
    if kernels is not None:
        token_RL, confidence_RL, mask_RL = kernels.token_stats(logits_RLV, mask_id, wanted_RL)
        return TokenStats(token_RL, confidence_RL, mask_RL, best_RL=token_RL if needs else None)
    prob_RLV = logits_RLV.softmax(-1)
    mask_RL = torch.zeros_like(prob_RLV[..., 0]) if mask_id is None else prob_RLV[..., mask_id]
    entropy_RL = torch.special.entr(prob_RLV).sum(-1) if "entropy" in needs else None
    margin_RL = -prob_RLV.topk(2, -1).values.diff(dim=-1)[..., 0] if "margin" in needs else None

    def offered(lure_RL: Tensor, score_RL: Tensor, token_RL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best token, its probability, and whether the mask token's score is better."""
        confidence_RL = prob_RLV.gather(-1, token_RL[..., None])[..., 0]
        return token_RL, confidence_RL.masked_fill(score_RL == float("-inf"), float("nan")), lure_RL > score_RL

    token_RL, confidence_RL, _ = offered(*winner(logits_RLV, mask_id))
    stats = TokenStats(token_RL, confidence_RL, mask_RL, entropy_RL, margin_RL, token_RL if "best" in needs else None)
    if draw is None:
        return stats
    kernels, where_RL = native("draw", draw.logits_RLV), wanted_RL if drawn_RL is None else drawn_RL
    won = winner(noisy(draw, 0), mask_id) if kernels is None else kernels.draw(draw, mask_id, where_RL)
    token_RL, confidence_RL, mask_wins_RL = offered(*won)
    declined_RL = torch.where(draw.noisy_R1, mask_wins_RL, mask_RL > confidence_RL)
    drawn = replace(stats, token_RL=token_RL, confidence_RL=confidence_RL, mask_drawn_RL=declined_RL)
    return stats.where(drawn_RL, drawn)


def winner(score_RLV: Tensor, mask_id: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The mask token's score (-inf: there is none), the best of the others, and its token. [R, L] each"""
    if mask_id is None:
        return torch.full_like(score_RLV[..., 0], float("-inf")), *score_RLV.max(-1)
    lure_RL, score_RLV = score_RLV[..., mask_id], score_RLV.clone()
    score_RLV[..., mask_id] = float("-inf")
    return lure_RL, *score_RLV.max(-1)


def noisy(draw: Draw, first: int) -> Tensor:
    """Logits with noise; the largest is the drawn token. `first`: the token of column 0. float64 [R, L, V]"""
    token_V = torch.arange(draw.logits_RLV.shape[-1], device=draw.logits_RLV.device) + first
    counters = draw.seed_R[:, None, None], draw.pos_RL[..., None], draw.step_R[:, None, None], token_V
    return draw.logits_RLV.to(torch.float64) + draw.scale_R1[..., None] * gumbel(*counters)
