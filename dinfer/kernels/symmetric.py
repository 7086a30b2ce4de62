"""Sums of small tensors over the GPUs of one machine, by memory that all of them can read (NVLink).

A sum through NCCL takes longer to begin than such a tensor takes to travel. Here each GPU writes its addend to a
buffer, waits for the others, and reads theirs. One kernel does it all (torch's symmetric memory, without multicast).
"""

import logging
import os
from typing import Any

import torch
from torch import Tensor

ROOM = 8 << 20  # bytes of a GPU's buffer
ONE_SHOT = 1 << 20  # bytes that a GPU reads from the others up to which each adds up all; for more, each a part
WIDTH = 16  # bytes that a thread reads at a time


class SymmetricSum:
    """The sum over the GPUs of a process group, in order of rank, so all of them get the same bits."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Every rank of the group makes one at the same time. RuntimeError where the GPUs cannot read each other."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory

        self.group, self.size = group, group.size()
        self.buffer = _symmetric_memory.empty(ROOM, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self.buffer, group)

    @classmethod
    def of(cls, group: Any, device: torch.device) -> "SymmetricSum | None":
        """None, and a warning, where the GPUs cannot read each other's memory."""
        try:
            return cls(group, device)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            logging.getLogger(__name__).warning("sums over cards go through NCCL, which takes longer: %s", reason)
            return None

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is one that this is faster for."""
        return x.nbytes <= ROOM and x.nbytes % WIDTH == 0 and x.dtype in (torch.bfloat16, torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of tensors that it `takes`. [...]"""
        return self.one_shot(x) if x.nbytes * (self.size - 1) <= ONE_SHOT else self.two_shot(x)

    def one_shot(self, x: Tensor) -> Tensor:
        """Each GPU adds up all."""
        own, flat = self.buffer[: x.nbytes].view(x.dtype), x.contiguous().flatten()
        return torch.ops.symm_mem.one_shot_all_reduce_copy(own, flat, "sum", self.group.group_name).view_as(x)

    def two_shot(self, x: Tensor) -> Tensor:
        """Each GPU adds up a part and gives it to the others."""
        own = self.buffer[: x.nbytes].view(x.dtype)
        own.copy_(x.flatten())
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self.group.group_name)
        return own.clone().view_as(x)
