"""Replicas of the model on Ray Serve, and the gateway that answers for them at the command's own address."""

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dinfer.serving.answers import cut_off
from dinfer.serving.app import application
from dinfer.serving.errors import ApiError
from dinfer.serving.guard import REQUEST_ID, Guard, HttpRequest, log_as_json, messages
from dinfer.serving.rows import failure
from dinfer.serving.run import EngineFailed, check, configured, open_files, tuned
from dinfer.serving.server import Server
from dinfer.serving.settings import NO_LIMIT, Settings, naming, url

END = b"data: [DONE]\n\n"  # a stream says nothing behind it
ATTEMPTS = 3  # replicas that may end during one request, which may be what ends them
PROBE = 5.0  # seconds in which a replica must answer
SESSION = b"x-session-id"  # the header in which a client names its conversation

LOG = logging.getLogger("dinfer.serving")
NAME = "dinfer"  # of the application on Ray Serve
CHECK = 2.0  # seconds between checks of a replica's health
STARTS = 3  # tries to start a replica
LOOK = 1.0  # seconds between looks at the application
LOGS = {"enable_access_log": False, "log_level": "WARNING"}  # of Ray Serve, since our logs say more
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
Make = Callable[[Settings], Server]


class Gateway:
    """The application of a server with replicas. It holds no model."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings) -> None:
        """Raises ValueError or OSError if this machine lacks the keys."""
        self._replicas, self._settings = replicas, settings
        self._registry = CollectorRegistry()
        self._retried = Counter(
            "dinfer_requests_retried", "Requests sent to another replica after theirs ended", registry=self._registry
        )

    def app(self) -> ASGIApp:
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
        asked = HttpRequest(
            scope["method"], scope["path"], body, scope["query_string"], scope["headers"], REQUEST_ID.get()
        )
        begun: Message | None = None  # the head of the answer, once it is sent
        try:
            async with asyncio.timeout(self._settings.deadline):
                async with aclosing(self._answer(asked)) as answer:
                    async for message in answer:
                        if message["type"] == "http.response.start":
                            begun = message
                        await send(message)
        except (ApiError, TimeoutError) as found:
            error = found if isinstance(found, ApiError) else failure(found)
            if begun is None:
                raise error from found
            LOG.error("a stream was cut off: %s", error.message)
            text = cut_off(error, asked.path, REQUEST_ID.get())
            await send({"type": "http.response.body", "body": text, "more_body": False})

    async def _answer(self, asked: HttpRequest) -> AsyncGenerator[Message]:
        """The messages of a replica. If it ends before it sends any of the body, another answers. Raises ApiError."""
        session = conversation(asked)
        for _ in range(ATTEMPTS):
            head: Message | None = None
            begun, done, said = False, False, b""
            response: Any = self._replicas.options(stream=True, session_id=session).answer.remote(asked)
            try:
                async for message in response:
                    if message["type"] == "http.response.start":
                        head = message
                        continue
                    done, said = not message.get("more_body"), message.get("body") or said
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
                if begun and said.endswith(END):  # nothing of the answer is missing
                    yield {"type": "http.response.body", "body": b"", "more_body": False}
                    return
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


# The paths of conversations, and the field that holds one.
TALKS = {
    "/v1/chat/completions": "messages", "/v1/trace": "messages", "/v1/messages": "messages", "/v1/responses": "input",
}  # fmt: skip


def conversation(asked: HttpRequest) -> str:
    """The key of a request's conversation: the client's name for it, or a hash of all up to its first question.

    Empty if it belongs to none, and any replica may answer it.
    """
    if name := dict(asked.headers).get(SESSION):
        return name.decode("latin-1")
    field = TALKS.get(asked.path)
    if field is None:
        return ""
    try:
        body = json.loads(asked.body)
        said = body[field]
        first = next(i for i, message in enumerate(said) if message["role"] == "user")
        told = json.dumps([body["model"], said[: first + 1]], sort_keys=True)
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return ""  # the replica says what is wrong with the body
    return hashlib.blake2b(told.encode(errors="backslashreplace"), digest_size=16).hexdigest()


class Replica:
    """One copy of the model with its application."""

    def __init__(self, make: Make, settings: Settings, owner: str) -> None:
        """`owner`: the command that deploys it."""
        log_as_json()
        self._owner = owner
        self._server = make(settings)
        self._app = application(self._server)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._for_good = ExitStack()
        self._for_good.enter_context(tuned())

    async def answer(self, asked: HttpRequest) -> AsyncGenerator[Message]:
        """The answer of the application, message by message."""
        async with aclosing(messages(self._app, asked)) as answer:
            async for message in answer:
                if self._server.failure is not None:  # gateways then ask other replicas, and Ray starts a new one
                    LOG.critical("the engine has failed, and so this replica ends", exc_info=self._server.failure)
                    logging.shutdown()
                    os._exit(1)
                yield message

    def owner(self) -> str:
        return self._owner

    def ready(self) -> None:
        """Raises ApiError unless the replica takes requests."""
        self._server.check()

    def check_health(self) -> None:
        """Ray Serve calls it, and replaces a replica that raises."""
        check(self._server)

    def metrics(self) -> tuple[str, list[Metric]]:
        """The name of this replica, and its metrics."""
        return self._name, [*self._server.metrics.registry.collect()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many replicas there are, and the resources of each."""

    replicas: int
    rows: int  # requests that one replica denoises at a time
    resources: dict[str, float]  # of one replica, all on one machine
    autoscaling: dict[str, Any] | None = None  # fields of Ray Serve's AutoscalingConfig

    def scaling(self) -> AutoscalingConfig | None:
        """Autoscaling between `replicas` and `max_replicas` by the number of requests. Raises ValueError."""
        if self.autoscaling is None:
            return None
        fields = {"min_replicas": self.replicas, "target_ongoing_requests": self.rows, **self.autoscaling}
        if unknown := self.autoscaling.keys() - AutoscalingConfig.model_fields.keys():
            raise ValueError(
                f"autoscaling: unknown {', '.join(sorted(unknown))}. Ray Serve's AutoscalingConfig has "
                f"{', '.join(name for name in AutoscalingConfig.model_fields if not name.startswith('_'))}"
            )
        try:
            return AutoscalingConfig(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(["autoscaling", *map(str, first["loc"])])
            raise ValueError(f"{where}={first['input']!r:.80}: {first['msg']}") from error

    @property
    def most(self) -> int:
        """The largest number of replicas."""
        scaling = self.scaling()
        return self.replicas if scaling is None else max(self.replicas, scaling.max_replicas)


def app(make: Make, settings: Settings, plan: Plan, owner: str) -> serve.Application:
    """The application for Ray Serve. `make` makes the server in a replica's process. `owner`: the deploying command."""
    scaling = plan.scaling()
    number: dict[str, Any] = {"num_replicas": plan.replicas} if scaling is None else {"autoscaling_config": scaling}
    replicas = serve.deployment(
        name="Replica",
        placement_group_bundles=[plan.resources], placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": plan.resources["CPU"], "num_gpus": plan.resources.get("GPU", 0)},
        # A few more than it denoises at a time, so that no row is free until the next request comes.
        max_ongoing_requests=plan.rows + max(1, plan.rows // 4),
        max_queued_requests=settings.max_requests,
        # All gateways find a replica by the same hash, and go on to the next if it is full.
        request_router_config={
            "request_router_class": ROUTER, "request_router_kwargs": {"num_fallback_replicas": plan.most - 1},
            "initial_backoff_s": 0.01, "max_backoff_s": 0.05,
        },
        graceful_shutdown_timeout_s=settings.grace, health_check_period_s=CHECK, logging_config=LOGS,
        max_constructor_retry_count=STARTS, **number,
    )(Replica)  # fmt: skip
    inside = replace(
        settings, host="127.0.0.1", api_key=None, insecure=True, max_requests=NO_LIMIT, send_timeout=NO_LIMIT
    )
    return replicas.bind(make, inside, owner)


def run(make: Make, settings: Settings, plan: Plan, made: socket.socket, ready: Callable[[str], None]) -> None:
    """Serves on the joined cluster until a signal comes. `ready` is called with the address, that of `made`.

    It replaces the replicas of an earlier command, one at a time, and that command ends. Raises ValueError, OSError,
    EngineFailed.
    """
    log_as_json()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it also ends the loading of a model
    try:
        with suppress(KeyboardInterrupt), deployed(make, settings, plan, made) as here:
            ready(here.address)
            watch(here)
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True)
class Deployed:
    """An application on Ray Serve, and the gateway that this process has before it."""

    address: str  # ends in a slash
    owner: str  # identifies this command
    replicas: DeploymentHandle
    ours: bool = True  # False: another command has replaced it


@contextmanager
def deployed(make: Make, settings: Settings, plan: Plan, made: socket.socket) -> Iterator[Deployed]:
    """Deploys the replicas, and deletes them at the end. Running requests then have `grace` seconds.

    Ray's own proxies stay off: they answer some paths without a key, take request ids from clients, and ask no other
    replica if one dies. Raises ValueError, OSError if the address is not free, EngineFailed if no replica starts.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    owner, before = uuid.uuid4().hex, serve.status()
    serve.start(proxy_location="Disabled", logging_config=LOGS)
    first = ours = NAME not in before.applications
    with ExitStack() as stack:

        def listen() -> None:
            gateway = Gateway(serve.get_app_handle(NAME), settings)
            stack.enter_context(listening(gateway, settings, made))

        try:
            if not first:  # so that there is no gap between the other command and this one
                listen()
            try:
                handle = serve.run(app(make, settings, plan, owner), name=NAME, route_prefix=None, logging_config=LOGS)
            except RuntimeError as error:
                raise EngineFailed(f"the replicas could not start: {_why() or error}") from error
            here, ours = Deployed(url(*made.getsockname()[:2]), owner, handle), True
            if first:
                listen()
            yield here
            ours = here.ours
        finally:
            stack.close()
            if ours:
                serve.delete(NAME)


@contextmanager
def listening(gateway: Gateway, settings: Settings, made: socket.socket) -> Iterator[None]:
    """Answers at the address of a socket, in a thread. At the end, running requests have `grace` seconds."""
    open_files(settings)
    with naming(settings):
        made.listen(settings.max_connections)
    web = uvicorn.Server(configured(gateway.app(), settings, grace=max(int(settings.grace), 1)))
    thread = Thread(target=lambda: asyncio.run(web.serve(sockets=[made])), name="gateway", daemon=True)
    thread.start()
    try:
        yield
    finally:
        web.should_exit = True
        thread.join()


def _why() -> str:
    """The error that a replica met at its start: the last line of its traceback. Empty if there is none."""
    found = serve.status().applications.get(NAME)
    messages = [one.message for one in found.deployments.values()] if found else []
    said = [line for one in messages if "Traceback" in one for line in one.splitlines() if line.strip()]
    return said[-1].strip() if said else ""


def watch(here: Deployed) -> None:
    """Returns when another command has replaced the application. Raises EngineFailed if the application is gone."""
    while True:
        time.sleep(LOOK)
        now = serve.status().applications.get(NAME)
        if now is None or now.status == ApplicationStatus.DELETING:
            raise EngineFailed("somebody has ended the application on Ray Serve")
        with suppress(TimeoutError, RayError, RayServeException):  # replicas may be between two versions
            owners = {*here.replicas.broadcast("owner").results(timeout_s=PROBE)}
            if owners and here.owner not in owners:
                LOG.warning("another command serves in place of this one")
                here.ours = False
                return
