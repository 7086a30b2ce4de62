"""How many requests may run and wait, by number and by tokens; others are told to come back later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dinfer.serving.errors import ApiError


@dataclass(slots=True)
class Admission:
    """Counts the requests that run or wait, and refuses those there is no room for with status 429."""

    max_requests: int
    max_tokens: int  # positions of all their canvases
    requests: int = 0
    tokens: int = 0
    open: bool = True  # False: the server is shutting down

    def close(self) -> None:
        """Takes no more requests; those that run go on."""
        self.open = False

    @contextmanager
    def admit(self, lengths: list[int], retry_after: int) -> Iterator[None]:
        """Holds room for one client's rows, of these lengths, while it is being served."""
        if not self.open:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=retry_after)
        for what, more, now, most in (
            ("requests", len(lengths), self.requests, self.max_requests),
            ("tokens", sum(lengths), self.tokens, self.max_tokens),
        ):
            if more > most:
                raise ApiError(400, f"{more} {what} at once are more than this server takes: at most {most}", code="too_large")
            if now + more > most:
                raise ApiError(
                    429, f"the server has {now} of at most {most} {what} in its queue: try again later",
                    code="queue_full", retry_after=retry_after,
                )  # fmt: skip
        self.requests, self.tokens = self.requests + len(lengths), self.tokens + sum(lengths)
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - len(lengths), self.tokens - sum(lengths)
