"""Embedding and LM head, of whose tokens each rank may hold a share.

Shape suffixes: B rows, W or L positions, D hidden, V vocabulary, O the rank's own tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.parallel.ranks import Ranks


def embed(tokens_BW: Tensor, rows: Callable[[Tensor], Tensor], ranks: Ranks, vocab: int) -> Tensor:
    """What `rows` looks up in a table. Each token has its row on one rank, others add zeros. [B, W] -> [B, W, D]"""
    if ranks.size == 1:
        return rows(tokens_BW)
    first, end = ranks.vocabulary(vocab)
    own_BW = (tokens_BW >= first) & (tokens_BW < end)
    x_BWD = rows((tokens_BW - first).clamp(0, end - first - 1))
    return ranks.all_reduce(x_BWD.masked_fill(~own_BW[..., None], 0))  # a product would keep NaN of another row


def whole(own_BLO: Tensor, ranks: Ranks, vocab: int) -> Tensor:
    """The logits of all tokens, from those of each rank's own. [B, L, O] -> [B, L, V]"""
    if ranks.size == 1:
        return own_BLO
    most = -(-vocab // ranks.size)
    parts_NBLO = ranks.all_gather(F.pad(own_BLO, (0, most - own_BLO.shape[-1])))
    if vocab % ranks.size == 0:
        return parts_NBLO.movedim(0, -2).flatten(-2)
    return torch.cat([part[..., :size] for part, size in zip(parts_NBLO, ranks.vocabularies(vocab), strict=True)], -1)


def mix(prob_BLV: Tensor, weight_OD: Tensor, ranks: Ranks) -> Tensor:
    """The expected row of the table. [B, L, V] -> [B, L, D]"""
    first, end = ranks.vocabulary(prob_BLV.shape[-1])
    return ranks.all_reduce(prob_BLV[..., first:end] @ weight_OD)
