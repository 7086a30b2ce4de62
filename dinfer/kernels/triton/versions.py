"""The pages of versions of a row, in two launches, and the keys of the chosen one; see `dinfer.core.step.versions`."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.types import FLOAT8
from dinfer.core.memory import NOWHERE, KVPool
from dinfer.kernels.triton.launch import early, follow

MOST = 1024  # values that a program copies at a time


@triton.jit(do_not_specialize=["lanes", "first_beside"])
def _forked(
    table_ptr, slot_ptr, pos_ptr, out_ptr, copies_ptr, lanes, width, pages, first_beside, sets, fork,
    PAGE: tl.constexpr, NOWHERE: tl.constexpr, W: tl.constexpr, P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    lane, version = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, column = tl.arange(0, W), tl.arange(0, P)
    pos = tl.load(pos_ptr + lane * width + at, mask=at < width, other=-1)
    last = tl.max(pos, 0)
    last = tl.where(last < 0, -1, last // PAGE)
    first = tl.min(tl.where(pos < 0, NOWHERE, pos), 0) // PAGE
    slot = tl.load(slot_ptr + lane)
    inside, line = column < pages, slot * pages + column
    page = tl.load(table_ptr + line, mask=inside, other=0)
    own = first_beside + (slot * sets + version - 1) * fork - first + column
    takes = (column >= first) & (column < tl.where(version > 0, last + 1, 0))
    tl.store(out_ptr + (version * lanes + lane) * pages + column, tl.where(takes, own, page), mask=inside)
    ends = tl.arange(0, 2)  # the first and the last of these pages may hold keys beside the window
    where = tl.minimum(tl.maximum(tl.where(ends == 0, first, last), 0), pages - 1)
    origin = tl.load(table_ptr + slot * pages + where)
    copied = first_beside + (slot * sets + version - 1) * fork - first + where
    copied = tl.where((where >= first) & (where <= last), copied, origin)
    place = copies_ptr + (((version - 1) * lanes + lane) * 2 + ends) * 2
    tl.store(place, origin, mask=(ends >= 0) & (ends < tl.where(version > 0, 2, 0)))
    tl.store(place + 1, copied, mask=(ends >= 0) & (ends < tl.where(version > 0, 2, 0)))


@triton.jit
def _moved(origin, copied, k_ptr, v_ptr, apart, size, MOST: tl.constexpr):
    layer, at = tl.program_id(1).to(tl.int64), tl.arange(0, MOST)
    for begin in range(0, tl.where(origin == copied, 0, size), MOST):
        inside = begin + at < size
        place = layer * apart + begin + at
        k = tl.load(k_ptr + place + origin * size, mask=inside, other=0)
        v = tl.load(v_ptr + place + origin * size, mask=inside, other=0)
        tl.store(k_ptr + place + copied * size, k, mask=inside)
        tl.store(v_ptr + place + copied * size, v, mask=inside)


@triton.jit(do_not_specialize=["apart"])
def _copy(copies_ptr, k_ptr, v_ptr, apart, size, MOST: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    pair = tl.program_id(0)
    _moved(tl.load(copies_ptr + 2 * pair), tl.load(copies_ptr + 2 * pair + 1), k_ptr, v_ptr, apart, size, MOST)


@triton.jit(do_not_specialize=["apart", "queries"])
def _adopt(write_ptr, choice_ptr, k_ptr, v_ptr, apart, size, queries, width, MOST: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    query = tl.program_id(0)
    origin = tl.load(write_ptr + tl.load(choice_ptr + query // width) * queries + query)
    _moved(origin, tl.load(write_ptr + query), k_ptr, v_ptr, apart, size, MOST)


def sides(kv: KVPool | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each kind of layer, whose bits are copied."""
    while kv is not None:
        k, v = (x.view(torch.uint8) if x.dtype == FLOAT8 else x for x in (kv.k_JPTGE, kv.v_JPTGE))
        yield k, v
        kv = kv.local


def adopt(kv: KVPool, write_CBW: Tensor, choice_B: Tensor) -> None:
    """See `dinfer.core.step.versions.adopt`. `write_CBW`: where in the pool each version has its keys."""
    _, lanes, width = write_CBW.shape
    for k, v in sides(kv):
        size = k[0, 0, 0].numel()
        _adopt[(lanes * width, len(k))](
            write_CBW, choice_B, k, v, k.stride(0), size, lanes * width, width,
            MOST=min(triton.next_power_of_2(size), MOST), num_warps=1, **early(choice_B),
        )  # fmt: skip


def forked(kv: KVPool, slot_B: Tensor, pos_BW: Tensor, count: int) -> Tensor:
    """See `dinfer.core.step.versions.forked`."""
    pos_BW, (lanes, width), pages = pos_BW.contiguous(), pos_BW.shape, kv.table_NP.shape[1]
    table_GP = slot_B.new_empty((count + 1) * lanes, pages)
    copies_X2 = slot_B.new_empty(count * lanes * 2, 2)
    _forked[(lanes, count + 1)](
        kv.table_NP, slot_B, pos_BW, table_GP, copies_X2, lanes, width, pages, kv.first_beside, kv.candidates, kv.fork,
        PAGE=kv.page, NOWHERE=NOWHERE, W=triton.next_power_of_2(width), P=triton.next_power_of_2(pages), num_warps=1,
        **early(slot_B),
    )  # fmt: skip
    for k, v in sides(kv) if count else ():
        _copy[(len(copies_X2), len(k))](
            copies_X2, k, v, k.stride(0), k[0, 0].numel(), MOST=MOST, num_warps=4, **early(slot_B)
        )
    return table_GP
