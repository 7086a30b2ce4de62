"""Launching a kernel while the one before it still runs (programmatic dependent launch, from Hopper on).

A step is hundreds of kernels of a few microseconds. This takes away some of the time between them.
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

from dinfer.kernels.dispatch import card


@triton.jit
def follow(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits until all that the kernels before have written is there.

    It comes before the first read of anything a kernel has written, and before the first write. A kernel may read
    weights, scales and biases before it, with `let_next` and `wait`, its two halves. So a kernel that makes weights and
    lets others start early must not come right before one that multiplies with them.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def shared(function: Any) -> Any:
    """A function of plain Python as part of kernels, so that one source runs on the host and in them.

    Compiled in the scope of this module, since the interpreter wants to see `tl`: it may use nothing but its arguments.
    """
    return triton.jit(FunctionType(function.__code__, globals(), function.__name__))


@triton.jit
def wait(EARLY: tl.constexpr):
    """The second half of `follow`: for a kernel that reads weights first, or lets the next one start later.

    The next kernel's programs take what room there is. A large kernel that starts while this one still runs everywhere
    finds room on some multiprocessors and crowds there.
    """
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next(EARLY: tl.constexpr):
    """The first half of `follow`: lets the next kernel start, once all programs have come here or ended."""
    if EARLY:
        cuda.gdc_launch_dependents()


def early(tensor: Tensor) -> dict[str, Any]:
    """What a kernel that calls `follow` is launched with. `DINFER_EARLY=0` in the environment turns it off."""
    device = card(tensor.device)
    if os.environ.get("DINFER_EARLY", "1") != "0" and device is not None and _hopper(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


# Positions or lanes of a program that does next to nothing with them: one a thread, since it waits for memory alone.
PIECE, WARPS = 128, 4
SHARED = 200_000  # bytes of a multiprocessor's memory that a pipeline may take on Hopper; the rest is for the others


def stages(device: torch.device, each: int, most: int) -> int:
    """How deep a pipeline of stages of so many bytes may be: `most`, or less where shared memory is smaller."""
    return max(min(_shared(card(device)) // each, most), 1)


@cache
def _shared(device: torch.device | None) -> int:
    if device is None:
        return SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    return min(max_shared_mem(index) * 7 // 8, SHARED)


@cache
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
