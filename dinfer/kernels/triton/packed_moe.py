"""Products of tokens with the experts they chose, whose weights are in 4 bits."""

import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.dispatch import card
from dinfer.kernels.triton.launch import early, let_next, stages, wait
from dinfer.kernels.triton.linear import round_groups
from dinfer.kernels.triton.packed import group_sums
from dinfer.kernels.types import Grouped, Plan


@triton.jit
def _packed_expert_linear(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, shared_ptr, shared_scale_ptr, pairs_ptr, tile_ptr, out_ptr, tokens, room,
    width, outputs, experts, scale_expert, scale_output, scale_group, PER: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr, TOGETHER: tl.constexpr,
    ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
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
    weight_ptr += expert * outputs * (width // 2)
    scale_ptr += expert * scale_expert
    if SHARED:
        weight_ptr = tl.where(expert == experts, shared_ptr, weight_ptr)
        scale_ptr = tl.where(expert == experts, shared_scale_ptr, scale_ptr)
    total = group_sums(
        x_ptr, x_scale_ptr, weight_ptr, scale_ptr,
        pair // PER if PER else tl.where(there, place, 0), tl.minimum(output, outputs - 1),
        room, outputs, width, scale_output, scale_group,
        0, width // GROUP, x_scale_ptr, 0.0, ROWS, OUTPUTS, GROUP, TILED, TOGETHER, 0, ASM, False,
    )  # fmt: skip
    let_next(EARLY)
    row = (place if PER else pair).to(tl.int64)
    out = out_ptr + row[None, :] * outputs + output[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=there[None, :] & (output < outputs)[:, None])


def rows_of_tile(pairs_per_expert: float) -> int:
    """As for linear maps: up to 64 rows, so that few experts' weights are read more than once."""
    return min(max(triton.next_power_of_2(int(pairs_per_expert) + 1), 16), 64)


SHAPE = 128, 1, 8, 3  # outputs of a tile, groups together, warps, stages, by measurements with LLaDA2-mini's experts


def expert_linear(
    x: Tensor | Grouped, values: Tensor, scale_XOG: Tensor, plan: Plan, shared: tuple[Tensor, Tensor] | None = None, *,
    by_token: bool,
) -> Tensor:  # fmt: skip
    """For each pair of token and expert, the expert's matrix times a row. [P, O]

    `by_token`: rows that go in are those of tokens, and those that come out are in the order of the experts; else the
    other way round, a row for each pair.
    """
    (experts, outputs, groups), (rows, width) = scale_XOG.shape, x.shape
    group = width // groups
    given = x if isinstance(x, Grouped) else round_groups(x, group)
    out_PO = values.new_empty(plan.pairs, outputs, dtype=x.dtype)
    shared_values, shared_scale = (values, scale_XOG) if shared is None else shared
    tall, together, warps, most = SHAPE
    _packed_expert_linear[(triton.cdiv(outputs, tall) * plan.tile_I4.shape[0],)](
        given.values_RK, given.scale_GR, values, scale_XOG, shared_values, shared_scale, plan.pairs_XN, plan.tile_I4,
        out_PO, plan.pairs_XN.shape[1], len(given.values_RK), width, outputs, experts, *scale_XOG.stride(),
        PER=plan.pairs // rows if by_token else 0, SHARED=shared is not None, ROWS=plan.rows, OUTPUTS=tall, GROUP=group,
        TILED=values.ndim > 3, TOGETHER=together, ASM=card(values.device) is not None, num_warps=warps,
        num_stages=stages(values.device, (tall // 2 + plan.rows) * group * together, most), **early(values),
    )  # fmt: skip
    return out_PO
