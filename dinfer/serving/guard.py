"""What stands before every request: keys, limits, request ids, and clients that do not read."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dinfer.serving.errors import ApiError
from dinfer.serving.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LOG = logging.getLogger("dinfer.serving")
OPEN = ("/", "/health", "/ready")  # answered without a key: the page asks for one, and probes have none
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


class Guard:
    """ASGI middleware."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], settings: Settings) -> None:
        self._app, self._settings, self._keys = app, settings, settings.keys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, began, status = f"req-{uuid.uuid4().hex}", time.perf_counter(), 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []), *SAFE_HEADERS, (b"x-request-id", request_id.encode())
                ]  # fmt: skip
            # A client that does not read would hold its row, and the memory of what it does not read, for ever.
            await asyncio.wait_for(send(message), self._settings.send_timeout)

        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), sending)
        except ApiError as error:
            if status:
                raise
            await respond(error, sending)
        except TimeoutError:
            LOG.warning("%s: the client did not read for %s s", request_id, self._settings.send_timeout)
            status = 499
        finally:
            seconds = time.perf_counter() - began
            LOG.info("%s %s %s %s %.3fs", request_id, scope["method"], scope["path"], status, seconds)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise ApiError(400, "the header Content-Length must be a number", "Content-Length")
        if int(length) > self._settings.max_body:
            raise self._too_large()
        if self._keys and scope["path"] not in OPEN and not scope["path"].startswith("/static/"):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            # Every key is compared, so that the time says nothing about which one is nearly right.
            fits = [hmac.compare_digest(key.strip(), known) for known in self._keys]
            if scheme.lower() != b"bearer" or not any(fits):
                raise ApiError(401, "give a key of this server: Authorization: Bearer KEY", code="invalid_api_key")

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._settings.max_body:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than this server takes: {self._settings.max_body} bytes", code="too_large")


async def respond(error: ApiError, send: Send) -> None:
    """An error as a whole answer."""
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error.body()).encode()})
