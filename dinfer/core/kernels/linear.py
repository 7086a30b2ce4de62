"""Linear maps with weights as they are, and rows rounded to 8 bits.

Shape suffixes: R rows, K inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.dispatch import native, on_hopper, triton, use_triton
from dinfer.core.kernels.types import FLOAT8, LARGEST, Deferred, PartialSums, Rounded

BLOCK = 1 << 19  # values of a weight that are widened at a time
FEW = 32  # rows up to which the kernel is faster than cuBLAS
MORE = 64  # the same from Hopper on
MOST = 128  # the same from Hopper on, for a map of at most `SMALL` outputs whose parts the consumer adds up
SMALL = 4096


def check_float8(device: torch.device, what: str, instead: str) -> None:
    """ValueError for a GPU that does not know float8, where something is to be kept in it."""
    if device.type == "cuda" and (able := torch.cuda.get_device_capability(device)) < (8, 9):
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


def few(x: Tensor, most: int = FEW) -> bool:
    """Whether our kernel is faster than torch for 16-bit rows, which holds up to `most` rows."""
    return x.numel() // x.shape[-1] <= most and x.dtype.itemsize == 2 and not torch.compiler.is_compiling()


def linear(
    x: Deferred, weight_OK: Tensor, bias_O: Tensor | None = None, *, parts: bool = False
) -> Tensor | PartialSums:
    """x times the weight's transpose. [..., K] -> [..., O]

    With `parts` the consumer adds up: each program of a small weight takes a part of the inputs. A multiprocessor reads
    only so fast, and a map of few outputs would keep few of them busy.
    """
    x = close(x)
    most = MOST if parts and len(weight_OK) <= SMALL else MORE
    if not ((few(x) or (few(x, most) and on_hopper(x))) and use_triton(x, "linear")):
        if (kernels := native("linear", x, weight_OK)) is not None and kernels.faster(x):
            out = kernels.linear(x, weight_OK)
            return out if bias_O is None else out + bias_O
        return widened_linear(x, weight_OK, bias_O) if slow(x) else F.linear(x, weight_OK, bias_O)
    return triton("linear").linear(x, weight_OK, bias_O, None, split=parts)


def slow(x: Tensor) -> bool:
    """Whether torch multiplies such numbers far slower than float32: 16 bits on a CPU without AVX-512."""
    if x.device.type != "cpu" or x.dtype.itemsize != 2 or torch.compiler.is_compiling():
        return False
    return torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2") and not torch.is_grad_enabled()


def widened_linear(x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    """As `linear`, in float32, block by block of outputs: a widened block stays in the cache of the CPU."""
    wide, out = x.float(), x.new_empty(*x.shape[:-1], len(weight_OK))
    first = 0
    for block in weight_OK.split(max(BLOCK // x.shape[-1], 1)):
        out[..., first : first + len(block)] = F.linear(wide, block.float())
        first += len(block)
    return out if bias_O is None else out + bias_O
