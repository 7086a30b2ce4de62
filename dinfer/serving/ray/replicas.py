"""Replicas of the model on Ray Serve, and the command that serves them at its own address."""

import asyncio
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
from prometheus_client.core import Metric
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from dinfer.serving.app import application
from dinfer.serving.connection import open_files
from dinfer.serving.exchange import Asked, messages
from dinfer.serving.guard import Message
from dinfer.serving.log import log_as_json
from dinfer.serving.ray.gateway import PROBE, Gateway
from dinfer.serving.run import EngineFailed, configured, tuned
from dinfer.serving.server import Server
from dinfer.serving.settings import NO_LIMIT, Settings, naming, url

NAME = "dinfer"  # of the application on Ray Serve
CHECK = 2.0  # seconds between checks of a replica's health
STARTS = 3  # tries to start a replica
LOOK = 1.0  # seconds between looks at the application
LOGS = {"enable_access_log": False, "log_level": "WARNING"}  # of Ray Serve, since our logs say more
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

LOG = logging.getLogger("dinfer.serving")
Make = Callable[[Settings], Server]


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

    async def answer(self, asked: Asked) -> AsyncGenerator[Message]:
        """The answer of the application, message by message."""
        async with aclosing(messages(self._app, asked)) as answer:
            async for message in answer:
                self._end_if_failed()
                yield message

    def _end_if_failed(self) -> None:
        """Ends the process if the engine has failed. Gateways then ask other replicas, and Ray starts a new one."""
        if self._server.failure is not None:
            LOG.critical("the engine has failed, and so this replica ends", exc_info=self._server.failure)
            logging.shutdown()
            os._exit(1)

    def owner(self) -> str:
        return self._owner

    def ready(self) -> None:
        """Raises ApiError unless the replica takes requests."""
        self._server.check()

    def check_health(self) -> None:
        """Ray Serve calls it, and replaces a replica that raises."""
        if self._server.failure is not None:
            raise EngineFailed(f"the engine failed: {self._server.failure!r}") from self._server.failure

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
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": settings.grace,
        "health_check_period_s": CHECK,
        "logging_config": LOGS,
        "max_constructor_retry_count": STARTS,
    }
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
        **({"num_replicas": plan.replicas} if scaling is None else {"autoscaling_config": scaling}), **common,
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
    with suppress(KeyboardInterrupt), interruptible(), deployed(make, settings, plan, made) as here:
        ready(here.address)
        watch(here)


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


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, SIGTERM raises KeyboardInterrupt, so that it also ends the loading of a model."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
