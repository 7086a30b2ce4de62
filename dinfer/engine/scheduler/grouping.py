"""Which rows share a step, and how wide it is. Host side; the tokens do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dinfer.core.protocols import ModelSpec, Phase

# Positions that a forward of a dense model computes in the time it takes to read its weights, about. Of the LLaDA-8B
# shape on an H200, a step of few positions takes 5.3 ms and 2700 more take 57 ms more: as much time as 250 positions.
FREE = 256
# Grouped products reach less of the card's rate than plain ones: of the LLaDA2-mini shape there, a further step takes
# 8.9 ms and positions 5 to 6 us, where operations alone would make it 2.
GROUPED = 3


@dataclass(frozen=True, slots=True)
class Need:
    """Positions that a row needs a step to compute; `narrow` is what `CachePolicy.narrow` says."""

    width: int
    narrow: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that share a step."""

    slots: list[int]
    width: int
    settles: bool = False


def free_positions(spec: ModelSpec) -> int:
    """Positions that cost as much as a further step: more where a token uses few of the weights that are read."""
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    if (experts := spec.experts) is None:
        return FREE
    each = 3 * spec.hidden * experts.width
    shared = attention + 3 * spec.hidden * experts.shared
    return max(FREE * (shared + each * experts.experts) // (shared + each * experts.chosen) // GROUPED, FREE)


def plan(phase: Phase, needs: Mapping[int, Need], *, free: int, limit: int, unit: int) -> list[Step]:
    """The steps of one round for the rows of one phase, oldest first.

    `free`: as `free_positions` says; `limit`: positions that a step may compute; `unit`: length of the attention
    blocks. Prefills are cut to the limit, and a round has one step of them at most, so that rows that
    decode do not wait for long.
    """
    if not needs:
        return []
    if phase == Phase.PREFILL:
        return [_prefill(needs, max(limit // unit * unit, unit))]
    widths = {slot: need.width for slot, need in needs.items()}
    widest = max(widths.values())
    narrow = [need.narrow for need in needs.values() if need.narrow is not None]
    if len(narrow) == len(needs) and max(narrow) < widest and _settling_pays(list(widths.values()), max(narrow), free):
        return _cut(list(needs), max(narrow), limit, settles=True)
    return [step for slots in groups(widths, free) for step in _cut(slots, max(widths[slot] for slot in slots), limit)]


def groups(widths: Mapping[int, int], free: int) -> list[list[int]]:
    """Slots by step, given the positions that each needs: one step for all, or one for the narrow and one for the wide.

    A step computes as many positions for each row as for its widest. Rows that enter a block may need twice as many
    as the others: a few rows share one step anyhow, many do not.
    """
    order = sorted(widths, key=widths.__getitem__)
    narrow, widest = (widths[slot] for slot in (order[0], order[-1]))
    if (widest - narrow) * len(order) <= free:
        return [list(widths)]
    saved = [count * (widest - widths[order[count - 1]]) for count in range(len(order))]
    count = max(range(len(order)), key=saved.__getitem__)
    if saved[count] <= free:
        return [list(widths)]
    few = set(order[:count])
    return [[slot for slot in widths if slot in few], [slot for slot in widths if slot not in few]]


def _settling_pays(widths: list[int], narrow: int, free: int) -> bool:
    """Whether a narrow step for all, in which the wide rows do not get on, costs no more than wide ones.

    Times in positions: a step takes `free` and those that it computes.
    """
    rows, wide, widest = len(widths), sum(width > narrow for width in widths), max(widths)
    one = free + rows * widest
    two = 2 * free + (rows - wide) * narrow + wide * widest
    return (free + rows * narrow) * (rows + wide) <= min(one, two) * rows


def _prefill(needs: Mapping[int, Need], limit: int) -> Step:
    """As many rows as fit under the limit, the oldest at any rate."""
    slots: list[int] = []
    width = 0
    for slot, need in needs.items():
        wider = max(width, min(need.width, limit))
        if slots and wider * (len(slots) + 1) > limit:
            break
        slots, width = [*slots, slot], wider
    return Step(slots, width)


def _cut(slots: list[int], width: int, limit: int, *, settles: bool = False) -> list[Step]:
    """Steps of at most `limit` positions, but of a row at least."""
    steps = -(-len(slots) // max(limit // width, 1))
    rows = -(-len(slots) // steps)
    return [Step(slots[i : i + rows], width, settles) for i in range(0, len(slots), rows)]
