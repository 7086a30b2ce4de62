"""Which rows share a step, and how wide it is. Host side; no token depends on it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from dinfer.core.engine.row import Row, StepWidth
from dinfer.core.engine.scheduler import cut as equal_parts
from dinfer.core.step.contracts import CachePolicy, ModelSpec, Phase, WindowPlan
from dinfer.core.step.cursors import Cursors
from dinfer.core.step.window import place

# Positions that a dense model computes in the time in which it reads its weights. A step of the LLaDA-8B shape with few
# positions takes 5.3 ms on an H200, and 2,700 more positions take 57 ms more, so 5.3 ms are worth 250 positions.
FREE = 256
# Grouped products run at a third of the rate of plain ones. With the LLaDA2-mini shape on an H200, one more step takes
# 8.9 ms and one more position 5 to 6 us. Its operations alone would take 2 us.
GROUPED = 3
LATE = 64  # rows wait for a round, or lanes stay empty, if that costs less than such a part of it


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share a step."""

    slots: list[int]
    width: int
    keys_only: bool = False
    slices: int = 0  # lanes that its rows take, a row as many of `width` as it needs; 0: each takes one
    widest: int = 0  # most positions of a row that takes several


def free_positions(spec: ModelSpec) -> int:
    """The number of positions that takes as long as one more step. It is high if a token uses few of the weights."""
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    if (experts := spec.experts) is None:
        return FREE
    each = 3 * spec.hidden * experts.width
    shared = attention + 3 * spec.hidden * experts.shared
    return max(FREE * (shared + each * experts.experts) // (shared + each * experts.chosen) // GROUPED, FREE)


def grouped(
    phase: Phase, needs: Mapping[int, StepWidth], *, free: int, limit: int, unit: int, slices: bool = False
) -> list[Group]:
    """The steps of one round for the rows of one phase, by slot in order of admission.

    `free`: see `free_positions`. `limit`: most positions of a step. `unit`: length of an attention block. `slices`: a
    row may take several lanes. A round has at most one step of prefills, which is cut to the limit, so that rows that
    decode do not wait for long.
    """
    if not needs:
        return []
    if phase == Phase.PREFILL:
        return [_prefill(needs, max(limit // unit * unit, unit))]
    widths = {slot: need.width for slot, need in needs.items()}
    if all(need.narrow is not None for need in needs.values()):
        narrow = max(need.narrow or 0 for need in needs.values())
        if narrow < max(widths.values()) and settling_pays(list(widths.values()), narrow, free):
            return cut(list(needs), narrow, limit, keys_only=True)
    groups = by_width(widths, free)
    if slices and len(groups) > 1:
        narrow = groups[0][0]
        lanes = {slot: -(-width // narrow) for slot, width in widths.items()}
        return sliced(lanes, narrow, max(widths.values()), limit)
    return [group for width, slots in groups for group in cut(slots, width, limit)]


def sliced(lanes: Mapping[int, float], width: int, widest: int, limit: int) -> list[Group]:
    """Steps of at most `limit` positions and at least one row, in which rows take so many lanes of `width`."""
    groups, slots, taken = list[Group](), list[int](), 0.0
    for slot, own in lanes.items():
        if slots and ceil(taken + own) * width > limit:
            groups.append(Group(slots, width, slices=ceil(taken), widest=widest))
            slots, taken = [], 0.0
        slots.append(slot)
        taken += own
    return [*groups, Group(slots, width, slices=ceil(taken), widest=widest)]


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


def settling_pays(widths: list[int], narrow: int, free: int) -> bool:
    """Whether it is cheaper to give all rows a narrow step, in which the wide rows only compute keys.

    The unit of cost is the position: a step costs `free` and the positions that it computes.
    """
    rows, wide, widest = len(widths), sum(width > narrow for width in widths), max(widths)
    one = free + rows * widest
    two = 2 * free + (rows - wide) * narrow + wide * widest
    return (free + rows * narrow) * (rows + wide) <= min(one, two) * rows


def _prefill(needs: Mapping[int, StepWidth], limit: int) -> Group:
    """As many rows as fit under the limit, but always the oldest."""
    slots: list[int] = []
    width = 0
    for slot, need in needs.items():
        wider = max(width, min(need.width, limit))
        if slots and wider * (len(slots) + 1) > limit:
            break
        slots, width = [*slots, slot], wider
    return Group(slots, width)


def opens(row: Row, plan: WindowPlan) -> int:
    """About how many open positions a row's next step computes; no other position needs logits.

    The number is exact unless the window is narrow, and then it is exact where tokens are committed from the left. A
    row that had more open positions sits the step out, and gets room for all of them in the next one.
    """
    most, done = min(row.left, row.need.width), row.cursors.end - row.cursors.start - row.left
    if row.missed or not 0 < row.need.width <= plan.front:
        return most
    return min(most, plan.front - min(done, plan.behind))


def cut(slots: Sequence[int], width: int, limit: int, *, keys_only: bool = False) -> list[Group]:
    """Steps of at most `limit` positions and at least one row, of equal size."""
    return [Group([*some], width, keys_only) for some in equal_parts(slots, width, limit)]


def narrow_width(cache: CachePolicy, spec: ModelSpec, now: Cursors) -> int | None:
    """Width of a WINDOW step with `KeysOnly` in which a row progresses; None: its own `width_of`. Host side.

    A row that enters a block first runs a pass that only stores keys. This is the width of that pass.
    """
    if not (plan := cache.plan(Phase.WINDOW)).keeps or plan.front:  # rows that stay would be as wide as they were
        return None
    _, stop, settled = plan.bounds(place(now), spec.attention_layout)
    return max(stop - settled, spec.attention_block or 1)


MEMORY = 64  # rounds over which the rate of arrivals is averaged


@dataclass(slots=True)
class PrefillBatching:
    """Holds prefills back as long as waiting for the next one costs less than reading the weights once more.

    The unit of cost is the position, as in the rest of this module: a step costs `free` and the positions
    that it computes. A row that waits for a round costs its share of that round's step. The rule is that of the
    economic order quantity (F. W. Harris, 1913): with many requests in flight, a prefill gathers about
    sqrt(2 * free / (rounds between arrivals * cost of a row's round)) rows.
    """

    free: int
    limit: int  # most positions of a step
    rate: float = 0.0  # rows that arrive in a round
    debt: float = 0.0  # what the rows that wait have cost so far

    def holds(self, new: int, waiting: Sequence[int], decoding: Sequence[int]) -> bool:
        """Whether the prefills wait in this round. Asked once in each round that is planned.

        `new`: how many of them have just arrived. `waiting` and `decoding`: positions that each row needs. While rows
        decode, a prefill waits for about as many rounds as there are such rows at most. Else it does not wait.
        """
        self.rate += (new - self.rate) / MEMORY
        if waiting and decoding and sum(waiting) < self.limit:
            cost = len(waiting) * (self.free + sum(decoding)) / len(decoding)
            if self.debt * self.rate + cost <= self.free * self.rate:
                self.debt += cost
                return True
        self.debt = 0.0
        return False
