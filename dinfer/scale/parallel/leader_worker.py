"""The worker of rank 0, which tells the other ranks' workers everything that it does. Components as messages."""

import importlib
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from dinfer.core.engine.errors import RankFailed
from dinfer.core.engine.runtime import BatchSize, Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import values_of
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.request import Resolved
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import Entry
from dinfer.scale.parallel.follower import uninterrupted
from dinfer.scale.parallel.leader import Leader


class LeadingWorker(Worker):
    """Sends each action before it does it, so that all ranks act at about the same time.

    Only rank 0 decides, and no other rank reads anything back. An error within a step ends all ranks, since nobody
    knows how far the others have come.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime, leader: Leader) -> None:
        """Raises ValueError, RankFailed."""
        super().__init__(recipe, runtime)
        self._leader, self._number = leader, leader.number()
        parts = {kind: spelled(part) for kind, part in values_of(recipe).items() if kind != "model"}
        leader.together("engine", self._number, model_number(leader, recipe), parts, values_of(runtime), work=int)
        weakref.finalize(self, leader.forgotten.append, ("drop", self._number)).atexit = False

    @property
    def failure(self) -> RankFailed | None:
        return self._leader.failure

    def open(self, room: BatchSize) -> None:
        with uninterrupted():
            self._leader.together("open", self._number, *room, work=partial(opened, self, room))

    def close(self) -> None:
        super().close()
        if self._leader.alive:
            self._leader.tell("close", self._number)

    def do(self, work: Callable[..., object], *given: Any) -> None:
        call = partial(super().do, work, *given)
        self._leader.together("do", self._number, work.__module__, work.__name__, given, work=call)

    def admit(self, entries: Sequence[Entry]) -> tuple[list[Cursors], Tensor]:
        with self._leader.turn:
            self._leader.tell("admit", self._number, [entry_told(entry) for entry in entries])
            return super().admit(entries)

    def launch(self, shape: StepShape, slots: list[int], run: StepShape | None = None) -> None:
        leader, run = self._leader, run or self.runner.run_as(shape)
        with leader.turn, uninterrupted():
            leader.tell("launch", self._number, _values(shape), slots, _values(run))
            try:
                super().launch(shape, slots, run)
            except Exception as error:
                raise leader.reason(error) from error

    def wait(self, done: torch.cuda.Event) -> None:
        with self._leader.motion.wait():
            while not done.query():  # `synchronize` never returns if another rank is gone
                self._leader.check()
                time.sleep(0)  # lets other threads run

    def working(self) -> AbstractContextManager[object]:
        return self._leader.motion.work()

    def compare_ranks(self) -> None:
        with self._leader.turn:
            self._leader.tell("compare", self._number)
            try:
                super().compare_ranks()
            except RuntimeError as error:
                raise self._leader.reason(error) from error


def opened(worker: Worker, room: BatchSize) -> None:
    """Opens the worker of a rank. Raises MemoryError, which a rank can answer, if its device has too little memory."""
    try:
        Worker.open(worker, room)
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # which hold what was allocated
        raise MemoryError(str(error)) from error


def model_number(leader: Leader, recipe: Recipe) -> int:
    """The number of a recipe's model, by which all ranks know it. Raises RankFailed if they have ended."""
    leader.check()
    known = (number for number, ranks in leader.models.items() if ranks is recipe.ranks)
    if (number := next(known, None)) is None:
        raise RankFailed("the ranks that had the other parts of this model have ended: load it again")
    return number


def spelled(value: Any) -> Any:
    """A value as a message: a dataclass is the place of its class, and its fields. No code travels.

    What is not plain has a method `plain`. Raises ValueError if the other process cannot import a class.
    """
    if isinstance(value, tuple):
        return [spelled(one) for one in value]
    if not is_dataclass(value):
        return value
    cls: Any = type(value)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise ValueError(
            f"{cls.__qualname__} is defined in {cls.__module__}, where other ranks cannot import it: put it into a "
            "module of its own, or use runtime.tensor_parallel=1"
        )
    place = {"module": cls.__module__, "name": cls.__qualname__}
    if "plain" in vars(cls):
        return place | {"plain": cls.plain(value)}
    return place | {"fields": {name: spelled(one) for name, one in values_of(value).items()}}


def read(told: Any) -> Any:
    """The value of a `spelled` message. Lists come back as tuples."""
    if isinstance(told, list):
        return tuple(map(read, told) if told and isinstance(told[0], list | dict) else told)
    if not isinstance(told, dict) or "module" not in told:
        return told
    cls = vars(importlib.import_module(told["module"]))[told["name"]]
    if "plain" in told:
        return cls.of_plain(told["plain"])
    return cls(**{name: read(one) for name, one in told["fields"].items()})


def entry_told(entry: Entry) -> Any:
    """A request that enters a slot, as a message. Its options have been checked."""
    request = replace(entry.request, options=Resolved(entry.request.options.values))
    return spelled(replace(entry, request=request))


@lru_cache(maxsize=4096)
def _values(shape: StepShape) -> tuple[Any, ...]:
    *sizes, extras = values_of(shape).values()
    return (*sizes, [spelled(extra) for extra in extras])


def shape_of(values: Sequence[Any]) -> StepShape:
    """The shape of a step, from the values in a message."""
    phase, *sizes, extras = values
    return StepShape(Phase(phase), *sizes).adding(*(read(extra) for extra in extras))
