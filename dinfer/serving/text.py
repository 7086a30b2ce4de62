"""The text of an answer, which a stop string may end."""

from bisect import bisect_left
from collections.abc import Sequence

from dinfer.pipeline.streaming import Decode, GrowingText


class StoppableText:
    """The text of a growing list of tokens, in pieces. It ends before the first complete stop string.

    It holds back a possible beginning of a stop string until the next tokens decide.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._grown, self._held = GrowingText(decode), ""
        self._ids: list[int] = []
        self._length = 0  # characters returned so far
        self.stopped = False

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Takes the next tokens and returns the text that is now final. `last`: no others come."""
        if self.stopped:
            return ""
        self._ids += ids
        piece = self._held + self._grown.push(ids, last=last)
        if self._stops:
            piece = self._cut(piece, last)
        self._length += len(piece)
        return piece

    @property
    def taken(self) -> int:
        """The number of tokens it was given."""
        return len(self._ids)

    @property
    def tokens(self) -> int:
        """How many tokens the returned text takes, without those of a stop string."""
        if not (self.stopped or self._held or self._grown.pending):
            return len(self._ids)
        lengths = range(len(self._ids) + 1)
        return bisect_left(lengths, self._length, key=lambda count: len(self._decode(self._ids[:count])))

    def _cut(self, text: str, last: bool) -> str:
        """The text before a stop string. Holds back the beginning of a possible one."""
        seen = text + self._grown.pending
        found = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        self.stopped = bool(found)
        if found:
            return seen[: min(found)[1]]
        starts = range(max(len(text) - max(map(len, self._stops)) + 1, 0), len(text))
        begins = (at for at in starts if any(stop.startswith(text[at:]) for stop in self._stops))
        end = len(text) if last else next(begins, len(text))
        self._held = text[end:]
        return text[:end]
