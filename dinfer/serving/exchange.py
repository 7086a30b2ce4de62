"""Asks an ASGI application without a network."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from dinfer.serving.guard import Message, Receive, Scope, Send

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A complete HTTP request."""

    method: str
    path: str
    body: bytes = b""
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),)
    id: str | None = None  # its name in logs; None: the application chooses one


async def messages(app: Application, asked: Asked) -> AsyncGenerator[Message]:
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
