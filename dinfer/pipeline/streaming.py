"""An answer as text that grows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from dinfer.engine.request import Completion, Update


class TextStream(Iterator[str]):
    """Pieces of text, in order, none of which is taken back. `completion` is there once the last one is.

    Given up before, by `close` or by leaving it to the garbage collector, it cancels its request.
    """

    def __init__(self, updates: Generator[Update], decode: Callable[[list[int]], str]) -> None:
        """`updates`: of one request, with the new output."""
        self.completion: Completion | None = None
        self._pieces = self._texts(updates, decode)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    def _texts(self, updates: Generator[Update], decode: Callable[[list[int]], str]) -> Generator[str]:
        output: list[int] = []
        told = ""
        with closing(updates):  # the end of this generator does not end those it reads, not from Python 3.12 on
            for update in updates:
                if not update.new and update.completion is None:
                    continue
                output += update.new or []
                text, self.completion = decode(output), update.completion
                if update.completion is None:
                    # The last character may lack bytes that are in tokens to come, and a tokenizer may drop the space
                    # before some of them.
                    text = text.rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
                    if not text.startswith(told):
                        continue
                if piece := text[len(told) :]:
                    told = text
                    yield piece
