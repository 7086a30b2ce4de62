"""Messages that show a row's canvas. Each holds the changes since the one before (docs/serving.md)."""

from typing import Any

from dinfer.abilities.reports import LEVELS
from dinfer.analysis.trace.pieces import Pieces
from dinfer.engine.request import Request, Update

VERSION = 1
OPEN, COMMITTED, FINAL = 0, 1, 2  # a draft of a masked position; a token that may still be edited; one that stays
BUCKETS = 10  # tenths of confidence, rounded down


class Drafts:
    """The canvas of a row as its client knows it."""

    def __init__(self, pieces: Pieces, request: Request, *, edits: bool) -> None:
        """`edits`: the decoder may change what it committed in the active blocks."""
        self._pieces, self._standing = pieces, COMMITTED if edits else FINAL
        self._first, self._asked = len(request.prompt), request.asked
        # Token, bucket and state of each position; None: masked.
        self._known: list[tuple[int, int, int] | None] = [None] * (self._asked - self._first)
        self._left = 0  # blocks before this position are finished
        self._began = False

    def changes(self, update: Update) -> dict[str, Any] | None:
        """The message about an update with drafts; None if nothing has changed."""
        changed: list[list[Any]] = []
        start, end = self._take(update, changed)
        message: dict[str, Any] = {"v": VERSION, "region": [start, max(start, end)], "changes": changed}
        if not self._began:
            self._began = True
            return message | {"length": len(self._known)}
        return message if changed else None

    def _take(self, update: Update, changed: list[list[Any]]) -> tuple[int, int]:
        """Notes the changes, and returns the active positions `[start, end)`."""
        skip = max(self._first - update.region[0], 0)
        start, end = update.region[0] + skip - self._first, min(update.region[1], self._asked) - self._first
        for position in range(self._left, min(start, len(self._known))):
            if (known := self._known[position]) is not None and known[2] != FINAL:
                self._note(position, (*known[:2], FINAL), changed)
        self._left = max(self._left, start)
        active, offers = (update.active or [])[skip:], (update.offers or [])[skip:]
        for position, token, offer in zip(range(start, end), active, offers, strict=False):
            state = self._standing
            if token < 0:
                if offer < 0:
                    continue
                token, state = offer // LEVELS, OPEN
            entry = token, offer % LEVELS * BUCKETS // (LEVELS - 1), state
            if self._known[position] != entry:
                self._note(position, entry, changed)
        if update.completion is not None:
            for position, token in enumerate(update.completion.canvas[self._first : self._asked]):
                known = self._known[position]
                bucket = BUCKETS if known is None else known[1]
                if known != (token, bucket, FINAL):
                    self._note(position, (token, bucket, FINAL), changed)
        return start, end

    def _note(self, position: int, entry: tuple[int, int, int], changed: list[list[Any]]) -> None:
        self._known[position] = entry
        changed.append([position, self._pieces.of(entry[0]), entry[1], entry[2]])
