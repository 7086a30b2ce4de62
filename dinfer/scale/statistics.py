"""The statistics of logits of which each rank has a part of the vocabulary.

A rank tells the others eight numbers a position, and four more where tokens are drawn.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.token_stats import noisy
from dinfer.core.terms.stats import Draw, TokenStats, VocabularySlice


def divided_stats(
    logits_RLO: Tensor, mask_id: int | None, columns: VocabularySlice, needs: Collection[str], draw: Draw | None,
    drawn_RL: Tensor | None,
) -> TokenStats:  # fmt: skip
    """As `dinfer.core.kernels.token_stats.token_stats`."""
    assert columns.all_gather is not None
    told_NRL8 = columns.all_gather(own_numbers(logits_RLO, mask_id, columns))
    drawn = None if draw is None else (columns.all_gather(own_draw(draw, mask_id, columns)), draw.noisy_R1)
    return joined(told_NRL8, needs, drawn, drawn_RL)


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
    score_RLO = noisy(draw, columns.first)
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
    numbers_NRL8: Tensor, needs: Collection[str], drawn: tuple[Tensor, Tensor] | None, drawn_RL: Tensor | None
) -> TokenStats:
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
    if "entropy" in needs:
        entropy_RL = total_RL.log() - ((slope + shift * total) * shrink).sum(0) / total_RL
        entropy_RL = entropy_RL.masked_fill(spoilt_RL, float("nan"))
    if "margin" in needs:
        first_1RL = top.argmax(0, keepdim=True)
        second_RL = top.scatter(0, first_1RL, second.gather(0, first_1RL)).amax(0)
        margin_RL = ((1 - (second_RL - peak_RL).exp()) / total_RL).masked_fill(spoilt_RL, float("nan"))
    token_RL = token.gather(0, winner_1RL)[0].long()
    best_RL = token_RL if "best" in needs else None
    stats = TokenStats(token_RL, confidence_RL, mask_RL, entropy_RL, margin_RL, best_RL)
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
