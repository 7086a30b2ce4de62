"""The router's choice, one program a token, and products of tokens with the experts they chose.

With up to some thousand tokens the time is that of reading the chosen experts' weights. A plan cuts the pairs of token
and expert into tiles of one expert each, and a program multiplies a tile with some outputs of its expert. Most experts
then are one tile, whose weights are read once; those that many tokens choose are divided among many programs. There is
room for the most tiles there can be, so the grid does not depend on the choice, and programs without one leave at once.
The weights are the tall operand, as in `linear`. Each output has one writer and sums are in a fixed order.

With more tokens the products take the time, and the rows are the tall operand. The copy engine of Hopper (TMA) fetches
the weights and the rows of the second product. Those of the first product are scattered, which it cannot fetch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dinfer.core.kernels.dispatch import card
from dinfer.core.kernels.types import FLOAT8, LARGEST, Grouped, Matrices, PartialSums, Plan, Rounded
from dinfer.core.terms.spec import ExpertSpec
from dinfer.kernels.triton.launch import added, addends, early, follow, let_next, stages, wait
from dinfer.kernels.triton.linear import copyable, round_groups, scaled
from dinfer.kernels.triton.packed import group_sums


@triton.jit
def _plan(
    experts_ptr, pairs_ptr, tile_ptr, tokens, experts, tiles, C: tl.constexpr, CHOSEN: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    expert = tl.program_id(0)
    everyone = expert == experts
    place = tl.arange(0, CHOSEN)[None, :]
    found, lower = 0, tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = (token < tokens)[:, None] & (place < C)
        chosen = tl.load(experts_ptr + token[:, None] * C + place, mask=there, other=2**30)
        mine = tl.max(tl.where(chosen == expert, place, -1), 1)  # -1: the token has not chosen this expert
        if SHARED:
            mine = tl.where(everyone & (token < tokens), C, mine)
        rank = tl.cumsum((mine >= 0).to(tl.int32), 0)
        pair_ptrs = pairs_ptr + expert.to(tl.int64) * tokens + found + rank - 1
        tl.store(pair_ptrs, token * (C + SHARED) + mine, mask=mine >= 0)
        found += tl.max(rank, 0)
        lower += tl.sum((chosen < expert).to(tl.int32), 1)
    before = tl.sum(lower)
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


def plan(experts_NC: Tensor, experts: int, rows: int, shared: bool = False) -> Plan:
    """No expert is in `experts_NC` [N, C] twice for one token. Larger numbers than `experts` are none."""
    (tokens, chosen), device = experts_NC.shape, experts_NC.device
    programs, pairs = experts + shared, tokens * (chosen + shared)
    made = Plan(
        torch.empty(programs, tokens, dtype=torch.int32, device=device),
        torch.empty(programs + pairs // rows, 4, dtype=torch.int32, device=device),
        rows,
        pairs,
    )
    block, many = min(triton.next_power_of_2(tokens), 1024), triton.next_power_of_2(chosen)
    _plan[(programs,)](
        experts_NC.contiguous(), made.pairs_XN, made.tile_I4, tokens, experts, len(made.tile_I4),
        C=chosen, CHOSEN=many, SHARED=int(shared), ROWS=rows, BLOCK=block,
        num_warps=min(max(block * many // 256, 1), 8), **early(experts_NC),
    )  # fmt: skip
    return made


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _gelu(x):
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh y) / 2 is sigmoid(2 y)


@triton.jit
def _by_row(x, TALL: tl.constexpr):
    return x[None, :] if TALL else x[:, None]


@triton.jit
def _by_output(x, TALL: tl.constexpr):
    return x[:, None] if TALL else x[None, :]


@triton.jit
def _multiplied(weight, x, total, TALL: tl.constexpr, PRECISION: tl.constexpr):
    if TALL:
        product = tl.dot(weight.to(x.dtype), x, total, input_precision=PRECISION)
    else:
        product = tl.dot(x, weight.T, total, input_precision=PRECISION)
    return product


@triton.jit
def _tile(
    x_ptr, x_tiles, x_scale_ptr, weight_ptr, weight_tiles, scale_ptr, pairs_ptr, out_ptr, out_scale_ptr,
    pairs, width, outputs, expert, column, place, count,
    PARTS: tl.constexpr, SCALE: tl.constexpr, PER: tl.constexpr, GATE: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TALL: tl.constexpr = weight_tiles is None
    EACH: tl.constexpr = 1 if GATE is None else 2
    slot = tl.arange(0, ROWS)
    there = slot < count
    rank = place.to(tl.int64) + slot
    row = rank if GATE is None else tl.load(pairs_ptr + slot, mask=there, other=0).to(tl.int64) // PER
    output, depth = column * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, DEPTH)
    inside = output < outputs
    source = expert * outputs * EACH + output
    x_ptrs = x_ptr + _by_row(row, TALL) * width + _by_output(depth, TALL)
    if TALL:
        weight_ptrs = weight_ptr + source[:, None] * width + depth[None, :]
        up = outputs.to(tl.int64) * width  # from a gate's weights to those of what it gates
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        gated = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, EACH * OUTPUTS), tl.float32)
    if PARTS:
        scale = tl.load(x_scale_ptr + row, mask=there, other=0.0)
    if SCALE:
        weight_scale = tl.load(scale_ptr + source, mask=inside, other=0.0)
        if GATE is not None:
            up_scale = tl.load(scale_ptr + source + outputs, mask=inside, other=0.0)
    for k in range(0, width, DEPTH):
        deep = k + depth < width
        if x_tiles is not None:
            x = x_tiles.load([place, k])  # rows beyond the tile's are those of other tiles, and nothing stores theirs
        elif EXACT:
            x = tl.load(x_ptrs + k, mask=_by_row(there, TALL), other=0.0)
        else:
            x = tl.load(x_ptrs + k, mask=_by_row(there, TALL) & _by_output(deep, TALL), other=0.0)
        mask = inside[:, None] & deep[None, :]
        if not TALL:
            weight = weight_tiles.load([expert.to(tl.int32) * EACH, column * OUTPUTS, k])
            weight = weight.reshape(EACH * OUTPUTS, DEPTH)
        elif EXACT:
            weight = tl.load(weight_ptrs + k)
        else:
            weight = tl.load(weight_ptrs + k, mask=mask, other=0.0)
        if PARTS > 1:  # the scales of the next piece come while this one is multiplied
            next = tl.load(x_scale_ptr + tl.minimum(k // DEPTH + 1, PARTS - 1) * pairs + row, mask=there, other=0.0)
            total += _multiplied(weight, x, None, TALL, PRECISION) * _by_row(scale, TALL)
            scale = next
        else:
            total = _multiplied(weight, x, total, TALL, PRECISION)
        if TALL and GATE is not None:
            more = weight_ptrs + up + k
            weight = tl.load(more) if EXACT else tl.load(more, mask=mask, other=0.0)
            gated = _multiplied(weight, x, gated, TALL, PRECISION)
    if GATE is not None and not TALL:
        total, gated = total.reshape(ROWS, 2, OUTPUTS).permute(0, 2, 1).split()
    if SCALE:
        total *= _by_output(weight_scale, TALL)
        if GATE is not None:
            gated *= _by_output(up_scale, TALL)
    if PARTS == 1:
        total *= _by_row(scale, TALL)
        if GATE is not None:
            gated *= _by_row(scale, TALL)
    if GATE is None:
        rank = tl.load(pairs_ptr + slot, mask=there, other=0).to(tl.int64)
    else:
        total = (_silu(total) if GATE == "silu" else _gelu(total)) * gated
    if LARGEST:
        total, scale = scaled(total, 0 if TALL else 1, LARGEST)
        tl.store(out_scale_ptr + column * pairs + _by_row(rank, TALL), scale, mask=_by_row(there, TALL))
    out = out_ptr + _by_row(rank, TALL) * outputs + _by_output(output, TALL)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=_by_row(there, TALL) & _by_output(inside, TALL))


@triton.jit
def _expert_linear(
    x_ptr, x_tiles, few_tiles, x_scale_ptr, weight_ptr, weight_tiles, scale_ptr, shared_ptr, shared_scale_ptr,
    pairs_ptr, tile_ptr, out_ptr, out_scale_ptr, tokens, pairs, width, outputs, experts,
    PARTS: tl.constexpr, SCALE: tl.constexpr, PER: tl.constexpr, GATE: tl.constexpr, LARGEST: tl.constexpr,
    SHARED: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    # Programs next to each other share their rows, and those of one expert its weights, through the L2 cache.
    columns = tl.cdiv(outputs, OUTPUTS)
    column, turn = tl.program_id(0) % columns, tl.program_id(0) // columns
    tile_ptr += turn // SPLIT * 4
    before = turn % SPLIT * ROWS
    # All of a tile's fields at once: a program would wait for the others only when it has seen the count.
    expert, slot = tl.load(tile_ptr).to(tl.int64), tl.load(tile_ptr + 1) + before
    place, count = tl.load(tile_ptr + 2) + before, tl.load(tile_ptr + 3) - before
    if count <= 0:
        return
    pairs_ptr += expert * tokens + slot
    if SHARED:  # noqa: SIM102 (known when it is compiled, the next one is not)
        if expert == experts:
            expert, weight_ptr, scale_ptr = expert * 0, shared_ptr, shared_scale_ptr
    if FEW < ROWS:  # noqa: SIM102 (likewise)
        if count <= FEW:
            _tile(
                x_ptr, few_tiles, x_scale_ptr, weight_ptr, weight_tiles, scale_ptr, pairs_ptr, out_ptr, out_scale_ptr,
                pairs, width, outputs, expert, column, place, count,
                PARTS, SCALE, PER, GATE, LARGEST, FEW, OUTPUTS, DEPTH, EXACT, PRECISION,
            )  # fmt: skip
            return
    _tile(
        x_ptr, x_tiles, x_scale_ptr, weight_ptr, weight_tiles, scale_ptr, pairs_ptr, out_ptr, out_scale_ptr,
        pairs, width, outputs, expert, column, place, count,
        PARTS, SCALE, PER, GATE, LARGEST, ROWS, OUTPUTS, DEPTH, EXACT, PRECISION,
    )  # fmt: skip


class Shape(NamedTuple):
    outputs: int  # of a tile
    depth: int
    warps: int
    stages: int  # at most
    rows: int  # of a program, which takes a tile or a part of it
    copied: bool = False  # whether the copy engine of Hopper (TMA) fetches weights, and rows of the second product


def expert_linear(
    x: Tensor | Rounded, weight: Matrices, plan: Plan, gate: str | None = None, piece: int | None = None
) -> Tensor | Rounded:
    """For each pair of token and expert, the expert's matrix times a row. [P, O]

    With a `gate`, rows are those of tokens. "silu" or "gelu" of half of the outputs is multiplied with the other half,
    [P, O / 2], in the order of tiles. With a `piece` too, it is rounded to float8 by pieces of so many values, whose
    scales are [P, pieces]. Without a gate, rows are what such a product has made. Those that come out are in the order
    of the tokens, with each in that of its experts, a shared one last.
    """
    values, x_scale = (x.contiguous(), None) if isinstance(x, Tensor) else (x.values, x.scale)
    (experts, outputs, width), pairs = weight.each.shape, plan.pairs
    outputs = outputs // 2 if gate else outputs
    parts = 0 if x_scale is None else x_scale.numel() // values.shape[0]
    plain = weight.shared is None and weight.each.is_contiguous() and values.dtype == weight.each.dtype
    copied = plain and copyable(values, weight.each[0])
    inner, size = outputs if gate else width, values.dtype.itemsize
    many, depth, warps, most, rows, copied = _shape(plan.rows, size, gate is not None, copied, inner)
    many, depth = piece or many, width // parts if parts > 1 else depth
    few, copies = rows // 2 if rows >= (128 if copied else 64) else rows, 2 if gate else 1
    each = (many * copies * weight.each.dtype.itemsize + rows * values.dtype.itemsize) * depth
    out = values.new_empty(pairs, outputs, dtype=FLOAT8 if piece else x.dtype)
    out_scale = values.new_empty(outputs // piece, pairs, dtype=torch.float32) if piece else None
    x_tiles, few_tiles, weight_tiles = None, None, None
    if copied:
        by_matrix = weight.each.view(experts * copies, outputs, width)
        weight_tiles = TensorDescriptor.from_tensor(by_matrix, [copies, many, depth])
    if copied and not gate:
        x_tiles, few_tiles = (TensorDescriptor.from_tensor(values, [count, depth]) for count in (rows, few))
    _, scale, shared, shared_scale = (out if part is None else part for part in weight)
    _expert_linear[(triton.cdiv(outputs, many) * plan.tile_I4.shape[0] * (plan.rows // rows),)](
        values, x_tiles, few_tiles, out if x_scale is None else x_scale, weight.each, weight_tiles, scale, shared,
        shared_scale, plan.pairs_XN, plan.tile_I4, out, out if out_scale is None else out_scale,
        plan.pairs_XN.shape[1], pairs, width, outputs, experts,
        PARTS=parts, SCALE=weight.scale is not None, PER=pairs // values.shape[0], GATE=gate,
        LARGEST=LARGEST[FLOAT8] if piece else 0, SHARED=weight.shared is not None, SPLIT=plan.rows // rows,
        ROWS=rows, FEW=few, OUTPUTS=many, DEPTH=depth, EXACT=width % depth == 0 and outputs % many == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
        num_stages=stages(values.device, each, most), **early(values),
    )  # fmt: skip
    return out if out_scale is None else Rounded(out, out_scale.mT, x.dtype)


def _shape(rows: int, size: int, gated: bool, copied: bool, inner: int) -> Shape:
    """By measurements on an H200 with the experts of LLaDA2-mini, and with a fourth of each and of LLaDA2-flash's.

    `size`: bytes of an input. `inner`: values between gate and down. Of few, short pipelines leave room for more
    programs at once.
    """
    if size > 2:
        return Shape(64, 32, 4, 3, rows)
    if copied and rows == 128:  # of 8 bits, smaller tiles of `down` wait less for their scales
        return Shape(128, 128 // size, 8, 4, rows, True) if gated else Shape(128, 128 // size, 4, 3, 64 * size, True)
    if size == 1 and gated:
        return Shape(128, 128, 4 if 16 < rows < 128 else 8, 4 if rows == 128 else 3, rows)
    if size == 1:
        return Shape(128, 128, 4, 2, rows) if rows == 16 and inner <= 256 else Shape(64, 128, 4, 3, rows)
    if rows == 128:
        return Shape(128, 64, 8, 4, rows) if gated else Shape(128, 64, 4, 3, rows)
    if rows == 64:
        return Shape(64 if gated else 128, 64, 4, 3, rows)
    if inner <= 128:
        return Shape(64, 128, 4, 2, rows) if gated else Shape(128, 64, 4, 3, rows)
    return Shape(64, 128, 4, 3, rows) if gated else Shape(64, 64, 4, 4, rows)


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


PACKED = 128, 1, 8, 3  # outputs of a tile, groups together, warps, stages, by measurements with LLaDA2-mini's experts


def packed_expert_linear(
    x: Tensor | Grouped, values: Tensor, scale_XOG: Tensor, plan: Plan, shared: tuple[Tensor, Tensor] | None = None, *,
    by_token: bool,
) -> Tensor:  # fmt: skip
    """As `expert_linear`, with weights in 4 bits and no gate. [P, O]

    `by_token`: rows that go in are those of tokens, and those that come out are in the order of the experts; else the
    other way round, a row for each pair.
    """
    (experts, outputs, groups), (rows, width) = scale_XOG.shape, x.shape
    group = width // groups
    given = x if isinstance(x, Grouped) else round_groups(x, group)
    out_PO = values.new_empty(plan.pairs, outputs, dtype=x.dtype)
    shared_values, shared_scale = (values, scale_XOG) if shared is None else shared
    tall, together, warps, most = PACKED
    _packed_expert_linear[(triton.cdiv(outputs, tall) * plan.tile_I4.shape[0],)](
        given.values_RK, given.scale_GR, values, scale_XOG, shared_values, shared_scale, plan.pairs_XN, plan.tile_I4,
        out_PO, plan.pairs_XN.shape[1], len(given.values_RK), width, outputs, experts, *scale_XOG.stride(),
        PER=plan.pairs // rows if by_token else 0, SHARED=shared is not None, ROWS=plan.rows, OUTPUTS=tall, GROUP=group,
        TILED=values.ndim > 3, TOGETHER=together, ASM=card(values.device) is not None, num_warps=warps,
        num_stages=stages(values.device, (tall // 2 + plan.rows) * group * together, most), **early(values),
    )  # fmt: skip
    return out_PO


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


LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _first(values, place, LAST: tl.constexpr):
    """The place of the largest integer, of equals the first. A warp reduces integers faster than floats."""
    return tl.min(tl.where(values == tl.max(values, 0), place, LAST), 0)


@triton.jit
def _ordered(x):
    """Integers that sort like the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _route(
    logits_ptr, bias_ptr, pos_ptr, experts_ptr, weights_ptr, experts, scale,
    PARTS: tl.constexpr, C: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size = experts // G
    group, part = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    lane = group[:, None] * size + part[None, :]  # experts by group, padded to powers of two
    inside = (group < G)[:, None] & (part < size)[None, :]
    let_next(EARLY)
    if BIAS:
        bias = tl.load(bias_ptr + lane, mask=inside, other=0.0)
    wait(EARLY)
    logits_ptr += token * experts
    apart = tl.num_programs(0) * experts
    logits = added(logits_ptr + lane, logits_ptr, inside, apart, float("-inf"), PARTS, 0)
    if SIGMOID:
        score = tl.sigmoid(logits)
    else:
        top = tl.max(logits)
        sum = tl.sum(tl.exp(logits - top))
        score = tl.exp(logits - top) / sum
    rank = score
    if BIAS:
        rank += bias
    rank = tl.where(inside, rank, float("-inf"))
    if G > 1:
        best = tl.max(rank, 1)
        if SIZE > 1:
            first = tl.min(tl.where(rank == best[:, None], part[None, :], SIZE), 1)
            best += tl.max(tl.where(part[None, :] == first[:, None], float("-inf"), rank), 1)
        best = _ordered(tl.where(group < G, best, float("-inf")))
        kept = group < 0
        for _ in tl.static_range(KEPT):
            g = _first(best, group, GROUPS)
            kept = kept | (group == g)
            best = tl.where(group == g, LOWEST, best)
        rank = tl.where(kept[:, None], rank, float("-inf"))
    rank = _ordered(tl.reshape(rank, (GROUPS * SIZE,)))
    cell = tl.arange(0, GROUPS * SIZE)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), tl.int32)
    for c in tl.static_range(C):
        at = _first(rank, cell, GROUPS * SIZE)
        chosen = tl.where(place == c, at // SIZE * size + at % SIZE, chosen)
        rank = tl.where(cell == at, LOWEST, rank)
    weight = added(logits_ptr + chosen, logits_ptr, place < C, apart, float("-inf"), PARTS, 0)
    weight = tl.sigmoid(weight) if SIGMOID else tl.exp(weight - top) / sum
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    weight *= scale
    if PADDED:
        there = tl.load(pos_ptr + token) >= 0
        chosen, weight = tl.where(there, chosen, experts + 1), tl.where(there, weight, 0.0)
    tl.store(experts_ptr + token * C + place, chosen, mask=place < C)
    tl.store(weights_ptr + token * C + place, weight, mask=place < C)


def route(
    logits_NX: Tensor | PartialSums, spec: ExpertSpec, *, bias_X: Tensor | None, pos_BW: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `dinfer.core.kernels.moe.route`. A token's best expert comes first; of equal experts the first wins."""
    logits, parts = addends(logits_NX)
    tokens, experts = logits_NX.shape
    experts_NC = torch.empty(tokens, spec.chosen, dtype=torch.int32, device=logits.device)
    weights_NC = logits.new_empty(tokens, spec.chosen)
    _route[(tokens,)](
        logits, logits if bias_X is None else bias_X, experts_NC if pos_BW is None else pos_BW.contiguous(),
        experts_NC, weights_NC, experts, spec.scale, PARTS=parts, C=spec.chosen, G=spec.groups,
        KEPT=spec.groups_chosen, SIGMOID=spec.scores == "sigmoid", NORMALIZE=spec.normalize,
        BIAS=bias_X is not None, PADDED=pos_BW is not None, SIZE=triton.next_power_of_2(experts // spec.groups),
        CHOSEN=triton.next_power_of_2(spec.chosen), GROUPS=triton.next_power_of_2(spec.groups), num_warps=1,
        **early(logits),
    )  # fmt: skip
    return experts_NC, weights_NC
