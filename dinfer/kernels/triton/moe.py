"""Products of tokens with the experts they chose.

With up to some thousand tokens the time is that of reading the chosen experts' weights. A plan cuts the pairs of token
and expert into tiles of one expert each, and a program multiplies a tile with some outputs of its expert. Most experts
then are one tile, whose weights are read once; those that many tokens choose are divided among many programs. There is
room for the most tiles there can be, so the grid does not depend on the choice, and programs without one leave at once.
The weights are the tall operand, as in `linear`. Each output has one writer and sums are in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.kernels.triton.deferred import added
from dinfer.kernels.triton.launch import early, follow, stages
from dinfer.kernels.triton.linear import scaled
from dinfer.kernels.types import FLOAT8, LARGEST, Matrices, Plan, Rounded


@triton.jit
def _plan(
    experts_ptr, pairs_ptr, tile_ptr, tokens, experts, tiles, C: tl.constexpr, CHOSEN: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    expert = tl.program_id(0)
    everyone = expert == experts
    place = tl.arange(0, CHOSEN)[None, :]
    found, before = 0, 0
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = (token < tokens)[:, None] & (place < C)
        chosen = tl.load(experts_ptr + token[:, None] * C + place, mask=there, other=2**30)
        here = tl.sum((chosen == expert).to(tl.int32), 1)
        pair = token * (C + SHARED) + tl.sum(tl.where(chosen == expert, place, 0), 1)
        if SHARED:
            here = tl.where(everyone & (token < tokens), 1, here)
            pair += tl.where(everyone, C, 0)
        rank = found + tl.cumsum(here, 0) - 1
        tl.store(pairs_ptr + expert.to(tl.int64) * tokens + rank, pair, mask=here > 0)
        found += tl.sum(here, 0)
        before += tl.sum((chosen < expert).to(tl.int32))
    turn = expert
    if SHARED:
        before = tl.where(everyone, 0, before + tokens)
        turn = tl.where(everyone, 0, expert + 1)
    # Room for an expert's tiles, wherever those of the others end: one more than whole tiles, and whole ones add up.
    first, end = before // ROWS + turn, (before + found) // ROWS + turn + 1
    end = tl.where(expert == experts - 1, tiles, end)  # pairs of experts that are elsewhere leave tiles over
    for start in range(first, end, 32):
        tile = start + tl.arange(0, 32)
        slot = (tile - first) * ROWS
        fields = tile_ptr + tile * 4
        tl.store(fields, tl.where(slot < found, expert, -1), mask=tile < end)
        tl.store(fields + 1, slot, mask=tile < end)
        tl.store(fields + 2, before + slot, mask=tile < end)
        tl.store(fields + 3, tl.minimum(found - slot, ROWS), mask=tile < end)


def plan(experts_NC: Tensor, experts: int, rows: int, shared: bool = False, whole: bool = True) -> Plan:
    """No expert is in `experts_NC` [N, C] twice for one token. Not `whole`: larger numbers than `experts` are none."""
    (tokens, chosen), device = experts_NC.shape, experts_NC.device
    programs, pairs = experts + shared, tokens * (chosen + shared)
    made = Plan(
        torch.empty(programs, tokens, dtype=torch.int32, device=device),
        torch.empty(programs + pairs // rows, 4, dtype=torch.int32, device=device),
        rows,
        pairs,
        whole,
    )
    block, many = min(triton.next_power_of_2(tokens), 1024), triton.next_power_of_2(chosen)
    _plan[(programs,)](
        experts_NC.contiguous(), made.pairs_XN, made.tile_I4, tokens, experts, len(made.tile_I4),
        C=chosen, CHOSEN=many, SHARED=int(shared), ROWS=rows, BLOCK=block,
        num_warps=min(max(block * many // 1024, 1), 8), **early(experts_NC),
    )  # fmt: skip
    return made


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _gelu(x):
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh y) / 2 is sigmoid(2 y)


@triton.jit
def _tile(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, pairs_ptr, out_ptr, out_scale_ptr,
    pairs, width, outputs, expert, column, place, count,
    PARTS: tl.constexpr, SCALE: tl.constexpr, PER: tl.constexpr, GATE: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, ROWS)
    there = slot < count
    place = place.to(tl.int64) + slot
    row = place if GATE is None else tl.load(pairs_ptr + slot, mask=there, other=0).to(tl.int64) // PER
    output, depth = column * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, DEPTH)
    inside = output < outputs
    source = expert * outputs * (1 if GATE is None else 2) + output
    x_ptrs = x_ptr + row[None, :] * width + depth[:, None]
    weight_ptrs = weight_ptr + source[:, None] * width + depth[None, :]
    up = outputs.to(tl.int64) * width  # from a gate's weights to those of what it gates
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    gated = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if PARTS:
        scale = tl.load(x_scale_ptr + row, mask=there, other=0.0)
    if SCALE:
        weight_scale = tl.load(scale_ptr + source, mask=inside, other=0.0)
        if GATE is not None:
            up_scale = tl.load(scale_ptr + source + outputs, mask=inside, other=0.0)
    for k in range(0, width, DEPTH):
        if EXACT:
            x = tl.load(x_ptrs + k, mask=there[None, :], other=0.0)
            weight = tl.load(weight_ptrs + k)
        else:
            deep = k + depth < width
            mask = inside[:, None] & deep[None, :]
            x = tl.load(x_ptrs + k, mask=there[None, :] & deep[:, None], other=0.0)
            weight = tl.load(weight_ptrs + k, mask=mask, other=0.0)
        if PARTS > 1:  # the scales of the next piece come while this one is multiplied
            next = tl.load(x_scale_ptr + tl.minimum(k // DEPTH + 1, PARTS - 1) * pairs + row, mask=there, other=0.0)
            total += tl.dot(weight.to(x.dtype), x, input_precision=PRECISION) * scale[None, :]
            scale = next
        else:
            total = tl.dot(weight.to(x.dtype), x, total, input_precision=PRECISION)
        if GATE is not None:
            more = weight_ptrs + up + k
            weight = tl.load(more) if EXACT else tl.load(more, mask=mask, other=0.0)
            gated = tl.dot(weight.to(x.dtype), x, gated, input_precision=PRECISION)
    if SCALE:
        total *= weight_scale[:, None]
        if GATE is not None:
            gated *= up_scale[:, None]
    if PARTS == 1:
        total *= scale[None, :]
        if GATE is not None:
            gated *= scale[None, :]
    if GATE is None:
        row = tl.load(pairs_ptr + slot, mask=there, other=0).to(tl.int64)
    else:
        row = place
        total = (_silu(total) if GATE == "silu" else _gelu(total)) * gated
    if LARGEST:
        total, scale = scaled(total, 0, LARGEST)
        tl.store(out_scale_ptr + column * pairs + row[None, :], scale, mask=there[None, :])
    out = out_ptr + row[None, :] * outputs + output[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=there[None, :] & inside[:, None])


@triton.jit
def _expert_linear(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, shared_ptr, shared_scale_ptr, pairs_ptr, tile_ptr, out_ptr,
    out_scale_ptr, tokens, pairs, width, outputs, experts,
    PARTS: tl.constexpr, SCALE: tl.constexpr, PER: tl.constexpr, GATE: tl.constexpr, LARGEST: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    # Programs next to each other share their rows, and those of one expert its weights, through the L2 cache.
    columns = tl.cdiv(outputs, OUTPUTS)
    column, tile_ptr = tl.program_id(0) % columns, tile_ptr + tl.program_id(0) // columns * 4
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert < 0:
        return
    pairs_ptr += expert * tokens + tl.load(tile_ptr + 1)
    place, count = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    if SHARED:  # noqa: SIM102 (known when it is compiled, the next one is not)
        if expert == experts:
            expert, weight_ptr, scale_ptr = expert * 0, shared_ptr, shared_scale_ptr
    if FEW < ROWS:  # noqa: SIM102 (likewise)
        if count <= FEW:
            _tile(
                x_ptr, x_scale_ptr, weight_ptr, scale_ptr, pairs_ptr, out_ptr, out_scale_ptr,
                pairs, width, outputs, expert, column, place, count,
                PARTS, SCALE, PER, GATE, LARGEST, FEW, OUTPUTS, DEPTH, EXACT, PRECISION,
            )  # fmt: skip
            return
    _tile(
        x_ptr, x_scale_ptr, weight_ptr, scale_ptr, pairs_ptr, out_ptr, out_scale_ptr,
        pairs, width, outputs, expert, column, place, count,
        PARTS, SCALE, PER, GATE, LARGEST, ROWS, OUTPUTS, DEPTH, EXACT, PRECISION,
    )  # fmt: skip


class Shape(NamedTuple):
    outputs: int  # of a tile
    depth: int
    warps: int
    stages: int  # at most


def gated_linear(
    x_ND: Tensor | Rounded, weight: Matrices, plan: Plan, gate: str, piece: int | None = None
) -> Tensor | Rounded:
    """Each token by each of its experts, "silu" or "gelu" of half of the outputs times the other half. [P, O / 2]

    One row for each pair, in the order of tiles. Rounded to float8 by pieces of so many values, if `piece` says
    so, whose scales are [P, pieces].
    """
    out, out_scale = _product(x_ND, weight, plan, gate, piece)
    return out if out_scale is None else Rounded(out, out_scale.mT, x_ND.dtype)


def expert_linear(x_PM: Tensor | Rounded, weight: Matrices, plan: Plan) -> Tensor:
    """Each row that `gated_linear` made times the matrix of its expert. [P, O]

    The rows that come out are in the order of the tokens, with each in that of its experts, a shared one last.
    """
    return _product(x_PM, weight, plan, None, None)[0]


def _product(
    x: Tensor | Rounded, weight: Matrices, plan: Plan, gate: str | None, piece: int | None
) -> tuple[Tensor, Tensor | None]:
    values, x_scale = (x.contiguous(), None) if isinstance(x, Tensor) else (x.values, x.scale)
    (experts, outputs, width), rows, pairs = weight.each.shape, plan.rows, plan.pairs
    outputs = outputs // 2 if gate else outputs
    parts = 0 if x_scale is None else x_scale.numel() // values.shape[0]
    many, depth, warps, most = _shape(rows, values.dtype.itemsize, gate is not None)
    many, depth = piece or many, width // parts if parts > 1 else depth
    each = (many * (2 if gate else 1) * weight.each.dtype.itemsize + rows * values.dtype.itemsize) * depth
    # A gate's rows are read by tiles alone. Those of the second product are added up, whoever has written them.
    make = values.new_empty if gate or plan.whole else values.new_zeros
    out = make(pairs, outputs, dtype=FLOAT8 if piece else x.dtype)
    out_scale = values.new_empty(outputs // piece, pairs, dtype=torch.float32) if piece else None
    _expert_linear[(triton.cdiv(outputs, many) * plan.tile_I4.shape[0],)](
        values, out if x_scale is None else x_scale, *(out if part is None else part for part in weight),
        plan.pairs_XN, plan.tile_I4, out, out if out_scale is None else out_scale,
        plan.pairs_XN.shape[1], pairs, width, outputs, experts,
        PARTS=parts, SCALE=weight.scale is not None, PER=pairs // values.shape[0], GATE=gate,
        LARGEST=LARGEST[FLOAT8] if piece else 0, SHARED=weight.shared is not None,
        ROWS=rows, FEW=rows // 2 if rows >= 64 else rows, OUTPUTS=many, DEPTH=depth,
        EXACT=width % depth == 0 and outputs % many == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
        num_stages=stages(values.device, each, most), **early(values),
    )  # fmt: skip
    return out, out_scale


def rows_of_tile(pairs_per_expert: float, size: int) -> int:
    """`size`: bytes of a weight. This and the shapes by measurements on an H200 with the experts of LLaDA2-mini."""
    if size > 2 or pairs_per_expert <= 4:
        return 16
    return 128 if pairs_per_expert > 32 else 64 if size == 2 else 32


def _shape(rows: int, size: int, gated: bool) -> Shape:
    if size > 2:
        return Shape(64, 32, 4, 3)
    if size == 1:
        return Shape(128, 128, 4 if 16 < rows < 128 else 8, 4 if rows == 128 else 3) if gated else Shape(64, 128, 4, 3)
    if rows == 128:
        return Shape(128, 64, 8, 4) if gated else Shape(128, 64, 4, 3)
    if rows == 64:
        return Shape(64 if gated else 128, 64, 4, 3)
    return Shape(64, 128, 4, 3) if gated else Shape(64, 64, 4, 4)


@triton.jit
def _combine(
    x_ptr, weights_ptr, plus_ptr, out_ptr, width, C: tl.constexpr, SHARED: tl.constexpr, PLUS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x_ptr += token * (C + SHARED) * width + column
    sum = added(x_ptr, weights_ptr + token * C, inside, width, 0.0, C + SHARED, C)
    if PLUS:
        sum += tl.load(plus_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, sum.to(out_ptr.dtype.element_ty), mask=inside)


def combine(x_PD: Tensor, weights_NC: Tensor, plus_ND: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's pairs, that with a shared expert as it is, and `plus_ND`, in float32. [N, D]"""
    (tokens, chosen), width = weights_NC.shape, x_PD.shape[-1]
    out_ND = x_PD.new_empty(tokens, width)
    most, warps = (256, 1) if tokens <= 64 else (1024, 4)  # of few tokens, more programs wait less: 1.8 us, not 2.5
    block = min(triton.next_power_of_2(width), most)
    _combine[(tokens, triton.cdiv(width, block))](
        x_PD, weights_NC.float().contiguous(), out_ND if plus_ND is None else plus_ND.contiguous(), out_ND, width,
        C=chosen, SHARED=x_PD.shape[0] // tokens - chosen, PLUS=plus_ND is not None, BLOCK=block,
        num_warps=warps, **early(x_PD),
    )  # fmt: skip
    return out_ND
