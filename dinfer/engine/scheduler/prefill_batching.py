"""When prefills wait for one another, so that several read the weights together. Host side; no token depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 64  # rounds over which the rate of arrivals is averaged, about


@dataclass(slots=True)
class Gathering:
    """Holds prefills back while it costs less to wait for the next one than to read the weights once more.

    Costs are in positions, as in `dinfer.engine.scheduler.grouping`: a step costs `free` and those that it computes,
    so a round in which a row waits costs its share of a round's step. The rule is that of the economic order quantity
    (F. W. Harris, 1913): many in flight gather about sqrt(2 * free / (rounds between arrivals * cost of such a round))
    rows.
    """

    free: int
    limit: int  # positions that a step computes at most
    rate: float = 0.0  # rows that come in a round
    debt: float = 0.0  # what it has cost so far that rows wait

    def holds(self, came: int, waiting: Sequence[int], decoding: Sequence[int]) -> bool:
        """Whether the prefills wait in this round; asked once in each that is planned.

        `came`: how many of them are new; `waiting` and `decoding`: positions that each row needs. While rows decode, a
        prefill is held for about as many rounds as there are of them at most; else not at all.
        """
        self.rate += (came - self.rate) / MEMORY
        if waiting and decoding and sum(waiting) < self.limit:
            cost = len(waiting) * (self.free + sum(decoding)) / len(decoding)
            if self.debt * self.rate + cost <= self.free * self.rate:
                self.debt += cost
                return True
        self.debt = 0.0
        return False
