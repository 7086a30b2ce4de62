"""Where rows will most likely be once the step under way has ended. Host side; no token depends on it."""

from dinfer.core.canvas import Cursors, Phase
from dinfer.core.protocols import CachePolicy, ModelSpec
from dinfer.engine.row import Row


def expected(row: Row, cache: CachePolicy, spec: ModelSpec, block: int) -> Cursors:
    """The cursors of a row after its step, of a recipe whose phases are PREFILL and WINDOW. Counts stay as they are.

    A row leaves its block if its average step commits what is open there. `block`: positions of a block.
    """
    now = row.cursors
    if now.phase == Phase.PREFILL:
        return now._replace(phase=Phase.WINDOW, kept=cache.prefilled(spec, now.start))
    if now.kept < now.start:  # the first step in a block makes the keys before it final, as far as they can be
        kept = cache.plan(Phase.WINDOW).bounds(now.place, spec.frame)[2]
        if kept > now.kept:
            return now._replace(kept=kept)
    if now.end < now.length and now.steps and row.left * now.steps <= now.committed:
        return now._replace(start=now.end, end=min(now.end + block, now.length))
    return now
