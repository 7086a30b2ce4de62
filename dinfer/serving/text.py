"""From decided tokens to text that is never taken back, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a token may end in the middle of a character


class TextStream:
    """Turns decided tokens, as they come, into pieces of text. Their sum is the text of all tokens.

    `decode` turns ids into text. `stops`: strings that end the answer; the text ends before the first of them. What may
    be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._begin = self._end = 0  # the tokens of the last complete piece, which the next one is decoded behind
        self._text = ""  # of all complete pieces
        self._marks: list[tuple[int, int]] = []  # lengths of text and of tokens after each complete piece
        self._sent = 0
        self.stopped = False

    @property
    def tokens(self) -> int:
        """How many tokens the text takes: up to the one in which a stop string begins."""
        if not self.stopped:
            return len(self._ids)
        marks = [(0, 0), *self._marks]
        return next((count for length, count in marks if length >= len(self._text)), len(self._ids))

    @property
    def text(self) -> str:
        """The text so far, without the stop string."""
        return self._text

    def push(self, ids: Sequence[int]) -> str:
        """Takes tokens that follow those before, and returns the text that is now certain."""
        if self.stopped:
            return ""
        for token in ids:
            self._ids.append(token)
            self._complete(last=False)
        return self._release(last=False)

    def finish(self) -> str:
        """The rest of the text: no further token comes."""
        if not self.stopped:
            self._complete(last=True)
        return self._release(last=True)

    def _complete(self, *, last: bool) -> None:
        before = self._decode(self._ids[self._begin : self._end])
        now = self._decode(self._ids[self._begin :])
        if len(now) > len(before) and (last or not now.endswith(UNFINISHED)):
            self._text += now[len(before) :]
            self._begin, self._end = self._end, len(self._ids)
            self._marks.append((len(self._text), len(self._ids)))

    def _release(self, *, last: bool) -> str:
        found = [at for stop in self._stops if (at := self._text.find(stop, max(self._sent - len(stop), 0))) >= 0]
        if found and not self.stopped:
            self._text, self.stopped = self._text[: max(min(found), self._sent)], True
        held = 0 if last or self.stopped else self._held()
        piece = self._text[self._sent : len(self._text) - held]
        self._sent += len(piece)
        return piece

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._text) - self._sent), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
