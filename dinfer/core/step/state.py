"""All the mutable state of a running batch. Components are frozen and own none of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import Rows, host_rows, option_columns, store_rows, uploaded
from dinfer.core.memory import KVPool, PoolSize
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import Large, Moved, State
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.model import Parts
from dinfer.core.step.request import Request
from dinfer.core.step.shape import Extra, StepShape, Versioned
from dinfer.core.step.window import first_phase, prefilled, widest

T = TypeVar("T")

SHAPES = 256  # whose abilities are remembered


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as it enters a slot, in plain values that can be sent to other processes."""

    slot: int
    request: Request
    kept: int = 0  # positions whose keys its pages hold already
    pages: list[int] = field(default_factory=list)
    twin: list[int] = field(default_factory=list)  # pages of the branch without the prompt
    fresh: list[int] = field(default_factory=list)  # of all these pages, those that nobody shares


@dataclass(frozen=True, slots=True)
class StatePool:
    """The state of one component, for every slot; `fresh` is what a row starts from."""

    fresh: State
    rows: State  # [N, ...], or [N * K, ...] for a decoder
    large: State  # the same for what is `Large`

    @classmethod
    def alloc(cls, fresh: State, rows: int, device) -> StatePool:
        first = {name: (value.fresh if isinstance(value, Large) else value).to(device) for name, value in fresh.items()}
        held = {name: tensor.expand(rows, *tensor.shape).clone() for name, tensor in first.items()}
        large = {name: held.pop(name) for name, value in fresh.items() if isinstance(value, Large)}
        return cls({name: first[name] for name in held}, held, large)

    def reset(self, slot_A: Tensor) -> None:
        """Host side, when requests are admitted."""
        for name, rows in self.rows.items():
            rows[slot_A] = self.fresh[name]

    def lanes(self, slot_B: Tensor) -> State:
        return {name: rows.index_select(0, slot_B) for name, rows in self.rows.items()}

    def in_place(self, slot_B: Tensor, live_B: Tensor) -> State:
        return {name: Rows(rows, slot_B, live_B) for name, rows in self.large.items()}

    def store(self, slot_B: Tensor, state: State, live_B: Tensor) -> None:
        for name, rows in self.rows.items():
            store_rows(rows, slot_B, live_B, state[name].view(-1, *rows.shape[1:]))

    def refresh(self, state: State, rows: Tensor) -> None:
        """Makes the rows of `state` (lanes) that `rows` selects fresh, in place."""
        for name, fresh in self.fresh.items():
            chosen = rows.view(-1, *(1,) * fresh.dim())
            torch.where(chosen, fresh, state[name], out=state[name])


@dataclass(frozen=True, slots=True)
class BatchState:
    """Canvas, keys and values, per-request options and the state of each component, allocated once."""

    block: int  # L
    canvas: Canvas
    kv: KVPool
    options_NO: Tensor  # float64, columns as `Recipe.request_options`
    iteration: StatePool
    decoder: StatePool
    cache: StatePool
    kept: dict[type[Any], Any]  # what abilities keep for each slot
    resolved: dict[StepShape, Any] = field(default_factory=dict)  # the abilities of steps that have run, by shape

    @classmethod
    def alloc(
        cls, recipe: Parts, size: PoolSize, *, dtype: torch.dtype, device, block: int | None = None,
        extras: Sequence[Extra] = (),
    ) -> BatchState:  # fmt: skip
        """Room for requests, their keys and values in `dtype`.

        `block` is L; None: what the iteration says, or `size.length`. It is never longer: a block ends where the canvas
        does. `extras`: the largest that steps have, as far as they need memory.
        """
        spec, iteration, (slots, length, *_) = recipe.model.spec, recipe.iteration, size
        n, block = slots + 1, min(block or iteration.block or length, length)
        # Empty slots and the scratch slot hold the defaults: 0 may be no value of an option at all.
        defaults_O = torch.tensor([*recipe.values().values()], dtype=torch.float64)
        canvas = Canvas.alloc(slots, length, iteration.blocks, spec.stop_ids, device)
        beside = [extra.count for extra in extras if isinstance(extra, Versioned)]
        found = ((kind, kind.alloc(recipe, canvas, block, extras)) for kind in recipe.abilities)
        return cls(
            block=block,
            canvas=canvas,
            kv=KVPool.alloc(
                spec, size, dtype=dtype, device=device, window=widest(recipe, block, length), ranks=recipe.ranks,
                candidates=max(recipe.facts.page_sets, recipe.facts.versions, *beside),
            ),
            options_NO=defaults_O.to(device).repeat(n, 1),
            iteration=StatePool.alloc(iteration.fresh_state(spec, length), n, device),
            decoder=StatePool.alloc(recipe.decoder.fresh_state(spec, block), n * iteration.blocks, device),
            cache=StatePool.alloc(recipe.cache.fresh_state(spec, length), n, device),
            kept={kind: kept for kind, kept in found if kept is not None},
        )  # fmt: skip

    def held(self, kind: type[T]) -> T:
        """What an ability keeps, by its type."""
        return next(kept for kept in self.kept.values() if isinstance(kept, kind))

    def admit(self, recipe: Parts, entries: Sequence[Entry]) -> tuple[list[Cursors], Tensor]:
        """Places requests in free slots: canvas, pages, options, fresh state of every component. Host side.

        Returns the cursors of each, and their tokens on the host, ~token where it is open. int64 [A, S + 1]
        """
        spec, canvas, requests = recipe.model.spec, self.canvas, [entry.request for entry in entries]
        options = [[*recipe.values(request.options).values()] for request in requests]
        cursors, lengths = [self._cursors(recipe, entry) for entry in entries], [r.length for r in requests]
        tokens_AS = host_rows([request.tokens for request in requests], canvas.capacity + 1, 0)
        masked_AS = host_rows([request.open for request in requests], canvas.capacity + 1, 0).bool()
        if spec.mask_id is None:
            seed_A1, last = torch.tensor([[now.seed] for now in cursors]), max(lengths) - 1
            place_S = torch.arange(canvas.capacity + 1).clamp_max(last)
            blank_AS = recipe.sampling.noise(seed_A1, place_S, torch.tensor(0), spec.vocab)
        else:
            blank_AS = torch.tensor(spec.mask_id)
        tokens_AS = torch.where(masked_AS, blank_AS, tokens_AS)
        slot_A = uploaded(torch.tensor([entry.slot for entry in entries]), canvas.tokens_NS.device)

        self.kv.wipe([page for entry in entries for page in entry.fresh])
        self.kv.assign({e.slot: e.pages for e in entries} | {self.kv.twin(e.slot): e.twin for e in entries})
        options_AO = uploaded(torch.tensor(options, dtype=torch.float64), slot_A.device)
        self.options_NO.index_copy_(0, slot_A, options_AO)
        canvas.admit(slot_A, cursors, tokens_AS, masked_AS, torch.tensor(lengths))
        self.iteration.reset(slot_A)
        self.cache.reset(slot_A)
        blocks = torch.arange(recipe.iteration.blocks, device=slot_A.device)
        self.decoder.reset((slot_A[:, None] * len(blocks) + blocks).flatten())
        for kind, kept in self.kept.items():
            kind.admit(kept, slot_A, entries)
        return cursors, torch.where(masked_AS, ~tokens_AS, tokens_AS)

    def _cursors(self, recipe: Parts, entry: Entry) -> Cursors:
        """Where a request begins."""
        spec, request, length = recipe.model.spec, entry.request, entry.request.length
        start, end = recipe.iteration.first_region(request.start, length)
        phase = first_phase(recipe.cache, spec, start)
        if phase == Phase.PREFILL and entry.kept == prefilled(recipe.cache, spec, start):
            phase = Phase.WINDOW
        length = min((kind.first_length(recipe, request) for kind in recipe.abilities), default=length)
        seed = max(int(recipe.sampling_of(request.options).get("seed", 0)), 0)  # nobody chose one
        where = int(phase), request.start, length, start, end
        return Cursors(*where, kept=entry.kept, seed=seed, stops=int(request.stops))

    def abilities(self, recipe: Parts, shape: StepShape) -> tuple[Any, ...]:
        """The abilities that take part in steps of this shape, in the order of their hooks."""
        if (known := self.resolved.get(shape)) is None:
            if len(self.resolved) == SHAPES:  # without graphs, shapes are as many as mixtures of requests
                self.resolved.clear()
            found = (kind.of(recipe, shape) for kind in recipe.abilities)
            known = self.resolved[shape] = tuple(ability for ability in found if ability is not None)
        return known

    def block_rows(self, slot_B: Tensor, block_B: Tensor, blocks: int) -> Tensor:
        """Where the decoder's state of each active block is. int64 [R]

        A slot's rows are a ring: a block keeps its row while it is active, and a new block takes the row of one that
        left. So nothing is copied when blocks move.
        """
        if blocks == 1 or not (self.decoder.rows or self.decoder.large):
            return slot_B
        place_BK = (block_B[:, None] + torch.arange(blocks, device=slot_B.device)) % blocks
        return (slot_B[:, None] * blocks + place_BK).flatten()

    def enter_blocks(self, decoder_state: State, moved: Moved) -> None:
        """Gives the blocks that rows enter fresh decoder state, see `block_rows`."""
        entered_BK, left_B = moved.entered_BK, moved.left_B
        if not decoder_state:
            return
        if left_B is not None:
            blocks = entered_BK.shape[1]
            block_BK = (torch.arange(blocks, device=left_B.device) - left_B[:, None]) % blocks
            entered_BK = entered_BK.gather(1, block_BK)
        self.decoder.refresh(decoder_state, entered_BK.flatten())

    def options(self, recipe: Parts, slot_B: Tensor, kind: str, repeat: int = 1) -> dict[str, Tensor]:
        """Per-request options of one component: [B * repeat, 1] each, float64 (exactly as given) or int64."""
        exact_OR, whole_OR = option_columns(self.options_NO, slot_B, repeat)
        return {
            name.partition(".")[2]: (whole_OR if isinstance(default, int) else exact_OR)[i, :, None]
            for i, (name, default) in enumerate(recipe.request_options.items())
            if name.startswith(f"{kind}.")
        }
