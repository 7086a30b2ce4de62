"""Some positions of a window. Shape suffixes: B lanes, W positions, R rows of blocks, L block length, X entries."""

from __future__ import annotations

from torch import Tensor

from dinfer.kernels.dispatch import use_triton


def take(x_BWX: Tensor, index_RL: Tensor) -> Tensor:
    """The chosen positions of the window, one row a block. [B, W, X] -> [R, L, X]; -1 takes any."""
    if use_triton(x_BWX):
        from dinfer.kernels.triton.take import take as kernel

        return kernel(x_BWX, index_RL)
    index_BX = index_RL.clamp_min(0).view(x_BWX.shape[0], -1, 1).expand(-1, -1, x_BWX.shape[-1])
    return x_BWX.gather(1, index_BX).view(*index_RL.shape, x_BWX.shape[-1])
