"""A file of requests, in OpenAI's batch format, answered by the application that answers clients, without a network.

Each answer is a line of the output, whole or not there. A run that is killed goes on where it was.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from dinfer.analysis.outputs import naming
from dinfer.serving.app import application, of_validation
from dinfer.serving.errors import ApiError, refused
from dinfer.serving.guard import Message, Scope
from dinfer.serving.protocol import Strict
from dinfer.serving.run import ended
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings

NO_LIMIT = 10**9
# A file waits for nobody: as many of its lines run at a time as the caller says, and each may take its time.
SETTINGS = Settings(
    max_requests=NO_LIMIT, max_tokens=NO_LIMIT, max_body=NO_LIMIT, deadline=NO_LIMIT, send_timeout=NO_LIMIT
)


class Ask(Strict):
    """One line of the input."""

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/infill"]
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input that is not blank."""

    number: int  # in the file, from 1
    text: bytes
    id: str  # of its answer


def lines(source: BinaryIO, setup: Mapping[str, Any]) -> Iterator[Line]:
    """The lines from the beginning. `setup`: what an answer depends on beside its line."""
    base = hashlib.blake2b(json.dumps(setup, sort_keys=True, default=str).encode(), digest_size=12)
    source.seek(0)
    for number, text in enumerate(source, 1):
        if text.strip():
            own = base.copy()
            own.update(b"%d %s" % (number, text.strip()))
            yield Line(number, text, f"batch_req_{own.hexdigest()}")


class Output:
    """The file of answers, locked while it is open. A pipe or a device takes answers too, but keeps none."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """Raises ValueError for a file that is not ours, or that another process writes; OSError."""
        self.path, self.ids = path, dict[str, str | None]()  # custom ids by the id of the answer
        with naming(path):
            self._file = path.open("ab", buffering=0)
        self._keeps = path.is_file()
        if not self._keeps:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process writes {path}: wait for its end, or give another file") from error
        if overwrite:
            self._file.truncate(0)
        self._size = self._read()
        self._file.truncate(self._size)  # a last line that a kill cut short: its request is answered again

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Keeps an answer: it is in the file when this returns. Raises OSError, and then the file has none of it."""
        left = memoryview(json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        size = len(left)
        with naming(self.path):
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:  # such as a full disk
                if self._keeps:
                    self._file.truncate(self._size)
                raise
        if self._keeps:
            self._size += size
        self.ids[answer["id"]] = answer["custom_id"]

    def _read(self) -> int:
        """Takes up the answers that are there, and returns how many bytes they have."""
        size = 0
        with self.path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                try:
                    answer = json.loads(text)
                    self.ids[answer["id"]] = answer["custom_id"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{self.path}, line {number}, is not an answer of dinfer batch: give another file, or "
                        "overwrite=true to begin anew"
                    ) from error
                size += len(text)
        return size


def run(
    make: Callable[[Settings], Server], asked: BinaryIO, setup: Mapping[str, Any], output: Output, *, at_once: int,
    progress: Callable[[int, int, dict[str, Any] | None], None],
) -> None:  # fmt: skip
    """Answers all lines of `asked` that `output` lacks, `at_once` of them at a time.

    `make`: the server with these settings. `progress` is told how many lines are answered, of how many, and the last
    answer. Raises ValueError if `output` is of other lines or of another setup, OSError, EngineFailed, RankFailed.
    """
    ids = {line.id for line in lines(asked, setup)}
    if others := output.ids.keys() - ids:
        raise ValueError(
            f"{output.path} has answers to other lines, or of other settings, such as custom_id="
            f"{output.ids[min(others)]!r}: give another file, or overwrite=true to begin anew"
        )
    progress(len(output.ids), len(ids), None)
    if len(output.ids) == len(ids):
        return
    server = make(SETTINGS)
    app, seen, waiting = application(server), dict[str, int](), lines(asked, setup)

    async def work() -> None:
        for line in waiting:
            answer = await answered(app, line, seen, skip=line.id in output.ids)
            if server.failure is not None:
                raise ended(server.failure)
            if answer is not None:
                output.write(answer)
                progress(len(output.ids), len(ids), answer)

    async def all_lines() -> None:
        tasks = [asyncio.create_task(work()) for _ in range(at_once)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_lines())


async def answered(app: Any, line: Line, seen: dict[str, int], *, skip: bool) -> dict[str, Any] | None:
    """The answer to a line. `seen`: lines by custom id, to which it adds its own. None: `skip` it."""
    given: Any = None
    try:
        given = parsed(line.text)
        ask = checked(given)
        if (first := seen.setdefault(ask.custom_id, line.number)) != line.number:
            raise ApiError(
                400, f"custom_id={ask.custom_id!r:.80} is that of line {first} too", "custom_id", "duplicate"
            )
        if skip:
            return None
        status, request_id, body = await post(app, ask.url, json.dumps(ask.body).encode())
    except ApiError as error:
        if skip:
            return None
        found, response = error.body()["error"], None
        found["message"] = f"line {line.number}: {found['message']}"
    else:
        response = {"status_code": status, "request_id": request_id, "body": body}
        found = None if status < 400 else body["error"]
    name = given.get("custom_id") if isinstance(given, dict) else None
    return {
        "id": line.id,
        "custom_id": name if isinstance(name, str) else None,
        "response": response,
        "error": None if found is None else {key: found[key] for key in ("code", "message", "param")},
    }


def parsed(text: bytes) -> Any:
    """What a line says. Raises ApiError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"it is not JSON: {error}", None, "invalid_json") from error


def checked(given: Any) -> Ask:
    """A request that can be made. Raises ApiError."""
    try:
        ask = Ask.model_validate(given)
    except ValidationError as error:
        raise of_validation(
            RequestValidationError([{**one, "loc": ("line", *one["loc"])} for one in error.errors()])
        ) from error
    if ask.body.get("stream"):
        raise refused("body.stream", ask.body["stream"], "cannot be honoured in a file: leave it out")
    return ask


async def post(app: Any, path: str, content: bytes) -> tuple[int, str, Any]:
    """Asks an ASGI application: status, request id and body of its answer."""
    sent, parts = [content], list[bytes]()
    status, request_id = 0, ""

    async def receive() -> Message:
        if sent:
            return {"type": "http.request", "body": sent.pop()}
        return await asyncio.Future()  # this client stays

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status, request_id = message["status"], dict(message["headers"])[b"x-request-id"].decode()
        parts.append(message.get("body", b""))

    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "POST",
        "path": path, "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)
    return status, request_id, json.loads(b"".join(parts))
