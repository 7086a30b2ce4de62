"""A second, independent host loop, which a test can bend: any order of steps, any lanes, any pages."""

from __future__ import annotations

from random import Random

import torch

from dinfer.core.engine.request import Request
from dinfer.core.memory import RESERVED, PoolSize
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.step.cursors import CURSORS, Phase, Status
from dinfer.core.step.shape import KeysOnly, StepShape, Versioned, extras_of
from dinfer.core.step.state import BatchState, Entry
from dinfer.core.step.step import denoise_step
from dinfer.core.step.window import deciding
from dinfer.research.abilities.branches import branches_of

PHASE, FORWARDS = CURSORS.index("phase_B"), CURSORS.index("forwards_B")
LIMIT = 2000  # launches; far more than any of the tests needs


class Host:
    """State for a batch, with one unused slot, and pages handed out in random order."""

    def __init__(self, recipe: Recipe, requests: list[Request], *, page: int = 4, seed: int = 0) -> None:
        self.recipe, self.requests, self.page, self.random = recipe, requests, page, Random(seed)
        self.lengths = [request.length for request in requests]
        self.capacity = max(self.lengths) + 2 * page
        each, slots = -(-self.capacity // page), len(requests) + 1
        model = recipe.model
        self.state = BatchState.alloc(
            recipe, PoolSize(slots, self.capacity, 2 * slots * each, page), dtype=model.dtype, device=model.device
        )
        free = list(range(RESERVED, RESERVED + 2 * slots * each))
        self.random.shuffle(free)
        self.slots = self.random.sample(range(slots), len(requests))
        for slot, request, length in zip(self.slots, requests, self.lengths, strict=True):
            need = -(-length // page)
            twin = [free.pop() for _ in range(need * recipe.guided(request.options))]
            self.state.admit(recipe, [Entry(slot, request, pages=[free.pop() for _ in range(need)], twin=twin)])

    def step(
        self, phase: Phase, slots: list[int], *, width: int | None = None, pages: int | None = None,
        settles: bool = False, branches: bool = False,
    ) -> None:  # fmt: skip
        """A step that is wide enough for every row, whatever phase that is in."""
        every = -(-self.capacity // self.page)
        shape = StepShape(
            phase,
            len(slots),
            width or self.capacity,
            self.recipe.iteration.blocks,
            self.state.block,
            pages or every,
        ).adding(*extras_of(extra for request in self.requests for extra in self.recipe.extras(request)))
        shape = shape.adding(*([KeysOnly()] if settles else []))
        if branches and (count := branches_of(self.recipe.iteration)):
            shape = shape.adding(Versioned(count))
        denoise_step(self.recipe, self.state, shape, torch.tensor(slots, device=self.recipe.model.device))

    def phases(self) -> list[int]:
        return [int(self.state.canvas.cursors_NC[slot, PHASE]) for slot in self.slots]

    def live(self) -> list[Phase]:
        """Phases in which there is some row."""
        return [phase for phase in self.recipe.phases if phase in self.phases()]

    def run_at_random(self) -> None:
        """Steps on random groups of slots, padded with scratch lanes, until every row is done.

        One step in five is of any phase, so often of one that no row is in.
        """
        for _ in range(LIMIT):
            if not (live := self.live()):
                return
            group = self.random.sample(self.slots, self.random.randint(1, len(self.slots)))
            group += [self.state.canvas.scratch] * self.random.randint(0, 3)
            self.random.shuffle(group)
            phase = self.random.choice(live if self.random.random() < 0.8 else self.recipe.phases)
            self.step(phase, group, branches=phase == deciding(self.recipe) and self.random.random() < 0.8)
        raise AssertionError(f"rows are still in phases {self.phases()} after {LIMIT} launches")

    def canvases(self) -> list[list[int]]:
        """Tokens of every request; the eos id where an early stop left a position undecoded."""
        canvas, eos = self.state.canvas, self.recipe.model.spec.eos_id
        rows = []
        for slot, length in zip(self.slots, self.lengths, strict=True):
            open_S = canvas.status_NS[slot, :length] == int(Status.OPEN)
            rows.append(torch.where(open_S, eos, canvas.tokens_NS[slot, :length]).tolist())
        return rows

    def forwards(self) -> list[int]:
        return [int(self.state.canvas.cursors_NC[slot, FORWARDS]) for slot in self.slots]

    def steps(self) -> list[int]:
        """Forwards of every request that decoded."""
        return self.state.canvas.cursors_NC[self.slots, CURSORS.index("steps_B")].tolist()

    def addresses(self) -> dict[str, int]:
        state, canvas = self.state, self.state.canvas
        tensors = {
            "tokens": canvas.tokens_NS, "status": canvas.status_NS, "cursors": canvas.cursors_NC,
            "stop": canvas.stop_X, "k": state.kv.k_JPTGE, "v": state.kv.v_JPTGE,
            "table": state.kv.table_NP, "options": state.options_NO,
        }  # fmt: skip
        if (local := state.kv.local) is not None:
            tensors |= {"local k": local.k_JPTGE, "local v": local.v_JPTGE}
        for kind in ("iteration", "decoder", "cache"):
            pool = getattr(state, kind)
            tensors |= {f"{kind}.{name}": tensor for name, tensor in pool.rows.items()}
            tensors |= {f"{kind}.fresh.{name}": tensor for name, tensor in pool.fresh.items()}
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def keys(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request by position. [J, S, G, E] each"""
        pages = self.state.kv.table_NP[self.slots[row]]
        return tuple(pool[:, pages].flatten(1, 2) for pool in (self.state.kv.k_JPTGE, self.state.kv.v_JPTGE))
