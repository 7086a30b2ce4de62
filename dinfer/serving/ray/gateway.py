"""The entrance of a server with replicas. It checks keys and limits, and asks the replica that has the conversation."""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from dinfer.serving.answers import sse
from dinfer.serving.errors import ApiError
from dinfer.serving.exchange import Application, Asked
from dinfer.serving.guard import Guard, Message, Receive, Scope, Send
from dinfer.serving.log import REQUEST_ID
from dinfer.serving.settings import Settings

ATTEMPTS = 3  # replicas that may end during one request, which may be what ends them
PROBE = 5.0  # seconds in which a replica must answer
SESSION = b"x-session-id"  # the header in which a client names its conversation

LOG = logging.getLogger("dinfer.serving")


class Gateway:
    """The application of a server with replicas. It holds no model."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings) -> None:
        """Raises ValueError or OSError if this machine lacks the keys."""
        self._replicas, self._settings = replicas, settings
        self._registry = CollectorRegistry()
        self._retried = Counter(
            "dinfer_requests_retried", "Requests sent to another replica after theirs ended", registry=self._registry
        )

    def app(self) -> Application:
        own = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}
        routes = [*(Route(path, answer) for path, answer in own.items()), Mount("/", self._forward)]
        return Starlette(routes=routes, middleware=[Middleware(Guard, settings=self._settings)])

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if not await self._of_all("ready"):
            raise ApiError(503, "no replica is ready", code="no_replica", retry_after=1)
        return JSONResponse({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        """The metrics of this gateway and of every replica, each labelled with its name."""
        told = [*await self._of_all("metrics"), ("", [*self._registry.collect()])]
        registry = CollectorRegistry()
        registry.register(_Merged(told))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _of_all(self, method: str) -> list[Any]:
        """Calls a method on all replicas, and returns the results of those that answer in time."""
        try:
            told = await self._replicas.broadcast(method).results_async(timeout_s=PROBE, return_exceptions=True)
        except TimeoutError:
            raise ApiError(503, f"a replica has not answered within {PROBE:g} s", code="timeout") from None
        return [one for one in told if not isinstance(one, BaseException)]

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        asked = Asked(scope["method"], scope["path"], body, scope["query_string"], scope["headers"], REQUEST_ID.get())
        begun: Message | None = None  # the head of the answer, once it is sent
        try:
            async with asyncio.timeout(self._settings.deadline):
                async with aclosing(self._answer(asked)) as answer:
                    async for message in answer:
                        if message["type"] == "http.response.start":
                            begun = message
                        await send(message)
        except (ApiError, TimeoutError) as found:
            late = ApiError(504, "the request took longer than its deadline allows", code="deadline")
            error = found if isinstance(found, ApiError) else late
            if begun is None:
                raise error from found
            LOG.error("a stream was cut off: %s", error.message)
            text = sse([error.body() | {"request_id": REQUEST_ID.get()}])
            await send({"type": "http.response.body", "body": text, "more_body": False})

    async def _answer(self, asked: Asked) -> AsyncGenerator[Message]:
        """The messages of a replica. If it ends before it sends any of the body, another answers. Raises ApiError."""
        session = conversation(asked)
        for _ in range(ATTEMPTS):
            head: Message | None = None
            begun = done = False
            response: Any = self._replicas.options(stream=True, session_id=session).answer.remote(asked)
            try:
                async for message in response:
                    if message["type"] == "http.response.start":
                        head = message
                        continue
                    done = not message.get("more_body")
                    if head is not None and (message.get("body") or done):
                        begun = True
                        yield head
                        head = None
                    if begun:
                        yield message
                return
            except BackPressureError as error:
                raise ApiError(
                    429, "all replicas are busy, and as many requests wait as may: try again later",
                    code="queue_full", retry_after=1,
                ) from error  # fmt: skip
            except (RayError, RayServeException) as error:
                LOG.warning("a replica was lost: %s", type(error).__name__)
                if isinstance(error, RayTaskError) and not begun:  # the replica lives: this is a defect of ours
                    raise
                if begun:
                    raise ApiError(
                        500, "the replica that wrote this answer has ended: ask again", code="replica_lost"
                    ) from error
                self._retried.inc()
            except (asyncio.CancelledError, GeneratorExit):  # the client left, or the deadline passed
                with suppress(RayError, RayServeException):  # `cancel` raises what ended the response
                    if not done:
                        response.cancel()
                raise
        raise ApiError(
            503, f"{ATTEMPTS} replicas ended while they answered this request", code="replica_lost", retry_after=5
        )


class _Merged(Collector):
    """The metrics of several processes, labelled with the process's name."""

    def __init__(self, told: list[tuple[str, Any]]) -> None:
        self._told = told

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for name, metrics in self._told:
            own = {"replica": name} if name else {}
            for metric in metrics:
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.samples.append(sample._replace(labels=sample.labels | own))
        return [*families.values()]


def conversation(asked: Asked) -> str:
    """The key of a request's conversation: the client's name for it, or a hash of all up to its first question.

    Empty if it belongs to none, and any replica may answer it.
    """
    if name := dict(asked.headers).get(SESSION):
        return name.decode("latin-1")
    if asked.path not in ("/v1/chat/completions", "/v1/trace"):
        return ""
    try:
        body = json.loads(asked.body)
        said = body["messages"]
        first = next(i for i, message in enumerate(said) if message["role"] == "user")
        told = json.dumps([body["model"], said[: first + 1]], sort_keys=True)
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return ""  # the replica says what is wrong with the body
    return hashlib.blake2b(told.encode(errors="backslashreplace"), digest_size=16).hexdigest()
