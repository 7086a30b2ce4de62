"""Products of tokens with the experts they chose, whose weights are in 4 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.launch import early, follow, stages
from dinfer.kernels.triton.packed import group_sums
from dinfer.kernels.types import Plan


@triton.jit
def _packed_expert_linear(
    x_ptr, weight_ptr, scale_ptr, pairs_ptr, tile_ptr, out_ptr, tokens, width, outputs,
    scale_expert, scale_output, scale_group, PER: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    columns = tl.cdiv(outputs, OUTPUTS)
    output = tl.program_id(0) % columns * OUTPUTS + tl.arange(0, OUTPUTS)
    tile_ptr += tl.program_id(0) // columns * 4
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert < 0:
        return
    slot = tl.arange(0, ROWS)
    there = slot < tl.load(tile_ptr + 3)
    pair = tl.load(pairs_ptr + expert * tokens + tl.load(tile_ptr + 1) + slot, mask=there, other=0)
    place = tl.load(tile_ptr + 2) + slot
    total = group_sums(
        x_ptr, weight_ptr + expert * outputs * (width // 2), scale_ptr + expert * scale_expert, output,
        pair // PER if PER else place, there, outputs, width, scale_output, scale_group, 0, width // GROUP,
        ROWS, OUTPUTS, GROUP, PRECISION,
    )  # fmt: skip
    row = (place if PER else pair).to(tl.int64)
    out = out_ptr + row[None, :] * outputs + output[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=there[None, :] & (output < outputs)[:, None])


def rows_of_tile(pairs_per_expert: float) -> int:
    """As for linear maps: up to 64 rows, so that few experts' weights are read more than once."""
    return min(max(triton.next_power_of_2(int(pairs_per_expert) + 1), 16), 64)


def expert_linear(x: Tensor, weight_XOH: Tensor, scale_XOG: Tensor, plan: Plan, *, by_token: bool) -> Tensor:
    """For each pair of token and expert, the expert's matrix times a row. [P, O]

    `by_token`: rows that go in are those of tokens, and those that come out are in the order of the experts; else the
    other way round, a row for each pair.
    """
    x = x.contiguous()
    (_, outputs, groups), width = scale_XOG.shape, x.shape[-1]
    out_PO = (x.new_empty if by_token or plan.whole else x.new_zeros)(plan.pairs, outputs)
    _packed_expert_linear[(triton.cdiv(outputs, 64) * plan.tile_I4.shape[0],)](
        x, weight_XOH, scale_XOG, plan.pairs_XN, plan.tile_I4, out_PO, plan.pairs_XN.shape[1], width, outputs,
        *scale_XOG.stride(), PER=plan.pairs // x.shape[0] if by_token else 0, ROWS=plan.rows, OUTPUTS=64,
        GROUP=width // groups, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=stages(x.device, (32 + plan.rows * x.dtype.itemsize) * width // groups, 4), **early(x),
    )  # fmt: skip
    return out_PO
