"""An answer as text that grows."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from dinfer.engine.request import Completion, Update

Decode = Callable[[list[int]], str]
WINDOW = 16  # tokens that are decoded again with those that follow


class GrowingText:
    """The text of tokens that come bit by bit, in pieces of which none is taken back."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the last tokens: the text of those before has been told, and stays as it is
        self._told = ""  # of their text
        self._limit = 2 * WINDOW
        self.pending = ""  # text that is there and may still change

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Takes the tokens that follow and returns the text that is now certain. `last`: no others come."""
        self._ids += ids
        whole = text = self._decode(self._ids)
        if not last:
            # The last character may lack bytes that are in tokens to come, and a tokenizer may drop the space before
            # some of them.
            text = text.rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
            if not text.startswith(self._told):
                return ""
        piece, self.pending = text[len(self._told) :], whole[len(text) :]
        self._told = text
        if len(self._ids) > self._limit:
            self._shorten(whole)
        return piece

    def _shorten(self, whole: str) -> None:
        """Lets go of all but the last tokens, unless their text depends on those before."""
        tail = self._ids[-WINDOW:]
        after = self._decode(tail)
        gone = len(whole) - len(after)
        if whole.endswith(after) and gone <= len(self._told):
            self._ids, self._told = tail, self._told[gone:]
        else:
            self._limit *= 2


class TextStream(Iterator[str]):
    """Pieces of text, in order, none of which is taken back. `completion` is there once the last one is.

    Given up before, by `close` or by leaving it to the garbage collector, it cancels its request.
    """

    def __init__(self, updates: Generator[Update], decode: Decode) -> None:
        """`updates`: of one request, with the new output."""
        self.completion: Completion | None = None
        self._pieces = self._texts(updates, GrowingText(decode))

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    def _texts(self, updates: Generator[Update], text: GrowingText) -> Generator[str]:
        with closing(updates):  # the end of this generator does not end those it reads, not from Python 3.12 on
            for update in updates:
                self.completion = update.completion
                last = update.completion is not None
                if (update.new or last) and (piece := text.push(update.new or [], last=last)):
                    yield piece
