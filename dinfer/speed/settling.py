"""Steps that are planned before the host knows where the last ones leave their rows, with many rows in flight.

With many rows, some enter a block in every round, so no round repeats the last one. A step in which rows settle (they
compute the keys of their finished block alone) fits rows that stay in their block and rows that enter one. So does a
step with lanes to spare, if rows may take several. Host side; no token depends on it.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from dinfer.core.engine.row import PHASES, Row
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import ACTIVE, Phase
from dinfer.core.step.shape import KeysOnly, StepShape
from dinfer.core.step.window import place, width_of
from dinfer.speed.grouping import LATE, Group, cut, narrow_width, opens, settling_pays, sliced

MEMORY = 256  # steps with as many open positions after which older ones count half
RECENT = 32  # blocks that ended, over which rows that end with them are averaged
PATIENCE = 2  # rounds that a row waits at most where rows take steps by turns
SURE = 0.75  # of what a step commits on average, what many rows together are sure to commit
# Rows that a round takes, of all that run, where they take steps by turns: simulated with 128 rows, 0.83 if a step ends
# its block with probability 1/2, and 0.99 if each second step does.
FILL = 0.83


@dataclass(slots=True)
class BlockEnds:
    """Says which rows the step under way most likely takes on to another block. No token depends on it."""

    steps: Counter[int] = field(default_factory=Counter)  # by open positions
    ends: Counter[int] = field(default_factory=Counter)  # how many of them ended their block
    gain: float = 0.0  # positions that a step commits, on average over recent ones
    stops: float = 0.0  # the share of rows that end with a block although there is room for another

    def record(self, rows: Collection[Row]) -> None:
        """Learns where a round has left its rows."""
        steps, ends, gain = self.steps, self.ends, self.gain
        for row in rows:
            before, now = row.before, row.cursors
            if row.missed or now.steps == before.steps:
                continue
            left = row.open_before[before.end] - (committed := before.committed)
            gain += (now.committed - committed - gain) / MEMORY
            steps[left] = count = steps.get(left, 0) + 1
            if now.block > before.block:
                ends[left] = ends.get(left, 0) + 1
                if before.end < before.length:
                    self.stops += ((now.phase not in ACTIVE) - self.stops) / RECENT
            if count == MEMORY:
                steps[left], ends[left] = MEMORY // 2, ends.get(left, 0) // 2
        self.gain = gain

    @property
    def share(self) -> float:
        """The share of recent steps that ended their block; 0 where nothing is known."""
        return sum(self.ends.values()) / max(sum(self.steps.values()), 1)

    def chance(self, row: Row) -> float:
        """That the step under way ends a row's block; 0 where nothing is known."""
        if row.cursors.phase != Phase.WINDOW:
            return 0.0
        return self.ends.get(row.left, 0) / self.steps.get(row.left, 1)


class Guess(NamedTuple):
    """What a row needs of the step after the one under way."""

    narrow: int | None  # see `StepWidth`
    width: int
    enters: float  # the chance that it enters a block
    left: float  # open positions of its block


class Prediction(NamedTuple):
    """The next round."""

    phases: dict[Phase, list[Row]]  # its rows
    decoding: list[Row]  # those that decode in it
    groups: list[Group]  # of these
    opens: dict[int, float]  # by slot, open positions that are not `Row.left`


def phases_after(rows: Collection[Row], steps: Sequence[tuple[StepShape, list[int]]]) -> dict[Phase, list[Row]] | None:
    """The rows by the phase of their next step, if `steps`, which are under way, fit them; None if they may not."""
    prefilled = {slot: shape.width for shape, slots in steps if shape.phase == Phase.PREFILL for slot in slots}
    phases = dict[Phase, list[Row]]()
    for row in rows:
        phase = PHASES[row.cursors.phase]
        if prefilled and (width := prefilled.get(row.slot)) is not None:  # type: ignore[arg-type]
            if row.need.width > width:
                return None  # its prompt goes on in the next round
            phase = Phase.WINDOW
        if (found := phases.get(phase)) is None:
            found = phases[phase] = []
        found.append(row)
    return phases if {*phases} <= {Phase.PREFILL, Phase.WINDOW} else None


class Ahead(ABC):
    """Says where the steps under way most likely leave their rows, and which steps then fit all of them."""

    def __init__(self, recipe: Recipe, free: int, limit: int) -> None:
        """`free` and `limit`: see `grouping.grouped`."""
        self._cache, self._spec, self._free, self._limit = recipe.cache, recipe.model.spec, free, limit
        self._plan = recipe.cache.plan(Phase.WINDOW)
        self.ends = BlockEnds()

    def turn(self, rows: list[Row]) -> list[Row]:
        """Those of the rows that take part in a round, where the host knows what each needs."""
        return rows

    @abstractmethod
    def predicted(
        self, rows: Collection[Row], steps: Sequence[tuple[StepShape, list[int]]], block: int
    ) -> Prediction | None:
        """The round after `steps`, which are under way; None if it is not to be launched before they end."""


class Settling(Ahead):
    """Steps in which rows settle, wide steps, or rows that take steps by turns."""

    def turn(self, rows: list[Row]) -> list[Row]:
        """The rows whose turn it is, if those that enter a block and the others take steps by turns; else all."""
        if not (narrow := self._alternating([row.need.narrow for row in rows])):
            return rows
        return self._larger(rows, {row.slot: row.need.width > narrow for row in rows})

    def predicted(
        self, rows: Collection[Row], steps: Sequence[tuple[StepShape, list[int]]], block: int
    ) -> Prediction | None:
        """The round after `steps`, which are under way; None if no step fits wherever they leave the rows."""
        if (phases := phases_after(rows, steps)) is None:
            return None
        missed = any(row.missed for row in rows)
        stepping: dict[int | None, StepShape] = {slot: shape for shape, slots in steps for slot in slots}
        sure = 0.0 if missed else SURE * self.ends.gain
        guesses = [(row, self._guess(row, stepping.get(row.slot), sure, block)) for row in phases.get(Phase.WINDOW, [])]
        found = {row.slot: guess for row, guess in guesses if guess is not None and row.slot is not None}
        decoding = [row for row, _ in guesses if row.slot in found]
        narrows = {slot: guess.narrow for slot, guess in found.items()}
        if narrow := self._alternating([*narrows.values()]):
            decoding = self._larger(decoding, {slot: guess.width > narrow for slot, guess in found.items()})
            slots = [row.slot for row in decoding if row.slot is not None]
            groups = cut(slots, max(found[slot].width for slot in slots), self._limit)
        elif missed:
            return None  # what one row missed, it might miss for ever
        else:
            chances = {slot: guess.enters for slot, guess in found.items()}
            groups = settling(narrows, chances, free=self._free, limit=self._limit)
        keys_only = any(group.keys_only for group in groups)  # a row that keys_only decodes nothing
        opens = {slot: guess.left for slot, guess in found.items() if not keys_only or guess.enters < 0.5}
        return Prediction(phases, decoding, groups, opens) if groups else None

    def _alternating(self, narrows: Sequence[int | None]) -> int:
        """The width of rows that stay in their block, if those and rows that enter one take steps by turns; else 0."""
        if not narrows or None in narrows:
            return 0
        narrow = max(narrow or 0 for narrow in narrows)
        return narrow if alternating_pays(len(narrows), narrow, self.ends.share, self._free) else 0

    def _larger(self, rows: Sequence[Row], wide: Mapping[int | None, bool]) -> list[Row]:
        """The rows whose turn it is: those that enter a block or the others, whichever are more."""
        groups = [[row for row in rows if wide[row.slot] == each] for each in (False, True)]
        taken = max(groups, key=lambda group: (any(row.waited >= PATIENCE for row in group), len(group)))
        for row in rows:
            row.waited += 1
        for row in taken:
            row.waited = 0
        return taken

    def _guess(self, row: Row, step: StepShape | None, sure: float, block: int) -> Guess | None:
        """Where its step under way most likely leaves a row. None: it ends.

        `step`: None if it has none. `sure`: positions that the step commits, if the row stays in its block.
        """
        cache, spec, now, need = self._cache, self._spec, row.cursors, row.need
        narrow = need.narrow or narrow_width(cache, spec, now)  # None: its prompt is being computed
        if step is None or step.width < need.width:  # it keys_only, or waits, or does not fit: nothing is committed
            width = narrow or 0 if step is not None and step.extra(KeysOnly) else need.width
            return Guess(narrow, width, float(narrow is not None and width > narrow), row.left)
        chance, last = self.ends.chance(row), now.end == now.length
        if chance < 0.5:
            left = max(row.left - sure, 1) if now.phase == Phase.WINDOW else row.left
            return Guess(narrow, narrow or 0, 0.0 if last else chance, left)
        if last:
            return None
        end = min(now.end + block, now.length)
        narrow = narrow_width(cache, spec, now._replace(start=now.end, end=end))
        return Guess(narrow, 2 * (narrow or 0), chance, row.open_before[end] - row.open_before[now.end])


class Slicing(Ahead):
    """Steps with as many lanes as the rows of a narrow window will most likely take.

    Where they are too few, the last rows that enter a block sit a round out, and come first in the next one.
    """

    def predicted(
        self, rows: Collection[Row], steps: Sequence[tuple[StepShape, list[int]]], block: int
    ) -> Prediction | None:
        """The round after `steps`, which are under way. None: so few lanes hardly pay, or nobody can tell how many."""
        phases, front = phases_after(rows, steps), self._plan.front
        if phases is None:
            return None
        stepping, left_out = dict[int | None, StepShape](), set[int | None]()
        wide = {row.slot: own - 1 for row in rows if (own := self._lanes(row.need.width)) > 1}
        for shape, slots in steps:
            stepping.update(dict.fromkeys(slots, shape))
            spare, narrow = shape.lanes - len(slots), shape.phase == Phase.WINDOW and shape.width == front
            for slot in slots if wide and narrow else ():
                if slot in wide:
                    spare -= wide[slot]
                    if spare < 0:
                        left_out.add(slot)
        decoding = phases.get(Phase.WINDOW, [])
        if left_out:
            decoding = sorted(decoding, key=lambda row: row.slot not in left_out)
        lanes, expected, chances = dict[int, float](), dict[int, float](), list[float]()
        known = dict[Hashable, tuple[float, tuple[float, float] | None]]()  # many rows stand alike
        for row in decoding:
            step, now = None if row.slot in left_out else stepping.get(row.slot), row.cursors
            alike: Hashable = row.index
            if step is not None and now.phase == Phase.WINDOW:
                alike = row.left, row.need.width, now.end - now.start, now.end == now.length, row.missed
            if (found := known.get(alike)) is None:
                chance = 0.0 if step is None else self.ends.chance(row)
                found = known[alike] = chance, self._guess(row, step, chance, block)
            chances.append(found[0])
            if found[1] is not None and row.slot is not None:
                lanes[row.slot], expected[row.slot] = found[1]
        wrong = sqrt(sum(chance * (1 - chance) for chance in chances)) + self.ends.stops * sum(chances)
        if len(lanes) * (2 * block - front) <= self._free or (
            LATE * wrong * 2 * block > self._free + sum(lanes.values()) * front
        ):
            return None
        widest = max(2 * block, *map(self._need, decoding))
        groups = sliced(lanes, front, widest, self._limit)
        return Prediction(phases, [row for row in decoding if row.slot in lanes], groups, expected)

    def _lanes(self, width: int) -> int:
        return -(-width // self._plan.front)

    def _need(self, row: Row) -> int:
        """Positions of its next window; while its prompt is computed, of its first one."""
        now = row.cursors
        if now.phase != Phase.PREFILL:
            return row.need.width
        _, _, settled = self._plan.bounds(place(now), self._spec.attention_layout)
        return width_of(self._cache, self._spec, now._replace(phase=Phase.WINDOW, kept=settled))

    def _guess(self, row: Row, step: StepShape | None, enters: float, block: int) -> tuple[float, float] | None:
        """The lanes that it takes and its open positions, after a step that fits it. None: it ends.

        `step`: None if it has none. `enters`: the chance that the step ends its block.
        """
        now = row.cursors
        if step is None or now.phase == Phase.PREFILL:
            return self._lanes(self._need(row)), opens(row, self._plan)
        stays = min(opens(row, self._plan), self._plan.front)
        if now.end == now.length:
            return (1, stays) if enters < 0.5 else None
        goes_on = enters * (1 - self.ends.stops)
        return 1 - enters + goes_on * self._lanes(2 * block), stays + goes_on * block


def settling(narrows: Mapping[int, int | None], chances: Mapping[int, float], *, free: int, limit: int) -> list[Group]:
    """Steps that fit rows that stay in their block and rows that enter the next one. None if they do not pay.

    Narrow steps, in which the latter settle, if few enter. If so many enter that all would take a wide step, and rows
    are many: wide steps. Then all enter together from then on. `narrows`: see `StepWidth.narrow`. `chances`: that a row
    enters.
    """
    if not narrows or None in narrows.values():
        return []
    narrow, rows, wide = max(narrow or 0 for narrow in narrows.values()), len(narrows), round(sum(chances.values()))
    expected = max(wide, 1)  # one of them may enter unexpectedly
    if settling_pays([2 * narrow] * expected + [narrow] * (rows - expected), narrow, free):
        return [] if 4 * wide > rows else cut([*narrows], narrow, limit, keys_only=True)
    many = rows * narrow >= free and (rows - wide) * narrow <= free  # see `by_width`
    return cut([*narrows], 2 * narrow, limit) if wide and many else []


def alternating_pays(rows: int, narrow: int, ends: float, free: int) -> bool:
    """Whether rows that enter a block and rows that stay in theirs should take steps by turns.

    `ends`: the share of steps that end their block, and so of wide steps. By turns each row computes what it needs and
    no more, but a round takes `FILL` of the rows on average. Otherwise all share a wide step, or the rows that enter
    settle in a narrow one, which is one more for each block.
    """
    turns = free / FILL + rows * narrow * (1 + ends)
    return turns < min(free + rows * 2 * narrow, (1 + ends) * (free + rows * narrow))
