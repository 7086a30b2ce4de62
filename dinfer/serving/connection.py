"""Clients' connections: limits of time and size for a request's head, and the process's limit of open files."""

import asyncio
import logging
import re
import resource
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dinfer.serving.errors import ApiError
from dinfer.serving.guard import MAX_HEAD, head_too_large
from dinfer.serving.settings import Settings

LOG = logging.getLogger("dinfer.serving")
# Java's and other clients offer HTTP/2 by this header. httptools drops the body of a request that has it.
UPGRADE = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)
LINGER = 2.0  # seconds in which a client that still sends can read why it is refused
OTHERS = 256  # open files of the process beside its connections


def connection(settings: Settings) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol, which also closes a connection if the head of a request comes too slowly.

    A client that sends no valid request gets an error of the API too, although the application never sees it.
    """

    class Connection(HttpToolsProtocol):
        _late: asyncio.TimerHandle | None = None
        _before: Any = None  # uvicorn's cycle of the request before the last one
        _head: int | None = None  # bytes read of an unfinished head; None: there is none
        _refused = False  # drops all further input

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._await_head()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head = 0

        def on_headers_complete(self) -> None:
            self._head = None
            if self.parser.should_upgrade():
                raise ValueError("the header stood where `data_received` has not looked")
            self._before = self.cycle
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._head is not None or self.cycle is None or self.cycle.response_complete:
                head, end, rest = data.partition(b"\r\n\r\n")
                data = UPGRADE.sub(b"ignored", head) + end + rest
            super().data_received(data)
            if self._head is not None:
                self._head += len(data)
                if self._head > MAX_HEAD:
                    self._refuse(head_too_large())
            if self.cycle is None or self.cycle.response_complete:
                self._await_head()
            else:
                self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "this is no HTTP request that can be read", code="invalid_http"))

        def _refuse(self, error: ApiError) -> None:
            """Answers an incomplete request and closes the connection. It disturbs no other answer."""
            if self._refused or self.transport.is_closing():
                return
            if self.pipeline and self.cycle.more_body:  # this request has not begun, and the one before is answered
                self.pipeline.popleft()
                self.cycle = self._before
            running = self.cycle is not None and not self.cycle.response_complete
            if running and not self.cycle.more_body:  # the running request was complete and is answered
                self.cycle.keep_alive = False
                self._refused = True  # reading goes on, so that the client's end is seen and the answer is not reset
                return
            if running and self.cycle.response_started:
                self.transport.close()
                return
            body = to_json(error.body())
            self.transport.write(
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            self.transport.write_eof()  # closing while the client still sends would lose the answer
            self._refused = True
            asyncio.get_running_loop().call_later(LINGER, self.transport.close)

        def _await_head(self) -> None:
            if self._late is None:
                self._late = asyncio.get_running_loop().call_later(settings.send_timeout, self._give_up)

        def _give_up(self) -> None:
            if self._head is not None:
                self._refuse(ApiError(408, "the head of the request did not come in time", code="timeout"))
            else:
                self.transport.close()

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection


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
