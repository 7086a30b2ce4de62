"""Whether a function of this package runs its Triton kernel or its torch reference."""

from __future__ import annotations

import os

import torch
from torch import Tensor

VARIABLE = "DINFER_KERNELS"


def use_triton(tensor: Tensor, head_dim: int = 16) -> bool:
    """True on CUDA, unless the kernels cannot: gradients, float64, head sizes that are no power of two from 16 on.

    `DINFER_KERNELS=torch` in the environment turns them off; torch.compile makes kernels of its own of the references.
    """
    if torch.compiler.is_compiling():
        return False
    choice = os.environ.get(VARIABLE, "triton")
    if choice not in ("triton", "torch"):
        raise ValueError(f"{VARIABLE}={choice!r} must be 'triton' or 'torch'")
    able = head_dim >= 16 and head_dim & (head_dim - 1) == 0 and tensor.dtype != torch.float64
    return tensor.is_cuda and choice == "triton" and able and not torch.is_grad_enabled()
