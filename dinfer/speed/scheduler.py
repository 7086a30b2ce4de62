"""Which steps a round takes. Host side; no token depends on it.

A step may be launched once more before the host knows where the last one leaves its rows. Then the device need not wait
for the host between two steps. A step does not change rows that it does not fit, so a wrong guess changes no token. It
costs the time of a step.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from dinfer.core.engine.row import Row, StepWidth
from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.scheduler import PlannedStep, Scheduler
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.mixins import Slides
from dinfer.core.step.shape import KeysOnly, Planned, StepShape
from dinfer.speed.grouping import LATE, Group, PrefillBatching, free_positions, grouped, narrow_width, opens
from dinfer.speed.settling import Ahead, Settling, Slicing

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


def repeats(steps: Sequence[tuple[StepShape, list[int]]], rows: Collection[Row], slides: bool) -> bool:
    """Whether all rows will most likely need the one step of the last round once more. `slides`: see `Slides`."""
    if len(steps) != 1:
        return False
    shape, slots = steps[0]
    if shape.phase != Phase.WINDOW or len(rows) != len(slots) or not all(extra.repeats for extra in shape.extras):
        return False
    if {row.slot for row in rows} != {*slots}:
        return False
    if any(row.need.width != shape.width or row.missed for row in rows):
        return False
    if slides:  # wherever it slides, a window is as wide; one that has ended costs its lane
        return 2 * sum(map(ends_soon, rows)) < len(rows)
    return all(row.steady and stays_open(row.left, row.fastest, shape.blocks) for row in rows)


def ends_soon(row: Row) -> bool:
    """Whether the step under way may be a row's last, if no stop token ends it earlier."""
    return not stays_open(row.open_before[row.cursors.length] - row.cursors.committed, row.fastest)


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
    return all(extra.divides for extras in {row.extras for row in rows} for extra in extras)


class FastScheduler(Scheduler):
    """Also takes rows apart by width, lets prefills wait for each other, and plans before an outcome is known."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        super().__init__(recipe, runtime)
        self.lookahead, self._sliding = Lookahead(), isinstance(recipe.iteration, Slides)
        self._free = free_positions(recipe.model.spec)
        self._prefills = PrefillBatching(self._free, runtime.positions)
        self._window = recipe.cache.plan(Phase.WINDOW)
        keeps = self._window.keeps and recipe.iteration.blocks == 1
        simple = keeps and not (self.tries or recipe.facts.phases)  # else no step fits all that may come next
        self._slices = recipe.facts.divides
        self._ahead: Ahead | None = None  # guesses the next round while one is under way
        if simple and (self._slices or runtime.throughput):
            guesses = Slicing if self._slices else Settling
            self._ahead = guesses(recipe, self._free, runtime.positions)
        self._arrived = 0  # prefills since the last plan
        self._steps: list[PlannedStep] = []  # of the last round
        self._repeatable = False  # the last call of `plan` expected the steps to be needed once more

    def ordered(self, phases: dict[Phase, list[Row]]) -> list[PlannedStep]:
        if self.runtime.throughput and self._holds(phases):
            phases[Phase.PREFILL] = []
        if self._ahead is not None:
            phases[Phase.WINDOW] = self._ahead.turn(phases[Phase.WINDOW])
        self._steps = super().ordered(phases)
        return self._steps

    def plan(self, rows: Collection[Row], *, in_flight: bool = False) -> list[PlannedStep]:
        """As of any scheduler.

        `in_flight`: a round is under way, and the host does not know yet where it leaves the rows. Then the plan is to
        repeat its steps if they will most likely be needed, else steps that fit rows wherever it leaves them, else
        none. A step does not change rows that it does not fit, so a wrong guess costs the time of a step and changes no
        token. The rows have been through `prepare`.
        """
        if not in_flight:
            return super().plan(rows)
        self._repeatable = repeats(self._steps, rows, self._sliding)
        return self._steps if self._repeatable and self.lookahead.pays else self._predicted(rows)

    def _plan(self, row: Row, now: Cursors) -> None:
        self._arrived += not row.need_at and now.phase == Phase.PREFILL
        super()._plan(row, now)

    def goes_on(self, rows: Collection[Row], busy: Collection[Row]) -> bool:
        """Whether the next round leaves out the rows that are busy, since it then begins before their steps end.

        Later rounds have a step more for them. So leaving them out costs their share of what a step takes for reading
        the weights. It saves the host's time between two rounds, which is some hundredths of a round.
        """
        positions = sum(row.need.width for row in rows)
        return not self.tries and LATE * self._free * len(busy) < (self._free + positions) * len(rows)

    @property
    def plans_by_place(self) -> bool:
        """Whether a plan depends on nothing of a row that stays where it was."""
        return not (self.tries or self.counts_forwards)

    def observe(self, rows: Collection[Row]) -> None:
        if self._ahead is not None:
            self._ahead.ends.record(rows)
        if self._repeatable:
            self.lookahead.record(all(self._sliding or row.steady for row in rows))
        self._repeatable = False

    def need(self, now: Cursors) -> StepWidth:
        found = super().need(now)
        if self.runtime.throughput and now.phase == Phase.WINDOW:
            found.narrow = narrow_width(self.recipe.cache, self.recipe.model.spec, now)
        return found

    def grouped(self, phase: Phase, rows: Sequence[Row]) -> list[PlannedStep]:
        needs = {row.slot: row.need for row in rows if row.slot is not None}
        slices, limit = self._slices and phase == Phase.WINDOW and divide(rows), self.limit(phase, rows)
        groups = grouped(phase, needs, free=self._free, limit=limit, unit=self.unit(rows), slices=slices)
        return self._made(phase, rows, groups, {})

    def _made(
        self, phase: Phase, rows: Sequence[Row], groups: Sequence[Group], expected: Mapping[int, float]
    ) -> list[PlannedStep]:
        """The steps of groups of these rows. `expected`: by slot, open positions that are not `Row.left`."""
        by_slot, found = {row.slot: row for row in rows}, list[PlannedStep]()
        for group in groups:
            some = [by_slot[slot] for slot in group.slots]
            widest = group.widest if group.slices else 0
            most, opened = self.runtime.positions, partial(self._open, group, some, expected)
            planned = Planned(len(some), most, widest=widest, open=opened)
            more = [KeysOnly()] if group.keys_only else []
            found.append(self.step(phase, some, group.width, planned, *more, lanes=group.slices))
        return found

    def _open(self, group: Group, rows: Sequence[Row], expected: Mapping[int, float]) -> int:
        unknown = (opens(row, self._window) for row in rows if row.slot not in expected)
        return ceil(sum(unknown) + sum(expected[slot] for slot in group.slots if slot in expected))

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
        entering, held = guess.phases.get(Phase.PREFILL, []), self.runtime.throughput and self._holds(guess.phases)
        if entering and not held:
            steps += self.grouped(Phase.PREFILL, entering)
        self._steps = sorted(steps, key=lambda step: -len(step.slots))
        return self._steps
