"""Gives memory back while a trainer needs it: keys, and weights.

What wakes may be elsewhere in memory, so CUDA graphs are dropped.
"""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE = 4096  # bytes of /proc's pages


def tensors_of(network: Any) -> list[Tensor]:
    """The weights and what formats keep beside them."""
    return [*network.parameters(), *network.buffers()]


def forget(network: Any, keep: bool) -> None:
    """Frees the weights of a rank. `keep`: copies wait in the memory of the host, pinned where there is a card."""
    asleep = []
    for tensor in tensors_of(network):
        copy = None
        if keep:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
        asleep.append((tensor.shape, tensor.stride(), copy))
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    _asleep[id(network)] = asleep


def restore(network: Any) -> None:
    """Allocates the weights of a rank again, with their values if they were kept."""
    for tensor, (shape, stride, copy) in zip(tensors_of(network), _asleep.pop(id(network)), strict=True):
        made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor.data = made if copy is None else made.copy_(copy, non_blocking=True)
    if (device := network.device).type == "cuda":
        torch.cuda.synchronize(device)


_asleep: dict[int, list[tuple[torch.Size, tuple[int, ...], Tensor | None]]] = {}  # by the network


def trim(network: Any) -> int:
    """Gives free memory of a rank back to the system. Returns the bytes that it still has: of the card, or of RAM."""
    gc.collect()
    if network.device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(network.device)
    with suppress(AttributeError, OSError):  # another libc than glibc has none
        ctypes.CDLL(None).malloc_trim(0)
    return resident()


def resident() -> int:
    """Bytes of RAM of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
