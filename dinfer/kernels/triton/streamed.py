"""Linear maps of few rows on a Hopper card, which fetch weights while the kernel before still runs.

A step of few rows is a chain: each kernel waits for the one before, and memory rests meanwhile. Weights are no kernel's
output. So the programs here start early (`launch`), fill their shared memory with weights by the copy engine (TMA), and
wait only then. It is in Gluon, since Triton itself starts no copy of a loop before the wait.
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

OUTPUTS = 64  # of a program, which the tensor cores multiply at once
BYTES = 256  # of a row that a tile has
ROOM = 196 << 10  # bytes of shared memory of a multiprocessor that its programs share
MOST = 3  # programs of a multiprocessor
TWICE = 1  # programs of a multiprocessor; of more, each takes twice as many outputs, so inputs are read half as often


@gluon.jit(do_not_specialize=["rows"])
def _stream(
    x_tiles, weight_tiles, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, rows, outputs,
    STEPS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, LATE: gl.constexpr, X_SCALE: gl.constexpr,
    SCALE: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    KIND: gl.constexpr = weight_tiles.dtype
    OUTPUTS: gl.constexpr = weight_tiles.block_shape[0]
    DEPTH: gl.constexpr = weight_tiles.block_shape[1]
    ROWS: gl.constexpr = x_tiles.block_shape[0]
    SIZE: gl.constexpr = KIND.primitive_bitwidth // 8
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 // SIZE])
    tile, part = gl.program_id(0), gl.program_id(1)
    first = part * STEPS * DEPTH
    weights = gl.allocate_shared_memory(KIND, [STAGES, OUTPUTS, DEPTH], weight_tiles.layout)
    inputs = gl.allocate_shared_memory(KIND, [AHEAD, ROWS, DEPTH], x_tiles.layout)
    weights_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    inputs_full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(weights_full.index(i), count=1)
    for i in gl.static_range(AHEAD):
        mbarrier.init(inputs_full.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        mbarrier.expect(weights_full.index(i), OUTPUTS * DEPTH * SIZE)
        fetch_tile(weight_tiles, [tile * OUTPUTS, first + i * DEPTH], weights_full.index(i), weights.index(i))
    output = tile * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, PRODUCT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCT))
    if SCALE:
        scale = gl.load(scale_ptr + output)
    if BIAS:
        bias = gl.load(bias_ptr + output).to(gl.float32)
    if EARLY and not LATE:
        cuda.gdc_launch_dependents()
    if EARLY:
        cuda.gdc_wait()
    for i in gl.static_range(AHEAD):
        mbarrier.expect(inputs_full.index(i), ROWS * DEPTH * SIZE)
        fetch_tile(x_tiles, [0, first + i * DEPTH], inputs_full.index(i), inputs.index(i))
    if X_SCALE:
        x_scale = gl.load(x_scale_ptr + row, mask=row < rows, other=0.0)
    total = gl.zeros([OUTPUTS, ROWS], gl.float32, PRODUCT)
    for step in range(STEPS):
        stage, place = step % STAGES, step % AHEAD
        mbarrier.wait(weights_full.index(stage), step // STAGES & 1)
        mbarrier.wait(inputs_full.index(place), step // AHEAD & 1)
        total = warpgroup_mma(weights.index(stage), inputs.index(place).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        more = step + STAGES < STEPS
        mbarrier.expect(weights_full.index(stage), OUTPUTS * DEPTH * SIZE, pred=more)
        fetch_tile(
            weight_tiles, [tile * OUTPUTS, first + (step + STAGES) * DEPTH], weights_full.index(stage),
            weights.index(stage), pred=more,
        )  # fmt: skip
        more = step + AHEAD < STEPS
        mbarrier.expect(inputs_full.index(place), ROWS * DEPTH * SIZE, pred=more)
        fetch_tile(
            x_tiles, [0, first + (step + AHEAD) * DEPTH], inputs_full.index(place), inputs.index(place), pred=more
        )
    if EARLY and LATE:
        cuda.gdc_launch_dependents()
    if SCALE:
        total *= scale[:, None]
    if X_SCALE:
        total *= x_scale[None, :]
    if BIAS:
        total += gl.where(part == 0, bias, 0.0)[:, None]
    place_ptr = out_ptr + part.to(gl.int64) * rows * outputs + row.to(gl.int64)[None, :] * outputs + output[:, None]
    gl.store(place_ptr, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :])


def pays(x_RK: Tensor, weight_OK: Tensor, parts: int) -> bool:
    """Whether this kernel takes a map in `parts`, and is faster than `triton.linear`. Both operands can be copied."""
    rows, (outputs, width) = len(x_RK), weight_OK.shape
    return (
        multiplies_in_groups_of_warps(x_RK)
        and early(x_RK)["EARLY"]
        and not triton.knobs.runtime.interpret
        and weight_OK.dtype == x_RK.dtype
        and weight_OK.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        and rows <= 64 // weight_OK.dtype.itemsize
        and outputs % OUTPUTS == 0
        and width * weight_OK.dtype.itemsize % (parts * BYTES) == 0
        and outputs // OUTPUTS * parts <= MOST * multiprocessors(card(x_RK.device))
    )


def linear(
    x_RK: Tensor, x_scale: Tensor | None, weight_OK: Tensor, bias_O: Tensor | None, scale_O: Tensor | None, out: Tensor,
    parts: int, late: bool,
) -> None:  # fmt: skip
    """Fills `out`, [parts, rows, outputs] or without parts, as `triton.linear` does."""
    (rows, width), outputs, size = x_RK.shape, len(weight_OK), x_RK.dtype.itemsize
    programs = multiprocessors(card(x_RK.device))
    twice = outputs % (2 * OUTPUTS) == 0 and outputs * parts > TWICE * OUTPUTS * programs
    tall, many = OUTPUTS << twice, max(16, triton.next_power_of_2(rows))
    tiles, steps = outputs // tall, width * size // BYTES // parts
    each = triton.cdiv(tiles * parts, programs)
    inputs = min(4 if each == 1 else 2, steps)
    layout = gl.NVMMASharedLayout(128, 8 * size, 2)
    _stream[(tiles, parts)](
        TensorDescriptor.from_tensor(x_RK, [many, BYTES // size], layout),
        TensorDescriptor.from_tensor(weight_OK, [tall, BYTES // size], layout),
        out if x_scale is None else x_scale, out if scale_O is None else scale_O, out if bias_O is None else bias_O,
        out, rows, outputs, STEPS=steps, STAGES=min((ROOM // each // BYTES - inputs * many) // tall, steps),
        AHEAD=inputs, LATE=late, X_SCALE=x_scale is not None, SCALE=scale_O is not None, BIAS=bias_O is not None,
        num_warps=4, **early(x_RK),
    )  # fmt: skip
