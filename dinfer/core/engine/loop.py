"""Rounds of steps: admits requests, launches the planned steps, and reads the rows' cursors. One thread."""

import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch

from dinfer.core.engine.batch import Batch, Claim, CursorCopy
from dinfer.core.engine.errors import StalledRow
from dinfer.core.engine.request import Update
from dinfer.core.engine.row import Row
from dinfer.core.engine.runtime import BatchSize, pages_of, room_for
from dinfer.core.engine.scheduler import PlannedStep, Scheduler
from dinfer.core.engine.worker import Worker
from dinfer.core.step.blame import blamed
from dinfer.core.step.cursors import Cursors, Phase
from dinfer.core.step.told import Reports
from dinfer.core.step.window import widest

logger = logging.getLogger(__name__)


Launched = tuple[list[Row], CursorCopy]  # a launched step: its rows, and the copy that tells where it leaves them


class Loop:
    """The waiting requests, the running batch, and the updates of both.

    An error in work for one request ends that request. An error in a step ends the requests of that step.
    """

    def __init__(self, worker: Worker) -> None:
        recipe, runtime = worker.recipe, worker.runtime
        self.worker, self.recipe, self.runtime = worker, recipe, runtime
        # Whether all ranks are compared after every round, which is slow.
        self._compares = recipe.ranks.size > 1 and os.environ.get("DINFER_CHECK_RANKS", "0") not in ("", "0")
        self.scheduler = Scheduler(recipe, runtime)
        self.batch: Batch | None = None
        self.waiting: deque[Row] = deque()
        self.updates: deque[tuple[Row, Update]] = deque()  # for the caller to take
        self._room: BatchSize | None = None  # of the last batch
        self._most_pages = 0  # the most pages that memory has held; 0: no limit is known
        self.flights: deque[deque[Launched]] = deque()  # launched rounds
        self._moved: deque[Row] = deque()  # rows whose last step the caller does not know yet
        self._ended: deque[Row] = deque()  # rows whose error the caller does not know yet

    @property
    def running(self) -> list[Row]:
        """The rows that have a slot, in order of admission."""
        return [] if self.batch is None else [*self.batch.rows.values()]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.updates or self._moved or self._ended or self.running)

    def sweep(self) -> None:
        """Removes cancelled rows."""
        self.waiting = deque(row for row in self.waiting if not row.cancelled)
        for row in self.running:
            if row.cancelled and self.batch is not None:
                self.batch.release(row)

    @torch.inference_mode()
    def round(self) -> None:
        """Every row that is ready takes a step, and waiting requests enter."""
        if self._moved:  # after an interrupt
            self._hear()
            self._end()
        self._deliver()
        self.take_steps()
        self._hear()
        self._end()
        self._deliver()

    def take_steps(self) -> None:
        """Launches the steps of a round, and looks at the rows of each when it has ended."""
        if not self.flights:  # an interrupt may have left a round
            self.enter()
            self.launch()
        self._land()

    def _land(self) -> None:
        """Looks at the rows of each step of the oldest round when it has ended."""
        for flight, cursors in self.landed():
            rows, asked = flight[0]
            self.each(rows, partial(self.move, asked, cursors))

    @torch.inference_mode()
    def drain(self, stop: bool = False) -> None:
        """Looks at all rounds under way, and launches none. `stop`: rows then end with what they have."""
        while self.flights:
            self._land()
        for row in self.running if stop else ():
            row.cursors = row.cursors._replace(phase=Phase.IDLE)
            self._moved.append(row)
        self._hear()
        self._end()
        self._deliver()

    def landed(self) -> Iterator[tuple[deque[Launched], dict[int, list[int]]]]:
        """The steps of the oldest round, the next one first, each once its cursors are on the host: these, by slot.

        An interrupt leaves a step there. The host then looks at all its rows again, which changes nothing of those that
        it has seen.
        """
        taken = list[Row]()
        while (batch := self.batch) is not None and self.flights and (flight := self.flights[0]):
            rows, asked = flight[0]
            try:
                cursors = batch.reader.read(asked)
                if self._compares and len(flight) == 1:
                    self.worker.compare_ranks()
            except Exception as error:  # the device has failed, and nothing on it is reliable
                self._blame(self.running, error)
                self.close()
                return
            yield flight, cursors
            flight.popleft()
            batch.reader.free(asked)
            taken += rows
        if self.flights:
            self.flights.popleft()
        self.scheduler.observe(taken)

    def enter(self) -> None:
        """Gives waiting requests slots, and makes room first where nothing runs."""
        if self.waiting and not self.running:
            self._grow()
        self.admit()

    def _deliver(self) -> None:
        """Queues the updates of the last round for the caller."""
        while self._moved:
            if self._moved[0].error is None:
                self.each([self._moved[0]], self._tell)
            self._moved.popleft()
        while self._ended:
            self._tell(self._ended.popleft())

    def _tell(self, row: Row) -> None:
        self.updates.append((row, row.update(self.recipe)))

    def launch(self, busy: Collection[Row] = ()) -> None:
        """Launches the steps of a round. `busy`: rows that are still in a step, and wait for the round after it."""
        rows = [row for row in self.running if row.cursors.phase != Phase.IDLE and row not in busy]
        steps = self.scheduler.plan(rows)
        if rows and not steps:
            self._blame(rows, StalledRow("no step was planned for the requests that run"))
        self.each(self.start(steps), self.scheduler.prepare)

    def admit(self) -> None:
        """Gives slots to waiting requests, in their order, as long as there is room.

        A request that waits for keys which a running one computes lets those behind it go first.
        """
        batch, entered = self.batch, list[Row]()
        later, awaited = list[Row](), set[bytes]()
        try:
            while self.waiting and batch is not None and batch.has_slot:
                row = self.waiting[0]
                if not row.cancelled and row.error is None:
                    if row.prefix_keys and row.prefix_keys[-1] in awaited:
                        later.append(self.waiting.popleft())
                        continue
                    entered.append(row)
                    try:
                        if (claim := batch.claim(row)) is not Claim.ENTERS:
                            entered.pop()
                        if claim is Claim.AWAITS:
                            awaited.add(row.prefix_keys[-1])
                            later.append(self.waiting.popleft())
                            continue
                        if claim is Claim.FULL:
                            break
                    except Exception as error:
                        self._blame([entered.pop()], error)
                self.waiting.popleft()
            if entered and batch is not None:
                self._place(batch, entered)
        except BaseException as error:
            self._blame(entered, error)
        finally:
            self.waiting.extendleft(reversed(later))
        self.each(entered, self.scheduler.update)

    def _place(self, batch: Batch, rows: Sequence[Row]) -> None:
        """Places requests in their slots, all at once. If that fails, one by one, so that an error ends one request."""
        try:
            batch.place(rows)
        except Exception as error:
            if len(rows) == 1:
                self._blame(rows, error)
            else:
                self.each(rows, lambda row: batch.place([row]))

    def start(self, steps: Sequence[PlannedStep]) -> list[Row]:
        """Launches the steps of a round, and returns its rows. An error in a step ends its rows."""
        batch, flight, running = self.batch, deque[Launched](), self.running
        if batch is None or not steps:
            return []
        blocks, drafts = any(row.wants.canvas for row in running), any(row.wants.drafts for row in running)
        self.flights.append(flight)
        for shape, slots in steps:
            rows = [batch.rows[slot] for slot in slots]
            try:
                if blocks and not flight:
                    batch.reader.begin()
                self.worker.launch(shape, slots)
                flight.append((rows, batch.reader.request(slots, blocks=blocks, drafts=drafts)))
            except BaseException as error:
                self._blame(rows, error)
        return [row for rows, _ in flight for row in rows]

    def move(self, asked: CursorCopy, cursors: Mapping[int, Sequence[int]], row: Row) -> None:
        """Notes a row's cursors after a step, if the row still runs. Raises the error of a row that cannot continue."""
        if self.batch is None or row.slot is None or self.batch.rows.get(row.slot) is not row:
            return
        moved = row.advance(Cursors._make(cursors[row.slot]))
        if (failure := row.failure(self.recipe)) is not None:
            raise failure
        self.scheduler.update(row)  # also if the step did not change it: then `prepare` was wrong
        if moved:
            self.batch.publish(row)
            if row.wants.canvas:
                active_X, drafts_X = asked.active_NX[row.slot], asked.drafts_NX[row.slot]
                row.read_tokens(active_X, drafts_X, behind=self.recipe.facts.opens)
                if row.wants.deltas is not None:
                    row.settle(self.recipe)
            self._moved.append(row)

    def _hear(self) -> None:
        """Reads the log-probabilities of all new output together, since each read waits."""
        rows = [row for row in self._moved if row.wants.logprobs and len(row.heard) < len(row.fresh)]
        if self.batch is None or not rows:
            return
        slots = [row.slot for row in rows for _ in row.fresh if row.slot is not None]
        try:
            with self.worker.aside():
                heard = iter(self.batch.state.held(Reports).logprobs(slots, [at for row in rows for at in row.fresh]))
        except Exception as error:
            self._blame(rows, error)
            return
        for row in rows:
            row.heard = [*islice(heard, len(row.fresh))]

    def _end(self) -> None:
        """Frees the slots of finished rows. It reads their canvases together, since each read waits."""
        rows = [row for row in self.running if row.cursors.phase == Phase.IDLE]
        if self.batch is None or not rows:
            return
        unread = [row for row in rows if not row.wants.canvas]
        try:
            with self.worker.aside():
                canvases = self.batch.reader.canvases([row.slot for row in unread if row.slot is not None])
                self.batch.take_told(rows)
        except Exception as error:
            self._blame(rows, error)
            return
        for row, tokens_S in zip(unread, canvases, strict=True):
            row.canvas = tokens_S[: row.request.length].tolist()
        self.each(rows, self.batch.leave)

    def each(self, rows: Iterable[Row], work: Callable[[Row], None]) -> None:
        """Does work for each row. An error ends only that row."""
        for row in rows:
            try:
                work(row)
            except BaseException as error:
                self._blame([row], error)

    def _blame(self, rows: Iterable[Row], error: BaseException) -> None:
        """Ends rows with an error. Raises an interrupt again."""
        if isinstance(error, Exception):
            error = blamed(error, self.recipe.by_kind)
        traceback.clear_frames(error.__traceback__)  # which hold the tensors of a forward that ran out of memory
        for row in rows:
            if row.error is None:
                row.error = error if isinstance(error, Exception) else RuntimeError(f"{error!r} came within a step")
                self._ended.append(row)
            if self.batch is not None:
                self.batch.release(row)
        if not isinstance(error, Exception):
            raise error

    def _grow(self) -> None:
        """Makes room for waiting requests, while nothing runs. A request that fits no memory ends with the error."""
        while rows := [row for row in self.waiting if not row.cancelled]:
            requests = [row.request for row in rows]
            full = room_for(requests, self.recipe, self.runtime)
            failure: Exception | None = None
            for room in self._rooms(full, max(pages_of(r, self.recipe, self.runtime.page) for r in requests)):
                if self.batch is not None and self.batch.room.holds(room) and not self.worker.outdated:
                    return
                self.close()  # first, since memory may not hold both
                try:
                    self._open(room)
                except Exception as error:
                    traceback.clear_frames(error.__traceback__)
                    failure = error
                    continue
                if failure is not None and room.pages < full.pages:
                    self._most_pages = room.pages
                    logger.warning(
                        "memory has room for %d of %d pages of keys and values, so fewer requests run at a time. Lower "
                        "runtime.rows or runtime.max_length", room.pages, full.pages,
                    )  # fmt: skip
                return
            longest = max(rows, key=lambda row: row.request.length)
            self.waiting.remove(longest)
            self._blame([longest], failure or MemoryError("no room for a request"))

    def _rooms(self, full: BatchSize, need: int) -> Iterator[BatchSize]:
        """Room for the waiting requests and for as much as before, then for the former alone, with ever fewer pages.

        `need`: pages of the longest request.
        """
        if self._most_pages:
            full = full._replace(pages=max(min(full.pages, self._most_pages), need))
        if self._room is not None:
            yield BatchSize(*map(max, full, self._room))
        yield full
        while full.pages > need and self.runtime.pages is None:
            full = full._replace(pages=max(full.pages // 2, need))
            yield full

    def _open(self, room: BatchSize) -> None:
        self.worker.open(room)
        batch = Batch(self.worker, room)
        self.scheduler.block = batch.state.block
        self.scheduler.widest = widest(self.recipe, batch.state.block, room.length)
        self.batch, self._room = batch, room

    def close(self) -> None:
        """Frees the batch. Nothing may run."""
        self.batch = None
        self.worker.close()
        self.flights.clear()
