"""Whether a round is launched once more before it is known where it leaves its rows. Host side.

The device then need not wait for the host between two steps. A step leaves rows as they are that are not where it takes
them to be, so a wrong guess changes nothing but costs the row a step's time.
"""

from __future__ import annotations

from dataclasses import dataclass

MISS = 32  # right guesses that make up for a wrong one: each saves the host's time, a few hundredths of a short step
BURST = 2  # times as many positions as a row has ever committed in a step, it is taken not to


def stays(left: int, fastest: int) -> bool:
    """Whether a row with so many open positions will most likely not commit them all in a step."""
    return left > BURST * max(fastest, 1)


@dataclass(slots=True)
class Luck:
    """Whether guesses have been right often enough, counting those that were only made in thought as well."""

    balance: int = 0

    @property
    def good(self) -> bool:
        return self.balance >= 0

    def judge(self, right: bool) -> None:
        self.balance = min(self.balance + 1, MISS) if right else self.balance - MISS
