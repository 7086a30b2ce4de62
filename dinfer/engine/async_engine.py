"""An engine for asyncio: any number of callers, each of whom sees his own request."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import replace

from dinfer.engine.engine import Engine
from dinfer.engine.request import Deltas, Request, Update

# Each update costs a caller some 0.1 ms, and the engine shares the interpreter with all callers. So the more there are,
# the more steps come together.
PAUSE = 0.0005  # seconds, for each caller
SHIFT = 0.05  # seconds of rounds after which the engines that share a thread take turns


class AsyncEngine:
    """Runs rounds in a thread while there are requests, so the event loop is never blocked. One event loop at a time.

    Other threads may use the engine meanwhile, but not its `step`. `failure` is the error of a round that concerned no
    request, or of a device that has failed: the engine cannot be relied on.
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
        steps without new output are left out, and what comes within `PAUSE` seconds for each caller comes together.
        `deadline`, by the event loop's clock: when to give the request up.

        A caller who stops, by `aclose`, `break` under `contextlib.aclosing`, or as a cancelled task, cancels the
        request: its slot and pages are free. Raises ValueError for a request that can never run, TimeoutError at the
        deadline, and the error that ends the request, such as NonFiniteLogits or StalledRow.
        """
        index = self.engine.add(request, snapshots=snapshots, deltas=deltas, drafts=drafts, logprobs=logprobs)
        every_step = snapshots or drafts or deltas is None
        caller = self.callers[index] = _Caller(None if every_step else lambda: PAUSE * len(self.callers))
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

    async def probe(self) -> None:
        """Notes a failure if the device does not answer any more."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self.engine.check_device)
        except Exception as error:
            self.failure = error

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        while self.callers and self.engine.busy:
            await loop.run_in_executor(self._executor, self._rounds, loop)

    def _rounds(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs rounds for a while. In its thread, so that no round waits for the event loop."""
        began = now = time.perf_counter()
        while self.engine.busy and now - began < SHIFT:
            updates = self.engine.step()
            before, now = now, time.perf_counter()
            if self.observer is not None:
                self.observer(now - before)
            loop.call_soon_threadsafe(self._tell, updates)

    def _tell(self, updates: list[Update]) -> None:
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

    def __init__(self, pause: Callable[[], float] | None) -> None:
        """`pause`: seconds from one update to the next, which has all that is new; None: every update is wanted."""
        self._pause = pause
        self._updates: deque[Update | BaseException] = deque()
        self._told = asyncio.Event()
        self._due = 0.0  # when the caller wants the next update
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, update: Update | BaseException) -> None:
        last = not isinstance(update, Update) or update.completion is not None or update.error is not None
        if self._pause is not None and isinstance(update, Update):
            if not last and not update.new:
                return
            if self._updates and isinstance(held := self._updates[-1], Update) and update.error is None:
                logprobs = None if held.logprobs is None else [*held.logprobs, *(update.logprobs or [])]
                update = replace(update, new=[*(held.new or []), *(update.new or [])], logprobs=logprobs)
                self._updates.pop()
        self._updates.append(update)
        loop = asyncio.get_running_loop()
        if last or self._pause is None or loop.time() >= self._due:
            self._told.set()
        elif self._timer is None:
            self._timer = loop.call_at(self._due, self._told.set)

    async def next(self) -> Update | BaseException:
        await self._told.wait()
        update = self._updates.popleft()
        if not self._updates:
            self._told.clear()
        if self._pause is not None:
            self._due = asyncio.get_running_loop().time() + self._pause()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return update
