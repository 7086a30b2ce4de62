"""Chooses the recipe of each request by load, from a table that `dinfer tune` has measured.

A step of few requests reads weights, whatever it computes. A step of many is bound by what it computes. So few requests
are decoded by recipes that compute more positions and take fewer steps. A request keeps the recipe of its entry to its
end. So its tokens depend on that recipe, and on nothing that others do later.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dinfer.core.engine.engine import LoadLevel
from dinfer.core.engine.loop import Loop
from dinfer.core.engine.request import Update
from dinfer.core.engine.row import Row
from dinfer.core.engine.runtime import TUNES, Runtime
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.registry import CACHES, ITERATIONS, Registry, changed
from dinfer.core.step.contracts import Component
from dinfer.core.step.mixins import Pads
from dinfer.core.terms.spec import ModelSpec

CHOSEN = ("iteration", "cache")  # what recipes of a table may differ in; requests bring options of the others


def called(spec: ModelSpec) -> dict[str, Any]:
    """What says that a table is of this model."""
    return {"family": spec.family, "layers": spec.layers, "hidden": spec.hidden, "vocab": spec.vocab}


def levels_of(recipe: Recipe, runtime: Runtime) -> list[LoadLevel]:
    """The recipes that requests get, from few in flight to many. Raises ValueError for a table that does not fit."""
    path, found = runtime.load_table, list[tuple[int, Recipe]]()
    try:
        table = json.loads(Path(path or "").read_text())
        if table["model"] != called(recipe.model.spec):
            raise ValueError(f"it was measured for {table['model']}, and this is {called(recipe.model.spec)}")
        if (reference := _composed(recipe, table["reference"])) != recipe:
            raise ValueError(f"accuracy was lost against {reference.parts}, and this is {recipe.parts}")
        allowed = [row for row in table["recipes"] if row["points_lost"] <= (runtime.max_accuracy_loss or 0)]
        if not table["in_flight"]:
            raise ValueError("it names no numbers of requests")
        for count in sorted(table["in_flight"]):
            best = max(allowed, key=lambda row: row["tokens_per_s"][str(count)])
            found.append((count, _composed(recipe, best)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"runtime.load_table={path} cannot be used ({type(error).__name__}: {error}): {TUNES}"
        ) from error
    return _levels(found, runtime)


def _composed(recipe: Recipe, parts: Mapping[str, Any]) -> Recipe:
    """The recipe with components of the table: what it names, and its own otherwise."""
    given = {kind: parts[kind] for kind in (*CHOSEN, "decoder") if kind in parts}
    found = compose(recipe.model, **{"decoder": recipe.decoder, "sampling": recipe.sampling, **given})
    if found.iteration != recipe.iteration and isinstance(found.iteration, Pads) | isinstance(recipe.iteration, Pads):
        raise ValueError(f"{found.iteration} and {recipe.iteration} give requests different lengths")
    return found


def _levels(found: Sequence[tuple[int, Recipe]], runtime: Runtime) -> list[LoadLevel]:
    """A level for each stretch of loads with the same recipe. The last one has room for all."""
    levels, plain = list[LoadLevel](), replace(runtime, load=None, load_table=None, max_accuracy_loss=None)
    for place, (count, recipe) in enumerate(found):
        last = place == len(found) - 1 or count >= runtime.rows
        told = " ".join(_told(*part) for part in ((ITERATIONS, recipe.iteration), (CACHES, recipe.cache)))
        if levels and levels[-1].recipe == recipe:
            levels.pop()
        levels.append(LoadLevel(recipe, replace(plain, rows=runtime.rows if last else count), told))
        if last:
            break
    return levels


def _told(registry: Registry, part: Component) -> str:
    """A component as it is written on the command line."""
    options = (f"{registry.kind}.{name}={value}" for name, value in changed(part).items())
    return " ".join([registry.called(part), *options])


class Loops:
    """A loop for each level, each with keys and values of its own. Requests wait here until one of them is to run.

    Those in flight are the ones that run or wait, up to `rows`. As many as a level is for have room in its loop.
    """

    def __init__(self, levels: Sequence[LoadLevel], loops: Sequence[Loop]) -> None:
        self._levels, self._loops = levels, loops
        self.worker = loops[-1].worker
        self.waiting: deque[Row] = deque()
        self.updates: deque[tuple[Row, Update]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.updates) or any(loop.busy for loop in self._loops)

    def sweep(self) -> None:
        """Removes cancelled rows."""
        self.waiting = deque(row for row in self.waiting if not row.cancelled)
        for loop in self._loops:
            loop.sweep()

    def round(self) -> None:
        """Requests that wait get their recipe, as long as there is room. Then each loop that has some runs a round."""
        most = self._levels[-1].runtime.rows
        taken = sum(len(loop.running) + len(loop.waiting) for loop in self._loops)
        while self.waiting and taken < most:
            load = min(taken + len(self.waiting), most)
            place = next(place for place, level in enumerate(self._levels) if load <= level.runtime.rows)
            row = self.waiting.popleft()
            row.figures = {"recipe": self._levels[place].told}
            self._loops[place].waiting.append(row)
            taken += 1
        for loop in self._loops:
            if loop.busy:
                loop.round()
                self.updates += loop.updates
                loop.updates.clear()
