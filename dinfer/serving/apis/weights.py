"""What a trainer asks of a server with `rollouts=true`: new weights, pauses, sleep. The paths are SGLang's and vLLM's.

verl, slime and AReaL speak to SGLang, TRL to vLLM. Fields that ask for what does not exist here are refused, and no
pickle is read. One thread does all this, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from prometheus_client import Gauge
from pydantic import Field

from dinfer.core.engine.errors import Unready
from dinfer.core.provided import needed
from dinfer.serving.async_engine import EngineThread
from dinfer.serving.errors import ApiError, refused
from dinfer.serving.forms import Strict
from dinfer.serving.server import Server

T = TypeVar("T")
TAGS = {"weights": "weights", "kv_cache": "keys", "keys": "keys"}  # as clients call them
PICKLES = "would be a pickle, which may run code: give `handles` as dinfer.rollouts.transport.handle_of makes them"
Tags = list[Literal["weights", "kv_cache", "keys"]]


class Changed(Strict):
    """What all updates of SGLang's have."""

    weight_version: int | str | None = None
    flush_cache: bool = True  # False: requests on the way keep the keys that they have
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors", "flattened_bucket"] | None = None

    @property
    def pending(self) -> str:
        """What becomes of requests on the way."""
        return "abort" if self.abort_all_requests else "recompute" if self.flush_cache else "keep"


class FromDisk(Changed):
    model_path: str
    is_async: Literal[False] = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: Literal[False] = False
    token_step: int = 0
    manifest: None = None


class FromTensor(Changed):
    serialized_named_tensors: list[Any] | None = None
    handles: list[dict[str, Any]] | None = None
    disable_draft_model: bool | None = None


class Joins(Strict):
    master_address: str
    master_port: Annotated[int, Field(ge=1, le=65535, strict=False)]  # AReaL sends a text
    rank_offset: Annotated[int, Field(ge=1)]  # rank 0 is the trainer
    world_size: Annotated[int, Field(ge=2)]
    group_name: str = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"
    packed: bool = False  # vLLM's: each update says so itself


class FromGroup(Changed):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class Leaves(Strict):
    group_name: str = "weight_update_group"


class Pauses(Strict):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continues(Strict):
    torch_empty_cache: bool = False


class Sleeps(Strict):
    tags: Tags | None = None
    level: Literal[1, 2] = 1


class Wakes(Strict):
    tags: Tags | None = None


class Versioned(Strict):
    new_version: int | str
    abort_all_requests: bool = False


class Checks(Strict):
    action: Literal["checksum"]


class Begins(Strict):
    is_checkpoint_format: Literal[True] = True


class Init(Strict):
    init_info: Joins


class Chunk(Strict):
    """Tensors that come by a group, or the handles of some on this card."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool = False
    handles: list[dict[str, Any]] | None = None


class Chunks(Strict):
    update_info: Chunk


class Ends(Strict):
    weight_version: int | str | None = None


class Updates:
    """The updates of one server."""

    def __init__(self, server: Server) -> None:
        pipes = (served.pipe for served in server.catalogue.values())
        self.weights: Any = next(pipe for pipe in pipes if pipe.origin is not None).weights
        self.weights.state.told = True
        for served in server.catalogue.values():
            served.told["weight_version"] = lambda: self.weights.version
        self._thread, self._groups = EngineThread(), dict[str, Any]()
        self._stack: ExitStack | None = None  # of an update over several requests
        self._into: Any = None

    async def run(self, work: Callable[[], T]) -> T:
        """Does work in the thread of updates. Raises ApiError."""
        try:
            return await self._thread.run(work)
        except ValueError as error:
            raise ApiError(400, str(error), None, "invalid_value") from error
        except Unready as error:
            raise ApiError(409, str(error), None, "incomplete_weights") from error

    async def told(self, work: Callable[[], object]) -> JSONResponse:
        """Does work, and says how it went as SGLang does."""
        try:
            await self._thread.run(work)
        except (ValueError, RuntimeError, OSError) as error:
            answer = {"success": False, "message": f"{type(error).__name__}: {error}", "num_paused_requests": self.held}
            return JSONResponse(answer, 400)
        return JSONResponse({"success": True, "message": "", "num_paused_requests": self.held})

    @property
    def held(self) -> int:
        """Requests that run, where a pause holds them."""
        engines = [engine for engine in self.weights.engines if engine.paused]
        return sum(engine.occupancy()["running"] for engine in engines)

    def update(self, asked: Changed, fill: Callable[[Any], object]) -> None:
        """One whole update."""
        with self.weights.updating(number(asked.weight_version), pending=asked.pending) as into:
            fill(into)

    def join(self, asked: Joins) -> None:
        """Joins a trainer's process group. A group whose trainer has died, and its update, are given up for it."""
        transport = needed("transport", "rollouts=true", "rollouts")
        if (old := self._groups.get(asked.group_name)) is not None:
            if transport.there(old):
                raise ValueError(f"group_name={asked.group_name!r:.40} is there already: destroy it first")
            self.leave(asked.group_name)
            if self._stack is not None and not self._groups:
                with suppress(ConnectionError):
                    self.fail(ConnectionError("its trainer has died"))
        self._groups[asked.group_name] = transport.join(
            asked.master_address, asked.master_port, asked.rank_offset, asked.world_size, asked.backend,
            asked.group_name,
        )  # fmt: skip

    def group(self, name: str) -> Any:
        """A trainer's process group. Raises ValueError."""
        if name not in self._groups:
            raise ValueError(f"group_name={name!r:.40} is not there: make it first, with /init_weights_update_group")
        return self._groups[name]

    def leave(self, name: str) -> None:
        """Leaves a trainer's process group."""
        found = self.group(name)
        del self._groups[name]
        needed("transport", "rollouts=true", "rollouts").leave(found)

    def begin(self) -> None:
        """Begins an update over several requests."""
        if self._stack is not None:
            raise ValueError("an update is under way: finish it with /finish_weight_update")
        stack = ExitStack()
        self._into = stack.enter_context(self.weights.updating(pending="recompute"))
        self._stack = stack

    def chunk(self, asked: Chunk) -> None:
        """Some tensors of such an update. A failure ends it."""
        if self._stack is None:
            raise ValueError("no update is under way: begin it with /start_weight_update")
        try:
            if asked.handles is not None:
                self._into.open(asked.handles)
            if asked.names:
                group = next(iter(self._groups.values()), None)
                if group is None:
                    raise ValueError("there is no group: make it first, with /init_weight_transfer_engine")
                self._into.receive(group, asked.names, asked.dtype_names, asked.shapes, flat=asked.packed)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends such an update by an error, which it raises."""
        stack, self._stack = self._stack, None
        if stack is None or not stack.__exit__(type(error), error, error.__traceback__):
            raise error

    def finish(self, version: int | None) -> None:
        """Ends such an update."""
        if self._stack is None:
            raise ValueError("no update is under way: begin it with /start_weight_update")
        stack, self._stack = self._stack, None
        stack.close()
        if version is not None:
            self.weights.state.version = version

    def abort(self) -> None:
        """Ends all requests with what they have."""
        held = self.weights.state.held
        self.weights.pause("abort")
        if not held:
            self.weights.resume()


def number(version: int | str | None) -> int | None:
    """A version as an integer, which clients may write as a text. Raises ValueError."""
    found = int(version) if isinstance(version, str) and version.isdecimal() and len(version) < 20 else version
    if found is not None and (isinstance(found, str) or not 0 <= found < 2**63):
        raise ValueError(f"weight_version={version!r:.40} must be an integer, 0 or more, of 64 bits")
    return found


def tags_of(tags: Tags | None) -> list[str]:
    """The parts of an engine that sleep, in our words; None: all."""
    return [TAGS[tag] for tag in tags] if tags is not None else ["weights", "keys"]


def add(app: FastAPI, server: Server) -> None:
    updates = Updates(server)
    gauge = Gauge("dinfer_weight_version", "Version of the weights", registry=server.metrics.registry)
    gauge.set_function(lambda: updates.weights.version)
    add_updates(app, updates)
    add_groups(app, updates)
    add_states(app, updates)
    add_phases(app, updates)
    add_infos(app, updates)
    add_pauses(app, updates)


def add_updates(app: FastAPI, updates: Updates) -> None:
    """SGLang's updates, each in one request."""

    @app.post("/update_weights_from_disk")
    async def from_disk(body: FromDisk) -> JSONResponse:
        """Takes the weights of a folder of safetensors."""

        def work() -> None:
            if not Path(body.model_path).is_dir():
                raise ValueError(f"model_path={body.model_path!r:.200} is no folder on the server's machine")
            updates.weights.state.held |= body.keep_pause
            updates.update(body, lambda into: into.from_folder(body.model_path))

        return await updates.told(work)

    @app.post("/update_weights_from_tensor")
    async def from_tensor(body: FromTensor) -> JSONResponse:
        """Takes tensors in the memory of this card, by their handles."""
        if body.serialized_named_tensors is not None:
            raise refused("serialized_named_tensors", "...", PICKLES)
        if (handles := body.handles) is None:
            raise ApiError(400, "handles is missing: give them as transport.handle_of makes them", "handles", "missing")
        return await updates.told(lambda: updates.update(body, lambda into: into.open(handles)))

    @app.post("/update_weights_from_distributed")
    async def from_distributed(body: FromGroup) -> JSONResponse:
        """Takes tensors that rank 0 of a group broadcasts."""
        flat = body.load_format == "flattened_bucket"

        def fill(into: Any) -> None:
            into.receive(updates.group(body.group_name), body.names, body.dtypes, body.shapes, flat=flat)

        return await updates.told(lambda: updates.update(body, fill))

    @app.post("/update_weight_version")
    async def set_version(body: Versioned) -> JSONResponse:
        """Gives the weights another version."""

        def work() -> None:
            version = number(body.new_version)
            if body.abort_all_requests:
                updates.abort()
            updates.weights.state.version = version

        return await updates.told(work)


def add_groups(app: FastAPI, updates: Updates) -> None:
    """The process groups by which weights come."""

    @app.post("/init_weights_update_group")
    async def init_group(body: Joins) -> JSONResponse:
        """Joins a trainer's group. Of a divided model rank 0 alone takes part."""
        return await updates.told(lambda: updates.join(body))

    @app.post("/destroy_weights_update_group")
    async def destroy_group(body: Leaves) -> JSONResponse:
        """Leaves a trainer's group."""
        return await updates.told(lambda: updates.leave(body.group_name))


def add_states(app: FastAPI, updates: Updates) -> None:
    """SGLang's pauses and sleep, and what it tells."""
    weights = updates.weights

    @app.post("/pause_generation")
    async def pause(body: Pauses | None = None) -> JSONResponse:
        """Stops. Requests on the way end with what they have (abort), or wait, with their keys (in_place) or not."""
        pending = {"abort": "abort", "retract": "recompute", "in_place": "keep"}[(body or Pauses()).mode]
        return await updates.told(lambda: weights.pause(pending))

    @app.post("/continue_generation")
    async def resume(body: Continues | None = None) -> JSONResponse:
        """Goes on."""
        return await updates.told(weights.resume)

    @app.post("/release_memory_occupation")
    async def release(body: Sleeps | None = None) -> JSONResponse:
        """Sleeps: keys are freed, and weights move to the host (level 1) or are forgotten (level 2)."""
        asked = body or Sleeps()
        tags, level = tags_of(asked.tags), asked.level
        return await updates.told(lambda: weights.sleep(level, tags))

    @app.post("/resume_memory_occupation")
    async def take(body: Wakes | None = None) -> JSONResponse:
        """Wakes what sleeps."""
        return await updates.told(lambda: weights.wake(tags_of((body or Wakes()).tags)))

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    @app.post("/reset_prefix_cache")
    async def flush() -> JSONResponse:
        """No later request shares keys that were computed until now."""
        return await updates.told(weights.forget_keys)

    @app.get("/get_weight_version")
    @app.get("/weight_version")
    async def version() -> dict[str, str]:
        """The version of the weights."""
        return {"weight_version": str(weights.version)}

    @app.post("/weights_checker")
    async def checksums(body: Checks) -> dict[str, Any]:
        """SHA-256 of what is held of each tensor, by its name in a checkpoint."""
        return {"success": True, "message": "", "checksums": await updates.run(weights.checksums)}


def add_phases(app: FastAPI, updates: Updates) -> None:
    """vLLM's four phases of an update."""

    @app.post("/init_weight_transfer_engine")
    async def init(body: Init) -> dict[str, str]:
        """Joins a trainer's group."""
        await updates.run(lambda: updates.join(body.init_info))
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update")
    async def start(body: Begins | None = None) -> dict[str, str]:
        """Begins an update: no request runs until it has ended."""
        await updates.run(updates.begin)
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def chunk(body: Chunks) -> dict[str, str]:
        """Some of its tensors."""
        await updates.run(lambda: updates.chunk(body.update_info))
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish(body: Ends | None = None) -> dict[str, str]:
        """Ends it."""
        await updates.run(lambda: updates.finish(number(None if body is None else body.weight_version)))
        return {"message": "Weight update finished"}


def add_infos(app: FastAPI, updates: Updates) -> None:
    """What trainers ask about a server."""
    weights = updates.weights

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """What slime asks of SGLang's servers, and TRL of vLLM's. Groups are joined by torch, not by vLLM's engine."""
        spec, ranks = weights.pipe.model.spec, weights.recipe.ranks.size
        told = {"logprobs_mode": "raw_logprobs", "max_model_len": spec.max_length}
        return {
            "model_path": str(weights.pipe.origin[1]), "tp_size": ranks, "dp_size": 1, "pp_size": 1, "ep_size": 1,
            "weight_version": str(weights.version),
            "vllm_config": {"model_config": told, "weight_transfer_config": None},
        }  # fmt: skip

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """Requests that run and wait, as SGLang tells them."""
        found = [engine.occupancy() for engine in weights.engines]
        return {"loads": [
            {"num_running_reqs": one["running"], "num_waiting_reqs": one["waiting"]} for one in found
        ]}  # fmt: skip


def add_pauses(app: FastAPI, updates: Updates) -> None:
    """vLLM's pauses and sleep, and what it tells."""
    weights = updates.weights

    @app.get("/weight_info")
    async def info() -> dict[str, Any]:
        """The version of the weights."""
        return {"weight_version": str(weights.version)}

    @app.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        """Processes that take part in a trainer's group."""
        return {"world_size": 1}

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

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Whether no request runs."""
        return {"is_paused": any(engine.paused for engine in weights.engines)}

    @app.post("/sleep")
    async def sleep(level: Literal["0", "1", "2"] = "1") -> dict[str, int]:
        """Gives memory back, and says how much there was and is."""
        return await updates.run(lambda: weights.sleep(int(level)))

    @app.post("/wake_up")
    async def wake(tags: str | None = None) -> dict[str, str]:
        """Takes memory again."""
        given: Any = None if tags is None else tags.split(",")
        if wrong := [tag for tag in given or () if tag not in TAGS]:
            raise refused("tags", wrong[0], "is not known; use weights, kv_cache or both")
        await updates.run(lambda: weights.wake(tags_of(given)))
        return {"status": "awake"}

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether memory was given back."""
        return {"is_sleeping": bool(weights.state.asleep)}
