"""The rows that run, with their slots, their pages and the state of every component."""

import time
from itertools import accumulate

from dinfer.core.told import Told
from dinfer.engine.pages import PageAllocator, common, prompt_keys
from dinfer.engine.reader import CanvasReader
from dinfer.engine.room import Room, block_of, pages_of
from dinfer.engine.row import Row
from dinfer.engine.worker import Entry, Worker


class Batch:
    """The state of the running rows, allocated once. Rows enter and leave between steps."""

    def __init__(self, worker: Worker, room: Room) -> None:
        """`worker` has opened that room."""
        self.worker, self.recipe, self.runtime, self.room = worker, worker.recipe, worker.runtime, room
        self.state = worker.state
        self.reader = CanvasReader(self.state.canvas, self.state.tellings, self.state.block, worker)
        self.pages = PageAllocator(room.pages)
        self.rows: dict[int, Row] = {}  # by slot, in order of admission

    def admit(self, row: Row) -> bool:
        """Gives a row a slot and pages, and places its request there. False: it has to wait.

        If it raises, the row has neither.
        """
        request, recipe, room, page = row.request, self.recipe, self.room, self.runtime.page
        fits = request.length <= room.length and block_of(request, recipe) <= room.block
        if not fits or len(self.rows) == room.slots or (shared := self._shared(row)) is None:
            return False
        need, kept = pages_of(request, recipe, page), len(shared) * page
        pages = self.pages.claim(shared, need - len(shared))
        if pages is None:
            return False
        try:
            slot = next(slot for slot in range(room.slots) if slot not in self.rows)
            row.sampled, row.guided = recipe.sampled(request.options), recipe.guided(request.options)
            row.top_candidates = recipe.top_candidates(request.options)
            row.visible, row.published = need // (1 + row.guided), len(shared)
            entry = Entry(
                slot, request.prompt + [0] * (request.length - len(request.prompt)), request.masked,
                prompt=request.start, options=request.options, stops=request.stops, kept=kept,
                pages=pages[: row.visible], twin=pages[row.visible :], fresh=pages[len(shared) :],
                drafts=row.drafts, logprobs=row.told == Told.LOGPROBS,
            )  # fmt: skip
            row.cursors, row.canvas = self.worker.admit(entry)
            row.open_before, row.settled = list(accumulate(entry.masked, initial=0)), request.start
        except BaseException:
            self.pages.release(pages)
            raise
        row.began, row.pages, row.slot, self.rows[slot] = time.perf_counter(), pages, slot, row
        return True

    def publish(self, row: Row) -> None:
        """Lets others share the pages of a prompt whose keys have just been computed."""
        if row.published == len(row.prefix_keys):
            return
        ready = min(row.cursors.kept // self.runtime.page, len(row.prefix_keys))
        for i in range(row.published, ready):
            self.pages.publish(row.prefix_keys[i], row.pages[i])
        row.published = max(row.published, ready)

    def publish_answer(self, row: Row) -> None:
        """Lets later requests share the pages of a finished row's answer, such as the next turn of a conversation.

        Those of the last block have the keys of tokens that were still masked.
        """
        spec, page = self.recipe.model.spec, self.runtime.page
        if not self.runtime.share or row.guided or not self.recipe.cache.prefilled(spec, row.request.length):
            return
        unit = spec.causal_block or 1
        final = row.cursors.kept // unit * unit
        keys = prompt_keys(row.canvas[:final], final, page, unit)
        for i in range(row.published, len(keys)):
            self.pages.publish(keys[i], row.pages[i])

    def leave(self, row: Row) -> None:
        """Takes a row that is done out of the batch. Its canvas is known."""
        self.publish_answer(row)
        self.release(row)

    def release(self, row: Row) -> None:
        """Frees the slot and the pages of a row that has them. No device work: steps name the slots of rows alone."""
        if row.slot is not None and self.rows.get(row.slot) is row:
            del self.rows[row.slot]
            self.pages.release(row.pages)

    def _shared(self, row: Row) -> list[int] | None:
        """Published pages that hold the beginning of the row's prompt. None: a running row is computing more."""
        spec, request, recipe = self.recipe.model.spec, row.request, self.recipe
        unit = spec.causal_block or 1
        own = spec.prompt_block or recipe.guided(request.options)  # keys depend on more than the tokens before them
        if not row.prefix_keys and self.runtime.share and not own:
            first, _ = recipe.iteration.first_region(request.start, request.length)
            end = recipe.cache.prefilled(spec, first)
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
            pages.pop()  # a prefill goes on where an attention block begins
        return pages
