"""Counter-based randomness, and the most likely tokens to which a draw is restricted.

A number is a function of seed, position, step and token, not of earlier draws. So a sample does not depend on batch,
slot or launch order, and is the same after a restart.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dinfer.core.terms.stats import VocabularySlice

MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd 64-bit constants of splitmix64


def uniform(*counters: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64, one for each element of the broadcast int64 counters.

    The counters are mixed one after the other by splitmix64's finaliser (Steele et al., OOPSLA 2014).
    """
    bits = torch.zeros((), dtype=torch.int64, device=counters[0].device)
    for counter in counters:
        bits = _mix(bits + counter + MIX[0])
    return (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52  # of one bit more, the largest would round to 1


def gumbel(*counters: Tensor) -> Tensor:
    """Standard Gumbel noise. The largest of logits plus noise is a draw from their softmax. float64"""
    return -torch.log(-torch.log(uniform(*counters)))


def noise(seed: Tensor, pos: Tensor, step: Tensor, vocab: int) -> Tensor:
    """Uniform tokens, one for each position and step of a request. int64"""
    token = torch.full((), -1, dtype=torch.int64, device=pos.device)  # no token, so that draws use other numbers
    return (uniform(seed, pos, step, token) * vocab).to(torch.int64)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * MIX[1]
    bits = (bits ^ _shift(bits, 27)) * MIX[2]
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


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
