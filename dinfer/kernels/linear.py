"""Linear maps with weights as they are, in 8 bits with a scale for each output, or in 4 (`dinfer.kernels.packed`).

Shape suffixes: R rows, K inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.deferred import close, held, widened
from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.packed import PACKED, packed_linear
from dinfer.kernels.types import FLOAT8, LARGEST, Deferred, Parts, Rounded

FEW = 32  # rows up to which the kernel is faster than cuBLAS


def check_float8(device: torch.device, what: str, instead: str) -> None:
    """ValueError for a GPU that does not know float8, where something is to be kept in it."""
    if device.type == "cuda" and (able := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ValueError(
            f"{what} needs a GPU of compute capability 8.9 or more (Ada, Hopper), and {device} has "
            f"{able[0]}.{able[1]}; use {instead}"
        )


def round_rows(x: Tensor, dtype: torch.dtype = FLOAT8) -> Rounded:
    """Each row of the last dimension at a scale of its own, its largest value at the largest of `dtype`."""
    if dtype == FLOAT8 and use_triton(x):
        from dinfer.kernels.triton.linear import round_rows as kernel

        return kernel(x)
    wide, largest = x.float(), LARGEST[dtype]
    scale = wide.abs().amax(-1).clamp_min(1e-12) / largest
    scaled = (wide / scale[..., None]).clamp(-largest, largest)
    return Rounded((scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale, x.dtype)


def few(x: Tensor) -> bool:
    return x.numel() // x.shape[-1] <= FEW and x.dtype.itemsize == 2 and not torch.compiler.is_compiling()


def linear(x: Deferred, weight_OK: Tensor, bias_O: Tensor | None = None, scale_O: Tensor | None = None) -> Tensor:
    """x times the weight's transpose. [..., K] -> [..., O]

    With a `scale_O` the weight is in 8 bits. Against float8 weights the rows are rounded to float8 as well, each at a
    scale of its own, unless they already are; products are summed in float32. Against int8 weights they stay as is.
    A weight of bytes is one in 4 bits: `[O, K / 2]`, and its scales `[O, K / group]`.
    """
    return close(_linear(x, weight_OK, bias_O, scale_O, split=False))


def linear_in_parts(
    x: Deferred, weight_OK: Tensor, bias_O: Tensor | None = None, scale_O: Tensor | None = None
) -> Tensor | Parts:
    """As `linear`, for a consumer that adds up parts: each program then takes a part of a small weight's inputs.

    One multiprocessor reads only so fast, and a map of few outputs has a program for few of them.
    """
    return _linear(x, weight_OK, bias_O, scale_O, split=True)


def _linear(
    x: Deferred, weight_OK: Tensor, bias_O: Tensor | None, scale_O: Tensor | None, split: bool
) -> Tensor | Parts:
    x = x if isinstance(x, Rounded) else close(x)
    if scale_O is not None and weight_OK.dtype == PACKED:
        return packed_linear(close(x), weight_OK, scale_O, bias_O)
    if scale_O is None and isinstance(x, Tensor) and not (few(x) and use_triton(x)):
        return F.linear(x, weight_OK, bias_O)
    if weight_OK.dtype == FLOAT8 and isinstance(x, Tensor):
        x = round_rows(x)
    if use_triton(held(x)):
        from dinfer.kernels.triton.linear import linear as kernel

        return kernel(x, weight_OK, bias_O, scale_O, split=split)
    out = F.linear(widened(x), weight_OK.to(torch.float32))
    out = out if scale_O is None else out * scale_O
    return (out if bias_O is None else out + bias_O).to(x.dtype)
