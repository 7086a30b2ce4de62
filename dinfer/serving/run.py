"""Runs the application: connections, signals, and how the process ends."""

import asyncio
import gc
import logging
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from dinfer.core.engine.errors import RankFailed
from dinfer.serving.app import application
from dinfer.serving.errors import ApiError
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings, naming, url

LOG = logging.getLogger("dinfer.serving")
MAX_HEAD = 65_536  # bytes of a request's path and headers
END = b"\r\n\r\n"  # of a head
# Java's and other clients offer HTTP/2 by this header. httptools drops the body of a request that has it.
UPGRADE = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)
LINGER = 2.0  # seconds in which a client that still sends can read why it is refused
OTHERS = 256  # open files of the process beside its connections
FAREWELL = 2.0  # seconds in which a server still answers after its engine failed, and in which requests are cut off


class Connection(asyncio.Protocol):
    """Reads each head as a whole, and only then hands the request to uvicorn's protocol.

    A head that is late, too large or no HTTP gets an error of the API, after the answers to requests before it. A
    chunked request is the last one of its connection, since only its length tells where the next head begins.
    """

    def __init__(self, settings: Settings, app_state: dict[str, Any], **given: Any) -> None:
        """`app_state` and `given` are uvicorn's. `Guard` finds the connection in the state of its requests."""
        self._settings = settings
        make: Any = AutoHTTPProtocol
        self._inner: asyncio.Protocol = make(app_state=app_state | {"connection": self}, **given)
        self._late: asyncio.TimerHandle | None = None
        self._head = b""  # what is known of an unfinished head
        self._fields: list[tuple[bytes, bytes]] = []
        self._body = 0  # bytes that are still to come of a request's body
        self._open = 0  # requests without a whole answer
        self._refusal = b""
        self._ended = False  # drops all further input

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._inner.connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        try:
            while data and not self._ended:
                data = self._continue(data) if self._body else self._read_head(data)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "this is no HTTP request that can be read", code="invalid_http"))

    def _continue(self, data: bytes) -> bytes:
        """Hands over what belongs to the running request. Returns the rest. Raises HttpParserError."""
        part, rest = data[: self._body], data[self._body :]
        self._body -= len(part)
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserError:  # in a chunk: for uvicorn, the client has left
            self._inner.connection_lost(ConnectionError())
            raise
        self._inner.data_received(part)
        return rest

    def _read_head(self, data: bytes) -> bytes:
        """Reads the head of the next request, and returns what is behind it. Raises HttpParserError."""
        if not self._head:
            data = data.lstrip(b"\r\n")
            self._parser, self._fields = httptools.HttpRequestParser(self), []
        known, self._head = len(self._head), self._head + data
        length = self._head.find(END, max(known - len(END), 0)) + len(END)
        whole = length >= len(END)
        length = length if whole else len(self._head)
        if length > MAX_HEAD:
            error = ApiError(431, f"the path and the headers of the request exceed {MAX_HEAD} bytes", code="too_large")
            self._refuse(error)
            return b""
        head, rest = self._head[:length], self._head[length:]
        try:
            self._parser.feed_data(head[known:])
        except httptools.HttpParserUpgrade as error:
            self._head, plain = b"", UPGRADE.sub(b"ignored", head)
            if plain == head:  # CONNECT
                raise httptools.HttpParserError from error
            return plain + rest  # read once more
        if whole:
            self._stop()
            self._head = b""
            self._begin(head)
        elif head:
            self._await_head()
        return rest

    def _begin(self, head: bytes) -> None:
        """Hands the head of a request to uvicorn."""
        names, version = [name for name, _ in self._fields], self._parser.get_http_version()
        if version not in ("1.0", "1.1"):  # uvicorn would wait for more of it
            told = f"HTTP/{version} is not spoken here: let the client, or the proxy, ask with HTTP/1.1"
            return self._refuse(ApiError(505, told, code="invalid_http"))
        if version == "1.1" and names.count(b"host") != 1:
            return self._refuse(ApiError(400, "a request in HTTP/1.1 needs one header Host", "Host", "invalid_http"))
        self._body = int(dict(self._fields).get(b"content-length", 0))
        if b"transfer-encoding" in names:
            self._body, head = sys.maxsize, head.removesuffix(b"\r\n") + b"Connection: close" + END
        self._open += 1
        self._inner.data_received(head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._fields.append((name.lower(), value))

    def answered(self) -> None:
        """Called when the application has answered a request, or has given it up."""
        self._open -= 1
        if not self._open and (self._body or self._refusal):
            self._end()  # the rest of a body that was refused may still be coming

    def _refuse(self, error: ApiError) -> None:
        body = to_json(error.body())
        self._refusal = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        ).encode() + body
        self._stop()
        self._ended = True
        if not self._open:
            self._end()

    def _end(self) -> None:
        """Closes the connection. At once, while the client still sends, the last answer would be lost."""
        self._ended = True
        if not self._transport.is_closing():
            self._transport.write(self._refusal)
            self._transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER, self._transport.close)

    def _await_head(self) -> None:
        if self._late is None:
            self._late = asyncio.get_running_loop().call_later(self._settings.send_timeout, self._give_up)

    def _give_up(self) -> None:
        if self._head:
            self._refuse(ApiError(408, "the head of the request did not come in time", code="timeout"))
        else:
            self._transport.close()

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def open_files(settings: Settings) -> None:
    """Raises the process's limit of open files to fit `max_connections`, and warns if the system does not allow it."""
    need, (soft, hard) = settings.max_connections + OTHERS, resource.getrlimit(resource.RLIMIT_NOFILE)
    most: Any = need if hard == resource.RLIM_INFINITY else min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < need:
        LOG.warning(
            "the process may open %d files, too few for max_connections=%d: raise `ulimit -n`, or lower it", most,
            settings.max_connections,
        )  # fmt: skip


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
    check(server)


def check(server: Server) -> None:
    """Raises EngineFailed or RankFailed, which needs no traceback, if an engine has failed: the program must end."""
    failure = server.failure
    if isinstance(failure, RankFailed):
        raise failure
    if failure is not None:
        raise EngineFailed(f"the engine failed: {failure!r}") from failure
