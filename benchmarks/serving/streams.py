"""Clients that stream answers, some of which leave or read slowly. A process with only the standard library.

Reads a `Crowd` as JSON from standard input, and prints each `Outcome` as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

DRAIN = 480  # seconds in which answers must end after the last request; two busy cores give three answers a second
SMALL = 4096  # bytes that a slow reader's socket holds


@dataclass(frozen=True, slots=True)
class Crowd:
    """The work of the clients of one process."""

    url: str  # of the endpoint
    streams: int  # at once
    bodies: list[dict[str, Any]]  # of the requests
    seed: int = 0
    seconds: float | None = None  # how long requests are drawn from `bodies`; None: each is sent once
    leave: float = 0.0  # share of requests whose client leaves before the end
    slow: float = 0.0  # share of requests whose client reads slowly


@dataclass(slots=True)
class Outcome:
    """One request."""

    asked: int  # index of the body
    fate: str  # stay, leave, slow
    status: int = 0
    text: str = ""
    done: bool = False  # the stream was complete
    error: str | None = None
    tokens: int = 0
    first: float | None = None  # seconds until the first text
    gaps: list[float] = field(default_factory=list)  # seconds between two pieces of text
    began: float = 0.0  # on the clock that all processes share
    ended: float = 0.0


async def ask(crowd: Crowd, asked: int, fate: str, draw: random.Random) -> Outcome:
    """A request and its outcome."""
    found, where = Outcome(asked, fate, began=time.monotonic()), urlsplit(crowd.url)
    pieces: list[tuple[float, bytes]] = []
    left = draw.randrange(12) if fate == "leave" else None  # chunks that are read before
    link = socket.socket(socket.AF_INET)
    if fate == "slow":
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    link.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(link, (where.hostname, where.port))
        reader, writer = await asyncio.open_connection(sock=link, limit=SMALL if fate == "slow" else 2**20)
        try:
            body = json.dumps(crowd.bodies[asked]).encode()
            writer.write(
                f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            if left == 0:
                await writer.drain()
                return found
            found.status = int((await reader.readline()).split()[1])
            async for chunk in chunks(reader):
                pieces.append((time.monotonic(), chunk))
                if fate == "slow":
                    await asyncio.sleep(draw.uniform(0.02, 0.3))
                if left is not None and len(pieces) >= left:
                    return found
            read(found, pieces)
        finally:
            if fate == "leave" and draw.random() < 0.5:
                writer.transport.abort()
            writer.close()
    except (OSError, EOFError, ValueError, IndexError) as error:
        found.error = f"{type(error).__name__}: {error}"
    finally:
        found.ended = time.monotonic()
        link.close()
    return found


async def chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """The parts of a body as they come."""
    length = None
    while (line := await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        length = int(value) if name.lower() == "content-length" else length
    if length is not None:
        yield await reader.readexactly(length)
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


def read(found: Outcome, pieces: list[tuple[float, bytes]]) -> None:
    """Parses the pieces of a stream."""
    last = None
    for at, chunk in pieces:
        text = ""
        for event in chunk.decode().split("\n\n"):
            if event == "data: [DONE]":
                found.done = True
            elif event and not event.startswith(":"):  # a sign of life
                message = json.loads(event.removeprefix("data: "))
                if "error" in message:
                    found.error = message["error"]["message"]
                    continue
                for choice in message["choices"]:
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                found.tokens = message["usage"]["completion_tokens"] if message.get("usage") else found.tokens
        if text:
            found.text += text
            if last is None:
                found.first = at - found.began
            else:
                found.gaps.append(at - last)
            last = at


def taken(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of requests, from the first start to the last end. Raises RuntimeError if one failed."""
    if bad := [found for found in outcomes if not found.done]:
        raise RuntimeError(f"{len(bad)} of {len(outcomes)} requests failed: {bad[0]}")
    seconds = max(found.ended for found in outcomes) - min(found.began for found in outcomes)
    tokens = sum(found.tokens for found in outcomes)
    return {
        "requests": len(outcomes), "tokens": tokens, "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "ttfb_ms": percentiles([found.first for found in outcomes if found.first is not None]),
        "inter_commit_ms": percentiles([gap for found in outcomes for gap in found.gaps]),
        "latency_s": {"median": round(statistics.median(found.ended - found.began for found in outcomes), 4)},
    }  # fmt: skip


def percentiles(values: list[float]) -> dict[str, float]:
    """Milliseconds at p50, p95 and p99."""
    ranked = sorted(values)
    return {
        f"p{p}": round(1e3 * ranked[min(len(ranked) * p // 100, len(ranked) - 1)], 2) for p in (50, 95, 99) if ranked
    }


async def asked_until(end: float | None, crowd: Crowd, asked: int, fate: str, draw: random.Random) -> Outcome:
    """The same, cancelled at that time of the event loop's clock."""
    try:
        async with asyncio.timeout_at(end):
            return await ask(crowd, asked, fate, draw)
    except TimeoutError:
        return Outcome(asked, fate, error=f"no end within {DRAIN} s")


async def run(crowd: Crowd, tell: Callable[[Outcome], None]) -> None:
    """Runs all streams. Each asks again as soon as its answer has ended. `tell` is called with each request."""
    draw, began = random.Random(crowd.seed), time.monotonic()
    waiting = iter(range(len(crowd.bodies)))

    def next_one() -> int | None:
        if crowd.seconds is None:
            return next(waiting, None)
        return draw.randrange(len(crowd.bodies)) if time.monotonic() - began < crowd.seconds else None

    async def stream() -> None:
        while (asked := next_one()) is not None:
            lot = draw.random()
            fate = "leave" if lot < crowd.leave else "slow" if lot < crowd.leave + crowd.slow else "stay"
            found = await asked_until(end, crowd, asked, fate, draw)
            tell(found)
            if found.error is not None or found.status >= 400:
                await asyncio.sleep(1)  # like a client that must try again later

    end = None if crowd.seconds is None else asyncio.get_running_loop().time() + crowd.seconds + DRAIN
    await asyncio.gather(*(stream() for _ in range(crowd.streams)))


if __name__ == "__main__":
    work = Crowd(**json.load(sys.stdin))
    asyncio.run(run(work, lambda found: print(json.dumps(asdict(found)), flush=True)))
