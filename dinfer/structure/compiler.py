"""Constraints into languages, with limits, a cache, and threads that compile while others work."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from dinfer.structure.automaton import ANYTHING, Automaton, alt, avoiding, build, cat
from dinfer.structure.constraint import Constraint
from dinfer.structure.grammar import compile_grammar
from dinfer.structure.json_schema import compile_schema
from dinfer.structure.language import Language, Vocabulary, language
from dinfer.structure.limits import Budget, Cancelled, ConstraintError, Limits, TooSlow, utf8_text
from dinfer.structure.regex import parse
from dinfer.structure.tools import compile_tools

QUICK = 0.5  # seconds after which a constraint makes way for others that wait
Built = tuple[Automaton, bool, int | None]  # whether it is exact, and how deep recursion was unrolled


BUILDERS: dict[str, Callable[[Constraint, Budget], Built]] = {
    "regex": lambda given, budget: (build(parse(given.text), budget), True, None),
    "choice": lambda given, budget: (build(alt(map(utf8_text, json.loads(given.text))), budget), True, None),
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


class Compiler:
    """Compiles constraints for one vocabulary and keeps the languages used last. Any thread may call its methods."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits | None = None, kept: int = 64) -> None:
        self.vocabulary, self.limits, self.kept = vocabulary, limits or Limits(), kept
        self._languages: OrderedDict[Constraint, Language] = OrderedDict()
        self._lock = threading.Lock()
        # Two threads, so that a few constraints that take long do not hold up all others.
        self._quick, self._slow = (ThreadPoolExecutor(1, f"dinfer-structure-{name}") for name in ("quick", "slow"))

    def compile(self, constraint: Constraint, cancelled: threading.Event | None = None) -> Language:
        """The language of a constraint, in this thread. Raises ConstraintError, or Cancelled once the event is set."""
        return self._compile(constraint, cancelled, self.limits)

    def _compile(self, constraint: Constraint, cancelled: threading.Event | None, limits: Limits) -> Language:
        if (kept := self._kept(constraint)) is not None:
            return kept
        if constraint.posterior:
            plain = self._compile(replace(constraint, posterior=False), cancelled, limits)
            found = replace(plain, posterior=True)
        else:
            budget = Budget(limits, cancelled)
            automaton, exact, depth = compile_automaton(constraint, budget)
            found = language(automaton, self.vocabulary, budget, exact=exact, depth=depth)
        with self._lock:
            self._languages[constraint] = found
            while len(self._languages) > self.kept:
                self._languages.popitem(last=False)
        return found

    def _kept(self, constraint: Constraint) -> Language | None:
        with self._lock:
            if constraint in self._languages:
                self._languages.move_to_end(constraint)
            return self._languages.get(constraint)

    def submit(self, constraint: Constraint) -> Compilation:
        """Compiles in a worker thread. A language that is there waits for no other."""
        cancelled, done = threading.Event(), Future[Language]()
        if (kept := self._kept(constraint)) is None:
            quick = replace(self.limits, seconds=min(QUICK, self.limits.seconds))
            self._let(self._quick, quick, constraint, cancelled, done)
        else:
            done.set_result(kept)
        return Compilation(done, cancelled)

    def _let(
        self, worker: ThreadPoolExecutor, limits: Limits, constraint: Constraint, cancelled: threading.Event,
        done: Future[Language],
    ) -> None:  # fmt: skip
        """Lets a worker compile, and the slow one once more what takes the quick one too long."""

        def work() -> None:
            if worker is self._quick and not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(self._compile(constraint, cancelled, limits))
            except TooSlow as error:
                if limits.seconds < self.limits.seconds:
                    self._let(self._slow, self.limits, constraint, cancelled, done)
                else:
                    done.set_exception(error)
            except BaseException as error:
                done.set_exception(error)

        def closed(asked: Future[None]) -> None:
            if asked.cancelled() and not done.cancel():
                done.set_exception(Cancelled())

        try:
            worker.submit(work).add_done_callback(closed)
        except RuntimeError:  # the compiler has been closed
            done.set_exception(Cancelled())

    def close(self) -> None:
        """Ends the worker threads; what waits for them is cancelled."""
        for worker in (self._quick, self._slow):
            worker.shutdown(wait=False, cancel_futures=True)


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
