"""Texts with gaps: `The capital of [MASK:4] is Paris.` stands for a text in which four tokens are to be found.

A backslash in front of a marker makes it a part of the text: `\\[MASK:4]`; two stand for one and leave it a marker.
Backslashes elsewhere are themselves.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dinfer.engine.request import Counts

MARKER = re.compile(r"(\\*)\[MASK:([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Infilled:
    """A text or canvas with its gaps filled."""

    text: str  # without special tokens; empty where there is no tokenizer
    ids: list[int]  # the canvas as a whole
    gaps: list[list[int]]  # what fills each gap: a run of mask tokens
    gap_texts: list[str]  # the same as text
    counts: Counts
    trace: list[list[int]] | None = None  # if asked for, the canvas after every step


def parse(text: str) -> list[str | int]:
    """Stretches of text, and the lengths of the gaps between them. Raises ValueError for a marker that is none."""
    pieces: list[str | int] = []
    words, begin = "", 0
    for match in MARKER.finditer(text):
        slashes, count = match.groups()
        words += text[begin : match.start()] + "\\" * (len(slashes) // 2)
        begin = match.end()
        if len(slashes) % 2:
            words += match[0][len(slashes) :]
            continue
        if not re.fullmatch(r"[0-9]{1,99}", count) or int(count) < 1:  # `int` takes 4300 digits at most
            raise ValueError(
                f"{match[0]!r:.80} is no gap: write [MASK:n] with the number n of tokens, or \\[MASK:...] for the text"
            )
        pieces += [words, int(count)] if words else [int(count)]
        words = ""
    words += text[begin:]
    return [*pieces, words] if words else pieces


def escaped(text: str) -> str:
    """A text that `parse` reads as nothing but this text."""
    return MARKER.sub(lambda found: "\\" * (len(found[1]) + 1) + found[0], text)


def gaps_of(ids: Sequence[int], mask_id: int) -> list[range]:
    """The positions of each unbroken run of mask tokens."""
    runs = [[*run] for is_mask, run in groupby(range(len(ids)), lambda place: ids[place] == mask_id) if is_mask]
    return [range(run[0], run[-1] + 1) for run in runs]
