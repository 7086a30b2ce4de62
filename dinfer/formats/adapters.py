"""Several LoRA adapters over one network, each for the requests that ask for it, together in one step.

The columns of all adapters stand side by side in two tables of each linear layer, and each lane of a step keeps those
of its own adapter: what the lane's number is not the owner of is set to 0 between the two products. So shapes depend
on no row, and a captured step serves whatever adapters its rows have. Steps without such rows run the network itself.

Shape suffixes: B lanes, W positions, K inputs, O outputs, P matrices of a checkpoint that are one here, C columns of
all adapters.
"""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dinfer.core.engine.engine import ENGINES, Engine
from dinfer.core.layers.linear import Linear
from dinfer.core.loading.files import ADAPTER, CheckpointError, local, locate, read_object
from dinfer.core.models.family import Placement
from dinfer.core.pipeline import Pipeline
from dinfer.core.provided import provided
from dinfer.core.step.model import Attend
from dinfer.core.step.request import Ask
from dinfer.formats.lora import WEIGHTS, Adapter, read_adapter

NAME = re.compile(r"[\w.-]+")
HEAD = "head"  # where a network has its head
FREE, NONE = -1, 0  # of a column: nobody's; of a lane: it has no adapter


@dataclass(frozen=True, slots=True)
class AdapterAsk(Ask):
    """Asks for an adapter. `number`: of this loading of it, which no later one has."""

    name: str
    number: int
    digest: str  # of its files

    @property
    def keyed(self) -> tuple[tuple[int, bytes], ...]:
        return ((0, bytes.fromhex(self.digest)),)


class LaneAdapters:
    """Whose columns the lanes of the forward that is running take; shared by the layers of a network."""

    def __init__(self, number_B: Tensor | None = None) -> None:
        self.number_B = number_B  # int64, or one for all lanes; None: no columns are computed


@dataclass(slots=True)
class Columns:
    """The low-rank parts of all adapters in one linear layer, which may be several matrices of the checkpoint."""

    rows: list[tuple[str, int, int]]  # of each of these matrices: its name, its first row here, its rows
    base: Linear
    a_PCK: Tensor | None = None  # None: no adapter changes this layer
    b_PCO: Tensor | None = None

    def widen(self, count: int) -> None:
        """Makes room for so many columns."""
        for name, size in (("a_PCK", self.base.in_features), ("b_PCO", self.base.out_features)):
            if (held := getattr(self, name)) is not None:
                more = count - held.shape[1]
                setattr(self, name, torch.cat((held, held.new_zeros(len(self.rows), more, size)), 1))

    def write(self, columns: Tensor, count: int, pairs: Mapping[str, tuple[Tensor, Tensor]], like: Tensor) -> None:
        """Writes an adapter's pairs A [r, K] and B [o, r]: those of this layer, zeros where it has none."""
        if self.a_PCK is None or self.b_PCO is None:
            if not any(name in pairs for name, _, _ in self.rows):
                return
            self.a_PCK = like.new_zeros(len(self.rows), count, self.base.in_features)
            self.b_PCO = like.new_zeros(len(self.rows), count, self.base.out_features)
        for part, (name, first, rows) in enumerate(self.rows):
            self.a_PCK[part, columns], self.b_PCO[part, columns] = 0, 0
            if name in pairs:
                a_RK, b_OR = pairs[name]
                self.a_PCK[part, columns] = a_RK.to(like)
                self.b_PCO[part, columns, first : first + rows] = b_OR.T.to(like)


class Adapted(nn.Module):
    """W x + b, and B A x of the adapter that each lane has."""

    def __init__(self, columns: Columns, lanes: LaneAdapters, owner: Owners) -> None:
        super().__init__()
        self.base, self.columns, self.lanes, self.owner = columns.base, columns, lanes, owner

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., O], whose lanes come one after the other"""
        y: Tensor = self.base(x)
        number_B, a_PCK, b_PCO = self.lanes.number_B, self.columns.a_PCK, self.columns.b_PCO
        if number_B is None or a_PCK is None or b_PCO is None:
            return y
        x_BWK = x.reshape(len(number_B), -1, x.shape[-1])
        low_BWPC = (x_BWK @ a_PCK.flatten(0, 1).T).unflatten(-1, a_PCK.shape[:2])
        # Never a product: 0 times what overflows in another row's columns is no 0.
        low_BWPC = low_BWPC.masked_fill((number_B[:, None] != self.owner.of_C)[:, None, None], 0)
        flat_NO, low_NPC = y.view(-1, y.shape[-1]), low_BWPC.flatten(0, 1)
        for part, (_, first, rows) in enumerate(self.columns.rows):
            # In place: a copy of y takes longer than the product.
            flat_NO[:, first : first + rows].addmm_(low_NPC[:, part], b_PCO[part, :, first : first + rows])
        return y


@dataclass(slots=True)
class Owners:
    """Whose each column is."""

    of_C: Tensor  # int64, the number of an adapter; `FREE`: nobody's


def twin(module: nn.Module, others: Mapping[str, nn.Module], path: str = "") -> nn.Module:
    """The same module with others at some paths. What is around these is copied, all else is shared."""
    if path in others:
        return others[path]
    inner = {name: twin(child, others, f"{path}.{name}".lstrip(".")) for name, child in module.named_children()}
    if all(inner[name] is child for name, child in module.named_children()):
        return module
    made = copy.copy(module)
    made.__dict__["_modules"] = {**module._modules, **inner}
    return made


@dataclass(slots=True)
class AdaptedPass:
    """A forward in which lanes have adapters."""

    network: Any  # the twin of the one that would run otherwise
    lanes: LaneAdapters
    number_B: Tensor

    @property
    def spec(self) -> Any:
        return self.network.spec

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return self.network.embed(tokens_BW)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        """See `dinfer.core.step.model.Network`. Further branches or versions of all lanes follow one another."""
        self.lanes.number_B = self.number_B.repeat(x_BWD.shape[0] // len(self.number_B))
        try:
            return self.network.forward(x_BWD, attend)
        finally:
            self.lanes.number_B = None

    def logits(self, h_BLD: Tensor) -> Tensor:
        return self.network.logits(h_BLD)

    def own_logits(self, h_BLD: Tensor) -> Tensor:
        return self.network.own_logits(h_BLD)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that requests may ask for."""

    ask: AdapterAsk
    folder: Path
    columns: Tensor  # int64, its own


@dataclass(eq=False)
class Adapters:
    """The adapters over one network, for all engines that run it."""

    by_name: dict[str, Loaded] = field(default_factory=dict)
    layers: dict[str, Columns] = field(default_factory=dict)  # by path
    owner: Owners | None = None  # None: none was ever loaded
    lanes: LaneAdapters = field(default_factory=LaneAdapters)  # of steps
    count: int = 0  # loadings so far
    turn: threading.Lock = field(default_factory=threading.Lock)

    def gone(self, ask: AdapterAsk) -> str | None:
        """Why there are no columns for a request any more; None: there are."""
        there = ask.name in self.by_name and self.by_name[ask.name].ask == ask
        return None if there else f"adapter={ask.name!r} was unloaded before the request began: load it and ask again"

    def find(self, name: str) -> Loaded:
        """Raises ValueError for a name that none has."""
        if name not in self.by_name:
            known = f"loaded are {', '.join(self.by_name)}" if self.by_name else "none is"
            raise ValueError(f"adapter={name!r:.80} is not loaded ({known}): load it first")
        return self.by_name[name]

    def over(self, network: Any, lanes: LaneAdapters) -> Any:
        """The network whose layers ask `lanes`."""
        assert self.owner is not None
        return twin(network, {path: Adapted(layer, lanes, self.owner) for path, layer in self.layers.items()})

    def found(self, network: Any, placements: Mapping[str, Placement]) -> None:
        """Looks for the linear layers, once."""
        if self.owner is not None:
            return
        parameters = dict(network.named_parameters())
        for name, place in placements.items():
            path = place.parameter.removesuffix(".weight")
            if place.experts or len(place.shape) != 2 or path == HEAD:
                continue
            base = network.get_submodule(path) if f"{path}.weight" in parameters else None
            if isinstance(base, Linear):
                self.layers.setdefault(path, Columns([], base)).rows.append((name, place.row, place.shape[0]))
        self.owner = Owners(torch.full((0,), FREE, device=network.device))

    def room(self, rank: int) -> Tensor:
        """So many free columns; tables grow if there are fewer, and then steps are captured anew."""
        assert self.owner is not None
        free = (self.owner.of_C == FREE).nonzero()[:, 0]
        if len(free) < rank:
            old = len(self.owner.of_C)
            count = 1 << (old + rank - len(free) - 1).bit_length()
            self.owner.of_C = torch.cat((self.owner.of_C, self.owner.of_C.new_full((count - old,), FREE)))
            for layer in self.layers.values():
                layer.widen(count)
            free = (self.owner.of_C == FREE).nonzero()[:, 0]
        return free[:rank]


_adapters = WeakIdKeyDictionary()  # by the first parameter, which copies of a network share


def adapters_of(network: Any) -> Adapters:
    """The adapters over a network."""
    first = next(network.parameters(), None) if isinstance(network, nn.Module) else None
    if first is None:
        return Adapters()
    found: Adapters = _adapters.setdefault(first, Adapters())
    return found


def load_adapter(pipe: Pipeline, name: str, adapter: str) -> AdaptedPipeline:
    """Loads a PEFT LoRA adapter, a folder or a hub name, beside the others of this model, for requests that ask for it.

    Returns a pipeline whose requests do. Raises ValueError for a name that is in use or none, and CheckpointError, also
    one, for an adapter that does not fit.
    """
    held, network = adapters_of(pipe.recipe.model), pipe.recipe.model
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"adapter={name!r:.80} must be a name of letters, digits, dots, dashes and underscores")
    if pipe.recipe.ranks.size > 1:
        raise ValueError(f"adapter={name!r}: runtime.tensor_parallel divides the model: use 1, or merge model.adapter")
    if pipe.origin is None:
        raise ValueError(f"adapter={name!r} needs a model that dinfer.load read: nobody knows the names of its tensors")
    family: Any = pipe.origin[0]
    if getattr(family, "draft_adapter", None):
        raise ValueError(f"adapter={name!r}: drafts of this model have model.draft_adapter: leave one of them out")
    folder = locate(adapter, needed=ADAPTER)
    _check_base(folder, family.checkpoint)
    placements = family.weights(pipe.model.spec)
    read = read_adapter(folder, placements)
    with held.turn:
        if name in held.by_name:
            raise ValueError(
                f"adapter={name!r} is loaded from {held.by_name[name].folder}: choose another name, or unload it first"
            )
        held.found(network, placements)
        taken = {matrix for layer in held.layers.values() for matrix, _, _ in layer.rows}
        if others := sorted(read.pairs.keys() - taken):
            raise ValueError(
                f"adapter={name!r} changes {others[0]}, and by request only linear layers within blocks can change: "
                f"merge it with model.adapter={adapter}"
            )
        if bad := [matrix for matrix, pair in read.pairs.items() if not all(x.isfinite().all() for x in pair)]:
            raise CheckpointError(f"{folder}: {bad[0]} holds NaN or infinite values: train or save it anew")
        digest = hashlib.sha256((folder / ADAPTER).read_bytes())
        digest.update((folder / WEIGHTS).read_bytes())
        held.count += 1
        ask = AdapterAsk(name, held.count, digest.hexdigest())
        with stopped(held):
            held.by_name[name] = Loaded(ask, folder, _write(held, network, ask.number, read))
    return AdaptedPipeline(pipe, name)


def _write(held: Adapters, network: Any, number: int, read: Adapter) -> Tensor:
    """Writes an adapter into columns of its own, which it returns."""
    assert held.owner is not None
    before = _addresses(held)
    columns = held.room(next(len(a_RK) for a_RK, _ in read.pairs.values()))
    pairs = {matrix: (a_RK, b_OR * read.scale) for matrix, (a_RK, b_OR) in read.pairs.items()}
    like = torch.empty(0, dtype=network.dtype, device=network.device)
    with torch.no_grad():
        for layer in held.layers.values():
            layer.write(columns, len(held.owner.of_C), pairs, like)
        held.owner.of_C[columns] = number
    if before != _addresses(held) and (drop := provided("drop_graphs")) is not None:
        drop()
    return columns


def _addresses(held: Adapters) -> list[int | None]:
    """Where captured steps find the tables."""
    owned = None if held.owner is None else held.owner.of_C.data_ptr()
    return [owned, *(None if layer.a_PCK is None else layer.a_PCK.data_ptr() for layer in held.layers.values())]


def _check_base(folder: Path, checkpoint: str) -> None:
    """Raises CheckpointError for an adapter that says it is of another model. A path says nothing."""
    base = read_object(folder / ADAPTER).get("base_model_name_or_path")
    named = all(isinstance(one, str) and one.count("/") == 1 and not local(one).exists() for one in (base, checkpoint))
    if named and str(base).lower() != checkpoint.lower():
        raise CheckpointError(
            f"{folder / ADAPTER}: base_model_name_or_path={base!r} is another model than {checkpoint!r}: serve that "
            "one, or correct the field if the adapter was trained on this one"
        )


class InUse(ValueError):
    """Requests use the adapter that is to be unloaded."""


def unload_adapter(pipe: Pipeline, name: str) -> None:
    """Forgets an adapter. Raises InUse if requests use it, ValueError if none has this name."""
    held = adapters_of(pipe.recipe.model)
    with held.turn, stopped(held) as engines:
        loaded = held.find(name)
        rows = [row for engine in engines for row in (*engine.loop.running, *engine.loop.waiting)]
        if users := sum(row.request.ask(AdapterAsk) == loaded.ask for row in rows):
            raise InUse(f"adapter={name!r} is used by {users} requests: wait for their end, or cancel them first")
        assert held.owner is not None
        held.owner.of_C[loaded.columns] = FREE
        del held.by_name[name]


@contextmanager
def stopped(held: Adapters) -> Iterator[list[Engine]]:
    """The engines of the network, none of which takes a step within."""
    engines = [engine for engine in ENGINES if adapters_of(engine.recipe.model) is held]
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.between_rounds())
        yield engines


class AdaptedPipeline(Pipeline):
    """A pipeline whose requests have an adapter. It shares all else with the one that it is made of."""

    def __init__(self, pipe: Pipeline, name: str) -> None:
        self.__dict__ |= {key: value for key, value in vars(pipe).items() if key not in ("weights", "compiler")}
        self.base, loaded = pipe, adapters_of(pipe.recipe.model).find(name)
        self.asks = (*pipe.asks, loaded.ask)

    @property
    def compiler(self) -> Any:
        return self.base.compiler

    @property
    def model(self) -> Any:
        """The network with the adapter in every lane, for `score`."""
        ask: Any = self.asks[-1]
        number_B = torch.tensor([ask.number], device=self.recipe.model.device)
        return adapters_of(self.recipe.model).over(self.recipe.model, LaneAdapters(number_B))
