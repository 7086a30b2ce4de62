"""Memory of a card that sleeps, and wakes where it was: CUDA graphs over it stay valid.

Torch allocates it through `addresses.c`, which reserves addresses and maps memory to them by CUDA's virtual memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Set
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

SOURCE = Path(__file__).with_name("addresses.c")
FLAGS = "-O2", "-shared", "-fPIC"
log = logging.getLogger(__name__)


@cache
def _driver() -> tuple[ctypes.CDLL, Any] | None:
    """The compiled functions, and torch's allocator over them; None: this system has none. A log line says why."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = str(Path(folder, "addresses.so"))
            command = [*compiler, *FLAGS, "-o", made, str(SOURCE), "-ldl"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            library = ctypes.CDLL(made)
            allocator = torch.cuda.memory.CUDAPluggableAllocator(made, "addresses_alloc", "addresses_free")
    except (OSError, subprocess.SubprocessError) as error:
        said = (error.stderr if isinstance(error, subprocess.CalledProcessError) else "") or error
        log.warning("what sleeps wakes at other addresses, since addresses.c cannot be compiled: %s", said)
        return None
    library.addresses_wake.argtypes = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
    library.addresses_sleep.argtypes = ctypes.c_uint64, ctypes.c_size_t
    if library.addresses_begin():
        log.warning("what sleeps wakes at other addresses: the driver has no virtual memory")
        return None
    return library, allocator


def able(device: torch.device) -> bool:
    """Whether memory of a device can keep its addresses."""
    return device.type == "cuda" and torch.version.hip is None and _driver() is not None


class Reserved:
    """A pool of memory that is given back, and taken again at the same addresses."""

    def __init__(self, device: torch.device) -> None:
        found = _driver()
        assert found is not None
        self._library, allocator = found
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.pool = torch.cuda.MemPool(allocator.allocator())
        self._asleep: list[tuple[int, int, Tensor | None, bool]] = []
        _reserved.add(self)

    def within(self) -> AbstractContextManager[None]:
        """What this thread allocates within is of the pool."""
        found: AbstractContextManager[None] = torch.cuda.use_mem_pool(self.pool, self._device)
        return found

    @property
    def asleep(self) -> int:
        """Bytes that torch counts, and that are given back."""
        return sum(size for _, size, _, _ in self._asleep)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in it."""
        at = tensor.data_ptr()
        return any(one["address"] <= at < one["address"] + one["total_size"] for one in self._segments())

    def sleep(self, *, keep: bool, zeros: Set[int] = frozenset()) -> None:
        """Gives the memory back; the device must be done with it. `keep`: contents wait in pinned memory of the host.

        `zeros`: addresses of tensors that are zeros afterwards. A segment that has no others is not kept.
        """
        found = list[tuple[int, int, Tensor | None, bool]]()
        for one in self._segments():
            address, size, copy = one["address"], one["total_size"], None
            zero = all(block["address"] in zeros for block in one["blocks"] if block["state"] != "inactive")
            if keep and not zero:
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=True).copy_(self._bytes(address, size))
            found.append((address, size, copy, zero and bool(zeros)))
        torch.cuda.synchronize(self._device)
        for part in found:
            if error := self._library.addresses_sleep(*part[:2]):
                raise RuntimeError(f"memory of {self._device} cannot be given back: CUDA error {error}")
            self._asleep.append(part)

    def wake(self) -> None:
        """Takes the memory again. Raises torch.OutOfMemoryError if others have it: then all of it sleeps on."""
        taken = list[tuple[int, int]]()
        for address, size, _, _ in self._asleep:
            error = self._library.addresses_wake(address, size, self._device.index)
            if error:
                for one in taken:
                    self._library.addresses_sleep(*one)
                raise torch.OutOfMemoryError(f"{size} bytes that slept cannot be taken again (CUDA error {error})")
            taken.append((address, size))
        for address, size, copy, zeros in self._asleep:
            if copy is not None:
                self._bytes(address, size).copy_(copy, non_blocking=True)
            elif zeros:
                self._bytes(address, size).zero_()
        torch.cuda.synchronize(self._device)
        self._asleep = []

    def _bytes(self, address: int, size: int) -> Tensor:
        """A segment, as bytes."""
        told = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        return torch.as_tensor(type("Segment", (), {"__cuda_array_interface__": told})(), device=self._device)

    def _segments(self) -> list[Any]:
        return [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(self.pool.id)]


_reserved: WeakSet[Reserved] = WeakSet()
_weights = WeakIdKeyDictionary()  # by the first parameter, which copies of a network share


def of(network: Any) -> Reserved | None:
    """The pool for a network's weights; None: it has never slept, or memory cannot keep its addresses."""
    first = next(network.parameters(), None) if isinstance(network, nn.Module) else None
    found: Reserved | None = None if first is None else _weights.get(first)
    return found


def place(network: Any) -> Reserved | None:
    """As `of`; from now on there is one, if memory can keep its addresses."""
    if of(network) is None and able(network.device):
        _weights[next(network.parameters())] = Reserved(network.device)
    return of(network)


def asleep() -> int:
    """Bytes of this process that torch counts, and that are given back."""
    return sum(one.asleep for one in _reserved)
