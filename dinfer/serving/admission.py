"""Limits the requests that run or wait, by number and by tokens. Others are told to come back later."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dinfer.serving.errors import ApiError


@dataclass(slots=True)
class Admission:
    """Counts the rows that run or wait. Refuses a row without room with status 429."""

    max_requests: int
    max_tokens: int  # positions of the canvases of all rows
    requests: int = 0
    tokens: int = 0
    open: bool = True  # False: the server is shutting down

    def close(self) -> None:
        """Refuses new requests. Running ones continue."""
        self.open = False

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused client may try again."""
        return 1 + self.requests // 64

    def check_open(self) -> None:
        if not self.open:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=self.retry_after)

    def check(self, rows: int, tokens: int = 0) -> None:
        """Raises ApiError for more rows or tokens than an idle server takes."""
        self.check_open()
        for what, more, most in (("requests", rows, self.max_requests), ("tokens", tokens, self.max_tokens)):
            if more > most:
                raise ApiError(400, f"{more} {what} at once exceed the {most} this server takes", code="too_large")

    @contextmanager
    def admit(self, lengths: Sequence[int]) -> Iterator[None]:
        """Reserves room for the rows of one request. `lengths`: positions of each row's canvas. Raises ApiError."""
        self.check(len(lengths), sum(lengths))
        for what, more, now, most in (
            ("requests", len(lengths), self.requests, self.max_requests),
            ("tokens", sum(lengths), self.tokens, self.max_tokens),
        ):
            if now + more > most:
                raise ApiError(
                    429, f"the server has {now} of at most {most} {what}: try again later",
                    code="queue_full", retry_after=self.retry_after,
                )  # fmt: skip
        self.requests, self.tokens = self.requests + len(lengths), self.tokens + sum(lengths)
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - len(lengths), self.tokens - sum(lengths)
