"""Linear maps with weights as they are, and rows rounded to 8 bits.

Shape suffixes: R rows, K inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.dispatch import capability, card, in_c, native, triton, use_triton
from dinfer.core.kernels.types import FLOAT8, LARGEST, Deferred, PartialSums, Rounded


def check_float8(device: torch.device, what: str, instead: str) -> None:
    """ValueError for a GPU that does not know float8, where something is to be kept in it."""
    if device.type == "cuda" and (able := capability(card(device))) < (8, 9):
        raise ValueError(
            f"{what} needs a GPU of compute capability 8.9 or more (Ada, Hopper), and {device} has "
            f"{able[0]}.{able[1]}; use {instead}"
        )


def round_rows(x: Tensor, dtype: torch.dtype = FLOAT8) -> Rounded:
    """Each row of the last dimension at a scale of its own, its largest value at the largest of `dtype`."""
    if dtype == FLOAT8 and use_triton(x, "linear"):
        return triton("linear").round_rows(x)
    wide, largest = x.float(), LARGEST[dtype]
    scale = wide.abs().amax(-1).clamp_min(1e-12) / largest
    scaled = (wide / scale[..., None]).clamp(-largest, largest)
    return Rounded((scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale, x.dtype)


def linear(
    x: Deferred, weight_OK: Tensor, bias_O: Tensor | None = None, *, parts: bool = False
) -> Tensor | PartialSums:
    """x times the weight's transpose. [..., K] -> [..., O]

    With `parts` the consumer adds up: each program of a small weight takes a part of the inputs. A multiprocessor reads
    only so fast, and a map of few outputs would keep few of them busy.
    """
    x = close(x)
    if x.dtype.itemsize == 2 and use_triton(x, "linear") and triton("linear").faster(x, weight_OK, parts):
        return triton("linear").linear(x, weight_OK, bias_O, None, split=parts)
    if (kernels := native("linear", x, weight_OK)) is not None and kernels.faster(x):
        out = kernels.linear(x, weight_OK)
        return out if bias_O is None else out + bias_O
    here = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if here and (kernels := in_c()) is not None and kernels.slow(x):
        return kernels.widened_linear(x, weight_OK, bias_O)
    return F.linear(x, weight_OK, bias_O)
