"""From a flag for each position to the list of positions, without a data-dependent shape."""

import torch
from torch import Tensor


def compact(flags_BS: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The flagged positions of each row, ascending, then -1, [B, width]; and each position's place among them, [B, S].

    The place is -1 where the flag is not set. A row must have at most `width` flags: the others are dropped.
    """
    place_BS = torch.where(flags_BS, flags_BS.cumsum(-1) - 1, -1)
    pos_BX = flags_BS.new_full((flags_BS.shape[0], width + 1), -1, dtype=torch.int64)
    pos_S = torch.arange(flags_BS.shape[1], device=flags_BS.device)
    index_BS = torch.where(flags_BS, place_BS.clamp_max(width), width)  # the last column is dropped
    return pos_BX.scatter_(1, index_BS, pos_S.expand_as(index_BS))[:, :width], place_BS
