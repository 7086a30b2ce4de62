"""Rank 0's end: it tells the others what to do, and notices at once when one of them fails."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from dinfer.engine.distributed.channel import Channel
from dinfer.engine.distributed.interrupts import uninterrupted
from dinfer.engine.distributed.motion import BEAT, SILENT, STILL, Motion

START = 120.0  # seconds in which a rank that torchrun has started says that it is there; it may load torch first
FAREWELL = 5.0  # seconds in which ranks that are told to end do so
STUCK = 5.0  # seconds after a failure from which on rank 0 itself cannot go on: it waits for its device
TICK = 0.2  # seconds between two looks at the other ranks

Result = TypeVar("Result")


class RankFailed(RuntimeError):
    """A rank of tensor parallelism has died, hangs, or met an error. The others have ended with it."""


class Leader:
    """The other ranks as rank 0 sees them. All are told the same, in one order: any thread may, one at a time.

    `turn` is held by a thread that tells something and does the same here.
    """

    def __init__(
        self, size: int, command: Sequence[str] | None, publish: Callable[[str], None] = lambda path: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Returns when ranks 1 to `size` - 1 are there. Raises RankFailed.

        `command` starts one of them; its own process id, the path of a socket and the rank follow. None: they have been
        started, and wait for the path, which `publish` is told.
        """
        self.size, self.motion, self.turn = size, Motion(), threading.RLock()
        self.failure: RankFailed | None = None
        self.patience = STILL  # seconds; more where ranks compile
        self.forgotten: deque[tuple[Any, ...]] = deque()  # messages that are told before the next one
        self.joined: Any = None  # what these ranks call each other, once they have a process group
        self.leave: Callable[[], object] = int  # what this process does in the end, when the others are gone
        self.models: dict[int, Any] = {}  # those that all ranks have, by number: the ranks that divide it
        self._numbers = count()
        self._told: dict[int, Channel] = {}
        self._watch: dict[int, Channel] = {}
        self._pids: dict[int, int] = {}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._heard: dict[int, float] = {}  # when each rank last gave a sign of life
        self._still: dict[int, float | None] = {}  # what `Motion.still` says there
        self._words: list[tuple[float, int, str]] = []  # when a rank has failed, which, and what it says of it
        self._ended, self._failing, self._failed = False, threading.Lock(), threading.Event()
        with TemporaryDirectory(prefix="dinfer-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = Path(folder) / "ranks"
            listener.bind(str(path))
            listener.listen(2 * size)
            started = threading.Event()
            commands = (
                [] if command is None else [[*command, str(os.getpid()), str(path), str(r)] for r in self._others]
            )
            # The kernel ends a process with the thread that started it, so that is the one that lives longest.
            watching = partial(self._watching, commands, environment, started)
            threading.Thread(target=watching, name="dinfer-ranks", daemon=True).start()
            try:
                started.wait()
                publish(str(path))
                self._accept(listener, START if command is None else SILENT)
            except BaseException:
                self.close()
                raise

    @property
    def _others(self) -> range:
        return range(1, self.size)

    @property
    def processes(self) -> dict[int, int]:
        """The process id of each other rank."""
        return dict(self._pids)

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._ended

    def check(self) -> None:
        """Raises RankFailed if a rank has failed."""
        if self.failure is not None:
            raise RankFailed(*self.failure.args)
        if self._ended:
            raise RankFailed("the other ranks of this model have ended: load it again")

    def tell(self, name: str, *given: Any, wanted: bool = False) -> None:
        """Tells all other ranks. Does not wait for them, nor for their answers, which may be `wanted`."""
        with self.turn, uninterrupted():
            self.check()
            messages = [(False, *self.forgotten.popleft()) for _ in range(len(self.forgotten))]
            try:
                for channel in self._told.values():
                    for message in (*messages, (wanted, name, *given)):
                        channel.send(*message)
            except OSError as error:
                raise self.reason(error) from error

    def number(self) -> int:
        """A number that nothing else of these ranks has."""
        return next(self._numbers)

    def together(
        self, name: str, *given: Any, work: Callable[[], Result], patience: float = 0.0
    ) -> tuple[Result, list[Any]]:
        """Does `work` here while the other ranks do what they are told. Returns both, theirs in order of rank.

        A ValueError or MemoryError of a rank is raised when all have answered, and nothing is lost. Any other error
        of `work` ends the ranks: they may wait for this one for ever. `patience`: for how many seconds no rank need
        move, if that is longer than within a step.
        """
        error: Exception | None = None
        with self.turn, self.motion.work(), self._patient(patience):
            self.tell(name, *given, wanted=True)
            try:
                result = work()
            except (ValueError, MemoryError) as raised:
                error = raised
            except BaseException as raised:
                raise self.reason(raised) from raised
            try:
                with self.motion.wait():
                    answers = [channel.receive() for channel in self._told.values()]
            except BaseException as raised:
                raise self.reason(raised) from raised
        if error is not None:
            raise error
        for rank, (kind, text) in zip(self._told, answers, strict=True):
            if kind != "done":
                raise (MemoryError if kind == "MemoryError" else ValueError)(f"rank {rank}: {text}")
        return result, [value for _, value in answers]

    @contextmanager
    def _patient(self, seconds: float) -> Iterator[None]:
        before, self.patience = self.patience, max(self.patience, seconds)
        try:
            yield
        finally:
            self.patience = before

    def reason(self, error: BaseException) -> BaseException:
        """What to raise where work of all ranks met `error` here: often that another rank is gone is behind it."""
        interrupt = not isinstance(error, Exception)
        if interrupt or not self._failed.wait(2 * BEAT):  # in which the watching thread finds out about the others
            self.fail(f"rank 0 (process {os.getpid()}): {type(error).__name__}: {error}")
        return error if interrupt else RankFailed(*self.failure.args) if self.failure else error

    def fail(self, why: str) -> None:
        """Ends all other ranks at once. The first reason counts."""
        with self._failing:
            if self.alive:
                self.failure = RankFailed(f"{why}. All {self.size} ranks have ended with it: start again")
                self._failed.set()
                self._end()

    def close(self) -> None:
        """Ends the other ranks in peace. Nothing can be told them any more."""
        if self.alive and self.turn.acquire(timeout=FAREWELL):  # else they are in the middle of a step
            with suppress(RankFailed):
                self.tell("end")
                self._ended = True  # so that nobody takes it for a failure
                for rank, channel in self._told.items():
                    channel.socket.settimeout(FAREWELL)
                    with suppress(TimeoutError):
                        self._left(rank, channel)
                self.leave()
            self.turn.release()
        self._ended = True
        self._end()

    def _left(self, rank: int, channel: Channel) -> None:
        """Waits until a rank has ended, after all that it may still say."""
        with suppress(EOFError, ConnectionResetError):
            while True:
                channel.receive()
        del self._pids[rank]
        if rank in self._children:
            self._children.pop(rank).wait()

    def _end(self) -> None:
        for rank, channel in (*self._told.items(), *self._watch.items()):
            channel.close()
            if rank in self._pids and rank not in self._children:
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):  # it hangs in a driver, and ends as soon as that lets it
                child.wait(FAREWELL)

    def _accept(self, listener: socket.socket, patience: float) -> None:
        """Takes the two connections of each rank. All are made within `patience` seconds, or this fails."""
        listener.settimeout(TICK)
        limit = time.monotonic() + patience
        while len(self._told) + len(self._watch) < 2 * len(self._others):
            self.check()
            if time.monotonic() > limit:
                missing = min({*self._others} - (self._told.keys() & self._watch.keys()))
                self.fail(f"{self._named(missing)} has not started within {patience:.0f} s")
            with suppress(TimeoutError):
                made = listener.accept()[0]
                made.settimeout(None)
                channel = Channel(made)
                rank, purpose, pid = channel.receive()
                self._pids[rank], self._heard[rank] = pid, time.monotonic()
                (self._told if purpose == "told" else self._watch)[rank] = channel
        self._told = dict(sorted(self._told.items()))

    def _watching(
        self, commands: list[list[str]], environment: Mapping[str, str] | None, started: threading.Event
    ) -> None:
        """Starts the ranks, and looks after them until they end."""
        try:
            for rank, command in zip(self._others, commands, strict=False):
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
                self._children[rank], self._pids[rank] = child, child.pid
        except OSError as error:
            self.fail(f"rank {rank} cannot be started: {error}")
        started.set()
        looked = beaten = time.monotonic()
        while self.alive:
            ready = self._ready(TICK)
            now = time.monotonic()
            if now - looked > 3 * BEAT:  # this process was stopped, and cannot tell for how long others were silent
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            ended = [rank for rank in ready if not self._hear(rank)]
            ended += [rank for rank, child in [*self._children.items()] if child.poll() is not None]
            if ended or self._words:
                self._blame(ended)
            if now - beaten > BEAT:
                beaten = now
                self._judge(now)
        # What waits for a device that waits for a rank that is gone waits for ever, and cannot be interrupted.
        while not self._ended:
            time.sleep(BEAT)
            if (still := self.motion.still()) is not None and still > STUCK:
                print(f"dinfer: {self.failure}", file=sys.stderr, flush=True)
                os._exit(1)

    def _ready(self, seconds: float) -> list[int]:
        """The ranks that have said something, or have ended. Waits for them."""
        watched, poll = {channel.socket.fileno(): rank for rank, channel in [*self._watch.items()]}, select.poll()
        for number in watched:
            poll.register(number, select.POLLIN)
        return [watched[number] for number, _ in poll.poll(1000 * seconds)]

    def _hear(self, rank: int) -> bool:
        """Takes what a rank says of itself. False: it has ended, and has said all."""
        try:
            for kind, what in self._watch[rank].arrived():
                self._heard[rank] = time.monotonic()
                if kind == "failed":
                    self._words.append((what[0], rank, what[1]))
                else:
                    self._still[rank] = what
        except (EOFError, OSError):
            return False
        return True

    def _blame(self, ended: list[int]) -> None:
        """Says which rank has failed. Ranks that wait for it fail too, so one that was killed counts, or the first."""
        time.sleep(TICK)  # in which they all have said why
        for rank in self._ready(0):
            self._hear(rank)
        killed = [rank for rank, child in self._children.items() if (child.poll() or 0) < 0]
        if self._words and not killed:
            _, rank, words = min(self._words)
            self.fail(f"{self._named(rank)}: {words}")
        elif ended or killed:
            self.fail(f"{self._named(rank := (killed or ended)[0])} {self._end_of(rank)}")

    def _end_of(self, rank: int) -> str:
        """How the process of a rank has ended."""
        if (child := self._children.get(rank)) is None:
            return "has ended"
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(BEAT)
            if code >= 0:
                return f"ended with status {code}"
            hint = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-code).name}{hint}"
        return "has closed its connections"

    def _judge(self, now: float) -> None:
        """Gives signs of life, and fails for a rank that gives none, or if no rank moves."""
        for rank, channel in [*self._watch.items()]:
            with suppress(OSError):  # it is gone, which is found out elsewhere
                channel.send("beat")
            if now - self._heard[rank] > SILENT:
                self.fail(f"{self._named(rank)} hangs: it has given no sign of life for {SILENT:.0f} s")
        still = {0: self.motion.still(), **self._still}
        working = {rank: seconds for rank, seconds in still.items() if seconds is not None}
        if working and min(working.values()) > self.patience:
            rank = max(working, key=lambda rank: (rank > 0, working[rank]))
            self.fail(f"{self._named(rank)} hangs: no rank has moved on in its step for {self.patience:.0f} s")

    def _named(self, rank: int) -> str:
        return f"rank {rank} (process {self._pids.get(rank) or os.getpid()})"
