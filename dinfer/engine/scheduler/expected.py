"""Where rows will most likely be once the step under way has ended. Host side; no token depends on it."""

from dataclasses import dataclass, field

from dinfer.core.canvas import Cursors, Phase
from dinfer.core.protocols import CachePolicy, ModelSpec
from dinfer.engine.row import Row

MEMORY = 256  # steps after which older ones count half


@dataclass(slots=True)
class BlockEnds:
    """How often a step finishes its block, by the open positions that it begins with."""

    steps: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    def record(self, row: Row) -> None:
        """Learns from the last step of a row, which moved it."""
        before, now = row.before, row.cursors
        if now.steps == before.steps:
            return
        left = row.open_before[before.end] - before.committed
        self.steps[left] = self.steps.get(left, 0) + 1
        self.ends[left] = self.ends.get(left, 0) + (now.block > before.block)
        if self.steps[left] == MEMORY:
            self.steps[left], self.ends[left] = MEMORY // 2, self.ends[left] // 2

    def chance(self, row: Row) -> float:
        """That the step under way takes a row on to another block; 0 where nothing is known."""
        if row.cursors.phase != Phase.WINDOW or row.cursors.end == row.cursors.length:
            return 0.0
        return self.ends.get(row.left, 0) / self.steps.get(row.left, 1)


def expected(now: Cursors, cache: CachePolicy, spec: ModelSpec, block: int, *, leaves: bool) -> Cursors:
    """The cursors of a row after its step, of a recipe whose phases are PREFILL and WINDOW. Counts stay as they are.

    `leaves`: it leaves its block, and enters one of at most `block` positions.
    """
    if now.phase == Phase.PREFILL:
        return now._replace(phase=Phase.WINDOW, kept=cache.prefilled(spec, now.start))
    kept = cache.plan(Phase.WINDOW).bounds(now.place, spec.frame)[2]
    if now.kept < min(now.start, kept):  # its first step in a block makes the keys before that final
        now = now._replace(kept=kept)
    return now._replace(start=now.end, end=min(now.end + block, now.length)) if leaves else now
