"""The door of a server with replicas: who answers, what is asked again elsewhere, and what clients see of a loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dinfer[ray]'")

from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from support.serving import QUESTION, tiny

from dinfer.scale.ray.replicas import Gateway, Plan, conversation
from dinfer.serving.app import application
from dinfer.serving.guard import HttpRequest, messages
from dinfer.serving.served import catalogue
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings

BODY = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
CHAT = "/v1/chat/completions"


class Handle:
    """What a gateway needs of Ray Serve's handle: replicas that do what the test says, one request after the other."""

    def __init__(self, *replicas: Callable[[HttpRequest], AsyncGenerator[Any]]) -> None:
        self._replicas, self.asked, self.sessions, self.cancelled = iter(replicas), list[HttpRequest](), list[str](), 0

    def options(self, *, stream: bool, session_id: str) -> Any:
        assert stream
        self.sessions.append(session_id)
        return SimpleNamespace(answer=SimpleNamespace(remote=self._remote))

    def _remote(self, asked: HttpRequest) -> Any:
        self.asked.append(asked)
        answer = next(self._replicas)(asked)
        failed: list[Exception] = []

        class Response:
            async def __aiter__(response) -> AsyncGenerator[Any]:
                try:
                    async for message in answer:
                        yield message
                except Exception as error:
                    failed.append(error)
                    raise

            def cancel(response) -> None:
                self.cancelled += 1
                if failed:
                    raise failed[0]  # as Ray Serve's does

        return Response()


def sound(asked: HttpRequest) -> AsyncGenerator[Any]:
    """A replica that works."""
    pipe = tiny()
    server = Server(catalogue(pipe, {"tiny": pipe.recipe}, max_new_tokens=64, created=0), Settings())
    return messages(application(server), asked)


def dies(after: int) -> Callable[[HttpRequest], AsyncGenerator[Any]]:
    """A replica that dies after so many messages of its answer."""

    async def answer(asked: HttpRequest) -> AsyncGenerator[Any]:
        left = after
        async with aclosing(sound(asked)) as answer:
            async for message in answer:
                if not left:
                    break
                left -= 1
                yield message
        raise ActorDiedError()

    return answer


async def busy(asked: HttpRequest) -> AsyncGenerator[Any]:
    raise BackPressureError(num_queued_requests=2, max_queued_requests=2)
    yield


async def silent(asked: HttpRequest) -> AsyncGenerator[Any]:
    await asyncio.Future()
    yield


@contextmanager
def gateway(handle: Handle, settings: Settings | None = None) -> Iterator[Callable[..., httpx.Response]]:
    app = Gateway(handle, settings or Settings()).app()  # type: ignore[arg-type]

    def ask(body: Any = BODY, path: str = CHAT, method: str = "POST", **headers: str) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
                return await client.request(method, path, json=body, headers={"x-request-id": "mine"} | headers)

        return asyncio.run(once())

    yield ask


def text_of(response: httpx.Response) -> str:
    """The text of a stream, which must be complete."""
    *pieces, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return "".join(c["delta"].get("content") or "" for piece in pieces for c in json.loads(piece)["choices"])


@cache
def answer() -> str:
    return tiny().generate([BODY["messages"]], max_new_tokens=16)[0].text  # type: ignore[list-item]


@pytest.mark.parametrize("lost", [[], [0], [0, 1]], ids=["none is lost", "one is lost", "two are lost"])
def test_what_has_streamed_nothing_is_asked_elsewhere(lost: list[int]) -> None:
    handle = Handle(*map(dies, lost), sound, *map(dies, lost), sound)
    with gateway(handle) as ask:
        whole, stream = ask(), ask(BODY | {"stream": True})
    assert whole.json()["choices"][0]["message"]["content"] == text_of(stream) == answer()
    assert stream.headers["content-type"].startswith("text/event-stream")
    ids = [response.headers["x-request-id"] for response in (whole, stream)]
    assert [asked.id for asked in handle.asked] == [one for one in ids for _ in range(len(lost) + 1)]
    assert len(set(handle.sessions)) == 1 and not handle.cancelled


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    with gateway(Handle(dies(3))) as ask:
        response = ask(BODY | {"stream": True})
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    said = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert response.status_code == 200 and said and answer().startswith(said)
    assert last["error"]["code"] == "replica_lost" and last["request_id"] == response.headers["x-request-id"]


def test_a_request_that_ends_every_replica_ends() -> None:
    handle = Handle(*[dies(1)] * 9)
    with gateway(handle) as ask:
        response = ask()
    assert response.status_code == 503 and response.headers["retry-after"]
    assert response.json()["error"]["code"] == "replica_lost" and len(handle.asked) == 3


def test_a_full_queue_is_429() -> None:
    with gateway(Handle(busy)) as ask:
        response = ask()
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"


def test_no_replica_answers_in_time() -> None:
    handle = Handle(silent)
    with gateway(handle, Settings(deadline=0.05)) as ask:
        response = ask()
    assert response.status_code == 504 and handle.cancelled == 1


def test_keys_and_limits_hold_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "a-key-of-ours")
    handle = Handle(sound)
    with gateway(handle, Settings(api_key="env:KEY", max_body=500)) as ask:
        assert ask().status_code == 401
        assert ask(BODY | {"user": "x" * 500}, authorization="Bearer a-key-of-ours").status_code == 413
        assert not handle.asked
        response = ask(authorization="Bearer a-key-of-ours")
        for path in ("/-/routes", "/-/healthz", "/metrics"):
            assert ask(path=path, method="GET").status_code == 401
    assert response.status_code == 200 and response.headers["x-request-id"].startswith("req-")


def test_what_a_client_does_wrong_is_said_by_the_replica() -> None:
    with gateway(Handle(sound, sound, sound)) as ask:
        assert ask({"model": "tiny"}).json()["error"]["param"] == "messages"
        assert ask(path="/v1/nothing").status_code == 404
        assert ask(path="/v1/models", method="GET").json()["data"][0]["id"] == "tiny"


def test_turns_of_a_conversation_belong_together() -> None:
    def of(said: list[Any], **headers: str) -> str:
        body = json.dumps({"model": "tiny", "messages": said}).encode()
        return conversation(
            HttpRequest("POST", CHAT, body, b"", [(k.encode(), v.encode()) for k, v in headers.items()])
        )

    def turn(role: str, content: Any) -> dict[str, Any]:
        return {"role": role, "content": content}

    first = [turn("system", "be brief"), turn("user", "one")]
    later = [*first, turn("assistant", "1"), turn("user", "two")]
    assert of(first) == of(later) != of([turn("system", "be brief"), turn("user", "two")])
    assert of(first, **{"x-session-id": "s"}) == "s"
    assert of([turn("assistant", "alone")]) == of([1]) == ""  # whatever it is, a replica answers it
    assert conversation(HttpRequest("POST", "/v1/completions", b'{"prompt": "x"}')) == ""
    assert conversation(HttpRequest("POST", CHAT, b"{")) == ""


def test_autoscaling_is_ray_serves() -> None:
    plan = Plan(replicas=2, rows=8, resources={"CPU": 1}, autoscaling={"max_replicas": 5, "upscale_delay_s": 1})
    found = plan.scaling()
    assert found is not None and plan.most == 5
    assert (found.min_replicas, found.max_replicas, found.upscale_delay_s) == (2, 5, 1)
    assert found.target_ongoing_requests == 8
    for wrong, message in (
        ({"most": 3}, "autoscaling: unknown most"), ({"max_replicas": 1}, "autoscaling"),
        ({"upscale_delay_s": -1}, "autoscaling.upscale_delay_s=-1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            replace(plan, autoscaling=wrong).scaling()
