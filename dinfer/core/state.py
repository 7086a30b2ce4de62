"""All the mutable state of a running batch. Components are frozen and own none of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.branches import Added
from dinfer.core.canvas import Canvas, Cursors, Phase
from dinfer.core.kv import KVPool
from dinfer.core.protocols import State
from dinfer.core.recipe import Recipe
from dinfer.core.speculation import Drafts, widest
from dinfer.core.told import Tellings
from dinfer.kernels.canvas import option_columns
from dinfer.kernels.rows import Rows, store_rows
from dinfer.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class StatePool:
    """The state of one component, for every slot; `fresh` is what a row starts from."""

    fresh: State
    rows: State  # [N, ...], or [N * K, ...] for a decoder
    large: State  # the same for what `Decoder.large` names

    @classmethod
    def alloc(cls, fresh: State, rows: int, device, large: tuple[str, ...] = ()) -> StatePool:
        held = {name: tensor.to(device).expand(rows, *tensor.shape).clone() for name, tensor in fresh.items()}
        small = {name: tensor.to(device) for name, tensor in fresh.items() if name not in large}
        return cls(small, {name: held[name] for name in small}, {name: held[name] for name in large})

    def reset(self, slot: int) -> None:
        """Host side, when a request is admitted."""
        for name, rows in self.rows.items():
            rows[slot] = self.fresh[name]

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
    tellings: Tellings
    drafts: Drafts | None = None  # of recipes that run with candidates
    added: Added | None = None  # of iterations with branches

    @classmethod
    def alloc(
        cls, recipe: Recipe, slots: int, length: int, *, page: int, pages: int, dtype: torch.dtype, device,
        block: int | None = None, candidates: int = 0,
    ) -> BatchState:  # fmt: skip
        """Room for `slots` requests of at most `length` positions, in `pages` pages of `page` positions in `dtype`.

        `block` is L; None: what the iteration says for a generation of `length`. It is never longer than `length`:
        a block ends where the canvas does. `candidates`: the most that a step evaluates.
        """
        spec, iteration, n = recipe.model.spec, recipe.iteration, slots + 1
        # Empty slots and the scratch slot hold the defaults: 0 may be no value of an option at all.
        defaults_O = torch.tensor([float(o.default) for o in recipe.request_options], dtype=torch.float64)
        block = min(block or iteration.block_length(length), length)
        block_state = recipe.decoder.fresh_state(spec, block)
        canvas = Canvas.alloc(slots, length, iteration.blocks, spec.stop_ids, device)
        return cls(
            block=block,
            canvas=canvas,
            kv=KVPool.alloc(
                spec,
                slots,
                length,
                pages,
                page,
                dtype=dtype,
                device=device,
                candidates=max(candidates, iteration.branches, int(recipe.decoder.verifies)),
                window=widest(recipe, block, length),
                ranks=recipe.ranks,
            ),
            options_NO=defaults_O.to(device).repeat(n, 1),
            iteration=StatePool.alloc(iteration.fresh_state(spec, length), n, device),
            decoder=StatePool.alloc(block_state, n * iteration.blocks, device, recipe.decoder.large),
            cache=StatePool.alloc(recipe.cache.fresh_state(spec, length), n, device),
            tellings=Tellings.alloc(canvas),
            drafts=Drafts.alloc(n, iteration.blocks * block, device) if candidates else None,
            added=Added.alloc(n, iteration.branches, device) if iteration.branches else None,
        )

    def admit(
        self, recipe: Recipe, slot: int, tokens: Sequence[int], masked: Sequence[bool], *, prompt: int,
        options: Sequence[float] = (), stops: bool = True, kept: int = 0,
    ) -> tuple[Cursors, list[int]]:  # fmt: skip
        """Places a request in a free slot: canvas, options, fresh state of every component. Host side.

        `prompt` is the length of the part before the first position to be decoded; `options` as `Recipe.resolve`
        returns them, those left out at the end have their defaults; `kept`: up to where its pages hold the keys of a
        prompt already. Returns the row's cursors and its tokens, ~token where it is open.
        """
        given = [*options, *(float(o.default) for o in recipe.request_options[len(options) :])]
        upload(self.options_NO[slot], torch.tensor(given, dtype=torch.float64))
        spec, region = recipe.model.spec, recipe.iteration.first_region(prompt, len(tokens))
        phase = recipe.cache.first_phase(spec, region[0])
        prefilled = phase == Phase.PREFILL and kept == recipe.cache.prefilled(spec, region[0])
        seed = int(recipe.sampling_of(given).get("seed", 0))
        blank_S: Tensor | int
        if spec.mask_id is None:
            no_steps = torch.tensor(0)
            blank_S = recipe.sampling.noise(torch.tensor(seed), torch.arange(len(tokens)), no_steps, spec.vocab)
        else:
            blank_S = spec.mask_id
        beginning = None
        if recipe.decoder.grows:
            names = [f"{o.kind}.{o.name}" for o in recipe.request_options]
            beginning = min(prompt + int(given[names.index("decoder.initial")]), len(tokens))
        placed = self.canvas.admit(
            slot, list(tokens), list(masked), prompt=prompt, region=region, blank_S=blank_S,
            phase=Phase.WINDOW if prefilled else phase, kept=kept, seed=seed, stops=stops,
            beginning=beginning,
        )  # fmt: skip
        self.iteration.reset(slot)
        self.cache.reset(slot)
        if self.drafts is not None:
            self.drafts.confidence_NX[slot] = -1.0
        if self.added is not None:
            self.added.pos_NJ[slot] = -1
        blocks = recipe.iteration.blocks
        for row in range(slot * blocks, (slot + 1) * blocks):
            self.decoder.reset(row)
        return placed

    def block_rows(self, slot_B: Tensor, block_B: Tensor, blocks: int) -> Tensor:
        """Where the decoder's state of each active block is. int64 [R]

        A slot's rows are a ring: a block keeps its row while it is active, and a new block takes the row of one that
        left. So nothing is copied when blocks move.
        """
        if blocks == 1 or not self.decoder.rows:
            return slot_B
        place_BK = (block_B[:, None] + torch.arange(blocks, device=slot_B.device)) % blocks
        return (slot_B[:, None] * blocks + place_BK).flatten()

    def options(self, recipe: Recipe, slot_B: Tensor, kind: str, repeat: int = 1) -> dict[str, Tensor]:
        """Per-request options of one component: [B * repeat, 1] each, float64 (exactly as given) or int64."""
        exact_OR, whole_OR = option_columns(self.options_NO, slot_B, repeat)
        return {
            o.name: (whole_OR if isinstance(o.default, int) else exact_OR)[i, :, None]
            for i, o in enumerate(recipe.request_options)
            if o.kind == kind
        }
