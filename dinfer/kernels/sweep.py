"""How rows leave their active blocks. Shape suffixes: B lanes, K active blocks, L block length, X = K * L."""

from __future__ import annotations

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton


def leave_blocks(
    finished_BK: Tensor, ends_BX: Tensor, given_BX: Tensor, open_BX: Tensor, next_B: Tensor, length_B: Tensor,
    here_B2: tuple[Tensor, Tensor], there_B2: tuple[Tensor, Tensor], *, stop: str, prompt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows that leave, those of them that enter new blocks, rows that are done, and where each is now, start and end.

    A row leaves when all its blocks are finished: for `there`, `[start, end)`, or, where no position from `next` on
    before `length` is open, for good; else it stays `here`. It is also done at a token that ends an answer (`ends`):
    with `stop` "block" once its blocks are finished, with "cut" once all before that token is decoded, never with
    "off". `prompt`: such tokens of the prompt count too. bool [B] three times, int64 [B] twice
    """
    if use_triton(next_B):
        from dinfer.kernels.triton.sweep import leave_blocks as kernel

        return kernel(
            finished_BK, ends_BX, given_BX, open_BX, next_B, length_B, *here_B2, *there_B2, stop=stop, prompt=prompt
        )
    leaves_B = finished_BK.all(-1)
    done_B = leaves_B & (next_B >= length_B)
    if stop != "off":
        ends_BX = ends_BX if prompt else ends_BX & ~given_BX
        cut_B = (ends_BX & (open_BX.cumsum(-1) == 0)).any(-1) if stop == "cut" else ends_BX.any(-1) & leaves_B
        done_B = done_B | cut_B
    enters_B = leaves_B & ~done_B
    start_B = torch.where(enters_B, there_B2[0], here_B2[0])
    end_B = torch.where(enters_B, torch.minimum(there_B2[1], length_B), here_B2[1])
    return leaves_B, enters_B, done_B, start_B, end_B
