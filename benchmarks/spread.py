"""The kernel of `benchmarks.feeds.Spread`, which makes its share of a step small."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow


@triton.jit
def _spread(
    tokens_ptr, pos_ptr, slot_ptr, forwards_ptr, out_ptr, width, mask_id, first, count, stride,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < width, lane * width + column
    token = tl.load(tokens_ptr + place, mask=inside, other=0)
    pos = tl.maximum(tl.load(pos_ptr + place, mask=inside, other=0), 0)
    row = tl.load(slot_ptr + lane) + ROUNDS * tl.load(forwards_ptr + lane)
    other = (pos + stride * row) % count + first
    tl.store(out_ptr + place, tl.where(token == mask_id, other, token), mask=inside)


def spread(
    tokens_BW: Tensor, pos_BW: Tensor, slot_B: Tensor, forwards_B: Tensor, mask_id: int, plain: range, stride: int,
    rounds: int,
) -> Tensor:  # fmt: skip
    """See `benchmarks.feeds.Spread`."""
    lanes, width = tokens_BW.shape
    out_BW = torch.empty_like(tokens_BW, memory_format=torch.contiguous_format)
    block = min(triton.next_power_of_2(width), 128)
    _spread[(lanes, triton.cdiv(width, block))](
        tokens_BW.contiguous(), pos_BW.contiguous(), slot_B.contiguous(), forwards_B.contiguous(), out_BW, width,
        mask_id, plain.start, len(plain), stride, ROUNDS=rounds, BLOCK=block, num_warps=1, **early(tokens_BW),
    )  # fmt: skip
    return out_BW
