"""The rows that run, with their slots, their pages and the state of every component."""

import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate

from dinfer.abilities.feeding import Feeds
from dinfer.abilities.reports import Reporting
from dinfer.engine.reader import CanvasReader
from dinfer.engine.row import Row
from dinfer.engine.runtime import BatchSize, block_of, pages_of
from dinfer.engine.worker import Worker
from dinfer.memory import PageAllocator, common, prompt_keys
from dinfer.step.state import Entry
from dinfer.step.window import prefilled


class Batch:
    """The state of the running rows, allocated once. Rows enter and leave between steps."""

    def __init__(self, worker: Worker, room: BatchSize) -> None:
        """`worker` has opened `room`."""
        self.worker, self.recipe, self.runtime, self.room = worker, worker.recipe, worker.runtime, room
        self.state = worker.state
        self.reader = CanvasReader(self.state.canvas, self.state.kept[Reporting], self.state.block, worker)
        self.pages = PageAllocator(room.pages)
        self.rows: dict[int, Row] = {}  # by slot, in order of admission
        self._free = [*range(room.slots)]  # slots, a heap

    def claim(self, row: Row) -> bool:
        """Gives a row a slot and pages. False: the row must wait. If this raises, the row has neither."""
        request, recipe, room, page = row.request, self.recipe, self.room, self.runtime.page
        fits = request.length <= room.length and block_of(request, recipe) <= room.block
        if not fits or not self._free or (shared := self._shared(row)) is None:
            return False
        options, need = request.options, pages_of(request, recipe, page)
        row.asks = recipe.asks(options, row.more)
        row.visible, row.published = need // (1 + recipe.guided(options)), len(shared)
        row.cached = len(shared) * page
        pages = self.pages.claim(shared, need - len(shared))
        if pages is None:
            return False
        row.pages, row.slot = pages, heappop(self._free)
        self.rows[row.slot] = row
        return True

    def place(self, rows: Sequence[Row]) -> None:
        """Places the requests of rows in their claimed slots."""
        entries = [self._entry(row, row.slot) for row in rows if row.slot is not None]
        cursors, tokens_AS = self.worker.admit(entries)
        for row, entry, now, tokens_S in zip(rows, entries, cursors, tokens_AS, strict=True):
            row.began, row.cursors, row.settled = time.perf_counter(), now, row.request.start
            row.open_before = list(accumulate(entry.masked, initial=0))
            row.left = row.open_before[now.end]
            if row.wants.canvas:
                row.canvas = tokens_S[: row.request.length].tolist()

    def _entry(self, row: Row, slot: int) -> Entry:
        request, shared = row.request, row.published
        return Entry(
            slot, request.prompt + [0] * (request.length - len(request.prompt)), request.masked, request.start,
            request.options, request.stops, kept=shared * self.runtime.page, pages=row.pages[: row.visible],
            twin=row.pages[row.visible :], fresh=row.pages[shared:], more=row.more,
        )  # fmt: skip

    def publish(self, row: Row) -> None:
        """Lets others share the pages of the row's prompt, as far as their keys are computed.

        Not before a step has decoded, which shows that they are finite: a NaN behind them may have spread to them.
        """
        if row.published == len(row.prefix_keys) or not row.cursors.steps:
            return
        ready = min(row.cursors.kept // self.runtime.page, len(row.prefix_keys))
        for i in range(row.published, ready):
            self.pages.publish(row.prefix_keys[i], row.pages[i])
        row.published = max(row.published, ready)

    def take_figures(self, rows: Sequence[Row]) -> None:
        """Takes what abilities counted of finished rows."""
        slots = [row.slot for row in rows if row.slot is not None]
        for ability, kept in self.state.kept.items():
            for slot, figures in ability.told(kept, slots).items():
                self.rows[slot].figures = {**self.rows[slot].figures, **figures}

    def leave(self, row: Row) -> None:
        """Takes a finished row out of the batch. The host has its canvas.

        Later requests, such as the next turn of a conversation, may share the pages of its answer, but for those of the
        last block: it was still masked when their keys were computed.
        """
        recipe, spec, page = self.recipe, self.recipe.model.spec, self.runtime.page
        mixes = isinstance(recipe.iteration, Feeds) and recipe.iteration.mixes
        own = recipe.guided(row.request.options) or mixes  # keys depend on more than tokens
        if self.runtime.share and not own and prefilled(recipe.cache, spec, row.request.length):
            unit = spec.causal_block or 1
            final = row.cursors.kept // unit * unit
            keys = prompt_keys(row.canvas[:final], final, page, unit)
            for i in range(row.published, len(keys)):
                self.pages.publish(keys[i], row.pages[i])
        self.release(row)

    def release(self, row: Row) -> None:
        """Frees the slot and pages of a row that has them. The device has nothing to do: no step names the slot."""
        if row.slot is not None and self.rows.get(row.slot) is row:
            del self.rows[row.slot]
            heappush(self._free, row.slot)
            self.pages.release(row.pages)

    def _shared(self, row: Row) -> list[int] | None:
        """Published pages that hold the beginning of the row's prompt. None: a running row computes more of it."""
        spec, request, recipe = self.recipe.model.spec, row.request, self.recipe
        unit = spec.causal_block or 1
        own = spec.prompt_block or recipe.guided(request.options)  # keys depend on more than the tokens before them
        if not row.prefix_keys and self.runtime.share and not own:
            first, _ = recipe.iteration.first_region(request.start, request.length)
            end = prefilled(recipe.cache, spec, first)
            row.prefix_keys = prompt_keys(request.prompt, end, self.runtime.page, unit)
        pages = self.pages.published(row.prefix_keys)
        if not row.prefix_keys:
            return pages
        computing = [other for other in self.rows.values() if common(row.prefix_keys, other.prefix_keys) > len(pages)]
        for other in computing:
            other.awaited = True
        if computing:
            return None
        while len(pages) * self.runtime.page % unit:
            pages.pop()  # a prefill continues at the beginning of an attention block
        return pages
