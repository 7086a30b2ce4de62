"""The pages of versions of a row, in two launches; see `dinfer.core.step.versions`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dinfer.core.kernels.types import FLOAT8
from dinfer.core.memory import NOWHERE, KVPool
from dinfer.kernels.triton.launch import early, follow

BYTES = 1024  # of a page that a program copies at a time


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


@triton.jit(do_not_specialize=["apart"])
def _copy(copies_ptr, k_ptr, v_ptr, apart, size, BYTES: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    origin, copied = tl.load(copies_ptr + 2 * pair), tl.load(copies_ptr + 2 * pair + 1)
    at = tl.arange(0, BYTES)
    for begin in range(0, tl.where(origin == copied, 0, size), BYTES):
        inside = begin + at < size
        place = layer * apart + begin + at
        k = tl.load(k_ptr + place + origin * size, mask=inside, other=0)
        v = tl.load(v_ptr + place + origin * size, mask=inside, other=0)
        tl.store(k_ptr + place + copied * size, k, mask=inside)
        tl.store(v_ptr + place + copied * size, v, mask=inside)


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
    pool: KVPool | None = kv
    while pool is not None and count:
        k, v = (x.view(torch.uint8) if x.dtype == FLOAT8 else x for x in (pool.k_JPTGE, pool.v_JPTGE))
        _copy[(len(copies_X2), len(k))](
            copies_X2, k, v, k.stride(0), k[0, 0].numel(), BYTES=BYTES, num_warps=4, **early(slot_B)
        )
        pool = pool.local
    return table_GP
