"""Linear maps with weights as they are, in 8 bits with a scale for each output, or in 4 (`dinfer.kernels.packed`).

Shape suffixes: R rows, K inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.kernels.deferred import Sum, summed
from dinfer.kernels.dispatch import use_triton
from dinfer.kernels.packed import PACKED, packed_linear

FLOAT8 = torch.float8_e4m3fn
LARGEST = {FLOAT8: 448, torch.int8: 127}
FEW = 32  # rows up to which the kernel is faster than cuBLAS


class Rounded(NamedTuple):
    """Rows in 8 bits, what each is to be multiplied with, and of what dtype they were."""

    values: Tensor
    scale: Tensor  # float32, shape of `values` less the last dimension
    dtype: torch.dtype
    wide: Tensor | None = None  # the rows before they were rounded, where these are wanted as well


Rows = Tensor | Rounded


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


def linear(x: Rows, weight_OK: Tensor, bias_O: Tensor | None = None, scale_O: Tensor | None = None) -> Tensor:
    """x times the weight's transpose. [..., K] -> [..., O]

    With a `scale_O` the weight is in 8 bits. Against float8 weights the rows are rounded to float8 as well, each at a
    scale of its own, unless they already are; products are summed in float32. Against int8 weights they stay as is.
    A weight of bytes is one in 4 bits: `[O, K / 2]`, and its scales `[O, K / group]`.
    """
    return summed(_linear(x, weight_OK, bias_O, scale_O, split=False))


def linear_in_parts(x: Rows, weight_OK: Tensor, bias_O: Tensor | None = None, scale_O: Tensor | None = None) -> Sum:
    """As `linear`, for a reader that can add up: of a small weight each program then takes a part of the inputs.

    One multiprocessor reads only so fast, and a map of few outputs has a program for few of them.
    """
    return _linear(x, weight_OK, bias_O, scale_O, split=True)


def _linear(x: Rows, weight_OK: Tensor, bias_O: Tensor | None, scale_O: Tensor | None, split: bool) -> Sum:
    if scale_O is not None and weight_OK.dtype == PACKED:
        return packed_linear(x if isinstance(x, Tensor) else widened(x).to(x.dtype), weight_OK, scale_O, bias_O)
    if scale_O is None and isinstance(x, Tensor) and not (few(x) and use_triton(x)):
        return F.linear(x, weight_OK, bias_O)
    if weight_OK.dtype == FLOAT8 and isinstance(x, Tensor):
        x = round_rows(x)
    if use_triton(x if isinstance(x, Tensor) else x.values):
        from dinfer.kernels.triton.linear import linear as kernel

        return kernel(x, weight_OK, bias_O, scale_O, split=split)
    out = F.linear(widened(x), weight_OK.to(torch.float32))
    out = out if scale_O is None else out * scale_O
    return (out if bias_O is None else out + bias_O).to(x.dtype)


def widened(x: Rows) -> Tensor:
    """The rows in float32."""
    return x.float() if isinstance(x, Tensor) else x.values.float() * x.scale[..., None]


def unrounded(x: Rows) -> Tensor:
    """The rows as they were before they were rounded, or as near as is known."""
    if isinstance(x, Tensor):
        return x
    return widened(x).to(x.dtype) if x.wide is None else x.wide


def merged(x: Rows) -> Rows:
    """All rows in one dimension. [..., K] -> [R, K]"""
    if isinstance(x, Tensor):
        return x.flatten(0, -2)
    wide = None if x.wide is None else x.wide.flatten(0, -2)
    return Rounded(x.values.flatten(0, -2), x.scale.flatten(), x.dtype, wide)
