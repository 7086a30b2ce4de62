"""Which steps a round takes. Host side; no token depends on it.

A step may be launched once more before the host knows where the last one leaves its rows. Then the device need not wait
for the host between two steps. A step does not change rows that it does not fit, so a wrong guess changes no token. It
costs the time of a step.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from dinfer.core.engine.row import PLACE, Row, StepWidth
from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.scheduler.grouping import LATE, Group, PrefillBatching, free_positions, grouped, opens
from dinfer.core.provided import provided
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.shape import KeysOnly, Planned, StepShape, extras_of
from dinfer.core.step.window import deciding, narrow_width, width_of

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
    if shape.phase != Phase.WINDOW or len(rows) != len(slots) or not all(extra.repeats for extra in shape.extras):
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


def divide(rows: Iterable[Row]) -> bool:
    """Whether each of the rows may take several lanes."""
    return all(extra.divides for asks in {row.asks for row in rows} for extra in asks)


class PlannedStep(NamedTuple):
    """A step to be launched: its shape, and the slots of its rows."""

    shape: StepShape
    slots: list[int]


class Scheduler:
    """Groups rows into steps, lets prefills wait for each other, and repeats steps before their outcome is known."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        self.recipe, self.runtime = recipe, runtime
        self.block = 0  # L of the batch
        self.widest = 0  # most positions of a row in a step with candidates
        self.lookahead = Lookahead()
        # What a row computes depends on where it is, and for some caches on how many forwards it has had.
        self._counts_forwards = any(recipe.cache.plan(phase).every for phase in recipe.phases)
        self._deciding = PLACE + self._counts_forwards  # the cursors before this one decide it
        self._free = free_positions(recipe.model.spec)
        self._prefills = PrefillBatching(self._free, runtime.positions)
        self._tries = runtime.speculate > 0 or recipe.facts.versions > 0
        self._window = recipe.cache.plan(Phase.WINDOW)
        keeps = self._window.keeps and recipe.iteration.blocks == 1
        simple = keeps and not (self._tries or recipe.facts.phases)  # else no step fits all that may come next
        self._slices = recipe.facts.divides
        self._ahead: Any | None = None  # of a layer: guesses the next round while one is under way
        if simple and (self._slices or runtime.throughput):
            guesses = provided("guessed_rounds")
            self._ahead = guesses and guesses(recipe, self._free, runtime.positions, self._slices)
        self._arrived = 0  # prefills since the last plan
        self._steps: list[PlannedStep] = []  # of the last round
        self._repeatable = False  # the last call of `plan` expected the steps to be needed once more

    def plan(self, rows: Collection[Row], *, in_flight: bool = False) -> list[PlannedStep]:
        """The steps of the next round, for rows in order of admission that have been through `update`.

        The step with most rows comes first: the host looks at them while the device is at the others.

        `in_flight`: a round is under way, and the host does not know yet where it leaves the rows. Then the plan is to
        repeat its steps if they will most likely be needed, else steps that fit rows wherever it leaves them, else
        none. A step does not change rows that it does not fit, so a wrong guess costs the time of a step and changes no
        token. The rows have been through `prepare`.
        """
        if in_flight:
            self._repeatable = repeats(self._steps, rows)
            return self._steps if self._repeatable and self.lookahead.pays else self._predicted(rows)
        phases: dict[Phase, list[Row]] = {phase: [] for phase in self.recipe.phases}
        for row in rows:
            phases[row.cursors.phase].append(row)  # type: ignore[index]  # an IntEnum is its number
        if self.runtime.throughput and self._holds(phases):
            phases[Phase.PREFILL] = []
        if self._ahead is not None:
            phases[Phase.WINDOW] = self._ahead.turn(phases[Phase.WINDOW])
        steps = [
            step
            for phase in phases
            for some in self._apart(phase, phases[phase])
            for step in self._grouped(phase, some)
        ]
        self._steps = sorted(steps, key=lambda step: -len(step.slots))
        return self._steps

    def update(self, row: Row) -> None:
        """Works out what a row needs now. It has just moved, and may have ended."""
        if row.cursors.phase == Phase.IDLE or (row.steady and not self._counts_forwards):
            return
        self._arrived += not row.need_at and row.cursors.phase == Phase.PREFILL
        self._plan(row, row.cursors)

    def prepare(self, row: Row) -> None:
        """Works out what a launched row needs next if it stays in its block, while the device is busy."""
        if self._counts_forwards:
            self._plan(row, row.cursors._replace(forwards=row.cursors.forwards + 1))

    def goes_on(self, rows: Collection[Row], busy: Collection[Row]) -> bool:
        """Whether the next round leaves out the rows that are busy, since it then begins before their steps end.

        Later rounds have a step more for them. So leaving them out costs their share of what a step takes for reading
        the weights. It saves the host's time between two rounds, which is some hundredths of a round.
        """
        positions = sum(row.need.width for row in rows)
        return not self._tries and LATE * self._free * len(busy) < (self._free + positions) * len(rows)

    @property
    def plans_by_place(self) -> bool:
        """Whether a plan depends on nothing of a row that stays where it was."""
        return not (self._tries or self._counts_forwards)

    def observe(self, rows: Collection[Row]) -> None:
        """Learns where a round has left its rows."""
        if self._ahead is not None:
            self._ahead.ends.record(rows)
        if self._repeatable:
            self.lookahead.record(all(row.steady for row in rows))
        self._repeatable = False

    def _plan(self, row: Row, now: Cursors) -> None:
        """Plans a row as if these were its cursors, unless that has been done."""
        at = now[: self._deciding]
        if row.need_at == at:
            return
        if self.recipe.facts.opens:
            most = now.start + self.recipe.iteration.blocks * self.block
            now = now._replace(end=max(min(now.end + self.block, most, now.length), now.end))
        cache, spec = self.recipe.cache, self.recipe.model.spec
        narrow = narrow_width(cache, spec, now) if self.runtime.throughput and now.phase == Phase.WINDOW else None
        row.need, row.need_at = StepWidth(width_of(cache, spec, now), narrow), at

    def _apart(self, phase: Phase, rows: list[Row]) -> list[list[Row]]:
        """The rows, apart from those that compute more than a version has pages for. They have no versions yet."""
        if not self.recipe.facts.versions or phase != deciding(self.recipe):
            return [rows]
        return [[row for row in rows if (row.need.width > self.widest) == wide] for wide in (False, True)]

    def _grouped(self, phase: Phase, rows: Sequence[Row]) -> list[PlannedStep]:
        if not rows:
            return []
        needs = {row.slot: row.need for row in rows if row.slot is not None}
        spec = self.recipe.model.spec
        unit = max(row.need.width for row in rows) if spec.prompt_block else spec.causal_block or 1
        slices = self._slices and phase == Phase.WINDOW and divide(rows)
        groups = grouped(phase, needs, free=self._free, limit=self.runtime.positions, unit=unit, slices=slices)
        return self._made(phase, rows, groups, {})

    def _made(
        self, phase: Phase, rows: Sequence[Row], groups: Sequence[Group], expected: Mapping[int, float]
    ) -> list[PlannedStep]:
        """The steps of groups of these rows. `expected`: by slot, open positions that are not `Row.left`."""
        by_slot = {row.slot: row for row in rows}
        return [self._step(phase, group, [by_slot[slot] for slot in group.slots], expected) for group in groups]

    def _step(self, phase: Phase, group: Group, rows: list[Row], expected: Mapping[int, float]) -> PlannedStep:
        blocks, pages = self.recipe.iteration.blocks, max(row.visible for row in rows)
        shape = StepShape(phase, group.slices or len(rows), group.width, blocks, self.block, pages)
        asked = extras_of(extra for asks in {row.asks for row in rows} for extra in asks)
        if phase == Phase.PREFILL:  # it draws and scores nothing, so one graph serves whatever the rows draw later
            return PlannedStep(shape.adding(*(extra for extra in asked if extra.prefills)), group.slots)
        shape = shape.adding(*asked, *([KeysOnly()] if group.keys_only else []))
        planned = self._planned(phase, group, rows, expected)
        for ability in self.recipe.abilities:
            if (extra := ability.adds(self.recipe, shape, planned)) is not None:
                shape = shape.adding(extra)
        for row in rows if self._tries else ():
            row.tried = shape.versions
        return PlannedStep(shape, group.slots)

    def _planned(self, phase: Phase, group: Group, rows: Sequence[Row], expected: Mapping[int, float]) -> Planned:
        forks = self._tries and phase == deciding(self.recipe) and group.width <= self.widest
        candidates = None
        if self.runtime.speculate:  # rows without drafts have nothing to try
            candidates = self.runtime.speculate if forks and any(row.drafted for row in rows) else 0

        def opened() -> int:
            some = (opens(row, self._window) for row in rows)
            return ceil(sum(expected.get(slot, own) for slot, own in zip(group.slots, some, strict=True)))

        return Planned(len(rows), forks, candidates, group.widest if group.slices else 0, opened)

    def _holds(self, phases: dict[Phase, list[Row]]) -> bool:
        """Whether prefills wait for more. Not while a request waits for their keys."""
        new, self._arrived = self._arrived, 0
        decoding = [row.need.width for phase in phases if phase != Phase.PREFILL for row in phases[phase]]
        entering = phases.get(Phase.PREFILL, [])
        if any(row.awaited for row in entering):
            decoding = []
        return self._prefills.holds(new, [row.need.width for row in entering], decoding)

    def _predicted(self, rows: Collection[Row]) -> list[PlannedStep]:
        """The next round, if steps fit its rows wherever the round under way leaves them."""
        if self._ahead is None or (self._slices and not divide(rows)):
            return []
        guess = self._ahead.predicted(rows, self._steps, self.block)
        if guess is None:
            return []
        steps = self._made(Phase.WINDOW, guess.decoding, guess.groups, guess.opens)
        if not (self.runtime.throughput and self._holds(guess.phases)):
            steps += self._grouped(Phase.PREFILL, guess.phases.get(Phase.PREFILL, []))
        self._steps = sorted(steps, key=lambda step: -len(step.slots))
        return self._steps
