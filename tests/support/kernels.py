"""What tests of kernels share: where they run, how near to the reference they must come, random tensors."""

from __future__ import annotations

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHORT = torch.bfloat16 if CUDA else torch.float16  # the interpreter computes in numpy, which has no bfloat16
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, SHORT: {"atol": 2e-2, "rtol": 2e-2}}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)
