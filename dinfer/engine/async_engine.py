"""An engine for asyncio: any number of callers, each of whom sees his own request."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import replace

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
        self.callers: dict[int, _Caller] = {}  # by request
        self._work: asyncio.Task[None] | None = None

    async def stream(
        self, request: Request, *, snapshots: bool = False, deltas: Deltas | None = None, drafts: bool = False,
        logprobs: bool = False, deadline: float | None = None,
    ) -> AsyncGenerator[Update]:  # fmt: skip
        """The request after each of its steps, the last time with its completion.

        `snapshots`, `deltas`, `drafts` and `logprobs`: what the updates hold, see `Engine.run`. With deltas alone,
        steps without new output are left out. `deadline`, by the event loop's clock: when to give the request up.

        A caller who stops, by `aclose`, `break` under `contextlib.aclosing`, or as a cancelled task, cancels the
        request: its slot and pages are free. Raises ValueError for a request that can never run, TimeoutError at the
        deadline, and the error that ends the request, such as NonFiniteLogits or StalledRow.
        """
        index = self.engine.add(request, snapshots=snapshots, deltas=deltas, drafts=drafts, logprobs=logprobs)
        caller = self.callers[index] = _Caller(every_step=snapshots or drafts or deltas is None)
        loop = asyncio.get_running_loop()
        timer = None if deadline is None else loop.call_at(deadline, caller.tell, TimeoutError("the deadline"))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._steps())
            self._work.add_done_callback(self._report)
        try:
            while True:
                update = await caller.next()
                if isinstance(update, BaseException):
                    raise update
                if update.error is not None:
                    raise update.error
                yield update
                if update.completion is not None:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            del self.callers[index]
            self.engine.cancel(index)

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        while self.callers and self.engine.busy:
            began = time.perf_counter()
            updates = await loop.run_in_executor(self._executor, self.engine.step)
            if self.observer is not None:
                self.observer(time.perf_counter() - began)
            for update in updates:
                if update.index in self.callers:
                    self.callers[update.index].tell(update)

    def _report(self, work: asyncio.Task[None]) -> None:
        """Tells all callers of an error that concerns the engine and not a request."""
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        self.failure = None if work.cancelled() else error
        if error is not None:
            for caller in self.callers.values():
                caller.tell(error)


class _Caller:
    """The updates that a caller has not taken yet."""

    def __init__(self, *, every_step: bool) -> None:
        """`every_step`: not only those with new output."""
        self._every_step = every_step
        self._updates: deque[Update | BaseException] = deque()
        self._told = asyncio.Event()

    def tell(self, update: Update | BaseException) -> None:
        if not self._every_step and isinstance(update, Update):
            if not update.new and update.completion is None and update.error is None:
                return
            if self._updates and isinstance(last := self._updates[-1], Update) and update.error is None:
                # A caller who lags behind takes all of it at once, so that he catches up.
                logprobs = None if last.logprobs is None else [*last.logprobs, *(update.logprobs or [])]
                update = replace(update, new=[*(last.new or []), *(update.new or [])], logprobs=logprobs)
                self._updates.pop()
        self._updates.append(update)
        self._told.set()

    async def next(self) -> Update | BaseException:
        await self._told.wait()
        update = self._updates.popleft()
        if not self._updates:
            self._told.clear()
        return update
