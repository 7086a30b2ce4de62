"""The host loop: admits requests to slots, launches the steps they need, and collects what is finished.

Requests enter and leave between steps. In each round the loop launches one step or few for each phase that some row
is in, and reads one small tensor of cursors; all else stays on the device. With CUDA graphs the next round is
launched as soon as the cursors are there, and whatever the host does with the last one overlaps it; where all rows most
likely stay in their blocks, before that (`dinfer.engine.scheduler.lookahead`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from dinfer.core.canvas import ACTIVE, Cursors, Phase, Status
from dinfer.core.kv import kv_dtype
from dinfer.core.protocols import StepShape
from dinfer.core.recipe import Recipe
from dinfer.core.state import BatchState
from dinfer.engine.pages import PageAllocator, common, prompt_keys
from dinfer.engine.reader import CursorReader
from dinfer.engine.request import Completion, Counts, NonFiniteLogits, Request, StalledRow, Update
from dinfer.engine.row import Row
from dinfer.engine.runner import Launcher
from dinfer.engine.runtime import Runtime, compiled
from dinfer.engine.scheduler.grouping import Need, Step, free_positions, plan
from dinfer.engine.scheduler.lookahead import Luck, stays
from dinfer.engine.scheduler.prefill_batching import Gathering

MANY = 1024  # positions of active blocks from which on the LM head runs on the open ones alone
PLACE = Cursors._fields.index("forwards")  # so many cursors, from the first on, say where a row is
PLANNED = PLACE + 1  # and so many decide on its next step
STALL_LIMIT = 256  # steps of one row without a commit, a new block or a further key


class Engine:
    """Runs requests through one recipe, as many at a time as there is room for; the others wait their turn.

    `run` takes a list of requests. Those who serve a model `add` requests at any time, call `step` while there is
    something to do, and `cancel`. What a request gives depends on nothing but itself. One thread at a time.

    Without `runtime.max_length` memory is allocated on first use, and grows when nothing is running: a request that is
    longer than all before it waits until then.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime, *, device: torch.device, dtype: torch.dtype) -> None:
        if runtime.compile != "none":
            recipe = replace(recipe, model=compiled(recipe.model, runtime.compile))
        self.recipe, self.runtime, self.device = recipe, runtime, device
        self.kv_dtype = kv_dtype(runtime.kv, dtype, device)
        if runtime.graphs and device.type != "cuda":
            raise ValueError(f"runtime.graphs=True needs a CUDA device, not {device}")
        self._free = free_positions(recipe.model.spec)
        self._gathering = Gathering(self._free, runtime.positions)
        self._waiting: deque[Row] = deque()
        self._rows: dict[int, Row] = {}  # by slot, in the order of admission
        self._rounds: deque[dict[int, Row]] = deque()  # on the device, each its rows by slot
        self._steps: list[tuple[StepShape, list[int]]] = []  # of the last round
        self._luck = Luck()
        self._count = 0
        self._running = False
        self._room: tuple[int, ...] = (0, 0, 0, 0)  # slots, length, L, branches that the state has room for

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not finished."""
        return bool(self._rows or self._waiting)

    def run(self, requests: Sequence[Request], *, snapshots: bool = False) -> Iterator[Update]:
        """Yields every row after each of its steps, the last time with its completion; `index` is its place here.

        Raises NonFiniteLogits or StalledRow for the row concerned. Whatever ends the loop, all slots are free after.
        RuntimeError while other requests have not finished.
        """
        if self._running or self.busy:
            raise RuntimeError("this engine is busy: exhaust or close the iterator of its running requests first")
        for request in requests:
            self._check(request)
        self._running = True
        try:
            self._waiting.extend(Row(i, request, snapshots) for i, request in enumerate(requests))
            while self.busy:
                for update in self._step():
                    if update.error is not None:
                        raise update.error
                    yield update
        finally:
            self._running = False
            self._clear()

    def add(self, request: Request, *, snapshots: bool = False) -> int:
        """Puts a request in the queue and returns the number by which `step` and `cancel` know it.

        `snapshots`: its updates hold the canvas after each step. Raises ValueError for one that will never fit.
        """
        self._idle("add")
        self._check(request)
        self._waiting.append(Row(self._count, request, snapshots))
        self._count += 1
        return self._count - 1

    def step(self) -> list[Update]:
        """One round: every row that is ready takes a step, some of those waiting may be admitted before.

        Returns the rows that took one. A row that fails has its `error` there and leaves; the others go on.
        """
        self._idle("step")
        return self._step()

    @torch.inference_mode()
    def cancel(self, index: int) -> bool:
        """Takes a request out, whether it waits or runs: its slot and pages are free. False: it is not there."""
        waiting = next((row for row in self._waiting if row.index == index), None)
        slot = next((slot for slot, row in self._rows.items() if row.index == index), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        elif slot is not None:
            self._release(slot)
        return waiting is not None or slot is not None

    def _idle(self, what: str) -> None:
        if self._running:
            raise RuntimeError(f"this engine is busy: exhaust or close the iterator of its run before you {what}")

    @torch.inference_mode()
    def _step(self) -> list[Update]:
        if not self._rounds:
            self._launch()
        rows = self._rounds[0] if self._rounds else {}
        likely = self.runtime.graphs and self._stay(rows)
        if likely and self._luck.good:  # the same step again, before it is known where this one leaves the rows
            self.launcher.launch(*self._steps[0])
            self._ask(rows)
        taken = self._take()
        if likely:
            self._luck.judge(all(row.steady for row in rows.values()))
        # Before the next round: what it would change, and rows whose slots it may give away.
        seen = {
            slot: self._seen(slot, row) for slot, row, _ in taken if row.snapshots or row.cursors.phase not in ACTIVE
        }
        if self.runtime.graphs and not self._rounds:  # what comes after, and what the caller does, then takes no time
            self._launch()
        return [self._update(slot, row, old, seen.get(slot)) for slot, row, old in taken]

    @torch.inference_mode()
    def _clear(self) -> None:
        self._waiting.clear()
        for slot in list(self._rows):
            self._release(slot)

    def _check(self, request: Request) -> None:
        """Raises ValueError for a request that can never run here, and says why."""
        request.check(self.recipe.model.spec.vocab)
        self.recipe.check(request.options)
        need, most = self._need(request), self.runtime.pages
        if self.runtime.max_length is not None and request.length > self.runtime.max_length:
            raise ValueError(
                f"a request of {request.length} positions exceeds runtime.max_length={self.runtime.max_length}: raise "
                "it, or leave it out"
            )
        if most is not None and need > most:
            raise ValueError(
                f"a request of {request.length} positions needs {need} pages of keys and values, and runtime.pages="
                f"{most}: raise it, or leave it out"
            )

    def _need(self, request: Request) -> int:
        """Pages that a request takes up."""
        return -(-request.length // self.runtime.page) * (1 + self.recipe.guided(request.options))

    def _block(self, request: Request) -> int:
        """Length of the longest active block. A block ends where the canvas does, however long the option says."""
        return min(self.recipe.iteration.block_length(request.length - request.start), request.length)

    def _grow(self) -> None:
        """Makes sure that there is room for what waits; a larger state replaces the old one, and its graphs."""
        requests, runtime = [row.request for row in self._waiting], self.runtime
        block = max(map(self._block, requests))
        branches = 1 + any(self.recipe.guided(request.options) for request in requests)
        slots, length = min(len(requests), runtime.rows), -(-max(r.length for r in requests) // 64) * 64
        if runtime.max_length is not None:
            slots, length = runtime.rows, runtime.max_length
            block = max(block, min(self.recipe.iteration.block_length(length), length))
        want, have = (slots, length, block, branches), self._room
        if all(map(int.__le__, want, have)):
            return
        slots, length, block, branches = room = tuple(map(max, want, have))
        pages = runtime.pages or branches * slots * -(-length // runtime.page)
        self._state = BatchState.alloc(
            self.recipe, slots, length, page=runtime.page, pages=pages, dtype=self.kv_dtype, device=self.device,
            block=block,
        )  # fmt: skip
        self._pages = PageAllocator(pages)
        self._reader = CursorReader(self._state.canvas.cursors_NC)
        self.launcher = Launcher(self.recipe, self._state, graphs=runtime.graphs)
        self._room = room  # last: should memory run out, what there was is still good

    def _admit(self, row: Row) -> bool:
        request, (slots, length, block, _) = row.request, self._room
        if len(self._rows) == slots:
            return False
        need, slot = self._need(request), next(s for s in range(slots) if s not in self._rows)
        fits = request.length <= length and self._block(request) <= block
        if not fits or (shared := self._shared(row)) is None:
            return False
        self._pages.share(shared)  # first, so that they are not handed out anew
        if need - len(shared) > self._pages.free:
            self._pages.release(shared)
            return False
        fresh = self._pages.allocate(need - len(shared))
        state, row.pages, row.published = self._state, shared + fresh, len(shared)
        row.sampled, row.guided = self.recipe.sampled(request.options), self.recipe.guided(request.options)
        row.most = self.recipe.most(request.options)
        row.seen = need // 2 if row.guided else need
        state.kv.wipe(fresh)
        state.kv.assign(slot, row.pages[: row.seen], row.pages[row.seen :])
        tokens, masked = request.prompt + [0] * (request.length - len(request.prompt)), request.masked
        row.cursors = state.admit(
            self.recipe, slot, tokens, masked,
            prompt=request.start, options=request.options, stops=request.stops,
            kept=len(shared) * self.runtime.page,
        )  # fmt: skip
        row.masks = list(accumulate(masked, initial=0))
        row.began = time.perf_counter()
        self._rows[slot] = row
        return True

    def _shared(self, row: Row) -> list[int] | None:
        """Pages that hold the beginning of the row's prompt; None: some more are being computed."""
        if not row.keys and self.runtime.share and not self.recipe.guided(row.request.options):
            spec, request = self.recipe.model.spec, row.request
            first, _ = self.recipe.iteration.first_region(request.start, request.length)
            end = self.recipe.cache.prefilled(spec, first)
            row.keys = prompt_keys(request.prompt, end, self.runtime.page, spec.causal_block or 1)
        pages = self._pages.published(row.keys)
        if any(common(row.keys, other.keys) > len(pages) for other in self._rows.values()):
            return None
        while len(pages) * self.runtime.page % (self.recipe.model.spec.causal_block or 1):
            pages.pop()  # a prefill goes on where an attention block begins
        return pages

    def _publish(self, row: Row) -> None:
        """Lets others share the pages whose keys have just been computed."""
        ready = min(row.cursors.kept // self.runtime.page, len(row.keys))
        for i in range(row.published, ready):
            self._pages.publish(row.keys[i], row.pages[i])
        row.published = max(row.published, ready)

    def _release(self, slot: int) -> None:
        self._state.canvas.release(slot)
        self._pages.release(self._rows.pop(slot).pages)

    def _launch(self) -> None:
        """Admits what there is room for, and launches the steps of a round."""
        if self._waiting and not self._rows:
            self._grow()
        prefills = 0
        while self._waiting and self._admit(self._waiting[0]):
            prefills += self._waiting.popleft().cursors.phase == Phase.PREFILL
        needs: dict[int, dict[int, Need]] = {phase: {} for phase in ACTIVE}
        for slot, row in self._rows.items():
            self._plan(row, row.cursors)
            needs[row.cursors.phase][slot] = row.need
        if self.runtime.gather and self._holds(prefills, needs):
            needs[Phase.PREFILL] = {}
        launched: dict[int, Row] = {}
        self._steps = []
        unit = self.recipe.model.spec.causal_block or 1
        for phase in ACTIVE:
            for step in plan(phase, needs[phase], free=self._free, limit=self.runtime.positions, unit=unit):
                self._steps.append((self._shape(phase, step), step.slots))
                self.launcher.launch(*self._steps[-1])
                launched |= {slot: self._rows[slot] for slot in step.slots}
        if launched:
            self._ask(launched)
        for row in launched.values():  # most will be where they are now; so the next round need not wait for this
            self._plan(row, row.cursors._replace(forwards=row.cursors.forwards + 1))

    def _ask(self, rows: dict[int, Row]) -> None:
        """Has the cursors read of a round that has just been launched."""
        self._reader.request()
        self._rounds.append(rows)

    def _stay(self, rows: dict[int, Row]) -> bool:
        """Whether all rows will most likely need the one step of this round once more."""
        if self._waiting or len(self._rounds) != 1 or len(self._steps) != 1 or rows.keys() != self._rows.keys():
            return False
        shape, _ = self._steps[0]
        if shape.phase != Phase.WINDOW or shape.settles or shape.scored:
            return False
        for row in rows.values():
            now = row.cursors
            self._plan(row, now._replace(forwards=now.forwards + 1))
            still = row.steady and row.need.width == shape.width and not row.snapshots
            if not still or not stays(row.masks[now.end] - now.committed, row.fastest):
                return False
        return True

    def _holds(self, came: int, needs: dict[int, dict[int, Need]]) -> bool:
        """Whether prefills wait for more, `came` of them being new. Not while others wait for their very keys."""
        decoding = [need.width for phase in (Phase.FULL, Phase.WINDOW) for need in needs[phase].values()]
        if self.runtime.share and self._waiting and self._shared(self._waiting[0]) is None:
            decoding = []
        return self._gathering.holds(came, [need.width for need in needs[Phase.PREFILL].values()], decoding)

    def _plan(self, row: Row, now: Cursors) -> None:
        """Says what the row needs a step to compute once its cursors are these, unless that is known."""
        if row.planned == now[:PLANNED]:
            return
        cache, spec = self.recipe.cache, self.recipe.model.spec
        settles = self.runtime.settle and now.phase == Phase.WINDOW
        row.planned = now[:PLANNED]
        row.need = Need(cache.width(spec, now), cache.narrow(spec, now) if settles else None)

    def _shape(self, phase: Phase, step: Step) -> StepShape:
        rows, iteration, block = [self._rows[slot] for slot in step.slots], self.recipe.iteration, self._state.block
        guided, pages = any([row.guided for row in rows]), max([row.seen for row in rows])
        if phase == Phase.PREFILL:  # draws and scores nothing, so one graph serves whatever the rows draw later
            return StepShape(phase, len(rows), step.width, iteration.blocks, block, pages, guided=guided)
        sampled = any([row.sampled for row in rows])
        positions, scored = len(rows) * iteration.blocks * block, 0
        if positions >= MANY and not sampled and not guided and self.recipe.scores_open:
            scored = sum([row.masks[row.cursors.end] - row.cursors.committed for row in rows])
        return StepShape(
            phase, len(rows), step.width, iteration.blocks, block, pages,
            sampled=sampled, guided=guided, settles=step.settles, most=max([row.most for row in rows]),
            scored=scored if 0 < scored < positions else 0,
        )  # fmt: skip

    def _take(self) -> list[tuple[int, Row, Cursors]]:
        """Waits for a round: the rows that are still there, and the cursors they had before."""
        if not self._rounds:
            return []
        taken, cursors, rows = [], self._reader.read(), self._rounds.popleft()
        for slot, row in rows.items():
            old, now = row.cursors, cursors[slot]
            # Else it was cancelled; or it was guessed to need a step that it did not.
            if self._rows.get(slot) is row and now.forwards > old.forwards:
                taken.append((slot, row, old))
                row.cursors, row.steady = now, now[:PLACE] == old[:PLACE]
                row.fastest = max(row.fastest, now.committed - old.committed)
                if row.published < len(row.keys):
                    self._publish(row)
        return taken

    def _seen(self, slot: int, row: Row) -> list[int]:
        """A row's tokens, ~token where they are still to be decoded; the slot of one that ended is free after."""
        length, canvas = row.request.asked, self._state.canvas
        tokens_S, status_S = canvas.tokens_NS[slot, :length], canvas.status_NS[slot, :length]
        seen = torch.where(status_S == int(Status.OPEN), ~tokens_S, tokens_S).tolist()
        if row.cursors.phase not in ACTIVE:
            self._release(slot)
        return seen

    def _update(self, slot: int, row: Row, old: Cursors, seen: list[int] | None) -> Update:
        now, tokens, masked, region = row.cursors, None, None, (old.start, old.end)
        if row.snapshots and seen is not None:
            tokens, masked = [max(token, ~token) for token in seen], [token < 0 for token in seen]
        error = self._error(row, old)
        if isinstance(error, StalledRow):
            self._release(slot)
        done = self._completion(row, seen) if now.phase == Phase.IDLE and seen is not None else None
        return Update(
            row.index, now.forwards, Phase(old.phase), region, tokens, masked, done,
            blocks=now.block, error=error,
        )  # fmt: skip

    def _error(self, row: Row, old: Cursors) -> NonFiniteLogits | StalledRow | None:
        now = row.cursors
        if now.phase == Phase.FAULT:
            return NonFiniteLogits(
                f"request {row.index}: the model's logits are not finite (NaN or infinite) at denoise step "
                f"{now.forwards}, in the block at positions {old.start} to {old.end - 1}. Check "
                "the checkpoint, or load the model in a wider dtype."
            )
        progress = (now.committed, now.block, now.kept)
        if progress != row.progress:
            row.progress, row.since = progress, now.forwards
        elif now.phase in ACTIVE and now.forwards - row.since >= STALL_LIMIT:
            return StalledRow(
                f"request {row.index}: {STALL_LIMIT} steps without a commit or a new block, at step "
                f"{now.forwards}. The decoder {type(self.recipe.decoder).__name__} keeps the row busy for ever."
            )
        return None

    def _completion(self, row: Row, seen: list[int]) -> Completion:
        now, spec = row.cursors, self.recipe.model.spec
        tokens = [token if token >= 0 else spec.eos_id for token in seen]
        output, stopped = row.request.answer(tokens, spec.stop_ids)
        seconds = time.perf_counter() - row.began
        counts = Counts(now.forwards, now.forwards - now.steps, now.refreshes, now.committed, len(output), seconds)
        return Completion(tokens, output, stopped, counts)
