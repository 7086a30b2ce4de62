"""Residual RMSNorm and SwiGLU. A program takes a row or a piece of one."""

import math
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.types import FLOAT8, LARGEST, Grouped, InputFormat, PartialSums, Rounded, Squares
from dinfer.kernels.symmetric import EMPTY as SENT_NOTHING
from dinfer.kernels.symmetric import GROUP, ROWS, Exchange
from dinfer.kernels.triton.launch import added, addends, early, follow, let_next, wait
from dinfer.kernels.triton.linear import FEW, empty_groups, empty_rounded, in_groups, round_rows, scaled, store_groups

EMPTY = tl.constexpr(SENT_NOTHING)
MANY = 256  # rows that busy the card with a program each


@triton.jit
def _arrived(own, inbox_ptr, apart, place, inside, dtype: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """The sum of all ranks' bits in float32, in their order, once those of the others are in the inbox."""
    total, missing = tl.zeros(place.shape, tl.float32), 1
    while missing > 0:  # it reads all ranks' rows at once: one after the other would take as many times as long
        total, empty = tl.zeros(place.shape, tl.float32), tl.zeros(place.shape, tl.int32)
        for rank in tl.static_range(RANKS):
            sent = own
            if rank != RANK:
                sent = tl.load(inbox_ptr + rank * apart + place, mask=inside, other=0, volatile=True)
            empty |= (sent == EMPTY).to(tl.int32)
            total += sent.to(dtype, bitcast=True).to(tl.float32)
        missing = tl.max(empty, 0) if len(empty.shape) == 1 else tl.max(tl.max(empty, 1), 0)
    return total


@triton.jit
def _emptied(inbox_ptr, apart, place, inside, RANK: tl.constexpr, RANKS: tl.constexpr):
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(inbox_ptr + rank * apart + place, tl.full(place.shape, EMPTY, tl.int16), mask=inside)


@triton.jit
def _swapped(
    own, inbox_ptr, there, count_ptr, count, column, inside,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, WIDEST: tl.constexpr,
):  # fmt: skip
    """The sum of a row over all ranks, in their order, rounded once (`Exchange`).

    It empties the places that it has read. Another GPU writes there again two swaps later. Before that it needs the
    row of the next swap, and this GPU sends that row only after this kernel.
    """
    row = tl.program_id(0)
    turn = (count & 1) * RANKS * ROWS * WIDEST
    place = turn + row * WIDEST + column
    bits = own.to(tl.int16, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits).to(tl.int16)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there_ptr = there[rank].to(tl.pointer_type(tl.int16))
            tl.store(tl.multiple_of(there_ptr, 16) + place, bits, mask=inside)
    total = _arrived(bits, inbox_ptr, ROWS * WIDEST, place, inside, own.dtype, RANK, RANKS)
    _emptied(inbox_ptr, ROWS * WIDEST, place, inside, RANK, RANKS)
    tl.store(count_ptr + row, count + 1)
    return total.to(own.dtype)


@triton.jit
def _plus(
    x, delta_ptr, mix_ptr, plus_ptr, inbox_ptr, address_ptr, count_ptr, column, inside, apart, stride,
    PARTS: tl.constexpr, MIXED: tl.constexpr, PLUS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, WIDEST: tl.constexpr,
):  # fmt: skip
    """A row plus the sum of the parts of its addend, and of other ranks' addends where there are `RANKS`."""
    row = tl.program_id(0)
    count, there = 0, ()
    if RANKS:  # asked for now: the first store would make a load of the next address wait
        count = tl.load(count_ptr + row)
        for rank in tl.static_range(RANKS):
            there = there + (tl.load(address_ptr + rank),)  # type: ignore[assignment]  # noqa: RUF005  no star in Triton
    delta_ptr += row.to(tl.int64) * stride + column
    delta = added(delta_ptr, mix_ptr + row * MIXED, inside, apart, 0.0, PARTS, MIXED)
    if PLUS:
        delta += tl.load(plus_ptr + column, mask=inside, other=0.0).to(tl.float32)
    delta = delta.to(x.dtype)
    if RANKS:
        delta = _swapped(delta, inbox_ptr, there, count_ptr, count, column, inside, RANK, RANKS, ROWS, WIDEST)
    return (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)


@triton.jit
def _add(
    x_ptr, delta_ptr, mix_ptr, plus_ptr, sum_ptr, inbox_ptr, address_ptr, count_ptr, width, apart, stride,
    PARTS: tl.constexpr, MIXED: tl.constexpr, PLUS: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, WIDEST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row, column = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    x = _plus(
        x, delta_ptr, mix_ptr, plus_ptr + row, inbox_ptr, address_ptr, count_ptr, column, inside, apart, stride,
        PARTS, MIXED, PLUS, RANK, RANKS, ROWS, WIDEST,
    )  # fmt: skip
    tl.store(sum_ptr + row + column, x, mask=inside)


@triton.jit
def _add_rms_norm(
    x_ptr, delta_ptr, mix_ptr, plus_ptr, weight_ptr, sum_ptr, out_ptr, scale_ptr, square_ptr, wide_ptr,
    inbox_ptr, address_ptr, count_ptr, width, apart, stride, room, eps,
    PARTS: tl.constexpr, MIXED: tl.constexpr, PLUS: tl.constexpr, LARGEST: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, WIDEST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64) * width, tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < width
    let_next(EARLY)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if PARTS:
        x = _plus(
            x, delta_ptr, mix_ptr, plus_ptr + row, inbox_ptr, address_ptr, count_ptr, column, inside, apart, stride,
            PARTS, MIXED, PLUS, RANK, RANKS, ROWS, WIDEST,
        )  # fmt: skip
        tl.store(sum_ptr + row + column, x, mask=inside)
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, 0)
    if PIECES:
        tl.store(square_ptr + tl.program_id(1) * room + tl.program_id(0), square)
        store_groups(wide * weight, out_ptr, scale_ptr, tl.program_id(0), first, width, room, GROUP, BLOCK)
        return
    scale = tl.rsqrt(square / width + eps)
    normed = ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)
    if BOTH:
        tl.store(wide_ptr + row + column, normed, mask=inside)
    if GROUP:
        store_groups(normed.to(tl.float32), out_ptr, scale_ptr, tl.program_id(0), 0, width, room, GROUP, BLOCK)
        return
    if LARGEST:
        normed, scale = scaled(normed.to(tl.float32), 0, LARGEST)
        tl.store(scale_ptr + tl.program_id(0) + tl.arange(0, 1), scale)
    tl.store(out_ptr + row + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _own(
    delta_ptr, mix_ptr, plus_ptr, row, column, inside, width, apart, stride, dtype: tl.constexpr,
    PARTS: tl.constexpr, MIXED: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    """The bits that this rank adds to rows. -0.0 stands for nothing, so it adds 0 instead."""
    delta = added(delta_ptr + row * stride + column, mix_ptr + row * MIXED, inside, apart, 0.0, PARTS, MIXED)
    if PLUS:
        delta += tl.load(plus_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    bits = delta.to(dtype).to(tl.int16, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(tl.int16)


@triton.jit
def _tile(count_ptr, program, first, each, lines, column, width, PROGRAMS: tl.constexpr):
    """The rows of a program from its line `first` on, which of their values there are, and the places to use."""
    row = (program + PROGRAMS * tl.minimum(first + each, lines - 1)).to(tl.int64)
    return row, (first + each < lines) & (column < width), tl.load(count_ptr + row) & 1


@triton.jit
def _add_many(
    x_ptr, delta_ptr, mix_ptr, plus_ptr, sum_ptr, addends_ptr, totals_ptr, address_ptr, count_ptr, rows, width, apart,
    stride, PARTS: tl.constexpr, MIXED: tl.constexpr, PLUS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, WIDEST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x + the sum of all ranks' addends (`ManyRows`). A program sends before it waits, so nobody waits for ever.

    Memory is emptied and taken again as in `_swapped`.
    """
    follow(EARLY)
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    each, column = tl.arange(0, TILE)[:, None], tl.arange(0, BLOCK)[None, :]
    lines = tl.cdiv(rows - program, PROGRAMS)
    theirs = ()
    for rank in tl.static_range(RANKS):
        theirs = theirs + (tl.load(address_ptr + RANKS + rank),)  # type: ignore[assignment]  # noqa: RUF005  no star in Triton
    for first in range(0, lines, TILE):
        owner = (program + first // GROUP) % RANKS
        if owner != RANK:
            row, inside, turn = _tile(count_ptr, program, first, each, lines, column, width, PROGRAMS)
            there_ptr = tl.load(address_ptr + owner).to(tl.pointer_type(tl.int16))
            bits = _own(
                delta_ptr, mix_ptr, plus_ptr, row, column, inside, width, apart, stride, dtype, PARTS, MIXED, PLUS
            )
            slot = program + PROGRAMS * (first // (GROUP * RANKS) * GROUP + first % GROUP + each)
            place = turn.to(tl.int64) * (RANKS * SLOTS * WIDEST) + slot * WIDEST + column
            tl.store(tl.multiple_of(there_ptr, 16) + place, bits, mask=inside)
    for first in range(0, lines, TILE):
        owner = (program + first // GROUP) % RANKS
        if owner == RANK:
            row, inside, turn = _tile(count_ptr, program, first, each, lines, column, width, PROGRAMS)
            x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0)
            own = _own(
                delta_ptr, mix_ptr, plus_ptr, row, column, inside, width, apart, stride, dtype, PARTS, MIXED, PLUS
            )
            slot = program + PROGRAMS * (first // (GROUP * RANKS) * GROUP + first % GROUP + each)
            place = turn.to(tl.int64) * (RANKS * SLOTS * WIDEST) + slot * WIDEST + column
            total = _arrived(own, addends_ptr, SLOTS * WIDEST, place, inside, dtype, RANK, RANKS)
            bits = total.to(dtype).to(tl.int16, bitcast=True)
            bits = tl.where(bits == EMPTY, 0, bits).to(tl.int16)
            there = turn.to(tl.int64) * (ROWS * WIDEST) + row * WIDEST + column
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    there_ptr = theirs[rank].to(tl.pointer_type(tl.int16))
                    tl.store(tl.multiple_of(there_ptr, 16) + there, bits, mask=inside)
            _emptied(addends_ptr, SLOTS * WIDEST, place, inside, RANK, RANKS)
            total = bits.to(dtype, bitcast=True).to(tl.float32)
            tl.store(sum_ptr + row * width + column, (x.to(tl.float32) + total).to(dtype), mask=inside)
    for first in range(0, lines, TILE):
        owner = (program + first // GROUP) % RANKS
        if owner != RANK:
            row, inside, turn = _tile(count_ptr, program, first, each, lines, column, width, PROGRAMS)
            x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0)
            place = turn.to(tl.int64) * (ROWS * WIDEST) + row * WIDEST + column
            sent, missing = tl.zeros((TILE, BLOCK), tl.int16), 1
            while missing > 0:
                sent = tl.load(totals_ptr + place, mask=inside, other=0, volatile=True)
                missing = tl.max(tl.max((sent == EMPTY).to(tl.int32), 1), 0)
            tl.store(totals_ptr + place, tl.full((TILE, BLOCK), EMPTY, tl.int16), mask=inside)
            total = sent.to(dtype, bitcast=True).to(tl.float32)
            tl.store(sum_ptr + row * width + column, (x.to(tl.float32) + total).to(dtype), mask=inside)
    tl.debug_barrier()
    for first in range(0, lines, TILE):
        row = program + PROGRAMS * (first + tl.arange(0, TILE))
        count = tl.load(count_ptr + row, mask=first + tl.arange(0, TILE) < lines, other=0)
        tl.store(count_ptr + row, count + 1, mask=first + tl.arange(0, TILE) < lines)


def _sum_of_many(x_BWD: Tensor, delta_BWD: Tensor | PartialSums, exchange: Exchange) -> Tensor:
    """`add` where ranks share the work of adding up."""
    many, width, lines = exchange.many, x_BWD.shape[-1], x_BWD.shape[:-1].numel()
    assert many is not None
    delta, sum_BWD = Addends.of(delta_BWD, x_BWD, exchange), torch.empty_like(x_BWD)
    block, (slots, widest) = triton.next_power_of_2(width), many.addends.shape[2:]
    fixed = delta.fixed | {"ROWS": many.totals.shape[1], "SLOTS": slots, "WIDEST": widest}
    _add_many[(min(lines, ROWS),)](
        x_BWD, *delta.parts, sum_BWD, many.addends, many.totals, many.address_2N, many.count_R, lines, width,
        *delta.strides, BLOCK=block, TILE=max(min(8192 // block, GROUP), 1), GROUP=GROUP, PROGRAMS=ROWS, num_warps=16,
        **fixed, **early(x_BWD),
    )  # fmt: skip
    return sum_BWD


PIECE = 256  # inputs of a row that a program takes where many programs share a row; a larger group stays whole


def _size(width: int, rows: int, parts: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    each = 256 if rows >= 2 * MANY and parts < 2 else 128  # values of a warp; more parts need more loads at once
    return {"BLOCK": block, "num_warps": min(max(block // each, 1), 16)}


class Addends(NamedTuple):
    """What `_plus` adds to rows, and the memory of an exchange. Where there is none of it, any tensors stand for it."""

    parts: tuple[Tensor, Tensor, Tensor]  # the parts, their weights, and one more addend, the last
    swapped: tuple[Tensor, ...]
    strides: tuple[int, int]  # from one part of a row to the next, and from one row to the next
    fixed: dict[str, int]

    @classmethod
    def of(cls, delta: Tensor | PartialSums | None, x: Tensor, exchange: Exchange | None) -> Self:
        """The addends of `delta`, which has the shape of `x`."""
        values, mix, plus = x, x, None
        parts, mixed, strides = 0, 0, (0, 0)
        if isinstance(delta, PartialSums) and delta.weights_NC is not None:
            values, mix, plus = delta.values, delta.weights_NC, delta.plus_ND
            parts, mixed = values.numel() // x.numel(), mix.shape[1]
            strides = x.shape[-1], parts * x.shape[-1]
        elif delta is not None:
            (values, parts), strides = addends(delta), (x.numel(), x.shape[-1])
        ranks, rows, widest = (0, 0, 0) if exchange is None else exchange.inbox.shape[1:]
        fixed = {"PARTS": parts, "MIXED": mixed, "PLUS": plus is not None}
        fixed |= {"RANK": exchange.rank if exchange else 0, "RANKS": ranks, "ROWS": rows, "WIDEST": widest}
        swapped = (x,) * 3 if exchange is None else (exchange.inbox, exchange.address_N, exchange.count_R)
        return cls((values, mix, values if plus is None else plus), swapped, strides, fixed)


def add(x_BWD: Tensor, delta_BWD: Tensor | PartialSums, exchange: Exchange | None = None) -> Tensor:
    """See `dinfer.core.kernels.norm.add`. With an `exchange`, `delta_BWD` is this rank's addend."""
    x_BWD = x_BWD.contiguous()
    if exchange is not None and exchange.in_two(x_BWD):
        return _sum_of_many(x_BWD, delta_BWD, exchange)
    sum_BWD, width = torch.empty_like(x_BWD), x_BWD.shape[-1]
    delta, lines = Addends.of(delta_BWD, x_BWD, exchange), x_BWD.shape[:-1].numel()
    _add[(lines,)](
        x_BWD, *delta.parts, sum_BWD, *delta.swapped, width, *delta.strides,
        **delta.fixed, **_size(width, lines, delta.fixed["PARTS"]), **early(x_BWD),
    )  # fmt: skip
    return sum_BWD


def add_rms_norm(
    x_BWD: Tensor, delta_BWD: Tensor | PartialSums | None, weight_D: Tensor, eps: float, inputs: InputFormat = "plain",
    exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor | Rounded | Grouped]:  # fmt: skip
    """See `dinfer.core.kernels.norm.add_rms_norm`. With an `exchange`, `delta_BWD` is this rank's addend."""
    x_BWD = x_BWD.contiguous()
    if exchange is not None and exchange.in_two(x_BWD) and delta_BWD is not None:
        x_BWD, delta_BWD, exchange = _sum_of_many(x_BWD, delta_BWD, exchange), None, None
    width, groups = x_BWD.shape[-1], in_groups(inputs, x_BWD.shape[:-1].numel())
    both = inputs == "both" or (groups is not None and groups.both)
    narrow = groups is not None or inputs in ("rounded", "both")
    plain = x_BWD if narrow and not both else torch.empty_like(x_BWD)
    wide, out, scale, square_SR, room = plain if both else None, plain, plain, plain, 0
    made: Tensor | Rounded | Grouped = plain
    piece = width
    if groups is not None:
        made = empty_groups(x_BWD, width, groups.group)._replace(wide=wide)
        out, scale, room = made.values_RK, made.scale_GR, len(made.values_RK)
        if not both and exchange is None and room <= FEW:
            piece = max(PIECE, groups.group)
            square_SR = scale.new_empty(triton.next_power_of_2(triton.cdiv(width, piece)), room)
            made = made._replace(squares=Squares(square_SR, eps))
    elif narrow:
        made = empty_rounded(x_BWD, width)._replace(wide=wide)
        out, scale = made.values, made.scale
    sum_BWD = x_BWD if delta_BWD is None else torch.empty_like(x_BWD)
    delta, lines = Addends.of(delta_BWD, x_BWD, exchange), x_BWD.shape[:-1].numel()
    pieces = len(square_SR) if isinstance(made, Grouped) and made.squares else 0
    _add_rms_norm[(lines, max(pieces, 1))](
        x_BWD, *delta.parts, weight_D, sum_BWD, out, scale, square_SR, plain, *delta.swapped,
        width, *delta.strides, room, eps, LARGEST=LARGEST[FLOAT8] if isinstance(made, Rounded) else 0,
        GROUP=0 if groups is None else groups.group, PIECES=pieces, BOTH=both,
        **delta.fixed, **_size(piece, lines, delta.fixed["PARTS"]), **early(x_BWD),
    )  # fmt: skip
    return sum_BWD, made


@triton.jit
def _swiglu(
    gate_up_ptr, out_ptr, scale_ptr, rows, width, room, apart, PARTS: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    gate_ptr = gate_up_ptr + row * 2 * width + column
    gate = added(gate_ptr, gate_ptr, inside, apart, 0.0, PARTS, 0)
    up = added(gate_ptr + width, gate_ptr, inside, apart, 0.0, PARTS, 0)
    out = (gate * tl.sigmoid(gate) * up).to(gate_up_ptr.dtype.element_ty)
    if GROUP:
        values, first = tl.reshape(out.to(tl.float32), (BLOCK,)), tl.program_id(1) * BLOCK
        store_groups(values, out_ptr, scale_ptr, tl.program_id(0), first, width, room, GROUP, BLOCK)
        return
    if LARGEST:
        out, scale = scaled(out.to(tl.float32), 1, LARGEST)
        tl.store(scale_ptr + row, scale, mask=row < rows)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up_BWX: Tensor | PartialSums, inputs: InputFormat = "plain") -> Tensor | Rounded | Grouped:
    """See `dinfer.core.kernels.norm.swiglu`."""
    (values, parts), (*lead, both) = addends(gate_up_BWX), gate_up_BWX.shape
    rows, width, room = math.prod(lead), both // 2, 0
    like = values.new_empty(*lead, 0, dtype=gate_up_BWX.dtype)
    made: Tensor | Rounded | Grouped
    groups, largest = in_groups(inputs, rows), 0
    block = min(triton.next_power_of_2(width), 512 if groups and rows <= FEW else 1024)
    if groups:
        block = max(block, groups.group)
        made = empty_groups(like, width, groups.group)
        out, scale, room = made.values_RK, made.scale_GR, len(made.values_RK)
    elif inputs == "rounded" and (width <= block or rows >= MANY):
        made = empty_rounded(like, width)
        out, scale, largest, block = made.values, made.scale, LARGEST[FLOAT8], triton.next_power_of_2(width)
    else:
        made = out = scale = like.new_empty(*lead, width)
    many = min(max(2048 // block, 1), 4) if rows >= MANY and width <= block and not groups else 1
    _swiglu[(triton.cdiv(rows, many), triton.cdiv(width, block))](
        values, out, scale, rows, width, room, rows * both, PARTS=parts, GROUP=groups.group if groups else 0,
        LARGEST=largest, ROWS=many, BLOCK=block, num_warps=min(max(block // 512, 4), 32), **early(values),
    )  # fmt: skip
    # A scale needs the whole row. Of few wide rows, one program for each would take longer than a second launch.
    return round_rows(made) if inputs == "rounded" and isinstance(made, Tensor) else made
