"""The text that a single token adds to a canvas."""

from typing import Any


class Pieces:
    """Texts of tokens, one at a time: a tokenizer may drop the space before a token that stands alone."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._anchor = pipe.encode("a", chat=False)
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        if token not in self._known:
            whole = self._pipe.decode([*self._anchor, token])
            self._known[token] = whole[len(self._pipe.decode(self._anchor)) :]
        return self._known[token]
