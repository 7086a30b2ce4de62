"""An engine for asyncio: each of any number of callers sees the updates of its own request."""

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import ONLY_COUNTS, Request, Update, Wants

T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]

LAST = 5.0  # seconds that the end of the process waits for the piece of work that runs


class EngineThread:
    """A thread that does one piece of work after the other, for one event loop.

    Unlike an executor's thread it is a daemon, so that a process can end while its device hangs. The end waits `LAST`
    seconds, since Python before 3.14 cuts off a daemon within its C++ code, which aborts the process.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked = 0  # pieces of work that wait or run

    @property
    def wanted(self) -> bool:
        """Whether work waits for the piece that runs."""
        return self._asked > 1

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` after all earlier work, and returns its result or raises its error."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="dinfer-engine", daemon=True)
            self._thread.start()
            _THREADS[self._thread] = self._jobs
            weakref.finalize(self, self._jobs.put, None)
        future: Future[T] = Future()
        self._asked += 1
        self._jobs.put((future, work))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._asked -= 1


_THREADS: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Job | None]] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """Lets each thread finish its piece of work."""
    for thread, jobs in [*_THREADS.items()]:
        jobs.put(None)
        thread.join(LAST)


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del job, future, work


# An update costs its caller time, and the engine shares the interpreter with all callers. So with more callers an
# update stands for more steps.
PAUSE = 0.0005  # seconds between two updates, for each caller
FRAME, FRAME_PAUSE = 1 / 30, 0.001  # seconds between two canvases: at least, since people see no more; for each caller
SHIFT = 0.05  # seconds of rounds after which the engines that share a thread take turns
NEW_SHAPE = 10  # times the limit that a round may take with a new shape: it compiles kernels or captures a graph


class EngineHung(RuntimeError):
    """A round does not end. The engine is lost, and nothing can stop its thread."""


class AsyncEngine:
    """Runs rounds in a thread while there are requests, so that it never blocks the event loop. One loop at a time.

    Other threads may use the engine meanwhile, except for its `step`. `failure` is the error of a round that belongs to
    no request, or of a failed device. The engine then is not reliable.
    """

    def __init__(self, engine: Engine, thread: EngineThread | None = None) -> None:
        """`thread`: the thread of rounds. Engines that share a device may share it. None: a thread of its own."""
        self.engine, self._thread = engine, thread or EngineThread()
        self.failure: BaseException | None = None
        self.observer: Callable[[float], None] | None = None  # called with the seconds of each round
        self.callers: dict[int, _Caller] = {}  # by request
        self._work: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the callers
        self._since: float | None = None  # start of the running round

    async def stream(
        self, request: Request, wants: Wants = ONLY_COUNTS, *, deadline: float | None = None
    ) -> AsyncGenerator[Update]:
        """Updates of the request after its steps; the last has its completion.

        With deltas and without snapshots, an update stands for several steps: it is that of the last step, with the new
        output of all. It joins the steps of `PAUSE` seconds for each caller. With drafts it joins steps in the same
        region, for `FRAME_PAUSE` seconds for each caller and at least `FRAME`.
        `deadline`: the time of the event loop's clock at which the request ends.

        A caller who stops cancels the request and frees its slot and pages: by `aclose`, by `break` under
        `contextlib.aclosing`, or as a cancelled task. Raises ValueError for a request that can never run, TimeoutError
        at the deadline, and the error that ends the request, such as NonFiniteLogits or StalledRow.
        """
        index = self.engine.add(request, wants)
        caller = self.callers[index] = _Caller(every_step=wants.snapshots or wants.deltas is None, drafts=wants.drafts)
        self._loop = loop = asyncio.get_running_loop()
        timer = None if deadline is None else loop.call_at(deadline, caller.tell, TimeoutError("the deadline"))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._steps())
            self._work.add_done_callback(self._report)
        try:
            while True:
                update = await caller.next(len(self.callers))
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
        """Notes a failure if the device no longer answers."""
        if self.failure is not None:
            return
        try:
            await self._thread.run(self.engine.check_device)
        except Exception as error:
            self.failure = error

    def check_alive(self, limit: float) -> None:
        """Fails if a round has taken longer than `limit` seconds, and tells all callers. Any thread may call it.

        A round with a new shape may take `NEW_SHAPE` times as long.
        """
        if self.engine.paused and self._since is not None:  # it waits for `resume`
            self._since = time.perf_counter()
        began, limit = self._since, limit if self.engine.runner.meeting is None else limit * NEW_SHAPE
        if self.failure is None and began is not None and time.perf_counter() - began > limit:
            self.failure = error = EngineHung(f"a round of steps has taken longer than {limit:g} seconds")
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._fail, error)

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        while self.callers and self.engine.busy:
            await self._thread.run(lambda: self._rounds(loop))

    def _rounds(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs rounds until no work is left or another engine wants the thread, without waiting for the event loop."""
        began = now = time.perf_counter()
        try:
            while self.callers and self.engine.busy and not (self._thread.wanted and now - began > SHIFT):
                self._since = now
                updates = self.engine.step()
                before, now = now, time.perf_counter()
                if self.observer is not None:
                    self.observer(now - before)
                loop.call_soon_threadsafe(self._tell, updates)
        finally:
            self._since = None

    def _tell(self, updates: list[Update]) -> None:
        now = asyncio.get_running_loop().time()
        for update in updates:
            if update.index in self.callers:
                self.callers[update.index].tell(update)
        for caller in self.callers.values():
            caller.wake(now)

    def _report(self, work: asyncio.Task[None]) -> None:
        """Tells all callers of an error of the engine."""
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self._fail(error)
        elif work.cancelled():
            for caller in self.callers.values():
                caller.tell(asyncio.CancelledError())

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        for caller in self.callers.values():
            caller.tell(error)


class _Caller:
    """The updates that a caller has not taken yet."""

    def __init__(self, *, every_step: bool, drafts: bool) -> None:
        """`every_step`: never join steps. `drafts`: join only steps in the same region."""
        self._every_step, self._drafts = every_step, drafts
        self._updates: deque[Update | BaseException] = deque()
        self._told = asyncio.Event()
        self._due = 0.0  # time of the next update

    def tell(self, update: Update | BaseException) -> None:
        """Keeps an update. The caller gets a last update or an error at once, others with the next `wake`."""
        if isinstance(update, Update) and update.completion is None and update.error is None:
            if self._every_step or self._drafts or update.new:
                self._updates.append(update)
        else:
            self._updates.append(update)
            self._told.set()

    def wake(self, now: float) -> None:
        """Wakes the caller if an update is due."""
        if self._updates and (self._every_step or now >= self._due):
            self._told.set()

    async def next(self, callers: int) -> Update | BaseException:
        """Waits for the next update, which may join several. `callers`: how many there are."""
        await self._told.wait()
        update = self._updates.popleft()
        held = [update] if isinstance(update, Update) else []
        while held and self._updates and self._joins(held[-1], self._updates[0]):
            held.append(self._updates.popleft())  # type: ignore[arg-type]
        if not self._updates:
            self._told.clear()
        pause = max(FRAME, FRAME_PAUSE * callers) if self._drafts else PAUSE * callers
        self._due = asyncio.get_running_loop().time() + pause
        return joined(held) if len(held) > 1 else update

    def _joins(self, first: Update, then: Update | BaseException) -> bool:
        if self._every_step or not isinstance(then, Update) or then.error is not None:
            return False
        return not self._drafts or first.region == then.region


def joined(updates: list[Update]) -> Update:
    """The last of a request's updates, with the new output of all of them."""
    last = updates[-1]
    new = [token for update in updates for token in update.new or []]
    if last.logprobs is None:
        return replace(last, new=new)
    return replace(last, new=new, logprobs=[told for update in updates for told in update.logprobs or []])
