"""OpenAI's batch format, answered by the server's own application without a network.

Each line of IN is `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`, each line of OUT
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`. A line of OUT is written whole or not
at all, so a run that was killed goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from fastapi import FastAPI

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/infill")


def read_requests(path: Path) -> list[dict[str, Any]]:
    """The requests of a file. Raises ValueError for a line that is none, with its number."""
    requests: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            request = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(request, dict):
            raise ValueError(f"{where} must be an object with custom_id, method, url and body")
        name, body = request.get("custom_id"), request.get("body")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: custom_id={name!r} must be a text")
        if name in known:
            raise ValueError(f"{where}: custom_id={name!r} is that of line {known[name]} too; each must be another")
        if request.get("method", "POST") != "POST" or request.get("url") not in URLS:
            raise ValueError(f"{where}: method and url must be POST and one of {', '.join(URLS)}")
        if not isinstance(body, dict) or body.get("stream"):
            raise ValueError(f"{where}: body must be a request without stream")
        known[name] = number
        requests.append(request)
    if not requests:
        raise ValueError(f"{path} holds no request")
    return requests


def finished(path: Path) -> set[str]:
    """The ids that a file answers already. A last line that a kill cut off is taken out of it."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        done = {json.loads(line)["custom_id"] for line in whole.splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by this command: choose another file") from error
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return done


async def answer_all(
    app: FastAPI, requests: list[dict[str, Any]], out: BinaryIO, *, at_once: int, told: Callable[[int], None]
) -> int:
    """Answers the requests, `at_once` at a time, and writes each answer as it comes. Returns how many failed.

    `told` hears of each answer. Raises OSError when a line cannot be written.
    """
    turns, failed = asyncio.Semaphore(at_once), 0
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:

        async def one(request: dict[str, Any]) -> None:
            nonlocal failed
            async with turns:
                response = await client.post(request["url"], json=request["body"])
            request_id = response.headers.get("x-request-id", "")
            line = {
                "id": request_id.replace("req-", "batch_req_"),
                "custom_id": request["custom_id"],
                "response": {
                    "status_code": response.status_code, "request_id": request_id, "body": response.json(),
                },
                "error": None,
            }  # fmt: skip
            out.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            out.flush()
            failed += response.status_code != 200
            told(1)

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(one(request))
    return failed
