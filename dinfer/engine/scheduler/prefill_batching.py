"""When prefills wait for each other, so that several read the weights together. No token depends on it. Host side."""

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 64  # rounds over which the rate of arrivals is averaged


@dataclass(slots=True)
class PrefillBatching:
    """Holds prefills back as long as waiting for the next one costs less than reading the weights once more.

    The unit of cost is the position, as in `dinfer.engine.scheduler.grouping`: a step costs `free` and the positions
    that it computes. A row that waits for a round costs its share of that round's step. The rule is that of the
    economic order quantity (F. W. Harris, 1913): with many requests in flight, a prefill gathers about
    sqrt(2 * free / (rounds between arrivals * cost of a row's round)) rows.
    """

    free: int
    limit: int  # most positions of a step
    rate: float = 0.0  # rows that arrive in a round
    debt: float = 0.0  # what the rows that wait have cost so far

    def holds(self, new: int, waiting: Sequence[int], decoding: Sequence[int]) -> bool:
        """Whether the prefills wait in this round. Asked once in each round that is planned.

        `new`: how many of them have just arrived. `waiting` and `decoding`: positions that each row needs. While rows
        decode, a prefill waits for about as many rounds as there are such rows at most. Else it does not wait.
        """
        self.rate += (new - self.rate) / MEMORY
        if waiting and decoding and sum(waiting) < self.limit:
            cost = len(waiting) * (self.free + sum(decoding)) / len(decoding)
            if self.debt * self.rate + cost <= self.free * self.rate:
                self.debt += cost
                return True
        self.debt = 0.0
        return False
