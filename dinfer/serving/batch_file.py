"""Answers a file of requests in OpenAI's batch format, with the server's application but without a network.

Each answer is one whole line of the output. A killed run resumes where it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from dinfer.lab.outputs import JsonLines
from dinfer.serving.app import application
from dinfer.serving.errors import ApiError, refused, validated
from dinfer.serving.forms import HeldFields, Strict
from dinfer.serving.guard import HttpRequest, messages
from dinfer.serving.run import check
from dinfer.serving.server import Server

# Paths whose requests take the fields of forms, and the field of each path with the seed of what it draws.
HELD = "/v1/chat/completions", "/v1/completions", "/v1/infill", "/v1/fim/completions", "/v1/edit/completions"
SEEDED = {**dict.fromkeys(HELD, "seed"), "/v1/responses": "seed", "/v1/messages": "dinfer"}
PREFIX = "batch_req_"  # of the ids of answers
BEGIN = f'{{"id": "{PREFIX}'.encode()  # of the lines of answers


class Ask(Strict):
    """One line of the input."""

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/infill", "/v1/messages", "/v1/responses", "/v1/decisions",
        "/v1/systemone", "/v1/read", "/v1/fim/completions", "/v1/edit/completions",
    ]  # fmt: skip
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input that is not blank."""

    number: int  # in the file, from 1
    text: bytes
    id: str  # of its answer


def lines(source: BinaryIO, setup: Mapping[str, Any]) -> Iterator[Line]:
    """The lines of the file that are not blank. `setup`: the settings on which answers depend."""
    base = hashlib.blake2b(json.dumps(setup, sort_keys=True, default=str).encode(), digest_size=12)
    source.seek(0)
    for number, text in enumerate(source, 1):
        if text.strip():
            own = base.copy()
            own.update(b"%d %s" % (number, text.strip()))
            yield Line(number, text, f"{PREFIX}{own.hexdigest()}")


class Output(JsonLines):
    """The file of answers."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        """Raises ValueError for a file of another kind or one that another process writes, and OSError."""
        super().__init__(path, overwrite=overwrite)
        self.ids: dict[str, str | None] = {}  # custom ids by answer id
        if not self.keeps:
            return
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n") and text[: len(BEGIN)] == BEGIN[: len(text)]:  # a kill cut it short
                    break
                try:
                    answer = json.loads(text) if text.endswith(b"\n") else {}  # another program's, which `mend` drops
                    self.ids[answer["id"]] = answer["custom_id"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number}, is not an answer of dinfer batch: give another file, or "
                        "overwrite=true to begin anew"
                    ) from error
        self.mend()

    def write(self, line: Mapping[str, Any]) -> None:
        super().write(line)
        self.ids[line["id"]] = line["custom_id"]


# Answers requests, given with the ids of their answers, and hands over each answer: here, or on a Ray cluster.
Answering = Callable[[Iterator[tuple[str, Ask]], Callable[[dict[str, Any]], None]], None]


def run(
    asked: BinaryIO, setup: Mapping[str, Any], output: Output, answering: Answering,
    progress: Callable[[int, int, dict[str, Any] | None], None], form: Mapping[str, Any],
) -> None:  # fmt: skip
    """Answers all lines of `asked` that `output` lacks.

    `progress` gets the number of answered lines, the number of lines, and the last answer. `form`: what lines that say
    no form are held to, by the names of `structure.form.Held`. Raises ValueError if `output` has answers to other
    lines or of another setup, OSError, EngineFailed, RankFailed.
    """
    setup, formed = {**setup, **form}, set[str]()
    ids = {line.id for line in lines(asked, setup)}
    if others := output.ids.keys() - ids:
        raise ValueError(
            f"{output.path} has answers to other lines, or of other settings, such as custom_id="
            f"{output.ids[min(others)]!r}: give another file, or overwrite=true to begin anew"
        )
    progress(len(output.ids), len(ids), None)

    def keep(answer: dict[str, Any]) -> None:
        if answer["id"] not in output.ids:
            output.write(renamed(answer) if answer["id"] in formed else answer)
            progress(len(output.ids), len(ids), answer)

    def left() -> Iterator[tuple[str, Ask]]:
        """The requests without an answer. It answers a faulty line with its error."""
        seen: dict[str, int] = {}
        for line in lines(asked, setup):
            try:
                ask = read(line)
                name = ask.custom_id
                if (first := seen.setdefault(name, line.number)) != line.number:
                    raise ApiError(400, f"custom_id={name!r:.80} is that of line {first} too", "custom_id", "duplicate")
                own = held(ask, form)
            except ApiError as error:
                keep(refusal(line, error))
            else:
                if line.id not in output.ids:
                    if own is not ask:
                        formed.add(line.id)
                    yield line.id, with_seed(own, setup, line.number)

    if len(output.ids) < len(ids):
        answering(left(), keep)


def answer_here(
    waiting: Iterator[tuple[str, Ask]], keep: Callable[[dict[str, Any]], None], *, make: Callable[[], Server],
    at_once: int,
) -> None:  # fmt: skip
    """Answers requests with an engine in this process, `at_once` at a time. Raises EngineFailed."""
    server = make()
    app = application(server)

    async def work() -> None:
        for answer_id, ask in waiting:
            answer = await answered(app, answer_id, ask)
            check(server)
            keep(answer)

    async def all_lines() -> None:
        tasks = [asyncio.create_task(work()) for _ in range(at_once)]
        try:
            async with server.watched():
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_lines())


async def answered(app: Any, answer_id: str, ask: Ask) -> dict[str, Any]:
    """The application's answer to a valid line."""
    status, request_id, parts = 0, "", list[bytes]()
    async with aclosing(messages(app, HttpRequest("POST", ask.url, json.dumps(ask.body).encode()))) as answer:
        async for message in answer:
            if message["type"] == "http.response.start":
                status, request_id = message["status"], dict(message["headers"])[b"x-request-id"].decode()
            parts.append(message.get("body", b""))
    body = json.loads(b"".join(parts))
    error = None if status < 400 else body["error"]
    return told(answer_id, ask.custom_id, {"status_code": status, "request_id": request_id, "body": body}, error)


def refusal(line: Line, error: ApiError) -> dict[str, Any]:
    """The answer to a faulty line."""
    found = error.body()["error"]
    found["message"] = f"line {line.number}: {found['message']}"
    try:
        name = parsed(line.text)["custom_id"]
    except (ApiError, TypeError, KeyError):
        name = None
    return told(line.id, name if isinstance(name, str) else None, None, found)


def told(answer_id: str, name: str | None, response: Any, error: Mapping[str, Any] | None) -> dict[str, Any]:
    """An answer in OpenAI's batch format."""
    kept = None if error is None else {key: error.get(key) for key in ("code", "message", "param")}
    return {"id": answer_id, "custom_id": name, "response": response, "error": kept}


def read(line: Line) -> Ask:
    """The request of a line. Raises ApiError."""
    body = parsed(line.text)
    if not isinstance(body, dict):
        raise ApiError(400, f"a line must be one request in braces, not {body!r:.80}", None, "invalid_value")
    ask = validated(Ask, body)
    if ask.body.get("stream"):
        raise refused("body.stream", ask.body["stream"], "cannot be honoured in a file: leave it out")
    return ask


FIELDS = {"schema": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}


def held(ask: Ask, form: Mapping[str, Any]) -> Ask:
    """The request with this form, unless it says one itself, or its answer must call a function. Raises ApiError."""
    body = ask.body
    if form and ask.url not in HELD:
        told = f"{ask.url} takes no form of the command: say it in the line, or leave out {', '.join(form)}"
        raise ApiError(400, told, "url", "unsupported_value")
    calls = body.get("tools") and body.get("tool_choice") not in (None, "auto", "none")
    if not form or calls or any(body.get(field) is not None for field in (*HeldFields.model_fields, "forms")):
        return ask
    own = {FIELDS[name]: value for name, value in form.items() if name in FIELDS}
    mine = body.get("dinfer") or {}
    if form.get("posterior") and isinstance(mine, dict):
        own["dinfer"] = {"posterior": True} | mine
    return ask.model_copy(update={"body": body | own})


def with_seed(ask: Ask, setup: Mapping[str, Any], number: int) -> Ask:
    """The request with a seed, unless it has one: that of the setup and the line's number, so that a run repeats."""
    mine, field = ask.body.get("dinfer"), SEEDED.get(ask.url)
    if field is None or (mine is not None and not isinstance(mine, dict)):
        return ask  # nothing is drawn, or the answer says what is wrong
    if ask.body.get("seed") is not None or {"seed", "sampling.seed"} & (mine or {}).keys():
        return ask
    first = (setup.get("sampling") or {}).get("seed", -1)
    seed = {"seed": max(first, 0) + number}
    own = seed if field == "seed" else {"dinfer": {**(mine or {}), **seed}}
    return ask.model_copy(update={"body": ask.body | own})


def renamed(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer to a line with the command's form: an error names the form as the command does."""
    if answer["error"] is None:
        return answer
    told = json.dumps({part: answer[part] for part in ("response", "error")})
    for name, field in FIELDS.items():
        told = told.replace(field, name)
    return answer | json.loads(told)


def parsed(text: bytes) -> Any:
    """The JSON of a line. Raises ApiError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"it is not JSON: {error}", None, "invalid_json") from error
