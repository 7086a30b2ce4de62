"""Whether a function of this package runs its Triton kernel or its torch reference."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Args = ParamSpec("Args")
Result = TypeVar("Result")
VARIABLE = "DINFER_KERNELS"
WIDEST_HEAD = 256  # the tiles are made for heads up to this size


def use_triton(tensor: Tensor, head_dim: int = 16) -> bool:
    """True on CUDA, unless the kernels cannot: gradients, float64, head sizes that are no power of two, 16 to 256.

    `DINFER_KERNELS=torch` in the environment turns them off; torch.compile makes kernels of its own of the references.
    """
    if torch.compiler.is_compiling():
        return False
    choice = os.environ.get(VARIABLE, "triton")
    if choice not in ("triton", "torch"):
        raise ValueError(f"{VARIABLE}={choice!r} must be 'triton' or 'torch'")
    able = 16 <= head_dim <= WIDEST_HEAD and head_dim & (head_dim - 1) == 0
    if not able and tensor.is_cuda and choice == "triton":
        _tell(head_dim)
    able = able and tensor.dtype != torch.float64
    return tensor.is_cuda and choice == "triton" and able and not torch.is_grad_enabled()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one. Triton kernels, events and graphs go there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(work: Callable[Args, Result]) -> Callable[Args, Result]:
    """Runs a function with the device of its first argument, a network, as the current one."""

    @wraps(work)
    def placed(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        network: Any = args[0]
        with on_device(network.device):
            return work(*args, **kwargs)

    return placed


@cache
def _tell(head_dim: int) -> None:
    """Says it once for each size."""
    logging.getLogger(__name__).warning("heads of size %d: attention runs without the Triton kernels", head_dim)
