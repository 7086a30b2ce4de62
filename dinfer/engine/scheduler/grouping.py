"""Which rows share a step, and how wide it is. Host side; no token depends on it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dinfer.core.protocols import ModelSpec, Phase
from dinfer.engine.row import Need

# Positions that a dense model computes in the time in which it reads its weights. A step of the LLaDA-8B shape with few
# positions takes 5.3 ms on an H200, and 2,700 more positions take 57 ms more, so 5.3 ms are worth 250 positions.
FREE = 256
# Grouped products run at a third of the rate of plain ones. With the LLaDA2-mini shape on an H200, one more step takes
# 8.9 ms and one more position 5 to 6 us. Its operations alone would take 2 us.
GROUPED = 3
SAVED = 64  # positions that lent lanes must save over a wide step for all: with few rows it saves next to no time


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share a step."""

    slots: list[int]
    width: int
    settles: bool = False
    spare: int = 0  # lanes beside those of the rows, which rows that settle borrow


def free_positions(spec: ModelSpec) -> int:
    """The number of positions that takes as long as one more step. It is high if a token uses few of the weights."""
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    if (experts := spec.experts) is None:
        return FREE
    each = 3 * spec.hidden * experts.width
    shared = attention + 3 * spec.hidden * experts.shared
    return max(FREE * (shared + each * experts.experts) // (shared + each * experts.chosen) // GROUPED, FREE)


def grouped(
    phase: Phase, needs: Mapping[int, Need], *, free: int, limit: int, unit: int, lends: bool = False
) -> list[Group]:
    """The steps of one round for the rows of one phase, by slot in order of admission.

    `free`: see `free_positions`. `limit`: most positions of a step. `unit`: length of an attention block. `lends`:
    rows that settle may borrow lanes, see `Recipe.lends`. A round has at most one step of prefills, which is cut to the
    limit, so that rows that decode do not wait for long.
    """
    if not needs:
        return []
    if phase == Phase.PREFILL:
        return [_prefill(needs, max(limit // unit * unit, unit))]
    widths = {slot: need.width for slot, need in needs.items()}
    if all(need.narrow is not None for need in needs.values()):
        narrow = max(need.narrow or 0 for need in needs.values())
        enters = {slot: float(width > narrow) for slot, width in widths.items()}
        saved = (len(enters) - sum(enters.values())) * narrow
        steps = _settling(enters, narrow, limit, lends and saved >= SAVED)
        lent = sum(step.spare for step in steps)
        if narrow < max(widths.values()) and settling_pays(list(widths.values()), narrow, free, lent):
            return steps
    return [group for width, slots in by_width(widths, free) for group in _cut(slots, width, limit)]


def settling(
    narrows: Mapping[int, int | None], chances: Mapping[int, float], *, free: int, limit: int, lends: bool = False
) -> list[Group]:
    """Narrow steps that settle, for rows that may stay in their block or enter the next one. None if they do not pay.

    They do not where many enter and borrow no lane: a wide step for all costs less, and then all enter together from
    then on. `narrows`: see `Need.narrow`. `chances`: that a row enters.
    """
    if not narrows or None in narrows.values():
        return []
    narrow, rows, wide = max(narrow or 0 for narrow in narrows.values()), len(narrows), round(sum(chances.values()))
    steps = _settling(chances, narrow, limit, lends)
    lent = sum(step.spare for step in steps)
    surprised = min(wide + (wide <= lent), rows)  # one of them may enter unexpectedly
    widths = [2 * narrow] * surprised + [narrow] * (rows - surprised)
    return [] if 4 * (wide - lent) > rows or not settling_pays(widths, narrow, free, lent) else steps


def by_width(widths: Mapping[int, int], free: int) -> list[tuple[int, list[int]]]:
    """Steps, given the width that each slot needs: one step for all, or one for narrow rows and one for wide ones.

    A step computes as many positions for each row as for its widest one. A row that enters a block may need twice the
    width of the others. Few rows share a step anyway; many do not.
    """
    widest, most, narrow, count = max(widths.values()), free, 0, 0
    for width, rows in sorted(Counter(widths.values()).items()):
        count += rows
        if (saved := count * (widest - width)) > most:
            most, narrow = saved, width
    if not narrow:
        return [(widest, list(widths))]
    few = [slot for slot, width in widths.items() if width <= narrow]
    return [(narrow, few), (widest, [slot for slot, width in widths.items() if width > narrow])]


def settling_pays(widths: list[int], narrow: int, free: int, lent: int = 0) -> bool:
    """Whether it is cheaper to give all rows a narrow step, in which the wide rows only compute keys.

    `lent`: lanes that wide rows borrow, and so also decode. The unit of cost is the position: a step costs `free` and
    the positions that it computes.
    """
    rows, wide, widest = len(widths), sum(width > narrow for width in widths), max(widths)
    one = free + rows * widest
    two = 2 * free + (rows - wide) * narrow + wide * widest
    return (free + (rows + lent) * narrow) * (rows + wide - lent) <= min(one, two) * rows


def _settling(chances: Mapping[int, float], narrow: int, limit: int, lends: bool) -> list[Group]:
    """Narrow steps that settle. If lanes are lent, one for each row that enters, as far as the limit allows."""
    steps = _cut(list(chances), narrow, limit, settles=True)
    if not lends:
        return steps
    enter = [round(sum(chances[slot] for slot in step.slots)) for step in steps]
    room = [max(limit // narrow - len(step.slots), 0) for step in steps]
    return [replace(step, spare=min(own)) for step, *own in zip(steps, enter, room, strict=True)]


def _prefill(needs: Mapping[int, Need], limit: int) -> Group:
    """As many rows as fit under the limit, but always the oldest."""
    slots: list[int] = []
    width = 0
    for slot, need in needs.items():
        wider = max(width, min(need.width, limit))
        if slots and wider * (len(slots) + 1) > limit:
            break
        slots, width = [*slots, slot], wider
    return Group(slots, width)


def _cut(slots: list[int], width: int, limit: int, *, settles: bool = False) -> list[Group]:
    """Steps of at most `limit` positions and at least one row, of equal size."""
    steps = -(-len(slots) // max(limit // width, 1))
    rows = -(-len(slots) // steps)
    return [Group(slots[i : i + rows], width, settles) for i in range(0, len(slots), rows)]
