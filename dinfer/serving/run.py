"""Runs the application: address, signals, and what the process says when it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from dinfer.serving.app import application
from dinfer.serving.served import Served
from dinfer.serving.settings import Settings

LOG = logging.getLogger("dinfer.serving")


class _Server(uvicorn.Server):
    """Uvicorn's server, except that SIGTERM ends it in peace: running requests finish, and the exit status is 0."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            self._stopping()
            self.handle_exit(number, None)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(settings: Settings) -> socket.socket:
    """The socket the server will listen on. Raises OSError, with the address, if it cannot."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"{error.strerror}: {settings.host}:{settings.port}. Choose another port=") from error
    return made


def serve(served: Sequence[Served], settings: Settings, made: socket.socket, ready: Callable[[str], None]) -> None:
    """Serves until a signal comes; `ready` is told the address of the page. Raises RuntimeError if the engine died."""
    app = application(served, settings)
    state = app.state.server
    host, port = made.getsockname()[:2]
    config = uvicorn.Config(
        app, log_config=None, access_log=False, limit_concurrency=settings.max_connections, timeout_keep_alive=30,
        timeout_graceful_shutdown=round(settings.grace), server_header=False,
    )  # fmt: skip
    server = _Server(config, state.admission.close)

    async def run() -> None:
        task = asyncio.create_task(server.serve(sockets=[made]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
        await task

    asyncio.run(run())
