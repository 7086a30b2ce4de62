"""Rank 0's end: it starts the other ranks, tells them what to do, and notices at once if one of them fails."""

import atexit
import faulthandler
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

from dinfer.core.engine.errors import RankFailed
from dinfer.scale.parallel.follower import BEAT, SILENT, STILL, Channel, Follower, Motion, uninterrupted

START = 120.0  # seconds in which a rank that torchrun has started must connect; it may load torch first
FAREWELL = 5.0  # seconds in which ranks that are told to end must end
STUCK = 5.0  # seconds without a move, after a failure, after which rank 0 counts as blocked by its device
TICK = 0.2  # seconds between two looks at the other ranks
FIELD = "runtime.tensor_parallel"
# Variables of torchrun. Processes that dinfer starts must not see them.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

Result = TypeVar("Result")


class Leader:
    """The other ranks as rank 0 sees them. All get the same messages in the same order.

    Any thread may send, one at a time: it holds `turn` while it sends a message and does the same here.
    """

    def __init__(
        self, size: int, command: Sequence[str] | None, publish: Callable[[str], None] = lambda path: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Returns when ranks 1 to `size` - 1 have connected. Raises RankFailed.

        `command` starts a rank. Its last arguments will be the id of this process, the path of a socket, and the rank.
        None: the ranks run already and wait for the path, with which `publish` is called.
        """
        self.size, self.motion, self.turn = size, Motion(), threading.RLock()
        self.failure: RankFailed | None = None
        self.patience = STILL  # seconds; more if ranks compile
        self.forgotten: deque[tuple[Any, ...]] = deque()  # messages that are sent before the next one
        self.joined: Any = None  # the process group of these ranks, once there is one
        self.leave: Callable[[], object] = int  # called at the end, when the others are gone
        self.models: dict[int, Any] = {}  # the ranks that divide each model, by the model's number
        self.processes: dict[int, int] = {}  # the process id of each other rank, until it ends in peace
        self._numbers = count()
        self._told: dict[int, Channel] = {}
        self._watch: dict[int, Channel] = {}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._heard: dict[int, float] = {}  # time of each rank's last sign of life
        self._still: dict[int, float | None] = {}  # each rank's `Motion.still`
        self._words: list[tuple[float, int, str]] = []  # of failed ranks: time, rank, reason
        self._ended, self._failing, self._failed = False, threading.Lock(), threading.Event()
        with TemporaryDirectory(prefix="dinfer-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = Path(folder) / "ranks"
            listener.bind(str(path))
            listener.listen(2 * size)
            started = threading.Event()
            commands = (
                [] if command is None else [[*command, str(os.getpid()), str(path), str(r)] for r in self._others]
            )
            # The kernel ends a process with the thread that started it, so the thread that lives longest starts them.
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
    def alive(self) -> bool:
        return self.failure is None and not self._ended

    def check(self) -> None:
        """Raises RankFailed if a rank has failed."""
        if self.failure is not None:
            raise RankFailed(*self.failure.args)
        if self._ended:
            raise RankFailed("the other ranks of this model have ended: load it again")

    def tell(self, name: str, *given: Any, wanted: bool = False) -> None:
        """Sends a message to all other ranks, and does not wait. `wanted`: they will answer. Raises RankFailed."""
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
        """A number that is unique among these ranks."""
        return next(self._numbers)

    def together(
        self, name: str, *given: Any, work: Callable[[], Result], patience: float = 0.0
    ) -> tuple[Result, list[Any]]:
        """Does `work` here while the other ranks do what they are told. Returns its result and theirs, by rank.

        A ValueError or MemoryError of a rank is raised once all have answered, and leaves the ranks as they were. Any
        other error of `work` ends the ranks, since they may wait for this one for ever. `patience`: seconds for which
        no rank need move, if longer than within a step.
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
        """The error to raise after work of all ranks met `error` here. Its cause is often that another rank is gone."""
        interrupt = not isinstance(error, Exception)
        if interrupt or not self._failed.wait(2 * BEAT):  # meanwhile the watching thread may find a lost rank
            self.fail(f"rank 0 (process {os.getpid()}): {type(error).__name__}: {error}")
        return error if interrupt else RankFailed(*self.failure.args) if self.failure else error

    def fail(self, why: str) -> None:
        """Ends all other ranks at once. Only the first reason is kept."""
        with self._failing:
            if self.alive:
                self.failure = RankFailed(f"{why}. All {self.size} ranks have ended with it: start again")
                self._failed.set()
                self._end()

    def close(self) -> None:
        """Lets the other ranks end. They take no more messages."""
        if self.alive and self.turn.acquire(timeout=FAREWELL):  # otherwise they are within a step
            with suppress(RankFailed):
                self.tell("end")
                self._ended = True  # so that their end does not count as a failure
                for rank, channel in self._told.items():
                    channel.socket.settimeout(FAREWELL)
                    with suppress(TimeoutError):
                        self._left(rank, channel)
                self.leave()
            self.turn.release()
        self._ended = True
        self._end()

    def _left(self, rank: int, channel: Channel) -> None:
        """Reads what a rank still sends, and waits until it has ended."""
        with suppress(EOFError, ConnectionResetError):
            while True:
                channel.receive()
        del self.processes[rank]
        if rank in self._children:
            self._children.pop(rank).wait()

    def _end(self) -> None:
        for rank, channel in (*self._told.items(), *self._watch.items()):
            channel.close()
            if rank in self.processes and rank not in self._children:
                with suppress(ProcessLookupError):
                    os.kill(self.processes[rank], signal.SIGKILL)
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):  # it hangs in a driver, and ends as soon as the driver returns
                child.wait(FAREWELL)

    def _accept(self, listener: socket.socket, patience: float) -> None:
        """Accepts the two connections of each rank. Raises RankFailed if one is missing after `patience` seconds."""
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
                self.processes[rank], self._heard[rank] = pid, time.monotonic()
                (self._told if purpose == "told" else self._watch)[rank] = channel
        self._told = dict(sorted(self._told.items()))

    def _watching(
        self, commands: list[list[str]], environment: Mapping[str, str] | None, started: threading.Event
    ) -> None:
        """Starts the ranks, and watches them until they end."""
        # Ctrl-C reaches all processes of a terminal, but only rank 0 decides. A child has the mask of this thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank, command in zip(self._others, commands, strict=False):
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
                self._children[rank], self.processes[rank] = child, child.pid
        except OSError as error:
            self.fail(f"rank {rank} cannot be started: {error}")
        started.set()
        looked = beaten = time.monotonic()
        while self.alive:
            ready = self._ready(TICK)
            now = time.monotonic()
            if now - looked > 3 * BEAT:  # this process was stopped, and cannot know how long others were silent
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            ended = [rank for rank in ready if not self._hear(rank)]
            ended += [rank for rank, child in [*self._children.items()] if child.poll() is not None]
            if ended or self._words:
                self._blame(ended)
            if now - beaten > BEAT:
                beaten = now
                self._judge(now)
        # A device that waits for a lost rank blocks its thread for ever, and nothing can interrupt the thread.
        while not self._ended:
            time.sleep(BEAT)
            if (still := self.motion.still()) is not None and still > STUCK:
                print(f"dinfer: {self.failure}", file=sys.stderr, flush=True)
                os._exit(1)

    def _ready(self, seconds: float) -> list[int]:
        """The ranks that have sent something or ended, after at most `seconds`."""
        watched, poll = {channel.socket.fileno(): rank for rank, channel in [*self._watch.items()]}, select.poll()
        for number in watched:
            poll.register(number, select.POLLIN)
        return [watched[number] for number, _ in poll.poll(1000 * seconds)]

    def _hear(self, rank: int) -> bool:
        """Takes a rank's signs of life. False: it has ended, and nothing is left to read."""
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
        """Fails for the rank that failed first. Ranks that wait for it fail too, so a killed one comes first."""
        time.sleep(TICK)  # so that all have sent their reasons
        for rank in self._ready(0):
            self._hear(rank)
        killed = [rank for rank, child in self._children.items() if (child.poll() or 0) < 0]
        if self._words and not killed:
            _, rank, words = min(self._words)
            self.fail(f"{self._named(rank)}: {words}")
        elif ended or killed:
            self.fail(f"{self._named(rank := (killed or ended)[0])} {self._end_of(rank)}")

    def _end_of(self, rank: int) -> str:
        """Says how the process of a rank has ended."""
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
        """Sends signs of life. Fails for a rank that sends none, or if no rank moves."""
        for rank, channel in [*self._watch.items()]:
            with suppress(OSError):  # the rank is gone, which `_hear` finds out
                channel.send("beat")
            if now - self._heard[rank] > SILENT:
                self.fail(f"{self._named(rank)} hangs: it has given no sign of life for {SILENT:.0f} s")
        still = {0: self.motion.still(), **self._still}
        working = {rank: seconds for rank, seconds in still.items() if seconds is not None}
        if working and min(working.values()) > self.patience:
            rank = max(working, key=lambda rank: (rank > 0, working[rank]))
            self.fail(f"{self._named(rank)} hangs: no rank has moved on in its step for {self.patience:.0f} s")

    def _named(self, rank: int) -> str:
        return f"rank {rank} (process {self.processes.get(rank) or os.getpid()})"


_leaders: list[Leader] = []
_nowhere = open(os.devnull, "w")  # noqa: SIM115


def by_torchrun(size: int) -> bool:
    """Whether torchrun has started the ranks. Raises ValueError unless it started `size` on this machine."""
    if size == 1 or (found := int(os.environ.get("WORLD_SIZE", "1"))) == 1:
        return False
    if found != size:
        raise ValueError(
            f"{FIELD}={size}, and torchrun has started {found} processes. For one model on all of them, start {size} "
            f"(torchrun --nproc-per-node {size}), or none: without torchrun dinfer starts them itself. For a model on "
            f"each of them, as `dinfer eval` runs, use {FIELD}=1"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", found)) != found:
        raise ValueError(f"{FIELD}={size}: torchrun has spread the ranks over machines, and they must be on one")
    return True


def check_copies(size: int) -> None:
    """Raises ValueError if torchrun has started several processes that would all do the same."""
    if size == 1 and (found := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"torchrun has started {found} processes, and with {FIELD}=1 each would do the same: set {FIELD}={found}, "
            "or start without torchrun. `dinfer eval` alone shares its work among processes"
        )


def follows(size: int) -> bool:
    """Whether torchrun started this process as a rank other than 0. Raises as `by_torchrun`."""
    return by_torchrun(size) and int(os.environ["RANK"]) > 0


def leader() -> Leader | None:
    """The ranks that this process leads or led last; None: it never led any."""
    return _leaders[-1] if _leaders else None


def started(size: int, publish: Callable[[str], None], follow: Callable[[Follower], object]) -> Leader:
    """The leader of `size` ranks: the present one if it has as many, or a new one.

    `follow`: what a new rank does, a function of a module. If torchrun has started the ranks, `publish` is called with
    the path where the leader listens instead. Raises ValueError, RankFailed.
    """
    if (present := leader()) is not None and present.alive:
        if present.size == size:
            return present
        if present.models:
            raise ValueError(
                f"{FIELD}={size}, and this process has a model with {FIELD}={present.size}: delete that, or use a "
                "process of its own for each"
            )
        present.close()
    if by_torchrun(size):
        made = Leader(size, None, publish)
    else:
        command = [sys.executable, "-m", __package__, follow.__module__, follow.__name__]
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)  # a rank imports what this process can
        own = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
        made = Leader(size, command, environment=own | {"PYTHONPATH": path})
    _leaders[:] = [made]
    return made


@atexit.register
def end() -> None:
    """Ends the ranks that this process leads. NCCL and torch may wait for ever, so time is limited."""
    if (present := leader()) is not None:
        faulthandler.dump_traceback_later(6 * FAREWELL, exit=True, file=_nowhere)
        present.close()
        if present.failure is not None:
            faulthandler.dump_traceback_later(FAREWELL, exit=True, file=_nowhere)
