"""Sums of small tensors over the GPUs of one machine, through memory that all of them can read (NVLink).

NCCL takes longer to start a sum than a small tensor takes to travel. Here each GPU writes its addend to a buffer, waits
for the others, and reads theirs. One kernel does it all (torch's symmetric memory, without multicast).
"""

import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import triton

ROOM = 8 << 20  # bytes of a GPU's buffer
ONE_SHOT = 384 << 10  # up to so many bytes to read from the others each GPU adds up all; for more, each adds up a part
EMPTY = -(1 << 15)  # -0.0 in 16 bits
ROWS, WIDEST = 128, 8192  # of `Exchange`; 128 programs run at once on every GPU that has symmetric memory
WIDTH = 16  # bytes that a thread reads at a time


class Exchange(NamedTuple):
    """Memory through which GPUs swap rows of 16-bit numbers. Each writes to the others' inboxes and reads its own.

    A row has two places in an inbox for each rank, and uses them in turn. `count_R` counts its swaps. An empty place
    holds -0.0, and a -0.0 is sent as 0. So a number says by itself that it has arrived, and no flag waits behind it.
    The LL protocol of NCCL and the Lamport all-reduce of TensorRT-LLM work like this.
    """

    inbox: Tensor  # int16 [2, N, R, width], the rows of each rank
    address_N: Tensor  # int64, where in the memory of each rank's inbox this rank's rows begin
    count_R: Tensor  # int32
    rank: int

    @classmethod
    def over(cls, inboxes: Sequence[Tensor], rank: int) -> Self:
        """Empties the inbox of a rank. `inboxes`: of all ranks, in order."""
        inbox, places = inboxes[rank], [each[:, rank] for each in inboxes]
        inbox.fill_(EMPTY)
        address_N = torch.tensor([place.data_ptr() for place in places], dtype=torch.int64).to(inbox.device)
        return cls(inbox, address_N, torch.zeros(inbox.shape[2], dtype=torch.int32, device=inbox.device), rank)

    def takes(self, x: Tensor) -> bool:
        """Whether the rows of `x` fit. All programs of a kernel must run at once, or they wait for ever."""
        fits = x.numel() // x.shape[-1] <= self.inbox.shape[2] and x.shape[-1] <= self.inbox.shape[3]
        return fits and x.dtype in (torch.bfloat16, torch.float16)


class SymmetricSum:
    """The sum over the GPUs of a process group, in order of rank, so that all get the same bits."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Every rank of the group makes one at the same time. Raises RuntimeError if GPUs cannot read each other."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory

        self.group, self.size = group, group.size()
        self.buffer = _symmetric_memory.empty(ROOM, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self.buffer, group)
        inbox = _symmetric_memory.empty(2, self.size, ROWS, WIDEST, dtype=torch.int16, device=device)
        memory = _symmetric_memory.rendezvous(inbox, group)
        inboxes = [memory.get_buffer(rank, inbox.shape, inbox.dtype) for rank in range(self.size)]
        inboxes[group.rank()] = inbox
        self.exchange = Exchange.over(inboxes, group.rank())
        self._nothing = torch.zeros(ROWS * WIDEST, dtype=torch.int16, device=device)
        memory.barrier()  # a rank writes only after the others have emptied their inboxes
        torch.cuda.synchronize(device)

    @classmethod
    def of(cls, group: Any, device: torch.device) -> "SymmetricSum | None":
        """A sum, or None and a warning if the GPUs cannot read each other's memory."""
        try:
            return cls(group, device)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            logging.getLogger(__name__).warning("sums over cards go through NCCL, which takes longer: %s", reason)
            return None

    def takes(self, x: Tensor) -> bool:
        """Whether this is faster than NCCL for `x`."""
        aligned = x.nbytes % WIDTH == 0 and x.storage_offset() * x.itemsize % WIDTH == 0
        return aligned and x.nbytes <= ROOM and x.dtype in (torch.bfloat16, torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over all ranks of a tensor that it `takes`, in the shape of `x`."""
        if self.exchange.takes(x):
            return triton("norm").add(self._nothing[: x.numel()].view(x.dtype).view_as(x), x, self.exchange)
        own, name = self.buffer[: x.nbytes].view(x.dtype), self.group.group_name
        if x.nbytes * (self.size - 1) <= ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(own, x.contiguous().flatten(), "sum", name).view_as(x)
        own.copy_(x.flatten())
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", name)
        return own.clone().view_as(x)
