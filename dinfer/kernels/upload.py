"""Copies host values to the device without waiting for it."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(target: Tensor, values: Tensor) -> Tensor:
    """Copies host values to a tensor, in the order of launches, and returns the tensor.

    They go through pinned memory. torch's allocator reuses it only once the device has read it, so the host may upload
    again at once.
    """
    return target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """The same values on the device, in the order of launches."""
    return upload(torch.empty_like(values, device=device), values) if device.type == "cuda" else values.to(device)


def host_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> Tensor:
    """Rows on the host, padded to `width` with `fill`. int64 [A, width]"""
    flat = array("q")  # torch.tensor is slow for long lists
    for row in rows:
        flat.extend(row)
        flat.extend(array("q", [fill]) * (width - len(row)))
    return torch.frombuffer(flat, dtype=torch.int64).view(len(rows), width)
