"""Runs the application: address, signals, and how the process ends."""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn

from dinfer.parallel.leader import RankFailed
from dinfer.serving.app import application
from dinfer.serving.connection import Connection, open_files
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings, naming, url

LOG = logging.getLogger("dinfer.serving")
FAREWELL = 2.0  # seconds in which a server still answers after its engine failed, and in which requests are cut off


class EngineFailed(RuntimeError):
    """An engine met an error that no single request caused. The server has ended."""


class _Uvicorn(uvicorn.Server):
    """Uvicorn's server. A signal ends it with exit status 0, after the running requests have finished.

    After `grace` seconds, or with a second Ctrl-C, it ends at once.
    """

    def __init__(self, config: uvicorn.Config, grace: float, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._grace, self._stopping = grace, stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def stop(number: int, frame: object) -> None:
            self._stopping()
            if not self.should_exit:
                self.handle_exit(number, None)
            elif number == signal.SIGINT:
                loop.call_soon_threadsafe(self._cut_off)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(self._grace, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _cut_off(self) -> None:
        """Closes all connections. The requests then end as if their clients had left."""
        if clients := [*self.server_state.connections]:
            LOG.warning("the server ends and closes %d connections, complete or not", len(clients))
        for client in clients:
            client.transport.abort()
        asyncio.get_running_loop().call_later(FAREWELL, setattr, self, "force_exit", True)


@contextmanager
def tuned() -> Iterator[None]:
    """Python's settings for a process that serves.

    After the engine's thread has waited for the device, it waits for the event loop's thread to release the
    interpreter. By default that takes up to 5 ms, as long as a step. The garbage collector skips everything loaded so
    far.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)


def configured(app: Any, settings: Settings, *, grace: int | None = None) -> uvicorn.Config:
    """The settings of uvicorn. `grace`: seconds after which it cuts off running requests by itself."""
    door: Any = partial(Connection, settings)
    return uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, backlog=settings.max_connections, http=door,
        ws="none", timeout_keep_alive=30, timeout_graceful_shutdown=grace,
    )  # fmt: skip


def serve(server: Server, made: socket.socket, ready: Callable[[str], None]) -> None:
    """Serves until a signal comes. `ready` is called with the address of the page.

    Raises EngineFailed, RankFailed, what `ready` raises, and OSError if another server has taken the address.
    """
    settings, config = server.settings, configured(application(server), server.settings)
    open_files(settings)
    with naming(settings):  # two sockets may be bound to an address, but only one can listen
        made.listen(settings.max_connections)
    web = _Uvicorn(config, settings.grace, server.admission.close)

    async def watch() -> None:
        while not web.started:
            await asyncio.sleep(0.01)
        ready(url(*made.getsockname()[:2]))
        await server.failed()
        await asyncio.sleep(FAREWELL)

    async def run() -> None:
        watcher = asyncio.create_task(watch())
        watcher.add_done_callback(lambda _: setattr(web, "should_exit", True))
        try:
            await web.serve(sockets=[made])
        finally:
            watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as loop:
        loop.run(run())
    if server.failure is not None:
        raise ended(server.failure)


def ended(failure: BaseException) -> BaseException:
    """The error with which a program ends after its engine failed. A lost rank needs no traceback."""
    if isinstance(failure, RankFailed):
        return failure
    error = EngineFailed(f"the engine failed: {failure!r}")
    error.__cause__ = failure
    return error
