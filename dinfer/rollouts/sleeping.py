"""Gives memory back while a trainer needs it: keys, and weights.

Where CUDA's virtual memory is to be had, what has slept once keeps its addresses, and CUDA graphs over it stay. Other
memory may wake elsewhere, so its graphs are dropped.
"""

import ctypes
import gc
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.core.provided import provided

PAGE = 4096  # bytes of /proc's pages


def tensors_of(network: Any) -> list[Tensor]:
    """The weights and what formats keep beside them."""
    return [*network.parameters(), *network.buffers()]


def forget(network: Any, keep: bool) -> None:
    """Frees the weights of a rank. `keep`: copies wait in the memory of the host, pinned where there is a card."""
    if (own := placed(network)) is not None:
        own.sleep(keep=keep)
        return
    tensors, copies = tensors_of(network), list[Tensor | None]()
    for tensor in tensors:  # all first: there may be no memory for one of them
        copies.append(torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor) if keep else None)
    _asleep[id(network)] = [(one.shape, one.stride(), copy) for one, copy in zip(tensors, copies, strict=True)]
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def restore(network: Any) -> None:
    """Takes memory for the weights of a rank again, with their values if they were kept."""
    if (asleep := _asleep.get(id(network))) is None:
        if (own := placed(network)) is not None:
            own.wake()
        return
    with nullcontext() if (own := _own(network)) is None else own.within():
        for tensor, (shape, stride, copy) in zip(tensors_of(network), asleep, strict=True):
            made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
            tensor.data = made if copy is None else made.copy_(copy, non_blocking=True)
    del _asleep[id(network)]
    if (device := network.device).type == "cuda":
        torch.cuda.synchronize(device)


def placed(network: Any) -> Any | None:
    """The memory of a rank's weights that keeps its addresses; None: they lie elsewhere."""
    own = _own(network)
    return own if own is not None and own.holds(next(network.parameters())) else None


def stays(network: Any) -> bool:
    """Whether what this network allocates from now on keeps its addresses."""
    return _own(network) is not None


def place(network: Any) -> None:
    """What a rank allocates from now on keeps its addresses, if it can."""
    if (found := provided("addresses")) is not None:
        found.place(network)


def _own(network: Any) -> Any | None:
    """The memory that a network has for weights, see `dinfer.speed.addresses.of`."""
    return None if (found := provided("addresses")) is None else found.of(network)


def doze(worker: Any) -> None:
    """Gives back what the state and the graphs of a rank take, but not their addresses."""
    worker.runner.sleep()


def rouse(worker: Any) -> None:
    """Takes it again, without keys."""
    worker.runner.wake()


_asleep: dict[int, list[tuple[torch.Size, tuple[int, ...], Tensor | None]]] = {}  # by the network


def trim(network: Any) -> int:
    """Gives free memory of a rank back to the system. Returns the bytes that it still has: of the card, or of RAM."""
    gc.collect()
    if network.device.type == "cuda":
        torch.cuda.empty_cache()
        found = provided("addresses")
        return torch.cuda.memory_reserved(network.device) - (0 if found is None else found.asleep())
    with suppress(AttributeError, OSError):  # another libc than glibc has none
        ctypes.CDLL(None).malloc_trim(0)
    return resident()


def resident() -> int:
    """Bytes of RAM of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
