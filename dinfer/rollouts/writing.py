"""Writes a checkpoint's tensors into the storage that a network has already, so that CUDA graphs stay valid.

Names and shapes are the checkpoint's. The family's placements say where each tensor goes: into a fused matrix, to an
expert, to a rank's share. What is held in few bits is rounded as loading does. So the bits are those of a fresh load.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property, partial, reduce
from operator import attrgetter, is_, or_
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from dinfer.core.kernels.dispatch import native, triton, use_triton
from dinfer.core.layers.format import PLAIN, Plain
from dinfer.core.layers.linear import formatted
from dinfer.core.loading.checkpoint import LoadPlan, load_network
from dinfer.core.loading.files import ADAPTER, CheckpointError, locate, refuse
from dinfer.core.loading.safetensors_io import FLOATS, read_slices
from dinfer.core.models.family import ModelFamily, Placement
from dinfer.core.provided import needed
from dinfer.core.registry import MODELS, values_of
from dinfer.core.terms.spec import ExpertLayout
from dinfer.rollouts.state import state_of

PLANS = 64  # of a network that are kept
PIECE = 1 << 19  # values that are looked at and copied at a time: they stay in the cache of a CPU
DTYPES = frozenset(FLOATS.values())
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # what values of these are added up in


class OnePiece(NamedTuple):
    """Where a tensor goes as one piece of memory."""

    parameter: str
    first: int  # number of the value in the parameter
    shape: tuple[int, ...]  # of the tensor


class Names:
    """The tensors that a checkpoint of a network may have, and the smallest pieces that they consist of."""

    def __init__(self, network: Any, family: ModelFamily) -> None:
        self.family, self.told, spec = family, named(family), network.spec
        self.pieces = family.weights(spec)  # the names of the usual layout, which cover the network once
        self.placements: dict[str, Placement] = {}
        for experts in get_args(ExpertLayout):
            self.placements |= family.weights(spec, experts)
        self.copies, self._unused = family.copies(spec), tuple(family.unused)
        forms = {one: module.formats[own] for one, (module, own) in formatted(network, embeddings=True).items()}
        self.fixed = {one: str(getattr(form, "fixed", "")) for one, form in forms.items()}  # what floats do not become
        self.rounded = {name for name, form in forms.items() if not isinstance(form, Plain)}
        self.spans: dict[str, OnePiece | None] = {}  # found as they are asked for
        self._of: dict[str, list[str]] = {}
        for name, place in self.pieces.items():
            self._of.setdefault(place.parameter, []).append(name)

    def spare(self, name: str) -> bool:
        """Whether the network has no use for a tensor that checkpoints have."""
        return name not in self.placements and name.startswith(self._unused)

    def place(self, name: str) -> Placement:
        """Where a tensor goes. Raises ValueError for a name that no checkpoint of this model has."""
        own = self.copies.get(name, name)
        if own not in self.placements:
            near = get_close_matches(name, self.placements, 1)
            raise ValueError(f"{name} is no tensor of this model{f': {near[0]} is' if near else ''}")
        return self.placements[own]

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raises ValueError for a tensor that cannot be written."""
        if not isinstance(name, str):
            raise ValueError(f"{name!r:.40} is no name of a tensor: give a text")
        place = self.placements.get(name)
        if place is not None and shape == place.shape and dtype in DTYPES and not self.fixed.get(place.parameter):
            return  # what comes thousands of times
        if place is None and self.spare(name):
            return
        place = place or self.place(name)
        if (*shape,) != place.shape:
            raise ValueError(f"{name} has the shape {(*shape,)}, and must have {place.shape}")
        if dtype not in DTYPES:
            known = ", ".join(str(one).removeprefix("torch.") for one in FLOATS.values())
            raise ValueError(f"{name} is of {dtype}, and must be one of {known}: dinfer rounds it as it was loaded")
        if fixed := self.fixed.get(place.parameter):
            raise ValueError(f"{name} is held in {fixed}, to which floats are not rounded: update from a checkpoint "
                             "that is rounded alike (from_folder), or load floats with quantize=int4")  # fmt: skip

    def covered(self, name: str) -> list[str]:
        """The pieces that a tensor writes: of one with all experts of a layer, those of each."""
        if self.spare(name):
            return []
        if (own := self.copies.get(name, name)) in self.pieces:
            return [own]
        at = self.placements[own].at
        return [
            piece
            for piece in self._of[self.placements[own].parameter]
            if all(a.start <= b.start and b.stop <= a.stop for a, b in zip(at, self.pieces[piece].at, strict=False))
        ]


def names_of(network: Any, family: ModelFamily) -> Names:
    """The names of a network, made once: there are thousands where experts come one by one."""
    state = state_of(network)
    if state is None or state.names is None or state.names.family != family:
        found = Names(network, family)
        if state is None:
            return found
        state.names = found
    return state.names


class Parameters:
    """The parameters of a network by name. A later update finds that they are still there in a hundredth of the time.

    `named_parameters` takes ten times as long as this: each name passes through all modules above it.
    """

    def __init__(self, network: Any) -> None:
        self.by_name: dict[str, Any] = {}
        self.plans: dict[tuple[str, ...], CopyPlan] = {}  # by the names of what came together
        self._bare: Names | None = None  # of which all were there
        self._edges: tuple[list[Any], list[str], list[Any]] = [], [], []  # tables, names in them, and what they gave
        left = [("", network)]
        while left:
            prefix, module = left.pop()
            for table in (module._parameters, module._modules):
                for name, one in table.items():
                    if one is None:
                        continue
                    for column, value in zip(self._edges, (table, name, one), strict=True):
                        column.append(value)
                    if table is module._modules:
                        left.append((f"{prefix}{name}.", one))
                    else:
                        self.by_name[prefix + name] = one

    @property
    def stand(self) -> bool:
        """Whether the network has all of them where they were found."""
        tables, names, found = self._edges
        return all(map(is_, map(dict.get, tables, names), found))

    def check_bare(self, names: Names) -> None:
        """Raises ValueError if something is around modules of the network, as peft puts its own around them."""
        for name, place in names.pieces.items() if self._bare is not names else ():
            if place.parameter not in self.by_name:
                raise ValueError(f"{name} goes into {place.parameter}, which something is around: train an adapter on "
                                 "a copy of pipe.model, or merge it first")  # fmt: skip
        self._bare = names


SHAPE, DTYPE, LAYOUT = attrgetter("shape"), attrgetter("dtype"), attrgetter("layout")


class CopyPlan:
    """How tensors that come together are copied: in a launch for each pair of types. It serves all alike."""

    def __init__(self, kernel: Any, tensors: Sequence[tuple[str, Tensor]], parts: Mapping[str, Any]) -> None:
        """`parts`: what `kernel` copies of these, by name. The first tensor of a name counts."""
        self._kernel, self.covered = kernel, frozenset[str]()  # the pieces that all of them write
        by_types, self.rest = dict[Any, dict[str, int]](), list[int]()  # the places of what takes more than a copy
        for at, (name, tensor) in enumerate(tensors):
            once = by_types.setdefault((tensor.dtype, parts[name][0].dtype), {}) if name in parts else {name: at}
            if once.setdefault(name, at) != at or name not in parts:
                self.rest.append(at)
        self.launches = [
            ([*some], [parts[name][0] for name in some], kernel.Copies([parts[name] for name in some]))
            for some in by_types.values()
        ]
        self._own = [at for some in by_types.values() for at in some.values()]
        self._held = [one for _, held, _ in self.launches for one in held]
        self._like, self._into = self._told([tensors[at][1] for at in self._own]), self._places()

    def sources(self, tensors: Sequence[tuple[str, Any]]) -> list[int] | None:
        """The addresses of what is copied, in the order of launches.

        None: the plan is not for such tensors, or not for the parameters as they are now.
        """
        own = [tensors[at][1] for at in self._own]
        told = self._told(own)
        if told is None or told != self._like or self._places() != self._into:
            return None
        sources = [*map(Tensor.data_ptr, own)]
        return None if reduce(or_, sources, 0) % self._kernel.ALIGNED else sources

    def _places(self) -> Any:
        held = self._held
        return [*map(Tensor.data_ptr, held)], [*map(DTYPE, held)], {*map(Tensor.is_contiguous, held)}

    @staticmethod
    def _told(tensors: Sequence[Any]) -> Any:
        """All that a launch depends on but addresses; None: something is no plain tensor. In C, for all at once."""
        if not {*map(type, tensors)} <= {Tensor, Parameter} or {*map(LAYOUT, tensors)} - {torch.strided}:
            return None
        devices, whole = {*map(Tensor.get_device, tensors)}, {*map(Tensor.is_contiguous, tensors)}
        return [*map(SHAPE, tensors)], [*map(DTYPE, tensors)], devices, whole


class Writer:
    """Writes to the share of one rank."""

    def __init__(self, network: Any, family: ModelFamily, held: Parameters | None = None) -> None:
        """`held`: what is known of the network's parameters, which still stand."""
        self.network, self.names, self.rank = network, names_of(network, family), network.ranks.rank
        self.adapter: Any = None  # merged into what it changes, as when a checkpoint is loaded
        self.sent: Sequence[Tensor] = ()  # on rank 0, what it sends to the others next
        self.plan: LoadPlan | None = None  # of a folder that was checked
        self.fresh: Mapping[str, Tensor] | None = None  # what it holds, if it is rounded
        self._known = held or Parameters(network)
        self._parameters = self._known.by_name
        self._whose: dict[str, str] = {}  # by the tied tensor, under which of its names it came
        self._copies: list[tuple[str, Any]] = []  # on a card, what one launch will copy
        self._checks: list[tuple[list[str], Tensor]] = []  # on a card: not 0 if not finite, unread as yet
        self._spare: Tensor | None = None  # zeros for more of them

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes this rank's pieces of a whole tensor. Raises ValueError, also for one that is not finite."""
        if (part := self._part(name, tensor)) is not None:
            self._copies.append((name, part))
            return
        if self.names.spare(name):
            return
        place = self.names.place(name)
        self.fill(name, ((tensor[source], source, target) for source, target in place.pieces(self.rank)))

    def known(self, tensors: Sequence[tuple[str, Tensor]]) -> tuple[CopyPlan, list[int]] | None:
        """The plan of an earlier update for tensors like these, and its `sources`; None: there is none that fits."""
        plan = None if self._fast is None else self._known.plans.get(tuple(name for name, _ in tensors))
        sources = None if plan is None else plan.sources(tensors)
        return None if plan is None or sources is None else (plan, sources)

    def planned(self, tensors: Sequence[tuple[str, Tensor]]) -> tuple[CopyPlan, list[int]] | None:
        """As `known`, made for tensors that have been checked, and kept; None: nothing copies them at once."""
        if (kernel := self._fast) is None:
            return None
        parts = {name: part for name, one in tensors if (part := self._part(name, one)) is not None}
        plan, plans = CopyPlan(kernel, tensors, parts), self._known.plans
        if (sources := plan.sources(tensors)) is None:
            return None
        plan.covered = frozenset(piece for name, _ in tensors for piece in self.names.covered(name))
        if not any(self._span(tensors[at][0]) for at in plan.rest):  # else others of these names may be copied
            if len(plans) >= PLANS:
                plans.clear()
            plans[tuple(name for name, _ in tensors)] = plan
        return plan, sources

    def launch(self, plan: CopyPlan, sources: list[int]) -> None:
        """Copies what a plan copies, whose memory the caller may write over then."""
        for names, held, copies in plan.launches:
            own, sources = sources[: len(names)], sources[len(names) :]
            broken_X = self._zeros(len(names), held[0].device)
            copies.launch(own, broken_X)
            increment_version(held)  # torch does not see what our kernels write
            self._checks.append((names, broken_X))

    @property
    def _fast(self) -> Any | None:
        """The kernel, where it takes whatever it can."""
        with torch.no_grad():
            return None if self.adapter is not None else self._kernel

    def fill(self, name: str, pieces: Iterable[tuple[Tensor, tuple[slice, ...], tuple[slice, ...]]]) -> None:
        """Writes pieces of a tensor: the values, the part of the tensor that they are, and where they go."""
        own = self.names.copies.get(name, name)
        tied = own in self.names.copies.values()
        first = self._whose.setdefault(own, name) == name
        for values, source, target in pieces:
            if self.adapter is not None:
                values = self.adapter.merged(own, values, self.network.device, source)
            if tied and not first:
                self.flush()
                held = self._held(own)[target]
                if not torch.equal(held, values.to(held.device, held.dtype).view_as(held)):
                    raise ValueError(f"{name} differs from {own}, and the model has one tensor for both")
            else:
                self._put(name, self.names.placements[own].parameter, target, values)

    def flush(self) -> None:
        """Launches the copies that wait. The caller may then write over what it gave."""
        by_types: dict[Any, list[tuple[str, Any]]] = {}
        for one in self._copies:
            by_types.setdefault((one[1][0].dtype, one[1][2].dtype), []).append(one)
        self._copies = []
        for some in by_types.values():
            assert self._kernel is not None
            broken_X = self._zeros(len(some), some[0][1][2].device)
            self._kernel.copy([part for _, part in some], broken_X)
            increment_version([part[0] for _, part in some])  # torch does not see what our kernels write
            self._checks.append(([name for name, _ in some], broken_X))

    def finish(self) -> None:
        """Raises ValueError if a tensor was not finite. The one place that waits for a card."""
        names = [name for some, _ in self._checks for name in some]
        all_broken = [broken_X for _, broken_X in self._checks]
        broken = (torch.cat(all_broken) if len(all_broken) > 1 else all_broken[0]).tolist() if names else []
        if wrong := [name for name, one in zip(names, broken, strict=True) if one]:
            raise ValueError(f"{wrong[0]} has values that are not finite (NaN or infinite)")

    def _zeros(self, count: int, device: torch.device) -> Tensor:
        """Made for many at once. int32 [count]"""
        if self._spare is None or len(self._spare) < count or self._spare.device != device:
            self._spare = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        found, self._spare = self._spare[:count], self._spare[count:]
        return found

    def digest(self, name: str) -> str:
        """SHA-256 of what this rank holds of a tensor."""
        sha, place = hashlib.sha256(), self.names.place(name)
        module, own = self._weights.get(place.parameter, (None, ""))
        weight = (self._parameters[place.parameter],) if module is None else module.weight_of(own)
        form = PLAIN if module is None else module.formats[own]
        for _, target in place.pieces(self.rank):
            for held in form.held(weight, target):
                sha.update(held.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return sha.hexdigest()

    @cached_property
    def _weights(self) -> Any:
        return formatted(self.network, embeddings=True)

    @cached_property
    def _kernel(self) -> Any | None:
        """What copies many tensors at once; None: nothing does. Asked for where no gradient is kept."""
        return triton("copies") if use_triton(next(iter(self._parameters.values())), "linear") else None

    def _part(self, name: str, tensor: Tensor) -> Any | None:
        """A tensor as a part that the kernel copies; None: it does not."""
        if self._kernel is None or (span := self._span(name)) is None:
            return None
        part = self._parameters[span.parameter], span.first, tensor
        return part if self._kernel.takes(*part) else None

    def _span(self, name: str) -> OnePiece | None:
        """Where a tensor goes as it is, and as one piece; None: it takes more than that."""
        if self.adapter is not None:
            return None
        spans = self.names.spans
        if name not in spans:
            spans[name] = self._found(name)
        span = spans[name]
        return span if span is not None and span.parameter in self._parameters else None

    def _found(self, name: str) -> OnePiece | None:
        names = self.names
        place, tied = names.placements.get(name), {*names.copies, *names.copies.values()}
        if place is None or name in tied or place.parameter in names.rounded or place.parameter not in self._parameters:
            return None
        shape, pieces = self._parameters[place.parameter].shape, place.pieces(self.rank)
        if len(pieces) != 1 or any(
            part.stop - part.start != size for part, size in zip(pieces[0][0], place.shape, strict=True)
        ):
            return None
        first, sizes = 0, [part.stop - part.start for part in pieces[0][1]]
        for part, size in zip(pieces[0][1], shape, strict=True):
            first = first * size + part.start
        cut = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))  # behind it, all is whole
        return OnePiece(place.parameter, first, place.shape) if sizes[cut + 1 :] == [*shape[cut + 1 :]] else None

    def _held(self, name: str) -> Tensor:
        return self._parameters[self.names.placements[name].parameter].detach()

    def _put(self, name: str, parameter: str, target: tuple[slice, ...], values: Tensor) -> None:
        module, own = self._weights.get(parameter, (None, ""))
        if module is None or isinstance(module.formats[own], Plain):
            held = self._parameters[parameter].detach()[target]
            copy(held, values.reshape(held.shape), partial(self._look, name))
            return
        self._look(name, values)
        values = values.to(self.network.device, self.network.dtype)
        try:
            module.formats[own].put(module.weight_of(own), target, values)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _look(self, name: str, values: Tensor) -> None:
        """Raises ValueError for values that are not finite. On a GPU nobody waits for the answer before `finish`."""
        if values.is_cuda:
            self._checks.append(([name], (~largest(values).isfinite()).view(1).int()))
            return
        if values.dim() == 1 and values.dtype not in WIDE:
            total = torch.dot(values, values)  # the fastest way to read all: BLAS
        else:
            total = values.sum(dtype=WIDE.get(values.dtype))
        # Finite values may exceed the largest float together.
        if not math.isfinite(total.item()) and not bool(values.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite (NaN or infinite)")


def largest(values: Tensor) -> Tensor:
    """The largest magnitude, NaN if there is one. One kernel reads all once; `isfinite` writes five times."""
    return torch.linalg.vector_norm(values, math.inf, dtype=torch.promote_types(values.dtype, torch.float32))


def copy(held: Tensor, values: Tensor, look: Callable[[Tensor], None]) -> None:
    """Looks at values and copies them, both in pieces, so that memory is read once."""
    if values.is_cuda or held.is_cuda or not (held.is_contiguous() and values.is_contiguous()):
        look(values)
        held.copy_(values, non_blocking=True)
        return
    if (kernels := native("linear")) is not None and (fine := kernels.copy(held, values)) is not None:
        increment_version(held)  # torch does not see what our kernels write
        if not fine:
            look(values)
        return
    for target, source in zip(held.view(-1).split(PIECE), values.view(-1).split(PIECE), strict=True):
        look(source)
        target.copy_(source)


# What all ranks do, as rank 0 tells them: functions of the network and of plain values.

_writers: dict[int, Writer] = {}  # of updates under way, by the network


def named(family: ModelFamily) -> dict[str, Any]:
    """A family as plain values."""
    return {"name": MODELS.name_of(family), **values_of(family)}


def begin(network: Any, family: Mapping[str, Any], held: Parameters | None = None) -> None:
    """Begins an update. An adapter that was merged as the model was loaded is merged into what comes.

    `held`: see `Writer`, where one rank has the whole model.
    """
    state, adapter = state_of(network), None
    known = None if state is None or state.names is None or state.names.told != family else state.names.family
    own = MODELS.build(dict(family)) if known is None else known
    writer = Writer(network, own, held)
    if own.adapter:
        adapter = needed("read_adapter", f"model.adapter={own.adapter}", "formats")
        writer.adapter = adapter(locate(own.adapter, needed=ADAPTER), writer.names.pieces)
    _writers[id(network)] = writer


def writer_of(network: Any) -> Writer:
    """That of the update under way, on this rank."""
    return _writers[id(network)]


def end(network: Any) -> None:
    """Ends an update. Raises ValueError if something was not finite."""
    _writers.pop(id(network)).finish()


def drop(network: Any) -> None:
    """Ends an update that has failed."""
    _writers.pop(id(network), None)


def write(network: Any, told: Sequence[tuple[str, str, Sequence[int]]]) -> None:
    """Writes whole tensors, which rank 0 has and sends to the others. `told`: their names, dtypes and shapes."""
    writer, ranks = _writers[id(network)], network.ranks
    sent, writer.sent = iter(writer.sent), ()
    with torch.no_grad():
        for name, dtype, shape in told:
            if ranks.index == 0:
                tensor = next(sent)
            else:
                tensor = torch.empty(*shape, dtype=vars(torch)[dtype], device=network.device)
            if ranks.size > 1:
                tensor = tensor.to(network.device).contiguous()
                dist.broadcast(tensor, group=ranks.group, group_src=0)
            writer.write(name, tensor)
        writer.flush()


def sends(network: Any, tensors: Sequence[Tensor]) -> None:
    """Keeps tensors on rank 0 until `write` takes them."""
    _writers[id(network)].sent = tensors


def fill(network: Any) -> None:
    """Writes all tensors of the folder that `check_folder` has seen, of which each rank reads its share."""
    writer = _writers[id(network)]
    assert writer.plan is not None
    with torch.no_grad():
        if writer.fresh is not None:
            for name, held in everything(network).items():
                held.copy_(writer.fresh[name])
            writer.fresh = None
            return
        for name in writer.plan.tensors:
            writer.fill(name, _pieces(writer.plan, name, writer))
        writer.flush()


def check_folder(network: Any, path: str) -> None:
    """Raises CheckpointError for a folder that cannot be written. A rounded one is read, as loading does."""
    writer, folder = _writers[id(network)], Path(path)
    if not folder.is_file() and not (folder / "config.json").is_file():  # a file is of GGUF
        raise CheckpointError(f"{path or 'the path'} has no config.json: give a folder as pipe.save makes it")
    plan = writer.plan = LoadPlan.read(folder, writer.names.family)
    if plan.spec != network.spec:
        raise CheckpointError(f"{folder} holds another model than the one that runs: its config.json differs")
    refuse([*plan.problems()], f"the tensors in {folder} do not fit its config.json")
    plan.check_values()
    writer.fresh = None
    rounded = plan.scales.stored or any(one.packed for one in plan.tensors.values())
    if not rounded and not any(writer.names.fixed.values()):
        return
    fresh = load_network(
        folder, writer.names.family, dtype=network.dtype, device=network.device, rank=network.ranks.rank
    )
    forms, read = [kinds(one) for one in (network, fresh)], everything(fresh)
    shapes = [{name: (one.shape, one.dtype) for name, one in held.items()} for held in (everything(network), read)]
    if forms[0] != forms[1] or shapes[0] != shapes[1]:
        raise CheckpointError(f"{folder} is rounded otherwise than what runs: a checkpoint of the same types can take "
                              "its place, and floats where the model was loaded with quantize")  # fmt: skip
    writer.fresh = read


def everything(network: Any) -> dict[str, Tensor]:
    """Parameters, and the buffers beside them."""
    return {name: one.detach() for name, one in [*network.named_parameters(), *network.named_buffers()]}


def kinds(network: Any) -> dict[str, Any]:
    """How each parameter is held, with all that its format knows of it."""
    found = {name: module.formats[own] for name, (module, own) in formatted(network, embeddings=True).items()}
    return {name: (type(form), vars(form)) for name, form in found.items()}


def _pieces(plan: LoadPlan, name: str, writer: Writer) -> Iterator[tuple[Tensor, tuple[slice, ...], tuple[slice, ...]]]:
    pieces, one = plan.placements[name].pieces(writer.rank), plan.tensors[name]
    parts = [(one, None if writer.rank.ranks == 1 else source) for source, _ in pieces]
    for (source, target), values in zip(pieces, read_slices(parts), strict=True):
        yield values, source, target


def digests(network: Any, family: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, str]:
    """SHA-256 of what a rank holds of each tensor: its values, and its scales if it is rounded."""
    own = Writer(network, MODELS.build(dict(family)))
    return {name: own.digest(name) for name in names or own.names.pieces}
