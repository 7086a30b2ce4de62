"""Data-parallel ranks: the processes of `torchrun` or `accelerate launch`, or one process on its own."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process, which is one of `size` that share the documents."""

    rank: int
    size: int
    device: torch.device

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, one behind the other."""
        if self.size == 1:
            return tensor
        from accelerate.utils import gather

        return gather(tensor)

    def collect(self, value: Any, to: int = 0) -> list[Any] | None:
        """The values of all ranks at rank `to`, None elsewhere."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.rank == to else None
        torch.distributed.gather_object(value, found, dst=to)
        return found

    def wait(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


ALONE = Ranks(0, 1, torch.device("cpu"))


def ranks(device: str | None, tensor_parallel: int = 1) -> Ranks:
    """The ranks of this run. `device`: None takes CUDA if there is any, with a card for each rank of a machine.

    With `tensor_parallel` above 1 torchrun's processes run one model and share no documents. Raises ValueError.
    """
    cuda = device.startswith("cuda") if device else torch.cuda.is_available()
    if tensor_parallel > 1 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(0, 1, torch.device(device or ("cuda" if cuda else "cpu")))
    if device and ":" in device:
        raise ValueError(f"device={device!r} names one card for several ranks: leave the number out")
    from accelerate import PartialState

    state = PartialState(cpu=not cuda)
    return Ranks(state.process_index, state.num_processes, state.device)
