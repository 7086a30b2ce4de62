"""Float32 on a CPU by `float.c`, which does in one pass what takes torch several.

The functions do what their namesakes in `dinfer.kernels` do, for tensors that `dispatch.native` accepts.
Shape suffixes: R rows, K inputs, O outputs, B lanes, W queries, H query heads, G key heads, E head size.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dinfer.kernels.cpu.linear import begin as begin
from dinfer.kernels.cpu.linear import library

FEWEST = 8  # rows from which `linear` is faster than torch's
TILE, WIDEST = 32, 256  # head sizes of `attention`: multiples of TILE up to WIDEST


def faster(x: Tensor) -> bool:
    """Whether `linear` takes these inputs, and is faster than torch."""
    return x.shape[-1] % 16 == 0 and x.numel() >= FEWEST * x.shape[-1] and slow_blas()


@cache
def slow_blas() -> bool:
    """Whether torch's BLAS is MKL on an AMD CPU. MKL uses only AVX2 there, and `linear` is faster even with AVX2."""
    info = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and info.is_file() and "AuthenticAMD" in info.read_text()[:1000]


def linear(x: Tensor, weight_OK: Tensor) -> Tensor:
    """x times the transpose of a weight. [..., K] -> [..., O]"""
    out = x.new_empty(*x.shape[:-1], len(weight_OK))
    _run("linear_float", x.contiguous(), weight_OK.contiguous(), out, x.numel() // x.shape[-1], *weight_OK.shape[::-1])
    return out


def attention(
    q_BWHE: Tensor, k_PTGE: Tensor, v_PTGE: Tensor, pages_BP: Tensor, from_BW: Tensor, to_BW: Tensor
) -> Tensor:  # fmt: skip
    """Interval attention over keys in pages. [B, W, H, E]"""
    out = torch.empty_like(q_BWHE, memory_format=torch.contiguous_format)
    each = [x.contiguous() for x in (q_BWHE, k_PTGE, v_PTGE, pages_BP, from_BW, to_BW)]
    lanes, queries, heads, size = q_BWHE.shape
    _run("attention", *each, out, lanes, queries, heads, k_PTGE.shape[2], size, pages_BP.shape[1], k_PTGE.shape[1])
    return out


def add_rms_norm(x: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMSNorm times the weight. [..., D] each"""
    x = x.contiguous()
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    delta = None if delta is None else delta.contiguous()
    _run("add_rms_norm", x, delta, weight_D, total, out, x.numel() // x.shape[-1], x.shape[-1], eps)
    return total, out


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension, times the second. [..., 2 M] -> [..., M]"""
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    _run("swiglu", x.contiguous(), out, out.numel() // width, width)
    return out


def rotate_and_store(
    qkv_BWXE: Tensor, heads: int, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float] | None, k_YGE: Tensor,
    v_YGE: Tensor, write_X: Tensor,
) -> Tensor:  # fmt: skip
    """Writes keys and values to their places and returns the queries, normed and rotated. [B, W, H, E]

    `norm`: the weight, [2 * E], and eps.
    """
    lanes, width, _, size = qkv_BWXE.shape
    q_BWHE = qkv_BWXE.new_empty(lanes, width, heads, size)
    weight, eps = norm or (None, 0.0)
    given = qkv_BWXE.contiguous(), cos.contiguous(), sin.contiguous(), weight, write_X, q_BWHE, k_YGE, v_YGE
    _run("rotate_and_store", *given, lanes * width, heads, k_YGE.shape[1], size, cos.shape[-1], eps)
    return q_BWHE


def _run(name: str, *given: Tensor | float | None) -> None:
    """Calls a function of `float.c`; its last argument is the number of threads."""
    plain = [_plain(one) for one in (*given, torch.get_num_threads())]
    if library()[f"dinfer_{name}"](*plain):  # type: ignore[index]
        raise MemoryError(f"{name}: no memory for its intermediate values")


def _plain(given: Tensor | float | None) -> "ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float":
    if given is None or isinstance(given, Tensor):
        return ctypes.c_void_p(None if given is None else given.data_ptr())
    return ctypes.c_int64(given) if isinstance(given, int) else ctypes.c_float(given)
