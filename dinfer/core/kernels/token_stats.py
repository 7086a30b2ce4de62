"""The statistics of the logits that decoders read, in one pass over the vocabulary."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.kernels.random import gumbel
from dinfer.core.terms.stats import Draw, TokenStats, VocabularySlice


def token_stats(
    logits_RLV: Tensor, mask_id: int | None, dtype: torch.dtype, *, entropy: bool = False, margin: bool = False,
    best: bool = False, draw: Draw | None = None, wanted_RL: Tensor | None = None,
    columns: VocabularySlice | None = None, drawn_RL: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """The statistics. The softmax is computed in `dtype` or the logits' own, whichever is wider.

    With a `draw`, its belief gives the probabilities and its scores give the token; `drawn_RL`: only there, and
    elsewhere the belief gives it. `mask_id` None: there is no mask token, and its probability is 0. `wanted_RL`: all
    other positions get 0. `columns`: the logits are one rank's, and the statistics those of all ranks. Each sends the
    others eight numbers a position, and four more for a `draw`.
    """
    if use_triton(logits_RLV, "token_stats") and (draw is None or use_triton(logits_RLV, "draw")):
        return triton("token_stats").token_stats(
            logits_RLV, mask_id, dtype, draw=draw, wanted_RL=wanted_RL, entropy=entropy, margin=margin, best=best,
            columns=columns, drawn_RL=drawn_RL,
        )  # fmt: skip
    logits_RLV = logits_RLV if draw is None else draw.belief_RLV
    dtype = torch.promote_types(logits_RLV.dtype, dtype)
    if columns is not None and columns.all_gather is not None:
        told_NRL8 = columns.all_gather(own_numbers(logits_RLV.to(dtype), mask_id, columns))
        drawn = None if draw is None else (columns.all_gather(own_draw(draw, mask_id, columns)), draw.noisy_R1)
        stats = joined(told_NRL8, entropy, margin, best, drawn, drawn_RL)
    else:
        stats = whole(logits_RLV.to(dtype), mask_id, entropy, margin, best, draw, drawn_RL)
    return stats if wanted_RL is None else stats.each(lambda stat_RL: stat_RL.masked_fill(~wanted_RL, 0))


def whole(
    logits_RLV: Tensor, mask_id: int | None, entropy: bool, margin: bool, best: bool, draw: Draw | None,
    drawn_RL: Tensor | None,
) -> TokenStats:  # fmt: skip
    """The statistics where all logits are here."""
    prob_RLV = logits_RLV.softmax(-1)
    mask_RL = torch.zeros_like(prob_RLV[..., 0]) if mask_id is None else prob_RLV[..., mask_id]
    entropy_RL = torch.special.entr(prob_RLV).sum(-1) if entropy else None
    margin_RL = None
    if margin:
        first, second = prob_RLV.topk(2, -1).values.unbind(-1)
        margin_RL = first - second

    def offered(score_RLV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The token with the best score, its probability, and whether the mask token's score is better."""
        others_RLV = score_RLV.clone()
        if mask_id is not None:
            others_RLV[..., mask_id] = float("-inf")
        top_RL1, token_RL1 = others_RLV.max(-1, keepdim=True)
        confidence_RL1 = prob_RLV.gather(-1, token_RL1).masked_fill(top_RL1 == float("-inf"), float("nan"))
        mask_wins_RL1 = torch.zeros_like(top_RL1 > 0) if mask_id is None else score_RLV[..., mask_id, None] > top_RL1
        return token_RL1[..., 0], confidence_RL1[..., 0], mask_wins_RL1[..., 0]

    token_RL, confidence_RL, _ = offered(logits_RLV)
    stats = TokenStats(token_RL, confidence_RL, mask_RL, entropy_RL, margin_RL, token_RL if best else None)
    if draw is None:
        return stats
    token_RL, confidence_RL, mask_wins_RL = offered(_scores(draw, 0))
    declined_RL = torch.where(draw.noisy_R1, mask_wins_RL, mask_RL > confidence_RL)
    drawn = replace(stats, token_RL=token_RL, confidence_RL=confidence_RL, mask_drawn_RL=declined_RL)
    return stats.where(drawn_RL, drawn)


def own_numbers(logits_RLO: Tensor, mask_id: int | None, columns: VocabularySlice) -> Tensor:
    """What the statistics need of a part of the vocabulary. [R, L, 8]

    The largest logit m, or NaN if a logit is NaN or infinite; the sums of e^(x - m) and of (x - m) e^(x - m); the best
    token's logit, m, the second largest logit, the mask token's logit, and the best token.
    """
    broken_RL = (logits_RLO.isnan() | (logits_RLO == float("inf"))).any(-1)
    logits_RLO = logits_RLO.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    top_RL, second_RL = F.pad(logits_RLO, (0, 1), value=float("-inf")).topk(2, -1).values.unbind(-1)
    shift_RLO = logits_RLO - torch.where(top_RL == float("-inf"), 0, top_RL)[..., None]
    power_RLO = shift_RLO.exp()
    slope_RL = torch.where(shift_RLO == float("-inf"), 0, shift_RLO * power_RLO).sum(-1)
    mask_RL, best_RL, index_RL = _best(logits_RLO, mask_id, columns)
    whole_RL, token_RL = top_RL.masked_fill(broken_RL, float("nan")), (index_RL + columns.first).to(top_RL.dtype)
    return torch.stack((whole_RL, power_RLO.sum(-1), slope_RL, best_RL, top_RL, second_RL, mask_RL, token_RL), -1)


def own_draw(draw: Draw, mask_id: int | None, columns: VocabularySlice) -> Tensor:
    """What a draw needs of a part of the vocabulary. float64 [R, L, 4]

    The best score, its token, that token's logit in the belief, and the mask token's score.
    """
    score_RLO = _scores(draw, columns.first)
    mask_RL, best_RL, index_RL = _best(score_RLO.masked_fill(score_RLO.isnan(), float("-inf")), mask_id, columns)
    belief_RL = draw.belief_RLV.gather(-1, index_RL[..., None])[..., 0].to(torch.float64)
    return torch.stack((best_RL, (index_RL + columns.first).to(torch.float64), belief_RL, mask_RL), -1)


def _best(value_RLO: Tensor, mask_id: int | None, columns: VocabularySlice) -> tuple[Tensor, Tensor, Tensor]:
    """The mask token's value (-inf if another rank has it), the largest of the others, and its column. [R, L] each"""
    masks, mask_RL = () if mask_id is None else (mask_id,), torch.full_like(value_RLO[..., 0], float("-inf"))
    for own_RL in columns.at(value_RLO, *masks):
        mask_RL, value_RLO = own_RL, value_RLO.clone()
    columns.fill(value_RLO, *masks)
    index_RL = value_RLO.argmax(-1)
    return mask_RL, value_RLO.gather(-1, index_RL[..., None])[..., 0], index_RL


def joined(
    numbers_NRL8: Tensor, entropy: bool, margin: bool, best: bool, drawn: tuple[Tensor, Tensor] | None = None,
    drawn_RL: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """The statistics of a vocabulary from those of its parts, in order. Of equal tokens the first wins.

    `drawn`: `own_draw` of the parts, [N, R, L, 4], and the rows in which the mask token takes part by its score.
    `drawn_RL`: where tokens are drawn; None: everywhere.
    """
    largest, total, slope, highest, top, second, mask, token = numbers_NRL8.unbind(-1)
    peak_RL = top.amax(0)
    spoilt_RL = largest.isnan().any(0)
    shift = torch.where(top == float("-inf"), 0, top - peak_RL)
    shrink = torch.where(top == float("-inf"), 0, shift.exp())
    total_RL, winner_1RL = (total * shrink).sum(0), highest.argmax(0, keepdim=True)
    highest_RL = highest.gather(0, winner_1RL)[0]
    confidence_RL = ((highest_RL - peak_RL).exp() / total_RL).masked_fill(
        spoilt_RL | (highest_RL == float("-inf")), float("nan")
    )
    mask_RL = ((mask.amax(0) - peak_RL).exp() / total_RL).masked_fill(spoilt_RL, float("nan"))
    entropy_RL = margin_RL = None
    if entropy:
        entropy_RL = total_RL.log() - ((slope + shift * total) * shrink).sum(0) / total_RL
        entropy_RL = entropy_RL.masked_fill(spoilt_RL, float("nan"))
    if margin:
        first_1RL = top.argmax(0, keepdim=True)
        second_RL = top.scatter(0, first_1RL, second.gather(0, first_1RL)).amax(0)
        margin_RL = ((1 - (second_RL - peak_RL).exp()) / total_RL).masked_fill(spoilt_RL, float("nan"))
    token_RL = token.gather(0, winner_1RL)[0].long()
    stats = TokenStats(token_RL, confidence_RL, mask_RL, entropy_RL, margin_RL, token_RL if best else None)
    if drawn is None:
        return stats
    score, token, belief, lure = drawn[0].unbind(-1)
    winner_1RL = score.argmax(0, keepdim=True)
    score_RL, belief_RL = (each.gather(0, winner_1RL)[0] for each in (score, belief))
    confidence_RL = ((belief_RL.to(peak_RL.dtype) - peak_RL).exp() / total_RL).masked_fill(
        spoilt_RL | (score_RL == float("-inf")), float("nan")
    )
    declined_RL = torch.where(drawn[1], lure.amax(0) > score_RL, mask_RL > confidence_RL)
    token_RL = token.gather(0, winner_1RL)[0].long()
    offered = replace(stats, token_RL=token_RL, confidence_RL=confidence_RL, mask_drawn_RL=declined_RL)
    return stats.where(drawn_RL, offered)


def _scores(draw: Draw, first: int) -> Tensor:
    """Logits with noise; the largest is the drawn token. `first`: the token of column 0. float64 [R, L, V]"""
    token_V = torch.arange(draw.logits_RLV.shape[-1], device=draw.logits_RLV.device) + first
    counters = draw.seed_R[:, None, None], draw.pos_RL[..., None], draw.step_R[:, None, None], token_V
    return draw.logits_RLV.to(torch.float64) + draw.scale_R1[..., None] * gumbel(*counters)
