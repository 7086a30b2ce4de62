"""The host loop: admits requests to slots, launches the steps they need, and collects what is finished.

Requests enter and leave between steps. The loop reads one small tensor of cursors a round and launches one step for
each phase that some row is in; all else stays on the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dinfer.canvas import ACTIVE, CURSORS, Phase, Status
from dinfer.compose import Recipe
from dinfer.engine.grouping import groups
from dinfer.engine.launcher import Launcher
from dinfer.engine.pages import PageAllocator
from dinfer.engine.request import Completion, Counts, NonFiniteLogits, Request, StalledRow, Update
from dinfer.protocols import StepShape
from dinfer.state import BatchState

WIDTH_CURSORS = ("kept", "prompt", "forwards", "start", "end", "length")  # that `CachePolicy.width` may read
STALL_LIMIT = 256  # steps of one row without a commit or a new block


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How the engine runs, whatever the recipe."""

    rows: int = 32  # requests in flight
    page: int = 16  # positions per page of keys and values
    graphs: bool = False  # run each step as a CUDA graph

    def __post_init__(self) -> None:
        for name in ("rows", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"runtime.{name}={getattr(self, name)} must be at least 1")


@dataclass(slots=True)
class _Row:
    """A request in a slot."""

    index: int
    request: Request
    pages: list[int]
    began: float
    sampled: bool  # its steps have to draw tokens
    guided: bool  # it has a second branch
    progress: tuple[int, int] = (-1, -1)  # tokens committed and blocks finished, when they last changed
    since: int = 0  # forwards at that time


class Engine:
    """Runs requests through one recipe. Memory is allocated on first use and grows with the largest batch."""

    def __init__(self, recipe: Recipe, runtime: Runtime, *, device: torch.device, dtype: torch.dtype) -> None:
        self.recipe, self.runtime, self.device, self.dtype = recipe, runtime, device, dtype
        if runtime.graphs and device.type != "cuda":
            raise ValueError(f"runtime.graphs=True needs a CUDA device, not {device}")
        self._rows: dict[int, _Row] = {}
        self._running = False
        self._room: tuple[int, ...] = (0, 0, 0, 0)  # slots, length, L, branches that the state has room for

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], *, snapshots: bool = False) -> Iterator[Update]:
        """Yields every row after each of its steps, the last time with its completion.

        Raises NonFiniteLogits or StalledRow for the row concerned. Whatever ends the loop, all slots are free after.
        One run at a time: RuntimeError while another one is neither exhausted nor closed.
        """
        if self._running:
            raise RuntimeError("this engine is busy: exhaust or close the iterator of its running requests first")
        self._running = True
        pending = deque(enumerate(requests))
        try:
            self._reserve(requests)
            while pending or self._rows:
                while pending and self._admit(*pending[0]):
                    pending.popleft()
                before = self._cursors()
                for phase in ACTIVE:
                    widths = {s: self._width(before[s]) for s in self._rows if before[s]["phase_B"] == phase}
                    for slots in groups(widths):
                        width, length = max(widths[s] for s in slots), max(before[s]["length_B"] for s in slots)
                        self.launcher.launch(self._shape(phase, slots, width, length), slots)
                yield from self._collect(before, self._cursors(), snapshots)
        finally:
            self._running = False
            for slot in list(self._rows):
                self._release(slot)

    def _reserve(self, requests: Sequence[Request]) -> None:
        """Makes sure that the state has room; a larger one replaces it, and its graphs, between runs."""
        longest = max((r.length for r in requests), default=0)
        slots, length = min(len(requests), self.runtime.rows), -(-longest // 64) * 64
        block = self.recipe.iteration.block_length(max((r.length - r.start for r in requests), default=1))
        branches = 1 + any(self.recipe.guided(request.options) for request in requests)
        want, have = (slots, length, block, branches), self._room
        if all(map(int.__le__, want, have)):
            return
        slots, length, block, branches = room = tuple(map(max, want, have))
        pages = branches * slots * -(-length // self.runtime.page)
        self._state = BatchState.alloc(
            self.recipe, slots, length,
            page=self.runtime.page, pages=pages, dtype=self.dtype, device=self.device, block=block,
        )  # fmt: skip
        self._pages = PageAllocator(pages)
        self.launcher = Launcher(self.recipe, self._state, graphs=self.runtime.graphs)
        self._room = room  # last: should memory run out, what there was is still good

    def _admit(self, index: int, request: Request) -> bool:
        need, guided = -(-request.length // self.runtime.page), self.recipe.guided(request.options)
        slot = next((s for s in range(self._room[0]) if s not in self._rows), None)
        if slot is None or need * (1 + guided) > self._pages.free:
            return False
        state, pages = self._state, self._pages.allocate(need * (1 + guided))
        state.kv.wipe(pages)
        state.kv.assign(slot, pages[:need], pages[need:])
        tokens = request.prompt + [0] * request.new_tokens
        state.admit(
            self.recipe, slot, tokens, request.masked,
            prompt=request.start, options=request.options, stops=request.stops,
        )  # fmt: skip
        sampled = self.recipe.sampled(request.options)
        self._rows[slot] = _Row(index, request, pages, time.perf_counter(), sampled, guided)
        return True

    def _release(self, slot: int) -> None:
        self._state.canvas.release(slot)
        self._pages.release(self._rows.pop(slot).pages)

    def _cursors(self) -> list[dict[str, int]]:
        """The cursors of every slot: the one place where the host waits for the device."""
        return [dict(zip(CURSORS, row, strict=True)) for row in self._state.canvas.cursors_NC.tolist()]

    def _width(self, row: dict[str, int]) -> int:
        cursors = {name: row[f"{name}_B"] for name in WIDTH_CURSORS}
        return self.recipe.cache.width(self.recipe.model.spec, Phase(row["phase_B"]), **cursors)

    def _shape(self, phase: Phase, slots: list[int], width: int, length: int) -> StepShape:
        blocks, pages = self.recipe.iteration.blocks, -(-length // self.runtime.page)
        sampled = any(self._rows[slot].sampled for slot in slots)
        guided = any(self._rows[slot].guided for slot in slots)
        return StepShape(phase, len(slots), width, blocks, self._state.block, pages, sampled=sampled, guided=guided)

    def _collect(self, before: list[dict[str, int]], after: list[dict[str, int]], snapshots: bool) -> Iterator[Update]:
        for slot in list(self._rows):
            row, old, now = self._rows[slot], before[slot], after[slot]
            phase = Phase(now["phase_B"])
            if phase == Phase.FAULT:
                raise NonFiniteLogits(
                    f"request {row.index}: the model's logits are not finite (NaN or infinite) at denoise step "
                    f"{now['forwards_B']}, in the block at positions {old['start_B']} to {old['end_B'] - 1}. Check "
                    "the checkpoint, or load the model in a wider dtype."
                )
            self._check_progress(row, now)
            done = self._finish(slot, now) if phase == Phase.IDLE else None
            tokens = masked = None
            if snapshots:
                length = now["length_B"]
                tokens = self._state.canvas.tokens_NS[slot, :length].tolist()
                masked = (self._state.canvas.status_NS[slot, :length] == int(Status.OPEN)).tolist()
            if done:
                self._release(slot)
            region = (old["start_B"], old["end_B"])
            yield Update(row.index, now["forwards_B"], Phase(old["phase_B"]), region, tokens, masked, done)

    def _check_progress(self, row: _Row, now: dict[str, int]) -> None:
        progress = (now["committed_B"], now["block_B"])
        if progress != row.progress:
            row.progress, row.since = progress, now["forwards_B"]
        elif now["forwards_B"] - row.since >= STALL_LIMIT:
            raise StalledRow(
                f"request {row.index}: {STALL_LIMIT} steps without a commit or a new block, at step "
                f"{now['forwards_B']}. The decoder {type(self.recipe.decoder).__name__} keeps the row busy for ever."
            )

    def _finish(self, slot: int, now: dict[str, int]) -> Completion:
        row, canvas, spec = self._rows[slot], self._state.canvas, self.recipe.model.spec
        length = now["length_B"]
        places = [i for i, masked in enumerate(row.request.masked) if masked]
        open_S = canvas.status_NS[slot, :length] == int(Status.OPEN)
        tokens = torch.where(open_S, spec.eos_id, canvas.tokens_NS[slot, :length]).tolist()
        filled = [tokens[i] for i in places]
        end = next((i for i, token in enumerate(filled) if token in spec.stop_ids), len(filled))
        stopped = row.request.stops and end < len(filled)
        output = filled[:end] if stopped else filled
        counts = Counts(
            forwards=now["forwards_B"],
            refreshes=now["refreshes_B"],
            committed=now["committed_B"],
            tokens=len(output),
            seconds=time.perf_counter() - row.began,
        )
        return Completion(tokens, output, stopped, counts)
