"""An engine for asyncio: any number of callers, each of whom sees his own request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dinfer.engine.engine import Engine
from dinfer.engine.request import Request, Update


class AsyncEngine:
    """Steps in a thread while there are requests; the event loop is never blocked. One event loop at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()  # the engine is for one thread at a time; fair, so nobody waits for two steps
        self._queues: dict[int, asyncio.Queue[Update | BaseException]] = {}
        self._work: asyncio.Task[None] | None = None

    async def stream(self, request: Request, *, snapshots: bool = False) -> AsyncIterator[Update]:
        """The request after each of its steps, the last time with its completion.

        `snapshots`: with the canvas. Whoever leaves off, by `aclose`, `break` under `contextlib.aclosing`, or as a
        cancelled task, cancels the request: its slot and pages are free. Raises ValueError for a request that will
        never fit, NonFiniteLogits, StalledRow, and to all callers what a step raises.
        """
        queue: asyncio.Queue[Update | BaseException] = asyncio.Queue()
        async with self._turn:
            index = self._engine.add(request, snapshots=snapshots)
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
            async with self._turn:
                self._engine.cancel(index)

    async def _steps(self) -> None:
        while self._engine.busy:
            async with self._turn:
                updates = await asyncio.to_thread(self._engine.step)
            for update in updates:
                if update.index in self._queues:
                    self._queues[update.index].put_nowait(update)

    def _report(self, work: asyncio.Task[None]) -> None:
        """Tells all callers of an error that no request of theirs is to blame for."""
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None:
            for queue in self._queues.values():
                queue.put_nowait(error)
