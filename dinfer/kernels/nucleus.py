"""The tokens a draw is restricted to: the most likely ones (Holtzman et al., arXiv:1904.09751)."""

from __future__ import annotations

import torch
from torch import Tensor


def nucleus(logits_RLV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, mask_id: int | None) -> Tensor:
    """The logits, -inf outside the `top_k` most likely tokens (0: all) and outside the nucleus of mass `top_p`.

    The nucleus is the fewest most likely tokens whose probabilities sum to at least `top_p`; equals from the lowest
    id on. The mask token, if there is one, counts in neither, and is left as it is. [R, L, V]
    """
    others_RLV = logits_RLV.clone()
    if mask_id is not None:
        others_RLV[..., mask_id].fill_(float("-inf"))
    sorted_RLV, order_RLV = others_RLV.sort(dim=-1, descending=True, stable=True)
    prob_RLV = sorted_RLV.softmax(-1)
    before_RLV = prob_RLV.cumsum(-1) - prob_RLV
    place_V = torch.arange(logits_RLV.shape[-1], device=logits_RLV.device)
    top_k_R11, top_p_R11 = top_k_R1[..., None], top_p_R1[..., None]
    # The first is always in: rounding may have left something "before" it.
    keep_RLV = (place_V == 0) | (before_RLV < top_p_R11) | (top_p_R11 >= 1)
    keep_RLV = keep_RLV & ((place_V < top_k_R11) | (top_k_R11 == 0))
    kept_RLV = torch.zeros_like(keep_RLV).scatter(-1, order_RLV, keep_RLV)
    if mask_id is not None:
        kept_RLV[..., mask_id].fill_(True)
    return logits_RLV.masked_fill(~kept_RLV, float("-inf"))
