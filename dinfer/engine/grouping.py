"""Which rows of a phase share a step. Host side; the tokens do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping

# Positions that a forward computes in the time it takes to read its weights, about, on the GPUs of today: their
# operations per byte of memory traffic. A step more is worth it where it saves more positions than these.
FREE = 256


def groups(widths: Mapping[int, int]) -> list[list[int]]:
    """Slots by step, given the positions that each needs: one step for all, or one for the narrow and one for the wide.

    A step computes as many positions for each row as for its widest. Rows that enter a block need twice as many as
    the others: a few rows share one step anyhow, many do not.
    """
    if not widths:
        return []
    order = sorted(widths, key=widths.__getitem__)
    narrow, widest = (widths[slot] for slot in (order[0], order[-1]))
    if (widest - narrow) * len(order) <= FREE:
        return [list(widths)]
    saved = [count * (widest - widths[order[count - 1]]) for count in range(len(order))]
    count = max(range(len(order)), key=saved.__getitem__)
    if saved[count] <= FREE:
        return [list(widths)]
    few = set(order[:count])
    return [[slot for slot in widths if slot in few], [slot for slot in widths if slot not in few]]
