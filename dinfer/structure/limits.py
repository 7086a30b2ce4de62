"""What a compilation may cost, and what is said when a constraint cannot be compiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


class ConstraintError(ValueError):
    """A constraint that is wrong, not supported or too large.

    `path`: the keyword or the position at fault, such as "properties.a.not"; empty where it is the whole.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.message, self.path = message, path


class TooLarge(ConstraintError):
    """The constraint needs more states than the limit allows."""


class TooSlow(ConstraintError):
    """The constraint takes longer to compile than the limit allows."""


class Cancelled(Exception):
    """Nobody waits for the result any more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one compilation: seconds of its thread, bytes of text, states, and token classes.

    `kept`: bytes of the languages that a compiler keeps for later requests.
    """

    seconds: float = 5.0
    text: int = 1024 * 1024
    states: int = 8192
    classes: int = 16384
    kept: int = 2**29


class Budget:
    """What is left of the limits while a compilation runs, in one thread.

    Seconds are those that the thread computes: what else runs on the machine does not make a constraint too large.
    `make_way(cancelled)` is called now and then, and returns when the thread may go on.
    """

    def __init__(
        self, limits: Limits | None = None, cancelled: threading.Event | None = None,
        make_way: Callable[[threading.Event | None], None] | None = None,
    ) -> None:  # fmt: skip
        self.limits = limits or Limits()
        self.cancelled, self.make_way = cancelled, make_way
        self.until: float | None = None

    def check(self, states: int = 0) -> None:
        """Raises if time is up, nobody waits, or an automaton under construction has far too many states."""
        if self.make_way is not None:
            self.make_way(self.cancelled)
        if self.cancelled is not None and self.cancelled.is_set():
            raise Cancelled
        now = time.thread_time()
        if self.until is None:  # begun in the thread that compiles, which may be another one than made this
            self.until = now + self.limits.seconds
        if now >= self.until:
            raise TooSlow(f"takes longer than {self.limits.seconds:g} s to compile; make it simpler")
        if states > 4 * self.limits.states:  # before it is minimised
            raise TooLarge(f"has more than {4 * self.limits.states:,} states before it is minimised")


def utf8_text(text: str) -> bytes:
    """The bytes of a literal text. Raises ConstraintError if it has half a pair of surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(f"{text!r} is not Unicode text: {error.reason}") from error
