"""Constraints into languages, with limits, a cache, and threads that compile while others work."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from dinfer.structure.automaton import ANYTHING, Automaton, avoiding, build, cat, words
from dinfer.structure.constraint import Constraint
from dinfer.structure.grammar import compile_grammar
from dinfer.structure.json_schema import compile_schema
from dinfer.structure.language import Language, Vocabulary, language
from dinfer.structure.limits import Budget, Cancelled, ConstraintError, Limits, TooSlow, utf8_text
from dinfer.structure.regex import parse
from dinfer.structure.tools import compile_tools

TRIES = 0.05, 0.5  # seconds after which a constraint makes way for others that wait
SLICE, NAP = 0.005, 0.02  # seconds that a long try computes at once, and for which it then lets others compute
BUSY = 0.002  # of the time others in the process compute, if only in the gaps of this: then they are let
Built = tuple[Automaton, bool, int | None]  # whether it is exact, and how deep recursion was unrolled


BUILDERS: dict[str, Callable[[Constraint, Budget], Built]] = {
    "regex": lambda given, budget: (build(parse(given.text), budget), True, None),
    "choice": lambda given, budget: (words(map(utf8_text, json.loads(given.text)), budget), True, None),
    "json_schema": compile_schema,
    "grammar": compile_grammar,
    "tools": compile_tools,
}


def compile_automaton(constraint: Constraint, budget: Budget | None = None) -> Built:
    """The automaton over bytes of a constraint. Raises ConstraintError with what is wrong with it."""
    budget = budget or Budget()
    if constraint.kind not in BUILDERS:
        raise ConstraintError(f"there is no constraint {constraint.kind!r}; there are {', '.join(BUILDERS)}")
    if (size := len(constraint.text.encode("utf-8", "surrogatepass"))) > budget.limits.text:
        raise ConstraintError(f"its text has {size:,} bytes; at most {budget.limits.text:,} are possible")
    try:
        automaton, exact, depth = BUILDERS[constraint.kind](constraint, budget)
    except RecursionError as error:
        raise ConstraintError("it nests too deep to be compiled") from error
    if constraint.stop:
        automaton = avoiding(automaton, constraint.stop, "accepted answer", budget)
    if constraint.after:
        before = avoiding(ANYTHING, [constraint.after], "text", budget)
        automaton = build(cat(before, utf8_text(constraint.after), automaton), budget)
    return automaton, exact, depth


@dataclass(eq=False, slots=True)
class _Job:
    constraint: Constraint
    cancelled: threading.Event
    done: Future[Language]


class Compiler:
    """Compiles constraints for one vocabulary and keeps the languages used last. Any thread may call its methods.

    What was refused is kept as well. Each try has a thread of its own: a constraint that takes the first too long goes
    to the next. While a shorter try has work, the longer ones wait, so memory is that of one constraint a try.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Limits | None = None, kept: int = 64) -> None:
        self.vocabulary, self.limits, self.kept = vocabulary, limits or Limits(), kept
        self.tries = [*(seconds for seconds in TRIES if seconds < self.limits.seconds), self.limits.seconds]
        self._found: OrderedDict[Constraint, Language | ConstraintError] = OrderedDict()
        self._lock = threading.Lock()
        self._changed, self._closed, self._count = threading.Condition(), False, count()
        self._waiting: list[list[tuple[int, int, _Job]]] = [[] for _ in self.tries]  # heaps: the shortest text first
        self._busy = [False] * len(self.tries)
        self._threads: list[threading.Thread] = []

    def compile(self, constraint: Constraint, cancelled: threading.Event | None = None) -> Language:
        """The language of a constraint, in this thread. Raises ConstraintError, or Cancelled once the event is set."""
        return self._compile(constraint, Budget(self.limits, cancelled))

    def _compile(self, constraint: Constraint, budget: Budget) -> Language:
        if (kept := self._kept(constraint)) is not None:
            return _told(kept)
        try:
            found: Language | ConstraintError
            if constraint.posterior:
                found = replace(self._compile(replace(constraint, posterior=False), budget), posterior=True)
            else:
                automaton, exact, depth = compile_automaton(constraint, budget)
                found = language(automaton, self.vocabulary, budget, exact=exact, depth=depth)
        except ConstraintError as error:
            if isinstance(error, TooSlow) and budget.limits.seconds < self.limits.seconds:
                raise
            found = _again(error)
        with self._lock:
            self._found[constraint] = found
            while len(self._found) > self.kept or self._size() > self.limits.kept:
                self._found.popitem(last=False)
        return _told(found)

    def _size(self) -> int:
        """Bytes of the languages that are kept."""
        return sum(found.nbytes for found in self._found.values() if isinstance(found, Language))

    def _kept(self, constraint: Constraint) -> Language | ConstraintError | None:
        with self._lock:
            if constraint in self._found:
                self._found.move_to_end(constraint)
            return self._found.get(constraint)

    def submit(self, constraint: Constraint) -> Compilation:
        """Compiles in a worker thread. A language that is there waits for no other."""
        job = _Job(constraint, threading.Event(), Future())
        kept = self._kept(constraint)
        if isinstance(kept, Language):
            job.done.set_result(kept)
        elif kept is not None:
            job.done.set_exception(_again(kept))
        else:
            self._put(0, job)
        return Compilation(job.done, job.cancelled)

    def _put(self, at: int, job: _Job) -> None:
        with self._changed:
            if self._closed:
                job.done.set_exception(Cancelled())
                return
            heappush(self._waiting[at], (len(job.constraint.text), next(self._count), job))
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._work, args=(i,), name=f"dinfer-structure-{i}", daemon=True)
                    for i in range(len(self.tries))
                ]
                for thread in self._threads:
                    thread.start()
            self._changed.notify_all()

    def _work(self, at: int) -> None:
        """Compiles what waits for one of the tries."""
        limits = replace(self.limits, seconds=self.tries[at])
        while True:
            with self._changed:
                self._busy[at] = False
                self._changed.notify_all()
                while not self._waiting[at] and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job, self._busy[at] = heappop(self._waiting[at])[2], True
            if at == 0 and not job.done.set_running_or_notify_cancel():
                continue
            try:
                job.done.set_result(self._compile(job.constraint, Budget(limits, job.cancelled, self._way(at))))
            except TooSlow as error:
                if at + 1 < len(self.tries):
                    self._put(at + 1, job)
                else:
                    job.done.set_exception(error)
            except BaseException as error:
                job.done.set_exception(error)

    def _way(self, at: int) -> Callable[[threading.Event | None], None] | None:
        """What a budget calls now and then: it makes way for shorter tries, and for what else the process computes."""
        if at == 0:
            return None
        own, whole, wall = time.thread_time(), time.process_time(), time.perf_counter()

        def make_way(cancelled: threading.Event | None) -> None:
            nonlocal own, whole, wall
            with self._changed:
                while any(self._busy[i] or self._waiting[i] for i in range(at)) and not self._closed:
                    if cancelled is not None and cancelled.is_set():
                        return
                    self._changed.wait(NAP)
            if (spent := time.thread_time() - own) < SLICE:
                return
            others = time.process_time() - whole - spent
            busy = others > BUSY * (time.perf_counter() - wall)
            own, whole, wall = time.thread_time(), time.process_time(), time.perf_counter()
            if busy:
                time.sleep(NAP)

        return make_way

    def close(self) -> None:
        """Ends the worker threads; what waits for them is cancelled."""
        with self._changed:
            self._closed = True
            waiting = [job for heap in self._waiting for *_, job in heap]
            self._changed.notify_all()
        for job in waiting:
            if job.done.running() or job.done.set_running_or_notify_cancel():
                job.done.set_exception(Cancelled())


def _again(error: ConstraintError) -> ConstraintError:
    """A refusal to be kept or raised once more: an exception holds all that the frames it went through computed."""
    return type(error)(error.message, error.path)


def _told(found: Language | ConstraintError) -> Language:
    if isinstance(found, ConstraintError):
        raise _again(found)
    return found


class Compilation:
    """A language that is being compiled. `future` may be awaited with `asyncio.wrap_future`."""

    def __init__(self, future: Future[Language], cancelled: threading.Event) -> None:
        self.future, self._cancelled = future, cancelled

    def result(self, timeout: float | None = None) -> Language:
        """Waits for the language. Raises ConstraintError, Cancelled, or TimeoutError after `timeout` seconds."""
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Stops the compilation: nobody waits for it."""
        self._cancelled.set()
        self.future.cancel()
