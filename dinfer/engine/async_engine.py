"""An engine for asyncio: any number of callers, each of whom sees his own request."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor

from dinfer.engine.engine import Engine
from dinfer.engine.request import Deltas, Request, Update


class AsyncEngine:
    """Runs rounds in a thread while there are requests, so the event loop is never blocked. One event loop at a time.

    Other threads may use the engine meanwhile, but not its `step`. `failure` is the error of a round that concerned no
    request: the engine has a defect, and cannot be relied on.
    """

    def __init__(self, engine: Engine, executor: Executor | None = None) -> None:
        """`executor`: where rounds run; engines that share a device may share a thread. None: the event loop's own."""
        self.engine, self._executor = engine, executor
        self.failure: BaseException | None = None
        self.observer: Callable[[float], None] | None = None  # is told how many seconds each round took
        self._queues: dict[int, asyncio.Queue[Update | BaseException]] = {}
        self._work: asyncio.Task[None] | None = None

    async def stream(
        self, request: Request, *, snapshots: bool = False, deltas: Deltas | None = None, drafts: bool = False,
        logprobs: bool = False,
    ) -> AsyncGenerator[Update]:  # fmt: skip
        """The request after each of its steps, the last time with its completion.

        `snapshots`, `deltas`, `drafts` and `logprobs`: what the updates hold, see `Engine.run`. A caller who stops, by
        `aclose`, `break` under `contextlib.aclosing`, or as a cancelled task, cancels the request: its slot and pages
        are free. Raises ValueError for a request that can never run, and the error that ends it, such as
        NonFiniteLogits or StalledRow.
        """
        queue: asyncio.Queue[Update | BaseException] = asyncio.Queue()
        index = self.engine.add(request, snapshots=snapshots, deltas=deltas, drafts=drafts, logprobs=logprobs)
        self._queues[index] = queue
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._steps())
            self._work.add_done_callback(self._report)
        try:
            while True:
                update = await queue.get()
                if isinstance(update, BaseException):
                    raise update
                if update.error is not None:
                    raise update.error
                yield update
                if update.completion is not None:
                    return
        finally:
            del self._queues[index]
            self.engine.cancel(index)

    async def _steps(self) -> None:
        while self._queues and self.engine.busy:
            loop, began = asyncio.get_running_loop(), time.perf_counter()
            updates = await loop.run_in_executor(self._executor, self.engine.step)
            if self.observer is not None:
                self.observer(time.perf_counter() - began)
            for update in updates:
                if update.index in self._queues:
                    self._queues[update.index].put_nowait(update)

    def _report(self, work: asyncio.Task[None]) -> None:
        """Tells all callers of an error that concerns the engine and not a request."""
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        self.failure = None if work.cancelled() else error
        if error is not None:
            for queue in self._queues.values():
                queue.put_nowait(error)
