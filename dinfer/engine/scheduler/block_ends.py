"""How many rows the step under way most likely takes on to their next blocks. Host side; no token depends on it."""

from dataclasses import dataclass, field

from dinfer.core.canvas import Phase
from dinfer.engine.row import Row

MEMORY = 256  # steps with as many open positions after which older ones count half
OFTEN = 8  # lanes are lent where one step in so many ends a block, or oftener: else they bring less than graphs cost


@dataclass(slots=True)
class Share:
    """How many of the last steps have ended a block."""

    steps: int = 0
    ends: int = 0

    def record(self, ends: bool, memory: int) -> None:
        self.steps, self.ends = self.steps + 1, self.ends + ends
        if self.steps == memory:
            self.steps, self.ends = self.steps // 2, self.ends // 2


@dataclass(slots=True)
class BlockEnds:
    """How often a denoise step ends its block: of all steps, and by the open positions that it begins with."""

    every: Share = field(default_factory=Share)
    by_open: dict[int, Share] = field(default_factory=dict)

    def record(self, row: Row) -> None:
        """Learns from the last step of a row, which moved it."""
        before, now = row.before, row.cursors
        if now.steps > before.steps:
            ends, left = now.block > before.block, row.open_before[before.end] - before.committed
            self.every.record(ends, 16 * MEMORY)
            self.by_open.setdefault(left, Share()).record(ends, MEMORY)

    @property
    def often(self) -> bool:
        """Whether rows enter blocks so often that lending lanes pays. Not until it is known of many steps."""
        return OFTEN * self.every.ends >= self.every.steps + MEMORY

    def chance(self, row: Row) -> float:
        """That the step under way takes a row on to another block; 0 where nothing is known."""
        known, now = self.by_open.get(row.left), row.cursors
        if known is None or now.phase != Phase.WINDOW or now.end == now.length:
            return 0.0
        return known.ends / known.steps
