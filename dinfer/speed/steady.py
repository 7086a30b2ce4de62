"""Steps whose shape depends on one request alone, so that no bit of it depends on what runs beside it.

A sum may be taken in another order where a product has other rows, and in 16 bits another order gives another token.
So rows share a step only if they need the same positions, pages and extras, and a step has a fixed number of lanes: on
a card `LANES`, of which those that no row needs compute nothing of use; on a CPU one. Within a shape, kernels add up
each row alike, wherever it stands.
"""

from collections import defaultdict
from collections.abc import Sequence

from dinfer.core.engine.loop import Loop
from dinfer.core.engine.row import Row
from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.scheduler import PlannedStep, Scheduler
from dinfer.core.engine.worker import Worker
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import Extra, Planned

LANES = 8


class SteadyScheduler(Scheduler):
    """Plans such steps."""

    def grouped(self, phase: Phase, rows: Sequence[Row]) -> list[PlannedStep]:
        most = LANES if self.recipe.model.device.type == "cuda" else 1
        alike = defaultdict[tuple[int, int, tuple[Extra, ...]], list[Row]](list)
        for row in rows:
            width = row.need.width
            if phase == Phase.PREFILL:
                unit = self.unit([row])
                width = min(width, max(self.runtime.positions // most // unit * unit, unit))
            alike[width, row.visible, row.extras].append(row)
        steps = list[PlannedStep]()
        for (width, _, _), some in alike.items():
            lanes = max(min(most, self.runtime.positions // width), 1)
            parts = [some[i : i + lanes] for i in range(0, len(some), lanes)]
            steps += [
                self.step(phase, part, width, Planned(lanes, self.runtime.positions), lanes=lanes) for part in parts
            ]
        return steps


class SteadyLoop(Loop):
    """Rounds of such steps, one after the other."""

    def __init__(self, worker: Worker) -> None:
        """Raises ValueError for what would let one request change another's steps."""
        if (reason := unsteady(worker.recipe, worker.runtime)) is not None:
            raise IncompatibleRecipe(f"runtime.deterministic=true: {reason}")
        super().__init__(worker)
        self.scheduler = SteadyScheduler(worker.recipe, worker.runtime)


def unsteady(recipe: Recipe, runtime: Runtime) -> str | None:
    """Why the bits of a request may depend on others; None: they do not."""
    if runtime.speculate:
        return f"runtime.speculate={runtime.speculate} computes a step among candidates; use 0"
    if runtime.share:
        return "runtime.share=true takes keys that another request computed in other steps; use false"
    if runtime.throughput:
        return "runtime.favour=throughput has rows wait for others; use latency"
    if runtime.graphs and runtime.max_length is None:
        return "runtime.graphs=true rounds steps up to the room there is: give runtime.max_length, or graphs=false"
    if not recipe.iteration.block:
        return f"{recipe.iteration} has blocks as long as the longest request: choose an iteration with a block"
    return None
