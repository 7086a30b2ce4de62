"""One model on several ranks: how the calling process has the others load their shares, and what these then do.

Rank 0 is the process that calls `dinfer.load`. It has the requests, the scheduler and all that callers see. The other
ranks have a share of the weights and, for each engine, a `Worker`, which does what that of rank 0 does.
"""

import hashlib
import importlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from dinfer import __version__
from dinfer.core.engine.runtime import BatchSize, Runtime
from dinfer.core.engine.worker import Worker
from dinfer.core.loading.checkpoint import divisions, load_network, read_config, read_spec
from dinfer.core.loading.files import QUANTIZATION
from dinfer.core.models.family import ModelFamily
from dinfer.core.provided import provided
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.core.ranks.split import Rank
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.contracts import ModelSpec
from dinfer.lab.random_network import random_network
from dinfer.scale.parallel.follower import Follower
from dinfer.scale.parallel.leader import FIELD, Leader, follows, leader, started
from dinfer.scale.parallel.leader_worker import model_number, opened, read, shape_of, spelled

PLACE = "dinfer/path"  # in torchrun's store: where rank 0 listens
HERE = "127.0.0.1"
LONG = 3600.0  # seconds in which a rank may read one tensor, or wait for one result of its card: disks are slow
# Multicast hangs on hosts where it is broken. NCCL's own watchdog would abort the process of the caller.
SETTINGS = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_GRAPH_REGISTER": "0",  # it knows no memory that torch may extend (`dinfer.speed.memory`)
}  # fmt: skip


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights of a network come from: a checkpoint, or, for measurements, a seed."""

    family: ModelFamily
    folder: Path | None
    dtype: torch.dtype | None
    quantize: str | None = None
    config: Mapping[str, Any] | None = None  # of a network with random weights
    seed: int = 0

    def network(self, device: torch.device, rank: Rank) -> Any:
        """The share of a rank."""
        if self.folder is not None:
            return load_network(
                self.folder, self.family, dtype=self.dtype, device=device, quantize=self.quantize, rank=rank
            )
        torch.manual_seed(self.seed)
        dtype = self.dtype or torch.bfloat16
        return random_network(self.family, self.spec, dtype=dtype, device=device, quantize=self.quantize, rank=rank)

    @property
    def spec(self) -> ModelSpec:
        """The shape of the model. Raises CheckpointError."""
        config = dict(self.config or {}) if self.folder is None else read_config(self.folder)
        return read_spec(self.family, config | {QUANTIZATION: None}, self.folder)

    def spelled(self) -> dict[str, Any]:
        """As other ranks are told."""
        return {
            "family": spelled(self.family), "folder": None if self.folder is None else str(self.folder),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "quantize": self.quantize, "config": self.config, "seed": self.seed,
        }  # fmt: skip

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> "Source":
        folder, dtype = told["folder"], told["dtype"]
        return cls(**dict(told) | {
            "family": read(told["family"]), "folder": None if folder is None else Path(folder),
            "dtype": None if dtype is None else vars(torch)[dtype],
        })  # fmt: skip


def check(source: Source, size: int, device: torch.device, expert_parallel: bool = False) -> None:
    """Raises ValueError if so many ranks cannot run this model here. Reads no weight and starts no process."""
    what = f"{FIELD}={size}"
    if device.index is not None:
        raise ValueError(f"{what} and device={str(device)!r} contradict each other: leave out the number of the card")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what} needs device=cuda, or device=cpu for a test, not {str(device)!r}")
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ValueError(
            f"{what}: torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices, and each rank has one "
            "of its own. Lower it, or see CUDA_VISIBLE_DEVICES"
        )
    backend, there = ("nccl", dist.is_nccl_available) if device.type == "cuda" else ("gloo", dist.is_gloo_available)
    if not dist.is_available() or not there():
        raise ValueError(f"{what} needs {backend}, and torch {torch.__version__} was built without it")
    if dist.is_initialized() and leader() is None:
        raise ValueError(f"{what}: this process has a process group of torch.distributed already. Load it in another")
    if expert_parallel and source.spec.experts is None:
        raise ValueError(f"runtime.expert_parallel=true, and {source.spec.family} has no experts: leave it out")
    if why := _undivided(source, Rank(0, size, expert_parallel)):
        fits = max(fewer for fewer in range(1, size) if not _undivided(source, Rank(0, fewer, expert_parallel)))
        raise ValueError(f"{what}: {why}. Use {FIELD}={fits}")


def _undivided(source: Source, rank: Rank) -> str:
    """Why so many ranks cannot divide the tensors; empty if they can."""
    try:
        for split in divisions(source.family, source.spec, rank).values():
            split.ranges(rank)
    except ValueError as error:
        return str(error)
    return ""


def divided(
    source: Source, size: int, device: torch.device, expert_parallel: bool = False,
    checks: Callable[[], None] | None = None,
) -> Any:  # fmt: skip
    """Rank 0's share of a network whose other shares `size` - 1 other processes have loaded.

    `checks`: what else raises ValueError before a process starts. Raises ValueError, RankFailed, and what loading
    raises. A process that torchrun has started as another rank does not return from here: it ends when rank 0 does.
    """
    for name, value in SETTINGS.items():  # of the ranks that torchrun has started, too
        os.environ.setdefault(name, value)
    if follows(size):
        serve_torchrun()
    check(source, size, device, expert_parallel)
    if checks is not None:
        checks()
    ranks = started(size, lambda path: torchrun_store().set(PLACE, path), follow)
    folder = None if source.folder is None else str(source.folder)
    mine, theirs = ranks.together("identity", folder, work=lambda: identity(source.folder), patience=LONG)
    for rank, other in enumerate(theirs, 1):
        for name, value in mine.items():
            if other[name] != value:
                raise ValueError(f"rank {rank} has another {name} than rank 0: {other[name]!r} instead of {value!r}")
    if ranks.joined is None:
        if dist.is_initialized():  # with ranks that have ended
            dist.destroy_process_group()
        store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        threads = max(torch.get_num_threads() // size, 1)
        join_here = partial(join, store, 0, size, device.type)
        own, others = ranks.together("join", store.port, size, device.type, threads, work=join_here, patience=LONG)
        if {*others} != {own.small is not None}:
            ranks.fail("some ranks can read the memory of other cards, and some cannot")
            ranks.check()
        ranks.joined = own
        ranks.leave, ranks.motion.computes = leave, device.type == "cpu"
    number, load_here = ranks.number(), partial(share, source, ranks.joined, expert_parallel)
    network, _ = ranks.together("load", number, source.spelled(), expert_parallel, work=load_here, patience=LONG)
    ranks.models[number] = network.ranks
    weakref.finalize(network, _forget, ranks, number).atexit = False
    return network


def _forget(ranks: Leader, number: int) -> None:
    del ranks.models[number]
    ranks.forgotten.append(("forget", number))


def everywhere(recipe: Recipe, work: Callable[..., Result], *given: Any, **named: Any) -> Result:
    """Calls `work`, a function of a module, with the model of a recipe on all its ranks. The result of this one.

    For what is computed beside the engine, where the ranks need each other. The arguments are plain values.
    """
    call = partial(work, recipe.model, *given, **named)
    if recipe.ranks.size == 1 or (ranks := leader()) is None:
        return call()
    number = model_number(ranks, recipe)
    return ranks.together("call", number, work.__module__, work.__name__, given, named, work=call, patience=LONG)[0]


def on_each_rank(recipe: Recipe, work: Callable[..., Result], *given: Any) -> list[Result]:
    """As `everywhere`, with the results of all ranks, which are plain values, in order."""
    call = partial(work, recipe.model, *given)
    if recipe.ranks.size == 1 or (ranks := leader()) is None:
        return [call()]
    number = model_number(ranks, recipe)
    own, others = ranks.together("ask", number, work.__module__, work.__name__, given, work=call, patience=LONG)
    return [own, *others]


def identity(folder: Path | None) -> dict[str, str]:
    """What must be the same on all ranks: the code, and the checkpoint as far as its files begin."""
    package, found = Path(__file__).parents[2], {"torch": torch.__version__, "dinfer": __version__}
    code, weights = hashlib.sha256(), hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(str(path.relative_to(package)).encode() + path.read_bytes())
    if folder is not None:
        for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
            if path.is_file():
                with path.open("rb") as file:
                    weights.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 16))
    return found | {"code": code.hexdigest()[:16], "checkpoint": weights.hexdigest()[:16]}


def join(store: dist.Store, rank: int, size: int, device: str) -> Ranks:
    """Makes this process a rank of the default process group. All do so at the same time."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        own = torch.device("cuda", rank)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=own)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return Ranks.of()


def leave() -> None:
    """Leaves the process group when the other ranks are gone: NCCL would complain at the end of the process."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        if (drop_graphs := provided("drop_graphs")) is not None:
            drop_graphs()
        cast(dist.ProcessGroup, dist.group.WORLD).abort()


def share(source: Source, ranks: Ranks, expert_parallel: bool) -> Any:
    """This rank's share of a network, which computes with those of the others. No rank waits for another here."""
    own = replace(ranks, rank=replace(ranks.rank, expert_parallel=expert_parallel))  # each model is known by its own
    cuda = dist.get_backend() == "nccl"
    network = source.network(torch.device("cuda", ranks.index) if cuda else torch.device("cpu"), own.rank)
    network.join(own)
    return network


class RankCommands:
    """What a rank other than 0 has, and does as it is told."""

    def __init__(self, rank: int) -> None:
        self._rank, self._ranks = rank, ALONE
        self._networks: dict[int, Any] = {}
        self._workers: dict[int, Worker] = {}

    def __call__(self, name: str, given: list[Any]) -> Any:
        """Does one thing. The names are those that `divided`, `everywhere` and `LeadingWorker` tell."""
        match name, given:
            case "identity", [folder]:
                return identity(None if folder is None else Path(folder))
            case "join", [port, size, device, threads]:
                torch.set_num_threads(threads)
                self._ranks = join(dist.TCPStore(HERE, port, is_master=False), self._rank, size, device)
                return self._ranks.small is not None
            case "load", [number, source, expert_parallel]:
                self._networks[number] = share(Source.read(source), self._ranks, expert_parallel)
            case "forget", [number]:
                del self._networks[number]
            case "engine", [number, model, parts, runtime]:
                recipe = Recipe(self._networks[model], **{kind: read(part) for kind, part in parts.items()})
                self._workers[number] = Worker(recipe, Runtime(**runtime))
            case "drop", [number]:
                del self._workers[number]
            case "call", [number, module, function, args, named]:
                vars(importlib.import_module(module))[function](self._networks[number], *args, **named)
            case "ask", [number, module, function, args]:
                return vars(importlib.import_module(module))[function](self._networks[number], *args)
            case _, [number, *rest]:
                with torch.inference_mode():
                    self._work(self._workers[number], name, rest)
        return None

    def _work(self, worker: Worker, name: str, given: list[Any]) -> None:
        match name, given:
            case "launch", [shape, slots, run]:
                worker.launch(shape_of(shape), slots, shape_of(run))
            case "admit", [entries]:
                with suppress(MemoryError):  # rank 0 meets it too, and ends the request
                    worker.admit([read(told) for told in entries])
            case "open", room:
                opened(worker, BatchSize(*room))
            case "close", []:
                worker.close()
            case "do", [module, function, args]:
                worker.do(vars(importlib.import_module(module))[function], *args)
            case "compare", []:
                worker.compare_ranks()
            case _:
                raise RuntimeError(f"rank {self._rank} does not know what {name!r} means")


def follow(follower: Follower) -> NoReturn:
    """Does what rank 0 tells, until that ends."""
    logging.disable(logging.WARNING)  # rank 0 says the same
    follower.serve(RankCommands(follower.rank))
    os._exit(0)  # what torch does at the end of a process may wait for the other ranks


def torchrun_store() -> dist.Store:
    """Where the processes that torchrun has started tell each other things."""
    store: dist.Store = next(iter(dist.rendezvous("env://")))[0]
    return store


def serve_torchrun() -> NoReturn:
    """The work of a process that torchrun has started as another rank than 0."""
    store = torchrun_store()
    store.wait([PLACE], timedelta(days=30))  # rank 0 may do much before it loads a model; torchrun ends us if it dies
    follow(Follower(Path(store.get(PLACE).decode()), int(os.environ["RANK"])))
