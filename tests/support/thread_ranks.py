"""Ranks that are threads of one process: they start at once, and what they tell each other can be looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from dinfer.core.ranks.ranks import Ranks
from dinfer.core.ranks.split import Rank

LIMIT = 200.0  # seconds in which all ranks have come to a sum or a gather
Result = TypeVar("Result")


@dataclass
class Meeting:
    """Where the ranks exchange tensors."""

    size: int
    widths: set[int] = field(default_factory=set)  # last dimensions of what was gathered

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.given: dict[int, torch.Tensor] = {}

    def exchanged(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, in order. [size, ...]"""
        self.given[index] = x
        self.barrier.wait(LIMIT)
        found = torch.stack([self.given[rank] for rank in range(self.size)])
        self.barrier.wait(LIMIT)
        return found


@dataclass(frozen=True, slots=True)
class ThreadRanks(Ranks):
    """`Ranks` whose sums and gathers are those of threads."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.meeting.exchanged(self.index, x).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.meeting.widths.add(x.shape[-1])
        return self.meeting.exchanged(self.index, x)


def together(size: int, work: Callable[[ThreadRanks], Result]) -> tuple[list[Result], set[int]]:
    """What each rank makes of `work`, and how wide the tensors were that they gathered."""
    meeting = Meeting(size)

    def run(index: int) -> Result:
        try:
            return work(ThreadRanks(Rank(index, size), meeting=meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, index) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures], meeting.widths
