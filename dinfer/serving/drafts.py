"""The canvas of a row for those who want to see drafts: what changed since the message before.

docs/serving.md documents the messages.
"""

from typing import Any

from dinfer.analysis.trace.pieces import Pieces
from dinfer.engine.request import Request, Update

VERSION = 1
OPEN, COMMITTED, FINAL = 0, 1, 2  # a guess at a masked position; a token that an edit may change; one that stays
BUCKETS = 10  # of confidence, rounded down; 10 is 1.0


class Drafts:
    """What a client knows of a row's canvas."""

    def __init__(self, pieces: Pieces, request: Request, *, edits: bool) -> None:
        """`edits`: the decoder may change what it committed in the active blocks."""
        self._pieces, self._edits = pieces, edits
        self._first, self._asked = len(request.prompt), request.asked
        self._known: dict[int, tuple[int, int, int]] = {}  # token, bucket, state
        self._left = self._first  # blocks before this position have been left
        self._began = False

    def changes(self, update: Update) -> dict[str, Any] | None:
        """The message about an update with drafts; None: nothing changed."""
        start, end = max(update.region[0], self._first), min(update.region[1], self._asked)
        shown = update.drafts[start - update.region[0] : max(end - update.region[0], 0)]
        changed: list[list[Any]] = []
        for position in range(self._left, start):
            self._note(position, (*self._known[position][:2], FINAL), changed)
        self._left = max(self._left, start)
        for position, (token, sure, stands) in enumerate(shown, start):
            state = (COMMITTED if self._edits else FINAL) if stands else OPEN
            self._note(position, (token, int(sure * BUCKETS), state), changed)
        if update.completion is not None:
            for position, token in enumerate(update.completion.canvas[self._first :], self._first):
                bucket = self._known.get(position, (0, BUCKETS, 0))[1]
                self._note(position, (token, bucket, FINAL), changed)
        message: dict[str, Any] = {
            "v": VERSION, "region": [start - self._first, max(start, end) - self._first], "changes": changed,
        }  # fmt: skip
        if not self._began:
            self._began = True
            return message | {"length": self._asked - self._first}
        return message if changed else None

    def _note(self, position: int, now: tuple[int, int, int], changed: list[list[Any]]) -> None:
        if self._known.get(position) != now:
            self._known[position] = now
            token, bucket, state = now
            changed.append([position - self._first, self._pieces.of(token), bucket, state])
