"""What a trainer asks of a server with `rollouts=true`: new weights, pauses, sleep. The paths are SGLang's and vLLM's.

verl, slime and AReaL speak to SGLang, TRL to vLLM. A request that changes something is a class: its fields, and `act`,
which does it. Fields that ask for what does not exist here are refused, and no pickle is read. One thread does all
this, one after the other.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse
from prometheus_client import Gauge
from pydantic import AfterValidator, BeforeValidator, Field

from dinfer.core.engine.errors import Unready
from dinfer.rollouts import transport
from dinfer.serving.async_engine import EngineThread
from dinfer.serving.errors import ApiError, refused, validated
from dinfer.serving.forms import Strict
from dinfer.serving.server import Server

T = TypeVar("T")
PICKLES = "would be a pickle, which may run code: give `handles` as dinfer.rollouts.transport.handle_of makes them"
ENGINE = (
    "weights come by groups of torch.distributed, not by vLLM's NCCL engine, with which TRL's VLLMClient sends them: "
    "make a group by dinfer.rollouts.transport.join and tell a backend (nccl, gloo), as examples/trainer_over_http.py "
    "does, or train in one process, as examples/trl_grpo.py does"
)


def _number(version: Any) -> Any:
    """A version that may be written as a text."""
    return int(version) if isinstance(version, str) and version.isdecimal() else version


Version = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_number)]
BOTH: list[Any] = ["weights", "keys"]
Tag = Annotated[Literal["weights", "kv_cache", "keys"], AfterValidator(lambda tag: tag.replace("kv_cache", "keys"))]
Tags = Annotated[list[Tag] | None, AfterValidator(lambda tags: BOTH if tags is None else tags)]


class Updates:
    """The weights of one server, the groups by which a trainer sends others, and an update over several requests."""

    def __init__(self, server: Server) -> None:
        pipes = (served.pipe for served in server.catalogue.values())
        self.weights: Any = next(pipe for pipe in pipes if pipe.origin is not None).weights
        self.weights.state.told = True
        for served in server.catalogue.values():
            served.told["weight_version"] = lambda: self.weights.version
        self.groups: dict[str, Any] = {}
        self.stack = ExitStack()  # of an update over several requests, which ends with it
        self.into: Any = None  # what takes its tensors
        self._thread = EngineThread()

    async def run(self, work: Callable[[], T], then: Callable[[], None] | None = None) -> T:
        """Does work in the thread of updates, and behind it what others need not wait for. Raises ApiError."""
        try:
            return await self._done(work, then)
        except ValueError as error:
            raise ApiError(400, str(error), None, "invalid_value") from error
        except Unready as error:
            raise ApiError(409, str(error), None, "incomplete_weights") from error

    async def _done(self, work: Callable[[], T], then: Callable[[], None] | None) -> T:
        found = await self._thread.run(work)
        if then is not None:
            await EngineThread().run(then)
        return found

    async def told(self, work: Callable[[], object], then: Callable[[], None] | None = None) -> JSONResponse:
        """Does both, and says how they went as SGLang does."""
        wrong = None
        try:
            await self._done(work, then)
        except (ValueError, RuntimeError, OSError) as error:
            wrong = f"{type(error).__name__}: {error}"
        held = sum(engine.occupancy()["running"] for engine in self.weights.engines if engine.paused)
        answer = {"success": wrong is None, "message": wrong or "", "num_paused_requests": held}
        return JSONResponse(answer, 200 if wrong is None else 400)

    def group(self, name: str) -> Any:
        """A trainer's process group. Raises ValueError."""
        if name not in self.groups:
            raise ValueError(f"group_name={name!r:.40} is not there: make it first, with /init_weights_update_group")
        return self.groups[name]

    def going(self) -> Any:
        """What takes the tensors of an update over several requests. Raises ValueError."""
        if self.into is None or self.into.ended:
            raise ValueError("no update is under way: begin it with /start_weight_update")
        return self.into


class Change(Strict):
    """A request that changes something. Its text tells clients what its path does."""

    @abstractmethod
    def act(self, updates: Updates) -> None:
        """Does it. Raises ValueError."""

    def meet(self, updates: Updates) -> None:
        """What waits for another process, while other changes go on; of most kinds there is none. Raises ValueError."""


class NewWeights(Change):
    """New weights in one request: what all of SGLang's have."""

    weight_version: Version | None = None
    flush_cache: bool = True  # False: requests on the way keep the keys that they have
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors", "flattened_bucket"] | None = None

    def updating(self, updates: Updates) -> Any:
        """The update, in whose block the tensors are written."""
        pending = "abort" if self.abort_all_requests else "recompute" if self.flush_cache else "keep"
        return updates.weights.updating(self.weight_version, pending=pending)


class FromDisk(NewWeights):
    """Takes the weights of a folder of safetensors."""

    model_path: str
    is_async: Literal[False] = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: Literal[False] = False
    token_step: int = 0
    manifest: None = None

    def act(self, updates: Updates) -> None:
        if not Path(self.model_path).is_dir():
            raise ValueError(f"model_path={self.model_path!r:.200} is no folder on the server's machine")
        updates.weights.state.held |= self.keep_pause
        with self.updating(updates) as into:
            into.from_folder(self.model_path)


class FromTensor(NewWeights):
    """Takes tensors in the memory of this card, by their handles."""

    serialized_named_tensors: list[Any] | None = None
    handles: list[dict[str, Any]] | None = None
    disable_draft_model: bool | None = None

    def act(self, updates: Updates) -> None:
        if self.serialized_named_tensors is not None:
            raise refused("serialized_named_tensors", "...", PICKLES)
        if self.handles is None:
            raise ApiError(400, "handles is missing: give them as transport.handle_of makes them", "handles", "missing")
        with self.updating(updates) as into:
            into.open(self.handles)


class FromGroup(NewWeights):
    """Takes tensors that rank 0 of a group broadcasts."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"

    def act(self, updates: Updates) -> None:
        flat = self.load_format == "flattened_bucket"
        with self.updating(updates) as into:
            into.receive(updates.group(self.group_name), self.names, self.dtypes, self.shapes, flat=flat)


class Versioned(Change):
    """Gives the weights another version."""

    new_version: Version
    abort_all_requests: bool = False

    def act(self, updates: Updates) -> None:
        weights = updates.weights
        held = weights.state.held
        if self.abort_all_requests:
            weights.pause("abort")
            if not held:
                weights.resume()
        weights.state.version = self.new_version


class Joins(Change):
    """Joins a trainer's group. Of a divided model rank 0 alone takes part."""

    master_address: str
    master_port: Annotated[int, Field(ge=1, le=65535, strict=False)]  # AReaL sends a text
    rank_offset: Annotated[int, Field(ge=1)]  # rank 0 is the trainer
    world_size: Annotated[int, Field(ge=2)]
    group_name: str = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"
    packed: bool = False  # vLLM's: each update says so itself

    def act(self, updates: Updates) -> None:
        """A group whose trainer has died, and its update, are given up for it."""
        name, groups = self.group_name, updates.groups
        if (old := groups.get(name)) is not None:
            if transport.there(old):
                raise ValueError(f"group_name={name!r:.40} is there already: destroy it first")
            transport.leave(groups.pop(name))
            if not groups:
                with suppress(ConnectionError), updates.stack:
                    raise ConnectionError("its trainer has died")

    def meet(self, updates: Updates) -> None:
        ours = self.rank_offset, self.world_size, self.backend, self.group_name
        try:
            group = transport.join(self.master_address, self.master_port, *ours, reach=transport.REACH)
        except RuntimeError as error:  # torch's errors of connections are such
            what = str(error).partition("\n")[0]
            raise ValueError(
                f"master_address={self.master_address!r:.80}, master_port={self.master_port}: no group: {what}"
            ) from error
        updates.groups[self.group_name] = group


class Leaves(Change):
    """Leaves a trainer's group."""

    group_name: str = "weight_update_group"

    def act(self, updates: Updates) -> None:
        transport.leave(updates.group(self.group_name))
        del updates.groups[self.group_name]


class Pauses(Change):
    """Stops. Requests on the way end with what they have (abort), or wait, with their keys (in_place) or not."""

    mode: Literal["abort", "retract", "in_place"] = "abort"

    def act(self, updates: Updates) -> None:
        updates.weights.pause({"abort": "abort", "retract": "recompute", "in_place": "keep"}[self.mode])


class Continues(Change):
    """Goes on."""

    torch_empty_cache: bool = False

    def act(self, updates: Updates) -> None:
        updates.weights.resume()


class Sleeps(Change):
    """Sleeps: keys are freed, and weights move to the host (level 1) or are forgotten (level 2)."""

    tags: Tags = BOTH
    level: Literal[1, 2] = 1

    def act(self, updates: Updates) -> None:
        updates.weights.sleep(self.level, self.tags)


class Wakes(Change):
    """Wakes what sleeps."""

    tags: Tags = BOTH

    def act(self, updates: Updates) -> None:
        updates.weights.wake(self.tags)


class Init(Change):
    """Joins a trainer's group."""

    init_info: Joins

    def act(self, updates: Updates) -> None:
        """vLLM's own engine, which would wait for minutes, names no backend."""
        if "backend" not in self.init_info.model_fields_set:
            raise ValueError(f"init_info has no backend: {ENGINE}")
        self.init_info.act(updates)

    def meet(self, updates: Updates) -> None:
        self.init_info.meet(updates)


class Begins(Change):
    """Begins an update: no request runs until it has ended."""

    is_checkpoint_format: Literal[True] = True

    def act(self, updates: Updates) -> None:
        if updates.into is not None and not updates.into.ended:
            raise ValueError("an update is under way: finish it with /finish_weight_update")
        updates.into = updates.stack.enter_context(updates.weights.updating(pending="recompute"))


class Chunk(Strict):
    """Tensors that come by a group, or the handles of some on this card."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool = False
    handles: list[dict[str, Any]] | None = None


class Chunks(Change):
    """Some of its tensors. A failure ends the update."""

    update_info: Chunk

    def act(self, updates: Updates) -> None:
        into, told = updates.going(), self.update_info
        with updates.stack as stack:
            if told.handles is not None:
                into.open(told.handles)
            if told.names:
                group = next(iter(updates.groups.values()), None)
                if group is None:
                    raise ValueError(f"there is no group: {ENGINE}")
                into.receive(group, told.names, told.dtype_names, told.shapes, flat=told.packed)
            updates.stack = stack.pop_all()  # nothing failed: it goes on


class Ends(Change):
    """Ends it."""

    weight_version: Version | None = None

    def act(self, updates: Updates) -> None:
        updates.going()
        updates.stack.close()
        if self.weight_version is not None:
            updates.weights.state.version = self.weight_version


# What each path takes; behind it for vLLM's, what the answer says.
SGLANG: dict[str, type[Change]] = {
    "/update_weights_from_disk": FromDisk,
    "/update_weights_from_tensor": FromTensor,
    "/update_weights_from_distributed": FromGroup,
    "/update_weight_version": Versioned,
    "/init_weights_update_group": Joins,
    "/destroy_weights_update_group": Leaves,
    "/pause_generation": Pauses,
    "/continue_generation": Continues,
    "/release_memory_occupation": Sleeps,
    "/resume_memory_occupation": Wakes,
}
VLLM: dict[str, tuple[type[Change], str]] = {
    "/init_weight_transfer_engine": (Init, "Weight transfer initialized"),
    "/start_weight_update": (Begins, "Weight update started"),
    "/update_weights": (Chunks, "Weights updated"),
    "/finish_weight_update": (Ends, "Weight update finished"),
}


class Checks(Strict):
    action: Literal["checksum"]


def add(app: FastAPI, server: Server) -> None:
    updates = Updates(server)
    gauge = Gauge("dinfer_weight_version", "Version of the weights", registry=server.metrics.registry)
    gauge.set_function(lambda: updates.weights.version)
    for path, kind in SGLANG.items():
        app.post(path, description=kind.__doc__)(route(updates, kind))
    for path, (kind, done) in VLLM.items():
        app.post(path, description=kind.__doc__)(route(updates, kind, done))
    add_switches(app, updates)
    add_infos(app, updates)


def route(updates: Updates, kind: type[Change], done: str | None = None) -> Callable[..., Any]:
    """What answers a request of this kind. `done`: as vLLM does, with these words; None: as SGLang does.

    It may come without a body if it has no field that must be given.
    """
    default: Any = ... if any(field.is_required() for field in kind.model_fields.values()) else kind()

    async def answer(body: Any = default) -> Any:
        work, then = partial(body.act, updates), None if kind.meet is Change.meet else partial(body.meet, updates)
        if done is None:
            return await updates.told(work, then)
        await updates.run(work, then)
        return {"message": done}

    answer.__annotations__["body"] = kind  # as FastAPI reads it
    return answer


def add_switches(app: FastAPI, updates: Updates) -> None:
    """Changes that are asked for without a body: vLLM's, and what both have."""
    weights = updates.weights

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    @app.post("/reset_prefix_cache")
    async def flush() -> JSONResponse:
        """No later request shares keys that were computed until now."""
        return await updates.told(weights.forget_keys)

    @app.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort") -> dict[str, str]:
        """Stops. Requests on the way end with what they have, end first, or wait."""
        await updates.run(lambda: weights.pause("finish" if mode == "wait" else mode))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        """Goes on."""
        await updates.run(weights.resume)
        return {"status": "resumed"}

    @app.post("/sleep")
    async def sleep(level: Literal["0", "1", "2"] = "1") -> dict[str, int]:
        """Gives memory back, and says how much there was and is."""
        return await updates.run(lambda: weights.sleep(int(level)))

    @app.post("/wake_up")
    async def wake(tags: Annotated[list[str] | None, Query()] = None) -> dict[str, str]:
        """Takes memory again. Tags stand in one parameter with commas between them, or in one each."""
        given = None if tags is None else ",".join(tags).split(",")
        await updates.run(partial(validated(Wakes, {"tags": given}).act, updates))
        return {"status": "awake"}


def add_infos(app: FastAPI, updates: Updates) -> None:
    """What trainers ask about a server."""
    weights = updates.weights

    @app.get("/get_weight_version")
    @app.get("/weight_version")
    @app.get("/weight_info")
    async def version() -> dict[str, str]:
        """The version of the weights."""
        return {"weight_version": str(weights.version)}

    @app.post("/weights_checker")
    async def checksums(body: Checks) -> dict[str, Any]:
        """SHA-256 of what is held of each tensor, by its name in a checkpoint."""
        return {"success": True, "message": "", "checksums": await updates.run(weights.checksums)}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Whether no request runs."""
        return {"is_paused": any(engine.paused for engine in weights.engines)}

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether memory was given back."""
        return {"is_sleeping": bool(weights.state.asleep)}

    @app.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        """Processes that take part in a trainer's group."""
        return {"world_size": 1}

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info(config_format: str | None = None) -> dict[str, Any]:
        """What slime asks of SGLang's servers. TRL asks for vLLM's configuration before it sends weights."""
        if config_format is not None:
            raise ApiError(501, f"this server has no configuration of vLLM: {ENGINE}", "config_format", "unsupported")
        return {
            "model_path": str(weights.pipe.origin[1]), "tp_size": weights.recipe.ranks.size, "dp_size": 1, "pp_size": 1,
            "ep_size": 1, "weight_version": str(weights.version),
        }  # fmt: skip

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """Requests that run and wait, as SGLang tells them."""
        found = [engine.occupancy() for engine in weights.engines]
        return {"loads": [{"num_running_reqs": one["running"], "num_waiting_reqs": one["waiting"]} for one in found]}
