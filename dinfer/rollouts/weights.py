"""Other weights under running engines: in place, all at once for every request, and forgotten where they are stale.

A request never runs on a mixture. Rounds stop, tensors are written, keys of the old weights are forgotten, and rounds
go on. If a tensor is refused before anything was written, the old weights stay. If it is refused later, the engines
stay paused and say why, until an update has written what the failed one left.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from dinfer.core.engine.engine import ENGINES, Engine
from dinfer.core.engine.errors import RequestAborted, Unready
from dinfer.core.engine.worker import Worker
from dinfer.core.loading.checkpoint import LoadPlan, place_of
from dinfer.core.loading.files import ADAPTER
from dinfer.core.loading.safetensors_io import read
from dinfer.core.provided import needed, provided
from dinfer.core.step.cursors import CURSORS
from dinfer.core.step.window import first_phase
from dinfer.rollouts import sleeping, transport, writing
from dinfer.rollouts.abilities.versions import Aborted, Seen
from dinfer.rollouts.state import WeightsState, state_of

Pending = Literal["finish", "abort", "keep", "recompute"]
"""What becomes of requests on the way: they end first, they end with what they have, they go on with the keys that they
have, or they go on and compute their keys anew."""
PENDING: tuple[str, ...] = get_args(Pending)
LOG = logging.getLogger("dinfer")
BUCKET = 1 << 28  # bytes that rank 0 sends to the others at a time
FIRST = 1 << 26  # bytes that a model on one card begins with


class WeightsIncomplete(Unready):
    """The weights are a mixture, or forgotten: no request may run."""


class Weights:
    """The weights of a pipeline's network, which other engines may run too: another pipeline's, or a server's."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.recipe = pipe, pipe.recipe
        if (state := state_of(pipe.model)) is None:
            raise ValueError(f"{type(pipe.model).__name__} is no module of torch, so its weights cannot be updated")
        self.state: WeightsState = state
        self._parameters: writing.Parameters | None = None

    @property
    def version(self) -> int:
        """That of the weights which answers come from."""
        return self.state.version

    @property
    def engines(self) -> list[Engine]:
        """All that run this network."""
        return [engine for engine in ENGINES if state_of(engine.recipe.model) is self.state]

    @property
    def loops(self) -> list[Any]:
        """Those of the engines."""
        return [engine.loop for engine in self.engines]

    @property
    def family(self) -> Any:
        """Raises ValueError for a model whose checkpoint names nobody knows."""
        if self.pipe.origin is None:
            raise ValueError("an update needs a model that dinfer.load read: nobody knows the names of its tensors")
        return self.pipe.origin[0]

    @property
    def parameters(self) -> writing.Parameters:
        """Those of the network as it is now."""
        if self._parameters is None or not self._parameters.stand:
            self._parameters = writing.Parameters(self.pipe.model)
        return self._parameters

    def check_bare(self) -> writing.Names:
        """The names of the network's tensors. Raises ValueError if something is around modules of it."""
        names = writing.names_of(self.pipe.model, self.family)
        self.parameters.check_bare(names)
        return names

    @contextmanager
    def updating(
        self, version: int | None = None, *, pending: Pending = "finish", staged: bool = False
    ) -> "Iterator[WeightSink]":
        """Gives what takes the new weights. No request runs until the block is left.

        `version`: of the new weights; None: one more than the last. `pending`: what becomes of requests on the way.
        `staged`: keep a copy of all that comes, and write it when all has been checked; then a refusal leaves the old
        weights. Raises ValueError for what cannot be written, and WeightsIncomplete if something is still missing.
        """
        if pending not in PENDING:
            raise ValueError(f"pending={pending!r} is not known; use one of {', '.join(PENDING)}")
        if version is not None and (type(version) is not int or not 0 <= version < 2**63):
            raise ValueError(f"version={version!r:.40} must be an integer, 0 or more, of 64 bits")
        family, state = self.family, self.state
        if "weights" in state.asleep:
            raise ValueError("the weights sleep: wake them first, with tags=['weights']")
        if not state.turn.acquire(blocking=False):
            raise ValueError("another update of these weights is under way: wait for its end")
        sink = WeightSink(self, family, staged)
        try:
            with self._stopped(pending):
                try:
                    known = (self.parameters,) if sink.alone else ()
                    writing_everywhere(self.recipe, writing.begin, sink.family, *known)
                    yield sink
                    sink.launch()
                    for loop in self.loops:  # while a card copies
                        loop.worker.renewed()
                    sink.finish()
                except BaseException as error:
                    self._failed(sink, error)
                    raise
                state.torn -= sink.touched
                state.sent |= sink.touched - sink.merged
                state.merged = state.merged - sink.touched if sink.adapted is None else sink.adapted
                if not state.torn:
                    state.version = state.version + 1 if version is None else version
                    self._renew(recompute=pending == "recompute")
        finally:
            sink.ended = True
            state.turn.release()
            if state.torn:  # nobody knows when another update comes, and none may enter from here on
                with suppress(RuntimeError), self._stopped("abort"):
                    pass
            self._go_on()
        if state.torn:
            raise incomplete(self.state)

    def pause(self, pending: Pending = "keep") -> None:
        """Stops rounds until `resume`. `pending`: as for `updating`."""
        self.state.held = True
        with self._stopped(pending):
            if pending == "recompute":
                for loop in self.loops:
                    _restart(loop)

    def resume(self) -> None:
        """Ends a pause. Raises WeightsIncomplete where weights are missing."""
        if self.state.torn:
            raise incomplete(self.state)
        self.state.held = False
        self._go_on()

    def sleep(
        self, level: int = 1, tags: Sequence[str] = ("weights", "keys"), *,
        pending: Literal["finish", "abort"] = "finish",
    ) -> dict[str, int]:  # fmt: skip
        """Gives memory back until `wake`. Returns the bytes before and after: of the card, or of RAM.

        Level 0 is a pause. Level 1 frees keys, and on a card moves weights to the host's memory. Level 2 forgets the
        weights: after `wake`, an update must write all of them before a request runs. `tags`: with "keys" alone the
        weights stay.
        """
        if type(level) is not int or level not in (0, 1, 2):
            raise ValueError(f"level={level!r:.20} must be 0, 1 or 2")
        _check_tags(tags)
        if pending not in ("finish", "abort"):
            raise ValueError(f"pending={pending!r:.20} is not known; use finish or abort: what sleeps has no requests")
        state, everywhere = self.state, partial(writing_everywhere, self.recipe)
        if state.asleep:
            raise ValueError(f"{' and '.join(state.asleep)} sleep already: wake them first")
        if level == 0:
            state.held = True
        with self._stopped(pending):
            before = sum(everywhere(sleeping.trim))
            if level:
                state.asleep = {"keys": level}  # first: what fails may have come half of its way, and wakes as a whole
                graphs = self._doze("weights" in tags)
                everywhere(sleeping.place)
                if "weights" in tags and (level == 2 or self.pipe.model.device.type == "cuda"):
                    state.asleep["weights"] = level
                    everywhere(sleeping.forget, level == 1)
                if level == 2 and "weights" in tags:
                    state.torn, state.why = (
                        {*writing.names_of(self.pipe.model, self.family).pieces},
                        "sleep forgot them",
                    )
                if graphs:
                    later = ", and keeps those from now on" if sleeping.stays(self.pipe.model) else ""
                    LOG.warning("%d CUDA graphs are dropped: memory wakes at other addresses%s", graphs, later)
            return {"before": before, "after": sum(everywhere(sleeping.trim))}

    def wake(self, tags: Sequence[str] = ("weights", "keys")) -> None:
        """Takes memory again: of weights, of keys, or of both. Keys are allocated with the next request.

        A trainer that shares the card wakes the weights, updates them, frees its own, and then wakes the keys.
        """
        state = self.state
        _check_tags(tags)
        with self._stopped("keep"):
            if "weights" in tags and "weights" in state.asleep:
                writing_everywhere(self.recipe, sleeping.restore)
                del state.asleep["weights"]
                for loop in self.loops:
                    loop.worker.renewed()
            if "keys" in tags and "keys" in state.asleep:
                for loop in self.loops:
                    if loop.batch is not None:
                        loop.worker.do(sleeping.rouse)
                del state.asleep["keys"]
            state.held = state.held and bool(state.asleep)
        self._go_on()

    def forget_keys(self) -> None:
        """No later request shares keys that were computed until now."""
        with self._stopped("keep"):
            for loop in self.loops:
                loop.worker.renewed()
            self._renew(recompute=False)
        self._go_on()

    def tensors(self) -> dict[str, Tensor]:
        """What is held, by its names in a checkpoint: views, so clone what is to stay. Only for floats on one card."""
        self.check_bare()
        if self.recipe.ranks.size > 1:
            raise ValueError("tensors are of a model on one card")
        places, held = self.family.weights(self.pipe.model.spec), dict(self.pipe.model.named_parameters())
        if rounded := [n for n, p in places.items() if not held[p.parameter].is_floating_point()]:
            raise ValueError(f"{rounded[0]} is held in few bits")
        return {name: place_of(held, place) for name, place in places.items()}

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """SHA-256 of what is held of each tensor, by its name in a checkpoint: of its values, and of its scales.

        Where ranks divide the model, one for each rank, joined by commas. `names`: None takes all.
        """
        own = self.check_bare()
        for name in names or ():
            own.place(name)
        with self._stopped("keep"):
            found = writing_everywhere(self.recipe, writing.digests, writing.named(self.family), names)
        self._go_on()
        return {name: ",".join(one[name] for one in found) for name in found[0]}

    def _doze(self, weights: bool) -> int:
        """Frees keys. Returns how many graphs were dropped for it, since they would find other addresses."""
        stays, dropped = provided("stays"), 0
        stays = None if weights and sleeping.placed(self.pipe.model) is None else stays
        for engine in self.engines:
            loop, batch = engine.loop, engine.loop.batch
            if batch is not None and stays is not None and stays(engine.runner):
                batch.pages.epoch += 1  # what requests shared is forgotten
                loop.worker.do(sleeping.doze)
            else:
                dropped += engine.runner.captured
                loop.close()
        return dropped

    @contextmanager
    def _stopped(self, pending: str) -> Iterator[None]:
        """No engine of this network takes a step within."""
        state, engines = self.state, self.engines
        before, state.owner = state.owner, threading.get_ident()
        for engine in engines:
            engine.paused, engine.gate = True, partial(check, state)
        try:
            for engine in engines if pending == "finish" else ():
                _finish(engine)
            with ExitStack() as stack:
                for engine in engines:
                    stack.enter_context(engine.between_rounds())
                    if pending == "abort":
                        _abort(engine, str(incomplete(state)) if state.torn else "the weights were updated")
                yield
        finally:
            state.owner = before

    def _go_on(self) -> None:
        state = self.state
        if not (state.held or state.torn or state.asleep):
            for engine in self.engines:
                engine.resume()

    def _renew(self, *, recompute: bool) -> None:
        """Forgets what was computed with the old weights."""
        self.state.told = True
        for loop in self.loops:
            if loop.batch is None:
                continue
            loop.batch.pages.epoch += 1
            for row in loop.running:
                loop.batch.state.held(Seen).changed(row.slot, row.cursors.steps)
            if recompute:
                _restart(loop)

    def _failed(self, sink: "WeightSink", error: BaseException) -> None:
        with suppress(RuntimeError):  # the ranks have ended: then nothing runs anyway
            writing_everywhere(self.recipe, writing.drop)
        if sink.touched:
            self.state.torn |= sink.touched
            self.state.why = f"an update failed: {str(error) or type(error).__name__}"
            for loop in self.loops:
                loop.worker.renewed()
                if loop.batch is not None:
                    loop.batch.pages.epoch += 1


def _check_tags(tags: Sequence[str]) -> None:
    if wrong := [tag for tag in tags if tag not in ("weights", "keys")]:
        raise ValueError(f"tags={wrong[0]!r:.20} is not known; use weights, keys or both")


def incomplete(state: WeightsState) -> WeightsIncomplete:
    """The error that says which tensors are missing."""
    names = sorted(state.torn)
    return WeightsIncomplete(
        f"the weights are incomplete ({state.why}): {len(names)} tensors must be written before a request runs, such "
        f"as {', '.join(names[:3])}"
    )


def check(state: WeightsState) -> None:
    """Raises RuntimeError if a request cannot enter. It waits where another thread updates or has paused."""
    if state.torn and not state.turn.locked():
        raise incomplete(state)
    if state.asleep:
        raise WeightsIncomplete(f"the engine sleeps ({', '.join(state.asleep)}): call wake first")
    if state.owner == threading.get_ident():
        raise RuntimeError("this thread is updating the weights: leave the block before you ask for anything")


def _finish(engine: Engine) -> None:
    """Runs rounds until what runs or waits now has ended. What comes later waits."""
    asked = {id(row) for row in engine.loop.waiting}
    while engine.loop.running or any(id(row) in asked for row in engine.loop.waiting):
        with engine.between_rounds():
            later = [row for row in [*engine.loop.waiting] if id(row) not in asked]
            for row in later:
                engine.loop.waiting.remove(row)
            try:
                engine.loop.round()
            finally:
                engine.loop.waiting.extendleft(reversed(later))


def _abort(engine: Engine, why: str) -> None:
    """Ends what runs with what it has, and what waits with an error."""
    loop = engine.loop
    for row in loop.running:
        row.told += (Aborted(),)
    loop.drain(stop=True)
    while loop.waiting:
        row = loop.waiting.popleft()
        row.error = RequestAborted(f"the request was aborted before it began: {why}")
        loop.updates.append((row, row.update(engine.recipe)))


def _restart(loop: Any) -> None:
    """The next pass of every row computes all its keys anew."""
    recipe, rows = loop.recipe, loop.running
    if not rows:
        return
    phases = [int(first_phase(recipe.cache, recipe.model.spec, row.cursors.start)) for row in rows]
    loop.worker.do(restart, [row.slot for row in rows], phases)
    for row, phase in zip(rows, phases, strict=True):
        row.cursors = row.cursors._replace(phase=phase, kept=0, seen=0)
        row.need_at, row.steady, row.drafted, row.missed = (), False, False, False
        loop.scheduler.update(row)


@torch.inference_mode()
def restart(worker: Worker, slots: Sequence[int], phases: Sequence[int]) -> None:
    """Puts rows before the pass that computes their first keys. Their tokens, steps and random streams stay."""
    state = worker.runner.state
    cursors_NC = state.canvas.cursors_NC
    slot_A = torch.tensor(slots, device=cursors_NC.device)
    for name, values in (("phase", phases), ("kept", [0] * len(slots)), ("seen", [0] * len(slots))):
        cursors_NC[slot_A, CURSORS.index(f"{name}_B")] = torch.tensor(values, device=cursors_NC.device)
    state.cache.reset(slot_A)


def writing_everywhere(recipe: Any, work: Any, *given: Any) -> list[Any]:
    """Calls a function with the network of each rank."""
    found = provided("on_each_rank")
    return [work(recipe.model, *given)] if found is None else found(recipe, work, *given)


def _pair(pair: Any) -> tuple[str, Tensor]:
    """A name and a tensor. Raises ValueError for anything else."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"load_all takes tensors by name, or pairs of name and tensor, not a {type(pair).__name__}")
    return pair[0], pair[1]


class WeightSink:
    """Takes new weights, under the names that a checkpoint has them: in any order, all or some, on any device."""

    def __init__(self, weights: Weights, family: Any, staged: bool) -> None:
        self._weights, self._recipe, self._staged = weights, weights.recipe, staged
        self._names, self._bare = writing.names_of(weights.pipe.model, family), False
        self.family, self.alone = self._names.told, self._recipe.ranks.size == 1
        self._held: deque[tuple[str, Tensor]] = deque()  # what waits to be written, and is not written over meanwhile
        self._bytes = 0
        self.ended = False
        self.touched: set[str] = set()  # what was written, as far as it may be seen
        self.merged: set[str] = set()  # of these, what is that of the checkpoint on disk, with an adapter or without
        self.adapted: set[str] | None = None  # what the new adapter is merged into; None: there is no new one

    def load(self, name: str, tensor: Tensor) -> None:
        """A tensor. Raises ValueError for a name, shape or dtype that the model does not have, and for NaN."""
        self._going()
        self._check(name, tensor)
        self._take(name, tensor)
        if not self._staged:
            self.launch()  # the caller may use its memory again

    def load_all(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Many tensors, such as a state dict. All are checked before the first is written, but those of an iterator."""
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        if isinstance(pairs, Iterator):
            for pair in pairs:
                self.load(*_pair(pair))
            return
        self._going()
        known = [*tensors.items()] if isinstance(tensors, Mapping) else [*map(_pair, pairs)]
        writer = writing.writer_of(self._weights.pipe.model) if self.alone and not self._staged else None
        found = None if writer is None else writer.known(known)
        for name, tensor in known if found is None else [known[at] for at in found[0].rest]:
            self._check(name, tensor)
        if self._staged:
            for name, tensor in known:
                self._keep(name, tensor)
            return
        self.launch()
        if writer is not None and (found := found or writer.planned(known)) is not None:
            self._see_bare()
            self.touched |= found[0].covered
            writer.launch(*found)
            known = [known[at] for at in found[0].rest]
        self._held.extend(known)
        self.launch()

    def from_folder(self, folder: str | Path) -> None:
        """A whole checkpoint of safetensors, of which every rank reads its share. Raises CheckpointError."""
        self.launch()
        self._weights.check_bare()
        self._everywhere(writing.check_folder, str(folder))
        self.touched |= {*self._names.pieces}
        self._everywhere(writing.fill)

    def receive(
        self, group: Any, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *,
        flat: bool = False,
    ) -> None:  # fmt: skip
        """Tensors that rank 0 of a process group broadcasts in this order. All are checked before the first comes.

        `flat`: as one tensor of all their bytes. Rank 0 of a divided model takes part alone, and hands on the shares.
        """
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError(f"{len(names)} names have {len(dtypes)} dtypes and {len(shapes)} shapes: give one of each")
        told = [(n, transport.dtype_named(d), s) for n, d, s in zip(names, dtypes, shapes, strict=True)]
        for name, dtype, shape in told:
            self._told(name, shape, dtype)
        for name, tensor in transport.received(group, told, self._weights.pipe.model.device, flat=flat):
            self._take(name, tensor)

    def open(self, handles: Sequence[Mapping[str, Any]]) -> None:
        """Tensors of another process on the same card, by what its `transport.handle_of` tells. Raises ValueError."""
        for one in handles:
            if lost := [field for field in ("name", "shape", "dtype") if field not in one]:
                raise ValueError(f"a handle has no {lost[0]}: give it as transport.handle_of makes it")
            shape = one["shape"] if isinstance(one["shape"], (list, tuple)) else [one["shape"]]
            self._told(one["name"], shape, transport.dtype_named(one["dtype"]))
        for one in handles:
            self._take(*transport.opened(one))

    def changed(self) -> None:
        """The caller has written to the parameters of `pipe.model` itself, to whichever and however."""
        self.launch()

    def lora(self, adapter: str | Path | Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> None:
        """A LoRA adapter alone: it is merged into the weights of the checkpoint on disk, in place of the last one.

        A folder that PEFT wrote, or its tensors by name with its `config`: of the checkpoint's modules, or of those of
        `pipe.model`, where a copy of that was trained. Raises ValueError and CheckpointError.
        """
        family, folder = self._weights.pipe.origin
        if family.adapter:
            raise ValueError(f"model.adapter={family.adapter} is merged into this model: load it without, to change it")
        with TemporaryDirectory() as place:
            if isinstance(adapter, Mapping):
                tensors = {name: one.contiguous() for name, one in adapter.items()}
                save_file(tensors, Path(place, "adapter_model.safetensors"))
                Path(place, ADAPTER).write_text(json.dumps(config or {}, default=list))  # peft has sets of names
                adapter = place
            found = needed("read_adapter", "lora", "formats")(Path(adapter), self._names.pieces)
        state, plan = self._weights.state, LoadPlan.read(folder, family)
        wanted = {*found.pairs} | state.merged
        if gone := sorted(wanted & state.sent):
            raise ValueError(f"{gone[0]} was replaced by an update, and an adapter is for that of {folder}")
        if rounded := [name for name in wanted if name in plan.scales.stored or plan.tensors[name].packed]:
            raise ValueError(f"{rounded[0]} is rounded in {folder}, and an adapter needs the floats that it is for")
        for name, base in read(plan.tensors, sorted(wanted)):
            part = tuple(slice(0, size) for size in base.shape)
            self.merged.add(name)
            self.load(name, found.merged(name, base, self._weights.pipe.model.device, part))
        self.adapted = {*found.pairs}

    def finish(self) -> None:
        """Waits for the end. Raises ValueError for what was not finite."""
        self._everywhere(writing.end)

    def _see_bare(self) -> None:
        if not self._bare:
            self._weights.check_bare()
            self._bare = True

    def _told(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raises ValueError for a tensor that cannot be written, before it is."""
        self._see_bare()
        self._names.check(name, shape, dtype)

    def _going(self) -> None:
        """Raises ValueError behind the end of the block."""
        if self.ended:
            raise ValueError("this update has ended: begin another, by `with pipe.updating() as into:`")

    def _check(self, name: str, tensor: Any) -> None:
        """Raises ValueError for what cannot be written, before it is."""
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            kind = type(tensor).__name__
            told = f"a {kind} on {tensor.device} in {tensor.layout}" if isinstance(tensor, Tensor) else f"a {kind}"
            raise ValueError(f"{name} must be a dense tensor of torch that has values, not {told}")
        self._told(name, tensor.shape, tensor.dtype)

    def _take(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor to be written, and not too much of them."""
        self._keep(name, tensor)
        if self._bytes >= BUCKET and not self._staged:
            self.launch()

    def _keep(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor to be written, with others in one launch."""
        if self._staged:
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} has values that are not finite (NaN or infinite)")
            tensor = tensor.detach().clone()
        self._held.append((name, tensor))
        self._bytes += tensor.nbytes

    def launch(self) -> None:
        """Writes what waits; a card may still be at it. One card soon has work, while the host looks at the rest."""
        most = FIRST if self.alone else BUCKET
        while self._held:
            some: list[tuple[str, Tensor]] = []
            size = 0
            while self._held and (not some or size + self._held[0][1].nbytes <= most):
                some.append(self._held.popleft())
                size += some[-1][1].nbytes
            self._write(some)
            most *= 4 if self.alone else 1
        self._bytes = 0

    def _write(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for name, _ in tensors:
            self.touched.update(self._names.covered(name))
        writing.sends(self._weights.pipe.model, [one.detach() if one.requires_grad else one for _, one in tensors])
        told: list[tuple[str, str, list[int]]] = [(name, "", []) for name, _ in tensors]
        if self._recipe.ranks.size > 1:  # others have none of them
            told = [(name, str(one.dtype).removeprefix("torch."), [*one.shape]) for name, one in tensors]
        self._everywhere(writing.write, told)

    def _everywhere(self, work: Any, *given: Any) -> None:
        self._going()
        writing_everywhere(self._recipe, work, *given)
