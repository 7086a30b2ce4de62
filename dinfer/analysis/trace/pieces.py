"""The text that a single token adds to a canvas."""

from typing import Any


class Pieces:
    """Texts of tokens, one at a time: a tokenizer may drop the space before a token that stands alone."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._anchor = pipe.encode("a", chat=False)
        self._before = len(pipe.decode(self._anchor))
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._pipe.decode([*self._anchor, token])[self._before :]
        return self._known[token]
