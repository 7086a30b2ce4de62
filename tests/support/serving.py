"""The server's application in this process, without a network."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import uvicorn

import dinfer
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.serving.app import application
from dinfer.serving.run import configured
from dinfer.serving.served import catalogue
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings, listen

QUESTION = "Tom has 12 coins and buys 3 books at 2 coins each. How many coins are left?"


@cache
def tiny() -> dinfer.Pipeline:
    return dinfer.load("tiny", device="cpu", runtime=dinfer.Runtime(rows=8))


@dataclass
class Client:
    """Asks the application, one event loop for all requests."""

    server: Server
    pipe: dinfer.Pipeline
    loop: asyncio.Runner
    http: httpx.AsyncClient

    def ask(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        if body is None:
            return self.loop.run(self.http.get(path, headers=headers))
        return self.loop.run(self.http.post(path, json=body, headers=headers))


@contextmanager
def served(
    settings: Settings | None = None, pipe: dinfer.Pipeline | None = None, **recipes: dict[str, Any]
) -> Iterator[Client]:
    """`recipes`: others than the pipeline's own, as `compose` takes them, served as tiny:NAME."""
    pipe = tiny() if pipe is None else pipe
    found: dict[str, Recipe] = {"tiny": pipe.recipe}
    usual = {"iteration": "blockwise", "decoder": "threshold", "cache": "dual"}
    found |= {f"tiny:{name}": compose(pipe.model, **usual | parts) for name, parts in recipes.items()}
    server = Server(catalogue(pipe, found, max_new_tokens=64, created=0), settings or Settings())
    transport = httpx.ASGITransport(app=application(server))
    with asyncio.Runner() as loop:
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        yield Client(server, pipe, loop, http)
        loop.run(http.aclose())


def pieces(response: httpx.Response) -> list[dict[str, Any]]:
    """The messages of a stream, which must be complete."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@contextmanager
def listening(client: Client) -> Iterator[str]:
    """The application behind a socket, in a thread: its address, which ends in a slash."""
    with listen(Settings(port=0)) as made:
        made.listen()
        web = uvicorn.Server(configured(application(client.server), client.server.settings))
        thread = threading.Thread(target=lambda: asyncio.run(web.serve(sockets=[made])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.getsockname()[1]}/"
        finally:
            web.should_exit = True
            thread.join()
