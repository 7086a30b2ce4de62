"""A thread for engines that share a device."""

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]

LAST = 5.0  # seconds that the end of the process waits for the piece of work that runs


class Turns:
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
