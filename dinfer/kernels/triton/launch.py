"""Launches a kernel while the one before it still runs (programmatic dependent launch, from Hopper on).

A step is hundreds of kernels of a few microseconds. This shortens the time between them.

And how a kernel adds up the parts of its input (`dinfer.core.kernels.types`).
"""

import os
from functools import cache
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem
from triton.language.extra import cuda

from dinfer.core.kernels.dispatch import card, on_hopper
from dinfer.core.kernels.types import PartialSums


@triton.jit
def follow(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits until everything that earlier kernels wrote is visible.

    Call it before the first read of what a kernel wrote, and before the first write. A kernel that calls its halves,
    `let_next` and `wait`, may read weights, scales and biases between them. So a kernel that writes weights and lets
    the next one start must not come right before one that multiplies with them.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def shared(function: Any) -> Any:
    """A plain Python function for use in kernels, so that the host and kernels share one source.

    The function may use only its arguments: it is compiled in the scope of this module, where the interpreter finds
    `tl`.
    """
    return triton.jit(FunctionType(function.__code__, globals(), function.__name__))


@triton.jit
def wait(EARLY: tl.constexpr):
    """The second half of `follow`, for a kernel that reads weights first or lets the next one start later.

    The next kernel's programs take the room that is free. If a large kernel starts while this one still runs
    everywhere, its programs crowd on the few multiprocessors with room.
    """
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next(EARLY: tl.constexpr):
    """The first half of `follow`: lets the next kernel start once all programs have reached this point or ended."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def fetch(ptrs):
    """Asks for the 32 bytes at each pointer, so that the L2 cache has them soon."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_piece(ptr, bytes):
    """Asks for a piece of memory, in multiples of 16 bytes. One thread does."""
    tl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 one, thread, 0;"
        " @one cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [ptr.to(tl.int64), bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def early(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that calls `follow`. `DINFER_EARLY=0` in the environment turns early starts off."""
    if os.environ.get("DINFER_EARLY", "1") != "0" and on_hopper(tensor):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


# Positions or lanes of a program that computes next to nothing: one a thread, since it only waits for memory.
PIECE, WARPS = 128, 4
SHARED = 200_000  # bytes of shared memory that a pipeline may take on Hopper; other programs need the rest


def stages(device: torch.device, each: int, most: int) -> int:
    """The depth of a pipeline whose stages take `each` bytes: at most `most`, and what shared memory holds."""
    return max(min(_shared(card(device)) // each, most), 1)


@cache
def _shared(device: torch.device | None) -> int:
    if device is None:
        return SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    return min(max_shared_mem(index) * 7 // 8, SHARED)


@triton.jit
def added(ptr, mix_ptr, mask, apart, OTHER: tl.constexpr, PARTS: tl.constexpr, MIXED: tl.constexpr):
    """The sum of PARTS parts, `apart` from one another, in order and in float32; the first MIXED are weighted.

    A part of weight 0 may hold anything: nobody may have written it.
    """
    sum = tl.load(ptr, mask=mask, other=OTHER).to(tl.float32)
    if MIXED:
        weight = tl.load(mix_ptr)
        sum = tl.where(weight == 0.0, 0.0, sum * weight)
    for part in tl.static_range(1, PARTS):
        addend = tl.load(ptr + part * apart, mask=mask, other=OTHER).to(tl.float32)
        if part < MIXED:
            weight = tl.load(mix_ptr + part)
            addend = tl.where(weight == 0.0, 0.0, addend * weight)
        sum += addend
    return sum


def addends(x: Tensor | PartialSums) -> tuple[Tensor, int]:
    """The parts, one behind the other, and their number."""
    return (x.values, x.values.shape[0]) if isinstance(x, PartialSums) else (x.contiguous(), 1)
