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
MOST_ROWS, WIDEST_OF_MANY, GROUP = 2048, 4096, 4  # of `ManyRows`
WIDTH = 16  # bytes that a thread reads at a time


class ManyRows(NamedTuple):
    """As `Exchange`, for more rows. One rank adds up each row and sends the total, so half as much travels.

    Program P takes the rows P, P + ROWS, P + 2 * ROWS, ... in groups of GROUP. Rank (P + G) % N adds up group G.
    """

    addends: Tensor  # int16 [2, N, S, width], what the other ranks add to rows that this one adds up
    totals: Tensor  # int16 [2, R, width], of rows that others add up
    address_2N: Tensor  # int64, of the addends of this rank in each rank's memory, then of each rank's totals
    count_R: Tensor  # int32

    @staticmethod
    def sizes(ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of `addends` and `totals`."""
        groups = MOST_ROWS // ROWS // GROUP
        return (2, ranks, -(-groups // ranks) * GROUP * ROWS, WIDEST_OF_MANY), (2, MOST_ROWS, WIDEST_OF_MANY)

    @classmethod
    def over(cls, addends: Sequence[Tensor], totals: Sequence[Tensor], rank: int) -> Self:
        """Empties the memory of a rank. `addends`, `totals`: of all ranks, in order."""
        own, total = addends[rank].fill_(EMPTY), totals[rank].fill_(EMPTY)
        places = [each[:, rank].data_ptr() for each in addends] + [each.data_ptr() for each in totals]
        address_2N = torch.tensor(places, dtype=torch.int64).to(own.device)
        return cls(own, total, address_2N, torch.zeros(total.shape[1], dtype=torch.int32, device=own.device))


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
    many: ManyRows | None = None

    @classmethod
    def over(cls, inboxes: Sequence[Tensor], rank: int) -> Self:
        """Empties the inbox of a rank. `inboxes`: of all ranks, in order."""
        inbox, places = inboxes[rank], [each[:, rank] for each in inboxes]
        inbox.fill_(EMPTY)
        address_N = torch.tensor([place.data_ptr() for place in places], dtype=torch.int64).to(inbox.device)
        return cls(inbox, address_N, torch.zeros(inbox.shape[2], dtype=torch.int32, device=inbox.device), rank)

    def takes(self, x: Tensor) -> bool:
        """Whether the rows of `x` fit. All programs of a kernel must run at once, or they wait for ever."""
        return x.dtype in (torch.bfloat16, torch.float16) and (
            _fit(x, *self.inbox.shape[2:]) or (self.many is not None and _fit(x, *self.many.totals.shape[1:]))
        )

    def in_two(self, x: Tensor) -> bool:
        """Whether so many rows are added up by one rank each (`ManyRows`)."""
        return not _fit(x, *self.inbox.shape[2:])


def _fit(x: Tensor, rows: int, width: int) -> bool:
    return x.numel() // x.shape[-1] <= rows and x.shape[-1] <= width


class SymmetricSum:
    """The sum over the GPUs of a process group, in order of rank, so that all get the same bits."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Every rank of the group makes one at the same time. Raises RuntimeError if GPUs cannot read each other."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory

        self.group, self.size = group, group.size()
        self.buffer = _symmetric_memory.empty(ROOM, dtype=torch.uint8, device=device)
        barrier = _symmetric_memory.rendezvous(self.buffer, group)

        def everyones(*shape: int) -> list[Tensor]:
            own = _symmetric_memory.empty(*shape, dtype=torch.int16, device=device)
            memory = _symmetric_memory.rendezvous(own, group)
            return [
                own if rank == group.rank() else memory.get_buffer(rank, shape, own.dtype) for rank in range(self.size)
            ]

        addends, totals = (everyones(*shape) for shape in ManyRows.sizes(self.size))
        exchange = Exchange.over(everyones(2, self.size, ROWS, WIDEST), group.rank())
        self.exchange = exchange._replace(many=ManyRows.over(addends, totals, group.rank()))
        torch.cuda.synchronize(device)
        barrier.barrier()  # a rank writes only after the others have emptied their inboxes
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
            return triton("norm").add(torch.zeros_like(x), x, self.exchange)
        own, name = self.buffer[: x.nbytes].view(x.dtype), self.group.group_name
        if x.nbytes * (self.size - 1) <= ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(own, x.contiguous().flatten(), "sum", name).view_as(x)
        own.copy_(x.flatten())
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", name)
        return own.clone().view_as(x)
