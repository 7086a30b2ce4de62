"""Which steps a round takes: one for all rows of a phase, as far as they fit. Host side; no token depends on it.

`dinfer.speed.scheduler` makes more of it: rows apart by width, prefills that wait for each other, guessed rounds.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

from dinfer.core.engine.row import PLACE, Row, StepWidth
from dinfer.core.engine.runtime import Runtime
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.shape import Extra, Planned, StepShape, Versioned, extras_of
from dinfer.core.step.window import deciding, width_of

T = TypeVar("T")


class PlannedStep(NamedTuple):
    """A step to be launched: its shape, and the slots of its rows."""

    shape: StepShape
    slots: list[int]


class Scheduler:
    """Groups rows into steps, and knows what each row needs of its next one."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        self.recipe, self.runtime = recipe, runtime
        self.block = 0  # L of the batch
        self.widest = 0  # most positions of a row in a step with candidates
        # What a row computes depends on where it is, and for some caches on how many forwards it has had.
        self.counts_forwards = any(recipe.cache.plan(phase).every for phase in recipe.phases)
        self.tries = runtime.speculate > 0 or recipe.facts.versions > 0
        self._deciding = PLACE + self.counts_forwards  # the cursors before this one decide it

    def plan(self, rows: Collection[Row]) -> list[PlannedStep]:
        """The steps of the next round, for rows in order of admission that have been through `update`.

        The step with most rows comes first: the host looks at them while the device is at the others.
        """
        phases: dict[Phase, list[Row]] = {phase: [] for phase in self.recipe.phases}
        for row in rows:
            phases[row.cursors.phase].append(row)  # type: ignore[index]  # an IntEnum is its number
        return self.ordered(phases)

    def ordered(self, phases: dict[Phase, list[Row]]) -> list[PlannedStep]:
        """The steps of these rows, those with most rows first."""
        parts = [(phase, some) for phase, rows in phases.items() for some in self._apart(phase, rows) if some]
        steps = [step for phase, some in parts for step in self.grouped(phase, some)]
        return sorted(steps, key=lambda step: -len(step.slots))

    def grouped(self, phase: Phase, rows: Sequence[Row]) -> list[PlannedStep]:
        """Steps of at most `runtime.positions` positions, and at least one row, for the rows of one phase."""
        width, limit, most = max(row.need.width for row in rows), self.limit(phase, rows), self.runtime.positions
        if phase == Phase.PREFILL:  # a longer prompt goes on in the next round
            unit = self.unit(rows)
            width = min(width, max(limit // unit * unit, unit))
        return [self.step(phase, some, width, Planned(len(some), most)) for some in cut(rows, width, limit)]

    def limit(self, phase: Phase, rows: Sequence[Row]) -> int:
        """Most positions of a step of these rows, where those of versions beside them count, too."""
        planned, width = Planned(len(rows), self.runtime.positions), min(row.need.width for row in rows)
        return planned.positions // (1 + (self.tries and self.step(phase, rows, width, planned).shape.versions))

    def unit(self, rows: Sequence[Row]) -> int:
        """Length of an attention block: where prefills may be cut."""
        spec = self.recipe.model.spec
        return max(row.need.width for row in rows) if spec.prompt_block else spec.causal_block or 1

    def update(self, row: Row) -> None:
        """Works out what a row needs now. It has just moved, and may have ended."""
        if (self.counts_forwards or not row.steady) and row.cursors.phase != Phase.IDLE:
            self._plan(row, row.cursors)

    def prepare(self, row: Row) -> None:
        """Works out what a launched row needs next if it stays in its block, while the device is busy."""
        if self.counts_forwards:
            self._plan(row, row.cursors._replace(forwards=row.cursors.forwards + 1))

    def observe(self, rows: Collection[Row]) -> None:
        """Learns where a round has left its rows."""

    def need(self, now: Cursors) -> StepWidth:
        """What a row with these cursors needs of its next step."""
        return StepWidth(width_of(self.recipe.cache, self.recipe.model.spec, now))

    def _plan(self, row: Row, now: Cursors) -> None:
        """Plans a row as if these were its cursors, unless that has been done."""
        at = now[: self._deciding]
        if row.need_at == at:
            return
        if self.recipe.facts.opens:
            most = now.start + self.recipe.iteration.blocks * self.block
            now = now._replace(end=max(min(now.end + self.block, most, now.length), now.end))
        row.need, row.need_at = self.need(now), at

    def _apart(self, phase: Phase, rows: list[Row]) -> list[list[Row]]:
        """The rows, apart from those that have no versions."""
        if not self.recipe.facts.versions or phase != deciding(self.recipe):
            return [rows]
        return [[row for row in rows if self._forks(row) == forks] for forks in (True, False)]

    def _forks(self, row: Row) -> bool:
        """Whether a row may have versions in its next step, and computes no more than a version has pages for."""
        few = not (most := self.recipe.facts.offered) or (row.drafted and row.gained <= most * (row.tried > 0))
        return row.need.width <= self.widest and (few or row.missed)

    def versions(self, phase: Phase, rows: Sequence[Row], width: int) -> int:
        """How many versions each lane of such a step evaluates: as many as are asked for, or 0 where rows have none."""
        decides, own = phase == deciding(self.recipe) and width <= self.widest, self.recipe.facts.versions
        tries = all(map(self._forks, rows)) if own else any(row.drafted for row in rows)
        return (own or self.runtime.speculate) * (decides and tries)

    def step(
        self, phase: Phase, rows: Sequence[Row], width: int, planned: Planned, *more: Extra, lanes: int = 0
    ) -> PlannedStep:
        """A step of these rows with what they ask for and abilities add. `lanes`: if they take more than one each."""
        slots = [row.slot for row in rows if row.slot is not None]
        blocks, pages = self.recipe.iteration.blocks, max(row.visible for row in rows)
        shape = StepShape(phase, lanes or len(rows), width, blocks, self.block, pages)
        asked = extras_of(extra for extras in {id(row.extras): row.extras for row in rows}.values() for extra in extras)
        if phase == Phase.PREFILL:  # it draws and scores nothing, so one graph serves whatever the rows draw later
            return PlannedStep(shape.adding(*(extra for extra in asked if extra.prefills)), slots)
        shape = shape.adding(*asked, *more)
        if self.tries:
            shape = shape.adding(Versioned(self.versions(phase, rows, width)))
        for ability in self.recipe.abilities:
            if (extra := ability.adds(self.recipe, shape, planned)) is not None:
                shape = shape.adding(extra)
        for row in rows if self.tries else ():
            row.tried = shape.versions
        return PlannedStep(shape, slots)


def cut(rows: Sequence[T], width: int, limit: int) -> list[Sequence[T]]:
    """Parts of equal size, each for a step of at most `limit` positions, and at least one row."""
    steps = -(-len(rows) // max(limit // width, 1))
    each = -(-len(rows) // steps)
    return [rows[i : i + each] for i in range(0, len(rows), each)]
