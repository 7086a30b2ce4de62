"""Checks the key and limits of every request, gives it an id, and notices clients that leave or do not read. Logs.

A caller in this process can be a client too: `messages`.
"""

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dinfer.serving.errors import ApiError
from dinfer.serving.settings import Settings, is_loopback

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
FIELDS = ("method", "path", "status", "seconds", "model", "prompt")  # optional fields of a record
LOG = logging.getLogger("dinfer.serving")
OPEN = ("/", "/health", "/ready")  # need no key: the page asks for one, and probes have none
QUIET = ("/health", "/ready", "/metrics")  # polled every few seconds
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]
ID_HEADERS = (b"x-request-id", b"request-id", b"x-typesafe-request-id")  # of OpenAI's, Anthropic's and System One's
LEAST_RATE = 16_384  # bytes a second of a body that takes longer than `send_timeout`
BODIES = 16  # times `max_body` that the bodies of all requests may take
SLASHES = re.compile("/+")
GONE = 499  # nginx's status for a client that has left; only the log shows it
SILENCE = 10.0  # seconds without an event, after which a stream gets a sign of life
EVENTS = b"text/event-stream; charset=utf-8"
# What a request holds: its place in the queue, and its rows. `Guard` releases them however the request ends. A response
# cannot, because it may never be sent, or not to the end.
HELD: ContextVar[AsyncExitStack] = ContextVar("held")


def log_as_json() -> None:
    """Makes dinfer and uvicorn log to stderr in JSON, a record a line. Requests are logged unless -q is given."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("dinfer", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    serving = logging.getLogger("dinfer.serving")
    if serving.isEnabledFor(logging.WARNING):
        serving.setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the request's id, and the record's `FIELDS`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get(),
            **{name: value for name, value in vars(record).items() if name in FIELDS},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete HTTP request."""

    method: str
    path: str
    body: bytes = b""
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),)
    id: str | None = None  # its name in logs; None: the application chooses one


async def messages(app: ASGIApp, asked: HttpRequest) -> AsyncGenerator[Message]:
    """The ASGI messages of the answer. To the application, a caller that stops early is a client that leaves."""
    queue: asyncio.Queue[Message | None] = asyncio.Queue()
    bodies: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": asked.method,
        "path": asked.path, "query_string": asked.query, "root_path": "", "headers": [*asked.headers],
        "request_id": asked.id,
    }  # fmt: skip

    async def receive() -> Message:
        return bodies.pop() if bodies else await asyncio.Future()  # this client stays

    async def answer() -> None:
        try:
            await app(scope, receive, queue.put)
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(answer())
    try:
        while (message := await queue.get()) is not None:
            yield message
        await task  # raises what the application raised
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class NotRead(Exception):
    """The client did not read in time. It is not a TimeoutError, since Starlette handles every OSError itself."""


class Guard:
    """ASGI middleware. The application sees only allowed and complete requests, and ends when its client leaves."""

    def __init__(
        self, app: ASGIApp, settings: Settings,
        refuse: Callable[[ApiError], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """`refuse` is called with the errors that are answered here."""
        self._app, self._settings, self._keys, self._refuse = app, settings, settings.keys(), refuse
        self._open = 0  # requests that wait for an answer
        self._bytes = 0  # of their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = SLASHES.sub("/", scope["path"])  # as clients join addresses and paths
        if (root := self._settings.root_path) and path.startswith(f"{root}/"):
            path = path.removeprefix(root)
        if scope["method"] == "POST":  # a redirection, which pages get, would not know of a proxy's prefix
            path = path.rstrip("/") or "/"
        scope = {**scope, "path": path}
        # A gateway has given the request an id.
        request_id, began = scope.get("request_id") or f"req-{uuid.uuid4().hex}", time.perf_counter()
        REQUEST_ID.set(request_id)
        sending, parts = _Sending(send, request_id, self._settings.send_timeout), list[bytes]()
        self._open += 1
        try:
            self._check(scope)
            body = await self._body(receive, parts)
            if body is None or not (await self._answer(scope, body, receive, sending) or sending.complete):
                sending.status = GONE
        except ApiError as error:
            self._refuse(error)
            await error.response(scope["path"], request_id)(scope, receive, sending)
        except (NotRead, ClientDisconnect) as error:  # uvicorn then closes the connection
            LOG.warning("the answer could not be sent: %r", error)
            sending.status = GONE
        except Exception as error:
            LOG.error("the request failed in the server", exc_info=error)
            if sending.status:
                raise
            message = f"the request {request_id} failed in the server, whose log says why"
            failed = ApiError(500, message, code="internal_error")
            await failed.response(scope["path"], request_id)(scope, receive, sending)
        finally:
            self._open -= 1
            self._bytes -= sum(map(len, parts))
            if connection := scope.get("state", {}).get("connection"):
                connection.answered()
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            path = scope["path"][:200]
            LOG.log(
                level, "%s %s %s", scope["method"], path, sending.status,
                extra={
                    "method": scope["method"], "path": path, "status": sending.status,
                    "seconds": round(time.perf_counter() - began, 4),
                },
            )  # fmt: skip

    def _check(self, scope: Scope) -> None:
        most = self._settings.max_connections
        if self._open > most and scope["path"] not in QUIET:
            raise ApiError(
                503, f"{most} requests wait for an answer already, which is the most: try again later",
                code="too_many_connections", retry_after=1,
            )  # fmt: skip
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"localhost").decode("latin-1"))
        if int(headers.get(b"content-length", b"0")) > self._settings.max_body:
            raise self._too_large()
        if (coding := headers.get(b"content-encoding", b"identity").lower()) != b"identity":
            told = f"the body is compressed ({coding.decode('latin-1'):.20}): send it as it is"
            raise ApiError(415, told, "Content-Encoding", "invalid_value")
        if self._keys and scope["path"] not in OPEN and not scope["path"].startswith("/static/"):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = [key.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
            # It compares every key, so that the time does not tell which key nearly matched.
            fits = [hmac.compare_digest(one, known) for one in given for known in self._keys]
            if not any(fits):
                told = "give a key of this server: Authorization: Bearer KEY, or x-api-key: KEY"
                raise ApiError(401, told, code="invalid_api_key")

    def _check_host(self, host: str) -> None:
        """Raises ApiError if a page of another site may have sent the request.

        Without keys, a server on the loopback address is for this machine alone. But anybody may point a name at that
        address, and pages under that name may then read the server's answers in browsers here (DNS rebinding).
        """
        settings = self._settings
        name = re.sub(r":\d+$", "", host)
        if is_loopback(settings.host) and not self._keys and not settings.insecure and not is_loopback(name):
            raise ApiError(
                421, f"this server answers to localhost alone, not to {name!r:.80}. Start it with api_key=, or with "
                "insecure=true, to reach it by another name", "Host", "wrong_host",
            )  # fmt: skip

    async def _body(self, receive: Receive, parts: list[bytes]) -> bytes | None:
        """The whole body, which comes in `parts`; None if the client has left. Raises ApiError."""
        settings, size, more, began = self._settings, 0, True, time.monotonic()
        while more:
            limit = min(settings.send_timeout + size / LEAST_RATE, settings.deadline)
            try:
                message = await asyncio.wait_for(receive(), began + limit - time.monotonic())
            except TimeoutError:
                raise ApiError(408, "the body did not come in time", code="timeout") from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            self._bytes += len(parts[-1])
            if size > settings.max_body:
                raise self._too_large()
            if self._bytes > BODIES * settings.max_body:
                raise ApiError(503, "too much is being sent at once: try again later", code="too_busy", retry_after=1)
        return b"".join(parts)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: "_Sending") -> bool:
        """Runs the application until its client leaves, and then returns False. Raises NotRead.

        HEAD runs as GET, and the HTTP server leaves out the body.
        """
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def left() -> Message:
            while (message := await receive())["type"] != "http.disconnect":
                LOG.debug("there is more than the body: %s", message["type"])
            return message

        gone = asyncio.create_task(left())

        async def once() -> Message:
            return bodies.pop() if bodies else await asyncio.shield(gone)

        async def app() -> None:
            await self._app(asked, once, send)

        async with AsyncExitStack() as held:
            HELD.set(held)
            work = asyncio.create_task(app())
            sign: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of life, that is being sent
            sign.set_result(None)
            try:
                while not work.done() and not gone.done():
                    due = max(min(send.left(), send.silence()), 0.0)
                    await asyncio.wait({work, gone}, timeout=due, return_when=asyncio.FIRST_COMPLETED)
                    if send.silence() <= 0 and sign.done() and not work.done():
                        sign = asyncio.create_task(send.sign(scope["path"]))
            finally:
                here = work.done()
                for task in (work, gone, sign):
                    task.cancel()
                results = await asyncio.gather(work, gone, sign, return_exceptions=True)
        if here and isinstance(results[0], BaseException):
            raise results[0]
        return here

    def _too_large(self) -> ApiError:
        most = self._settings.max_body
        return ApiError(413, f"the body has more than max_body={most} bytes: send less, or raise it", code="too_large")


class _Sending:
    """Sends the messages of one answer."""

    def __init__(self, send: Send, request_id: str, limit: float) -> None:
        """`limit`: seconds that the client may take to read a message."""
        self._send, self._id, self._limit = send, request_id.encode(), limit
        self._since: float | None = None  # start of the message that is being sent
        self._last: float | None = None  # end of the last one, of a stream of events
        self.status = 0
        self.complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if (b"content-type", EVENTS) in message.get("headers", []):
                self._last = time.perf_counter()
            given = list(message.get("headers", []))
            own = [*SAFE_HEADERS, *((name, self._id) for name in ID_HEADERS)]
            message = {**message, "headers": [*given, *(header for header in own if header not in given)]}
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._last = None
        await self._timed(message)
        self.complete = message["type"] == "http.response.body" and not message.get("more_body")

    async def _timed(self, message: Message) -> None:
        self._since = time.perf_counter()
        await self._send(message)
        self._since = None
        if self._last is not None:
            self._last = time.perf_counter()

    def silence(self) -> float:
        """Seconds until a stream of events needs a sign of life, or proxies and clients think that it has ended."""
        if self._last is None or self._since is not None:
            return SILENCE
        return self._last + SILENCE - time.perf_counter()

    async def sign(self, path: str) -> None:
        """Sends what clients pass over: an event of Anthropic's API, else a comment."""
        if self._last is None:
            return
        ping = b'event: ping\ndata: {"type": "ping"}\n\n' if path == "/v1/messages" else b": ping\n\n"
        await self._timed({"type": "http.response.body", "body": ping, "more_body": True})

    def left(self) -> float:
        """Seconds until the client may be late. Raises NotRead if it is late.

        A client that does not read would hold its rows and the memory of unsent messages for ever. Polling costs less
        than a timer for each message.
        """
        passed = 0.0 if self._since is None else time.perf_counter() - self._since
        if passed >= self._limit:
            raise NotRead
        return self._limit - passed
