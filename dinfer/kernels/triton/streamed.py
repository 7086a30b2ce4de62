"""Linear maps of few rows and few outputs on a Hopper card, which fetch weights while the kernel before still runs.

Few programs share such a map, and a multiprocessor reads only so fast. Weights are no kernel's output. So the programs
here start early (`launch`), fill their shared memory with all of their weights by the copy engine (TMA), and wait only
then. It is in Gluon, since Triton itself starts no copy of a loop before the wait.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from dinfer.core.kernels.dispatch import card, multiplies_in_groups_of_warps
from dinfer.kernels.triton.launch import early, fetch_tile, multiprocessors

ROWS, OUTPUTS = 32, 64  # of a program, at most; the tensor cores multiply so many outputs at once
DEPTH = 128  # inputs of a tile
HELD, AHEAD = 10, 4  # tiles of weights and of rows that fit a program's shared memory


@gluon.jit(do_not_specialize=["rows"])
def _stream(
    x_tiles, weight_tiles, bias_ptr, out_ptr, rows, outputs,
    STEPS: gl.constexpr, AHEAD: gl.constexpr, LATE: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    KIND: gl.constexpr = weight_tiles.dtype
    OUTPUTS: gl.constexpr = weight_tiles.block_shape[0]
    DEPTH: gl.constexpr = weight_tiles.block_shape[1]
    ROWS: gl.constexpr = x_tiles.block_shape[0]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    tile, part = gl.program_id(0), gl.program_id(1)
    first = part * STEPS * DEPTH
    weights = gl.allocate_shared_memory(KIND, [STEPS, OUTPUTS, DEPTH], weight_tiles.layout)
    inputs = gl.allocate_shared_memory(KIND, [AHEAD, ROWS, DEPTH], x_tiles.layout)
    weights_full = gl.allocate_shared_memory(gl.int64, [STEPS, 1], BARRIER)
    inputs_full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
    for i in gl.static_range(STEPS):
        mbarrier.init(weights_full.index(i), count=1)
    for i in gl.static_range(AHEAD):
        mbarrier.init(inputs_full.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STEPS):
        mbarrier.expect(weights_full.index(i), OUTPUTS * DEPTH * 2)
        fetch_tile(weight_tiles, [tile * OUTPUTS, first + i * DEPTH], weights_full.index(i), weights.index(i))
    output = tile * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, PRODUCT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCT))
    if BIAS:
        bias = gl.load(bias_ptr + output).to(gl.float32)
    if EARLY and not LATE:
        cuda.gdc_launch_dependents()
    if EARLY:
        cuda.gdc_wait()
    for i in gl.static_range(AHEAD):
        mbarrier.expect(inputs_full.index(i), ROWS * DEPTH * 2)
        fetch_tile(x_tiles, [0, first + i * DEPTH], inputs_full.index(i), inputs.index(i))
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, PRODUCT)
    for step in range(STEPS):
        place = step % AHEAD
        mbarrier.wait(weights_full.index(step), 0)
        mbarrier.wait(inputs_full.index(place), step // AHEAD & 1)
        total = warpgroup_mma(weights.index(step), inputs.index(place).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        more = step + AHEAD < STEPS
        mbarrier.expect(inputs_full.index(place), ROWS * DEPTH * 2, pred=more)
        fetch_tile(
            x_tiles, [0, first + (step + AHEAD) * DEPTH], inputs_full.index(place), inputs.index(place), pred=more
        )
    if EARLY and LATE:
        cuda.gdc_launch_dependents()
    if BIAS:
        total += gl.where(part == 0, bias, 0.0)[:, None]
    place_ptr = out_ptr + part.to(gl.int64) * rows * outputs + row.to(gl.int64)[None, :] * outputs + output[:, None]
    gl.store(place_ptr, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :])


def pays(x_RK: Tensor, weight_OK: Tensor, parts: int) -> bool:
    """Whether this kernel takes a map in `parts`, and is faster than `triton.linear`. Both operands can be copied."""
    outputs, width = weight_OK.shape
    return (
        multiplies_in_groups_of_warps(x_RK)
        and early(x_RK)["EARLY"]
        and not triton.knobs.runtime.interpret
        and weight_OK.dtype == x_RK.dtype
        and weight_OK.dtype in (torch.bfloat16, torch.float16)
        and len(x_RK) <= ROWS
        and outputs % OUTPUTS == 0
        and width % (parts * DEPTH) == 0
        and width // (parts * DEPTH) <= HELD
        and outputs // OUTPUTS * parts <= multiprocessors(card(x_RK.device)) // 2  # more read fast enough without
    )


def linear(x_RK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, out: Tensor, parts: int, late: bool) -> None:
    """Fills `out`, [parts, rows, outputs] or without parts, as `triton.linear` does."""
    (rows, width), outputs = x_RK.shape, len(weight_OK)
    many, steps = max(16, triton.next_power_of_2(rows)), width // (parts * DEPTH)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    _stream[(outputs // OUTPUTS, parts)](
        TensorDescriptor.from_tensor(x_RK, [many, DEPTH], layout),
        TensorDescriptor.from_tensor(weight_OK, [OUTPUTS, DEPTH], layout), out if bias_O is None else bias_O, out, rows,
        outputs, STEPS=steps, AHEAD=min(AHEAD, steps), LATE=late, BIAS=bias_O is not None, num_warps=4, **early(x_RK),
    )  # fmt: skip
