"""How often a denoise step ends its block, by the open positions that it begins with. Host side."""

from dataclasses import dataclass, field

from dinfer.engine.row import Row
from dinfer.step.canvas import Phase

MEMORY = 256  # steps with as many open positions after which older ones count half


@dataclass(slots=True)
class BlockEnds:
    """Says which rows the step under way most likely takes on to another block. No token depends on it."""

    steps: dict[int, int] = field(default_factory=dict)  # by open positions
    ends: dict[int, int] = field(default_factory=dict)  # how many of them ended their block
    gain: float = 0.0  # positions that a step commits, on average over recent ones

    def record(self, row: Row) -> None:
        """Learns from the last step of a row, which moved it."""
        before, now = row.before, row.cursors
        if now.steps == before.steps:
            return
        left = row.open_before[before.end] - before.committed
        self.gain += (now.committed - before.committed - self.gain) / MEMORY
        self.steps[left] = self.steps.get(left, 0) + 1
        self.ends[left] = self.ends.get(left, 0) + (now.block > before.block)
        if self.steps[left] == MEMORY:
            self.steps[left], self.ends[left] = MEMORY // 2, self.ends[left] // 2

    @property
    def share(self) -> float:
        """The share of recent steps that ended their block; 0 where nothing is known."""
        return sum(self.ends.values()) / max(sum(self.steps.values()), 1)

    def chance(self, row: Row) -> float:
        """That the step under way ends a row's block; 0 where nothing is known."""
        if row.cursors.phase != Phase.WINDOW:
            return 0.0
        return self.ends.get(row.left, 0) / self.steps.get(row.left, 1)
