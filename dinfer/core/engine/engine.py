"""Takes requests, runs them together, and returns updates of each.

Requests enter and leave between steps. A round admits the requests that fit, launches the steps that the scheduler
plans, and reads a small tensor of cursors after each. Everything else stays on the device. With CUDA graphs it launches
the next round as soon as it has the cursors, so that the round overlaps the host's work on the last one.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet, WeakValueDictionary

import torch

from dinfer.core.engine.checks import check
from dinfer.core.engine.loop import Loop
from dinfer.core.engine.request import ONLY_COUNTS, Request, Update, Wants
from dinfer.core.engine.row import Row
from dinfer.core.engine.runner import Runner
from dinfer.core.engine.runtime import Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.kernels.dispatch import on_device
from dinfer.core.provided import needed, provided
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe
from dinfer.core.step.blame import blaming

ENGINES: WeakSet["Engine"] = WeakSet()  # of this process: several may run one network


def worker_of(recipe: Recipe, runtime: Runtime) -> Worker:
    """What runs the steps of a recipe."""
    leading = provided("leading_worker") if runtime.tensor_parallel > 1 else None
    found: Worker = (leading and leading(recipe, runtime)) or Worker(recipe, runtime)
    if runtime.memory is not None:
        with on_device(recipe.model.device), found.working():
            found.runtime = needed("within_memory", f"runtime.memory={runtime.memory}", "speed")(found)
    return found


class Engine:
    """Runs requests through one recipe, as many at a time as fit. The others wait.

    `run` takes a list of requests. A server calls `add` at any time, `step` while the engine is `busy`, and `cancel`.
    Any thread may call these. One thread at a time runs a round for all requests, and the others wait for its updates.

    The result of a request depends only on that request. An error of one request ends that request. An error of a whole
    step, such as one that the model raises, ends the requests of that step.

    Without `runtime.max_length` memory is allocated on first use. It grows only when nothing runs, so a request longer
    than all before it waits until then.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        self.device = device = recipe.model.device
        if runtime.graphs and device.type != "cuda":
            raise ValueError(f"runtime.graphs=True needs a CUDA device, not {device}")
        if runtime.tensor_parallel != recipe.ranks.size:
            raise ValueError(
                f"runtime.tensor_parallel={runtime.tensor_parallel}, but the model is divided among "
                f"{recipe.ranks.size}: load it with that runtime, in one process for each card"
            )
        if runtime.expert_parallel != (dealt := recipe.ranks.rank.expert_parallel):
            raise ValueError(
                f"runtime.expert_parallel={runtime.expert_parallel}, but the model was loaded with {dealt}: load it "
                "with that runtime"
            )
        if (reason := recipe.refused(runtime=runtime)) is not None:
            raise IncompatibleRecipe(reason)
        with blaming(recipe.by_kind):
            found = needed("loop", "runtime.deterministic=true", "speed") if runtime.deterministic else provided("loop")
            self.loop: Loop = (found or Loop)(worker_of(recipe, runtime))
        self.recipe, self.runtime = self.loop.worker.recipe, self.loop.worker.runtime
        self._checked: WeakValueDictionary[int, Request] = WeakValueDictionary()  # by identity
        self._turn = threading.Condition()
        self._stepping = False  # a thread runs a round
        self._claim = threading.Lock()  # held by who waits for a turn between rounds: no round begins before
        self._inbox: deque[Update] = deque()  # of the requests that were added
        self._added: dict[int, Row] = {}
        self._count = 0
        self.paused = False  # no thread takes rounds, but within `between_rounds`
        self.gate: Callable[[], object] = int  # called before a request enters: it may raise why none does
        ENGINES.add(self)

    @property
    def runner(self) -> Runner:
        return self.loop.worker.runner

    @property
    def failure(self) -> Exception | None:
        """The failure of another rank of the model, after which no request can run; None: no rank has failed."""
        return self.loop.worker.failure

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not finished, or updates that `step` has not returned."""
        return self.loop.busy or bool(self._inbox)

    @property
    def max_length(self) -> int:
        """Positions of the longest canvas."""
        runtime = self.runtime
        most = [self.recipe.model.spec.max_length]
        if runtime.max_length is not None:
            most.append(runtime.max_length)
        if runtime.pages is not None:
            most.append(runtime.pages * runtime.page)
        return min(most)

    def occupancy(self) -> dict[str, int]:
        """Numbers of waiting and running requests, and of pages of keys and values, all and free."""
        waiting, batch = len(self.loop.waiting), self.loop.batch  # a round may close it meanwhile
        if batch is None:
            return {"waiting": waiting, "running": 0, "pages": 0, "pages_free": 0}
        pages, free = batch.room.pages, batch.pages.free
        return {"waiting": waiting, "running": len(batch.rows), "pages": pages, "pages_free": free}

    def run(self, requests: Sequence[Request], wants: Wants = ONLY_COUNTS) -> Generator[Update]:
        """Yields an update of a request after each of its steps; the last has its completion.

        `index` is the request's place in `requests`. Raises ValueError for a request that can never run, and the error
        of the first one that fails, such as NonFiniteLogits or StalledRow. When the iterator ends, for whatever reason,
        its requests end.
        """
        for request in requests:
            self.check(request)
        inbox: deque[Update] = deque()
        rows = [Row(i, wants.of(request), inbox, wants) for i, request in enumerate(requests)]
        left = len(rows)
        try:
            with self._turn:
                self.loop.waiting.extend(rows)
            while left > 0:
                self._advance(inbox)
                while inbox:
                    update = inbox.popleft()
                    if update.error is not None:
                        raise update.error
                    left -= update.completion is not None
                    yield update
        finally:
            self._cancel(rows)

    def add(self, request: Request, wants: Wants = ONLY_COUNTS) -> int:
        """Queues a request and returns its number for `step` and `cancel`. Raises ValueError if it can never run."""
        self.check(request)
        with self._turn:
            row = Row(self._count, wants.of(request), self._inbox, wants)
            self._count += 1
            self._added[row.index] = row
            self.loop.waiting.append(row)
        return row.index

    def step(self) -> list[Update]:
        """One round: every row that is ready takes a step, and waiting requests enter.

        Returns updates of requests that were added. The update of a request that fails has its `error`.
        """
        self._advance(self._inbox)
        with self._turn:
            updates = [*self._inbox]
            self._inbox.clear()
        return updates

    def cancel(self, index: int) -> bool:
        """Removes a request that was added and waits or runs. False: there is none of this number.

        Its slot and pages are free at once, or at the end of the round that another thread runs.
        """
        with self._turn:
            row = self._added.pop(index, None)
        if row is not None:
            self._cancel([row])
        return row is not None

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that can never run here. Looks at each request once."""
        self.gate()
        if self._checked.get(id(request)) is not request:
            check(request, self.recipe, self.runtime)
            self._checked[id(request)] = request

    def check_device(self) -> None:
        """Raises the device's error if it has failed for good, for example after an illegal access."""
        torch.ones((), device=self.device).item()

    def _advance(self, inbox: deque[Update]) -> None:
        """Runs a round, or waits for the thread that runs one. Returns at once if the inbox has an update."""
        with self._turn:
            while (self._stepping or self.paused or self._claim.locked()) and not inbox:
                self._turn.wait(1 if self._claim.locked() else None)  # it may be given up
            if inbox:
                return
            self._stepping = True
        with self._ending_turn():
            self.loop.round()

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """No thread takes a round within, and the device has ended all steps that were launched.

        Of what is queued within, requests that were added hear at the end.
        """
        with self._claim, self._turn:
            while self._stepping:
                self._turn.wait()
            self._stepping = True
        with self._ending_turn():
            self.loop.drain()
            yield

    def resume(self) -> None:
        """Ends a pause."""
        with self._turn:
            self.paused = False
            self._turn.notify_all()

    @contextmanager
    def _ending_turn(self) -> Iterator[None]:
        try:
            with on_device(self.device), self.loop.worker.working():
                yield
        finally:
            with self._turn:
                self._stepping = False
                self._deliver()
                self.loop.sweep()
                self._turn.notify_all()

    def _deliver(self) -> None:
        """Puts updates into the inboxes of their callers."""
        while self.loop.updates:
            row, update = self.loop.updates.popleft()
            if not row.cancelled:
                row.inbox.append(update)
            if row.inbox is self._inbox and (update.completion is not None or update.error is not None):
                self._added.pop(row.index, None)

    def _cancel(self, rows: Iterable[Row]) -> None:
        """Ends rows without an update. A thread that runs a round removes them after it."""
        with self._turn:
            for row in rows:
                row.cancelled = True
            if not self._stepping:
                self.loop.sweep()
