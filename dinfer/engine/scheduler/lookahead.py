"""Whether to launch a step once more before the host knows where the last one leaves its rows. Host side.

Then the device need not wait for the host between two steps. A step does not change rows that it does not fit, so a
wrong guess changes no token. It costs the time of a step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dinfer.abilities.open_positions import OpenOnly
from dinfer.engine.row import Row
from dinfer.step.canvas import Phase
from dinfer.step.shape import KeysOnly, StepShape

MISS = 32  # right guesses that pay for a wrong one: each saves the host's time, a few hundredths of a short step
BURST = 2  # assume that no step commits more than BURST times the row's record


def stays_open(left: int, fastest: int, blocks: int = 1) -> bool:
    """Whether a row with `left` open positions will most likely finish no block in its next step.

    `fastest`: most positions that one of its steps has committed. `blocks`: most active blocks. They open one after the
    other, so the first has fewer open positions than the others: if one opens at each step, half of that number of
    steps fewer than the average.
    """
    most = max(fastest, 1)
    return left - most * (blocks - 1) / 2 > BURST * most


def repeats(steps: Sequence[tuple[StepShape, list[int]]], rows: Collection[Row]) -> bool:
    """Whether all rows will most likely need the one step of the last round once more."""
    if len(steps) != 1:
        return False
    shape, slots = steps[0]
    if shape.phase != Phase.WINDOW or shape.extra(KeysOnly) or shape.extra(OpenOnly) or len(rows) != len(slots):
        return False
    if {row.slot for row in rows} != {*slots}:
        return False
    return all(
        row.steady and row.need.width == shape.width and stays_open(row.left, row.fastest, shape.blocks) for row in rows
    )


@dataclass(slots=True)
class Lookahead:
    """Whether guesses have been right often enough, including guesses that were not acted on."""

    balance: int = 0

    @property
    def pays(self) -> bool:
        return self.balance >= 0

    def record(self, right: bool) -> None:
        self.balance = min(self.balance + 1, MISS) if right else self.balance - MISS
