"""What core gets from this layer, see `dinfer.core.provided`."""

from typing import Any


def symmetric_sum(group: Any, device: Any) -> Any:
    """The sum over GPUs that can read each other's memory; None if they cannot, see `SymmetricSum`."""
    from dinfer.kernels.symmetric import SymmetricSum  # needs torch

    return SymmetricSum.of(group, device)
