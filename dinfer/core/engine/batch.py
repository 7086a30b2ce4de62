"""The rows that run, with their slots, their pages and the state of every component; what the host reads of it."""

import time
from collections.abc import Sequence
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dinfer.core.engine.pages import PageAllocator, common, prompt_keys
from dinfer.core.engine.row import Row
from dinfer.core.engine.runtime import BatchSize, block_of, pages_of
from dinfer.core.engine.worker import Worker
from dinfer.core.kernels.canvas import active_rows, uploaded
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.cursors import CURSORS, Status
from dinfer.core.step.mixins import Feeds
from dinfer.core.step.state import Entry
from dinfer.core.step.told import Reports
from dinfer.core.step.window import prefilled


class CursorCopy(NamedTuple):
    """A copy of cursors and active blocks that was requested, on the host. Valid until it is free."""

    slots: list[int]  # whose cursors are asked for
    cursors_NC: Tensor
    # Tokens of the blocks that were active before the round, ~token where it is open. Without `blocks`, those of an
    # earlier round.
    active_NX: Tensor
    drafts_NX: Tensor  # `Reports.draft_NS` of these positions. Without `drafts`, anything
    done: torch.cuda.Event | None  # the end of the copy


class CanvasReader:
    """Small pinned copies of cursors and active blocks, made by the device in order with its steps.

    The one place where the host waits for the device.
    """

    def __init__(self, canvas: Canvas, reports: Reports, block: int, worker: Worker) -> None:
        """`worker` waits for the end of a copy."""
        self._canvas, self._reports, self._block, self._worker = canvas, reports, block, worker
        self._before_CN = canvas.cursors_NC.T.contiguous()
        self._spare: list[CursorCopy] = []

    def begin(self) -> None:
        """Notes which blocks are active. Call it before the steps of a round that is read with `blocks`."""
        self._before_CN.copy_(self._canvas.cursors_NC.T)

    def request(self, slots: list[int], *, blocks: bool, drafts: bool) -> CursorCopy:
        """Requests a copy of these slots after all work launched so far. The caller reads it and then frees it.

        `blocks`: with the tokens of active blocks. `drafts`: also with the tokens proposed there.
        """
        copy = self._spare.pop() if self._spare else self._room()
        copy.cursors_NC.copy_(self._canvas.cursors_NC, non_blocking=True)
        if blocks:
            copy.active_NX.copy_(self.active(), non_blocking=True)
        if drafts:
            start_N = self._before_CN[CURSORS.index("start_B")]
            drafts_NX = self._reports.active(start_N, copy.drafts_NX.shape[1])
            copy.drafts_NX.copy_(drafts_NX, non_blocking=True)
        if copy.done is not None:
            copy.done.record()
        return copy._replace(slots=slots)

    def read(self, asked: CursorCopy) -> dict[int, list[int]]:
        """Waits for a copy: the cursors by slot. An interrupt leaves it as it was, to be read again."""
        if asked.done is not None:
            self._worker.wait(asked.done)
        # By numpy: torch wakes all its threads for as few as 3,000 numbers, which takes milliseconds on a busy host.
        cursors_BC = asked.cursors_NC.numpy()[asked.slots, : len(CURSORS)].tolist()
        return dict(zip(asked.slots, cursors_BC, strict=True))

    def active(self) -> Tensor:
        """The tokens of every slot's active blocks and what is behind them, ~token where it is open. int64 [N, K * L]

        Values behind the end of a row are undefined.
        """
        blocks = (self._before_CN.shape[0] - len(CURSORS)) // 2
        cursors_CN, step_KN, quota_KN = self._before_CN.split((len(CURSORS), blocks, blocks))
        slot_N = torch.arange(self._before_CN.shape[1], device=self._before_CN.device)
        start_N, *ends = (cursors_CN[CURSORS.index(name)] for name in ("start_B", "end_B", "length_B"))
        end_N = torch.maximum(*ends)  # rows that grow are shorter than their block
        _, tokens_RL, masked_RL, _, _ = active_rows(
            self._canvas.tokens_NS, self._canvas.status_NS, slot_N, start_N, end_N, step_KN.T, quota_KN.T,
            block=self._block, statuses=(int(Status.OPEN), int(Status.GIVEN)),
        )  # fmt: skip
        return torch.where(masked_RL, ~tokens_RL, tokens_RL).view(len(slot_N), -1)

    def canvases(self, slots: list[int]) -> Tensor:
        """The tokens of some slots, ~token where it is open, on the host. Waits for the device. int64 [B, S]"""
        slot_B = uploaded(torch.tensor(slots, dtype=torch.int64), self._canvas.tokens_NS.device)
        tokens_BS = self._canvas.tokens_NS.index_select(0, slot_B)
        open_BS = self._canvas.status_NS.index_select(0, slot_B) == int(Status.OPEN)
        return torch.where(open_BS, ~tokens_BS, tokens_BS).cpu()

    def free(self, asked: CursorCopy) -> None:
        """Lets another request have the memory of a copy."""
        self._spare.append(asked)

    def _room(self) -> CursorCopy:
        """The target of one more copy."""
        slots, columns = self._canvas.cursors_NC.shape
        active = (columns - len(CURSORS)) // 2 * self._block

        def host(width: int) -> Tensor:
            return torch.empty(slots, width, dtype=torch.int64, pin_memory=self._canvas.cursors_NC.is_cuda)

        return CursorCopy([], host(columns), host(active), host(active), self._worker.event())


class Claim(Enum):
    """What becomes of a row that asks for a slot."""

    ENTERS = auto()
    AWAITS = auto()  # keys of its prompt, which a running row computes
    FULL = auto()  # there is no room for it


class Batch:
    """The state of the running rows, allocated once. Rows enter and leave between steps."""

    def __init__(self, worker: Worker, room: BatchSize) -> None:
        """`worker` has opened `room`."""
        self.worker, self.recipe, self.runtime, self.room = worker, worker.recipe, worker.runtime, room
        self.state = worker.runner.state
        self.reader = CanvasReader(self.state.canvas, self.state.held(Reports), self.state.block, worker)
        self.pages = PageAllocator(room.pages)
        self.rows: dict[int, Row] = {}  # by slot, in order of admission
        self._extras: dict[Any, Any] = {}  # rows that ask for the same have one tuple, which a round compares by `is`
        self._free = [*range(room.slots)]  # slots, a heap

    @property
    def has_slot(self) -> bool:
        """Whether a row could enter, if there are pages for it."""
        return bool(self._free)

    def claim(self, row: Row) -> Claim:
        """Gives a row a slot and pages, if it enters. If this raises, the row has neither."""
        request, recipe, room, page = row.request, self.recipe, self.room, self.runtime.page
        fits = request.length <= room.length and block_of(request, recipe) <= room.block
        if not fits or not self._free:
            return Claim.FULL
        if (shared := self._shared(row)) is None:
            return Claim.AWAITS
        need = pages_of(request, recipe, page)
        row.extras = self._extras.setdefault(extras := recipe.extras(request), extras)
        row.visible, row.published = need // (1 + recipe.guided(request.options)), len(shared)
        row.cached = len(shared) * page
        pages = self.pages.claim(shared, need - len(shared))
        if pages is None:
            return Claim.FULL
        row.pages, row.slot = pages, heappop(self._free)
        self.rows[row.slot] = row
        return Claim.ENTERS

    def place(self, rows: Sequence[Row]) -> None:
        """Places the requests of rows in their claimed slots."""
        entries = [self._entry(row, row.slot) for row in rows if row.slot is not None]
        cursors, tokens_AS = self.worker.admit(entries)
        for row, now, tokens_S in zip(rows, cursors, tokens_AS, strict=True):
            row.began, row.cursors, row.settled = time.perf_counter(), now, row.request.start
            row.open_before = list(accumulate(row.request.open, initial=0))
            row.left = row.open_before[now.end]
            if row.wants.canvas:
                row.canvas = tokens_S[: row.request.length].tolist()

    def _entry(self, row: Row, slot: int) -> Entry:
        shared = row.published
        return Entry(
            slot, row.request, kept=shared * self.runtime.page, pages=row.pages[: row.visible],
            twin=row.pages[row.visible :], fresh=row.pages[shared:],
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

    def take_told(self, rows: Sequence[Row]) -> None:
        """Takes what abilities tell of finished rows."""
        slots = [row.slot for row in rows if row.slot is not None]
        for ability, kept in self.state.kept.items():
            for slot, told in ability.told(kept, slots).items():
                self.rows[slot].told += (told,)

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
            keys = prompt_keys(row.canvas[:final], final, page, unit, row.epoch, row.request.asks)
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
        if (not row.prefix_keys or row.epoch != self.pages.epoch) and self.runtime.share and not own:
            first, _ = recipe.iteration.first_region(request.start, request.length)
            end = prefilled(recipe.cache, spec, first)
            epoch, page = self.pages.epoch, self.runtime.page
            row.prefix_keys = prompt_keys(request.prompt, end, page, unit, epoch, request.asks)
        row.epoch = self.pages.epoch
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
