"""Simulates an engine like `dinfer.core.engine`: slots, a queue, gathered prefills, steps of several rows."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import simpy

from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.steps import StepTimes, Unmeasured
from benchmarks.capacity.traffic import Asked
from dinfer.core.engine.row import StepWidth
from dinfer.core.engine.runner import bucket
from dinfer.core.engine.scheduler.grouping import Group, PrefillBatching, free_positions, grouped
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import StepShape
from dinfer.serving.async_engine import PAUSE
from dinfer.speed.settling import settling


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """Seconds of CPU, as in benchmarks/results/capacity-front-end.json."""

    request: float = 0.0  # of the server's event loop for a request
    piece: float = 0.0  # of the event loop for a piece of a stream
    round: float = 0.0  # of the event loop for a round of the engine
    routed: float = 0.0  # of a router's process for a request with all its pieces

    @classmethod
    def read(cls, path: Path) -> FrontEnd:
        try:
            found = json.loads(path.read_text())["front_end"]
            return cls(**{name: float(found[name]) for name in found})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--front-end {path} has no figures of a front end: {type(error).__name__}: {error}"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How each replica runs."""

    rows: int  # runtime.rows
    gather: bool = False  # prefills wait for others
    positions: int = 8192  # runtime.positions
    most: int | None = None  # requests that run or wait, at most; others are refused
    front: FrontEnd = FrontEnd()


@dataclass(slots=True, eq=False)
class Job:
    """A request and its outcome. Times are in seconds."""

    asked: Asked
    sent: float
    admitted: float = 0.0
    first_text: float = 0.0
    first_block: float = 0.0
    ended: float = 0.0
    steps: int = 0  # forwards
    left: int = 0  # positions of the prompt that a prefill must still compute
    ends: deque[int] = field(default_factory=deque)  # the ends of its blocks on the canvas
    at: int = 0  # the beginning of its block


class Replica:
    """An engine and its queue, a process of a simpy environment."""

    def __init__(
        self, env: simpy.Environment, times: StepTimes, denoising: Denoising, setting: Setting, draw: Random,
        finished: Callable[[Job], None], committed: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`finished` is called with each job at its end, `committed` with the tokens of each block."""
        if setting.rows > times.rows * times.reach:
            raise Unmeasured(f"--rows {setting.rows}: {times.name} has steps of at most {times.rows} rows")
        self.env, self.times, self.denoising, self.setting, self.draw = env, times, denoising, setting, draw
        self.finished, self.committed = finished, committed
        self.free = free_positions(times.spec)
        self.unit = times.spec.causal_block or 1
        self.waiting: deque[Job] = deque()
        self.running = 0
        self.busy = 0.0  # seconds in which the card worked
        self.rounds = 0
        self.pieces = 0.0  # of streams
        self._canvas = 0  # positions of the canvases of the rows that run
        self._prefills: list[Job] = []
        self._arrived = 0  # prefills since the last plan
        self._wide: list[Job] = []  # rows whose next step also computes the block before
        self._full: list[Job] = []  # rows whose next step computes their whole canvas
        self._narrow = 0  # other rows that decode
        self._fresh: list[Job] = []  # rows that have not decoded yet
        self._due: dict[int, list[Job]] = defaultdict(list)  # by the round in which their block ends
        self._batching = PrefillBatching(self.free, setting.positions)
        self._work = 0.0  # seconds of work that the event loop must still do
        self._wake = env.event()

    def start(self) -> None:
        """Runs rounds from now on."""
        self.env.process(self._run())

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.waiting) + self.running

    def offer(self, job: Job) -> bool:
        """Takes a request. False: it is refused, since there are too many."""
        if self.setting.most is not None and self.load >= self.setting.most:
            return False
        if (length := job.asked.prompt + job.asked.new) > self.times.longest * self.times.reach:
            raise Unmeasured(
                f"a request of {length} positions: {self.times.name} has canvases of at most {self.times.longest}"
            )
        self._work += self.setting.front.request
        self.waiting.append(job)
        if not self._wake.triggered:
            self._wake.succeed()
        return True

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.load:
                self._wake = self.env.event()
                yield self._wake
            self._admit()
            device, moves = self._round()
            gap, host = self.times.host_ms(self.running)
            front, pieces = self.setting.front, min(self.running - len(self._prefills), device / 1e3 / PAUSE)
            self.pieces += pieces
            work, self._work = self._work + pieces * front.piece + front.round, 0.0
            self.busy += device / 1e3
            yield self.env.timeout(max(device + gap, host + 1e3 * work) / 1e3)
            self.rounds += 1
            moves()

    def _admit(self) -> None:
        while self.waiting and self.running < self.setting.rows:
            job = self.waiting.popleft()
            prompt, new, block = job.asked.prompt, job.asked.new, self.times.block
            job.admitted = self.env.now
            self.running += 1
            self._canvas += prompt + new
            job.at, end = prompt, prompt + new
            if self.times.kind == "block":
                job.left = prompt // block * block
                edges = range(job.left + block, end, block)
            else:
                edges = range(prompt + block, end, block)
            job.ends.extend([*edges, end])
            if job.left:
                self._prefills.append(job)
                self._arrived += 1
            else:
                self._enter(job, first=True)

    def _enter(self, job: Job, *, first: bool = False) -> None:
        """Enters a row whose next step is the first of its block."""
        if first:
            self._fresh.append(job)
        if self.times.kind == "dual":
            self._full.append(job)
        elif first and self.times.narrow == self.times.block:
            self._decode(job, 0)
        else:
            self._wide.append(job)

    def _decode(self, job: Job, done: int) -> None:
        """Enters a row that needs narrow steps from the next round on, after `done` steps of its block."""
        steps = self.denoising.steps(job.ends[0] - job.at, self.draw) - done
        if steps <= 0:
            self._end_block(job)
            return
        self._narrow += 1
        self._due[self.rounds + steps].append(job)

    def _round(self) -> tuple[float, Callable[[], None]]:
        """The milliseconds of a round's steps, and a function that applies their effects."""
        spent, prefilled = 0.0, list[Job]()
        if self._prefills and not self._holds():
            needs = {i: StepWidth(min(job.left, self.setting.positions)) for i, job in enumerate(self._prefills)}
            (group,) = self._groups(Phase.PREFILL, needs)
            spent += self._time("PREFILL", len(group.slots), group.width)
            prefilled = [self._prefills[slot] for slot in group.slots]
            for job in prefilled:
                job.left -= min(job.left, group.width)
        full, wide, fresh = self._full, self._wide, self._fresh
        whole = len(fresh) if self.times.narrow < self.times.block else 0  # of the wide ones: no block is before theirs
        if full:
            for group in self._groups(
                Phase.FULL, {i: StepWidth(j.asked.prompt + j.asked.new) for i, j in enumerate(full)}
            ):
                spent += self._time("FULL", len(group.slots), group.width)
        windows, settles = window_groups(
            len(wide) - whole, whole, self._narrow, self.times.block, self.times.narrow, self.times.settle, self.free,
            self.setting.positions, self.times.ahead,
        )  # fmt: skip
        for lanes, width in windows:
            spent += self._time("WINDOW", lanes, width)
        self._full, self._wide, self._fresh = [], [], []

        def moves() -> None:
            for job in fresh:
                job.first_text = self.env.now
            for job in self._due.pop(self.rounds, ()):
                self._narrow -= 1
                self._end_block(job)
            for job in wide:
                self._decode(job, 0 if settles else 1)
            for job in full:
                self._decode(job, 1)
            for job in prefilled:
                if not job.left:
                    self._prefills.remove(job)
                    self._enter(job, first=True)

        return spent, moves

    def _end_block(self, job: Job) -> None:
        end = job.ends.popleft()
        self.committed(end - job.at)
        job.at = end
        job.first_block = job.first_block or self.env.now
        if job.ends:
            self._enter(job)
            return
        job.ended = self.env.now
        self.running -= 1
        self._canvas -= job.asked.prompt + job.asked.new
        self.finished(job)

    def _holds(self) -> bool:
        new, self._arrived = self._arrived, 0
        if not self.setting.gather:
            return False
        block = self.times.block
        decoding = [2 * block] * len(self._wide) + [self.times.narrow] * self._narrow
        return self._batching.holds(new, [job.left for job in self._prefills], decoding)

    def _groups(self, phase: Phase, needs: dict[int, StepWidth]) -> Any:
        return grouped(phase, needs, free=self.free, limit=self.setting.positions, unit=self.unit)

    def _time(self, phase: str, rows: int, width: int) -> float:
        """The milliseconds of a step, drawn from measured times."""
        lanes, wide = lanes_of(phase, rows, width, self.times.block)
        if phase == "WINDOW":
            mean = -(-self._canvas // self.running)
            canvas = max(min(-(-mean // 64) * 64, self.times.longest), mean)  # few lengths, so that times are cached
            found = self.times.window(lanes, wide, canvas)
        else:
            found = self.times.wide(phase, lanes, wide)
        return found.at(self.draw.random()) if self.times.spreads else found.p50


class ByLoad(Replica):
    """A replica with `runtime.load=adaptive`: requests get the first recipe that has room for as many as are in flight.

    The rounds of all recipes follow each other.
    """

    def __init__(self, levels: Sequence[Replica]) -> None:
        """`levels`: a replica for each recipe, with `Setting.rows` up to which requests get it; the last is for all."""
        last = levels[-1]
        super().__init__(
            last.env, last.times, last.denoising, last.setting, last.draw, last.finished, last.committed
        )  # fmt: skip
        self._levels = levels

    @property
    def load(self) -> int:
        return len(self.waiting) + sum(level.load for level in self._levels)

    def _admit(self) -> None:
        self.running = sum(level.load for level in self._levels)
        while self.waiting and self.running < self.setting.rows:
            load = min(self.load, self.setting.rows)
            level = next(level for level in self._levels if load <= level.setting.rows)
            level.waiting.append(self.waiting.popleft())
            self.running += 1
        for level in self._levels:
            level.rounds = self.rounds
            level._admit()

    def _round(self) -> tuple[float, Callable[[], None]]:
        busy = [level for level in self._levels if level.load]
        rounds = [level._round() for level in busy]

        def moves() -> None:
            for level, (_, move) in zip(busy, rounds, strict=True):
                level.rounds = self.rounds
                move()

        return sum(spent for spent, _ in rounds), moves


@lru_cache(maxsize=65536)
def window_groups(
    wide: int, whole: int, narrow: int, block: int, window: int, settle: bool, free: int, limit: int,
    ahead: bool = False,
) -> tuple[list[tuple[int, int]], bool]:  # fmt: skip
    """Lanes and width of each window step of a round, and whether wide rows only settle in it.

    `wide` rows compute two blocks, `whole` ones a block, and `narrow` ones `window` positions.
    `ahead`: the round is launched before the last one is read. The engine then guesses which rows enter a block, and
    counts as right here.
    """
    rows, least, found = range(wide + whole + narrow), block if settle else None, list[Group]()
    if ahead:
        found = settling(dict.fromkeys(rows, least), {i: float(i < wide) for i in rows}, free=free, limit=limit)
    if not found:
        widths = [2 * block] * wide + [block] * whole + [window] * narrow
        needs = {i: StepWidth(width, least) for i, width in enumerate(widths)}
        found = grouped(Phase.WINDOW, needs, free=free, limit=limit, unit=block, slices=window < block)
    return [(group.slices or len(group.slots), group.width) for group in found], any(g.keys_only for g in found)


@lru_cache(maxsize=65536)
def lanes_of(phase: str, rows: int, width: int, block: int) -> tuple[int, int]:
    """Lanes and width of the graph of such a step."""
    found = bucket(StepShape(Phase[phase], rows, width, 1, block, 1), 16, 4096, 65536, 2**20)
    return found.lanes, found.width
