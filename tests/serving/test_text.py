"""Text that is never taken back, and stop strings, whatever the pieces that tokens come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from dinfer.core.pipeline.tokenizer import WINDOW, GrowingText
from dinfer.serving.rows import StoppableText


def decode(ids: list[int]) -> str:
    """A tokenizer whose tokens are bytes: characters may be cut in two."""
    return bytes(ids).decode("utf-8", errors="replace")


def said(text: StoppableText, pieces: list[bytes]) -> str:
    return "".join([*(text.push(list(piece)) for piece in pieces), text.push([], last=True)])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(st.text(max_size=30), st.lists(st.integers(0, 60)))
def test_the_pieces_are_the_text(text: str, places: list[int]) -> None:
    assert said(StoppableText(decode), cut(text.encode(), places)) == text


@given(
    st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 60)),
)  # fmt: skip
def test_the_stop_string_that_is_complete_first_ends_the_text_before_it(
    text: str, stops: list[str], places: list[int]
) -> None:
    grown = StoppableText(decode, stops)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert said(grown, cut(text.encode(), places)) == text[: min(ends)[1] if ends else None]
    assert grown.stopped == bool(ends)


def test_what_may_be_a_stop_string_is_held_back() -> None:
    text = StoppableText(decode, ["\n\n"])
    assert text.push(list(b"one\n")) == "one"
    assert text.push(list(b"two")) == "\ntwo"
    assert text.push(list(b"\n\nthree")) == ""
    assert text.stopped


def test_a_stop_string_of_white_space_is_certain_at_once() -> None:
    text = StoppableText(decode, ["\n\n"])
    assert text.push(list(b"one\n\n")) == "one" and text.stopped


@pytest.mark.parametrize(("stops", "tokens", "read"), [([], 6, 6), (["d"], 3, 4), (["a"], 0, 1), (["bcd"], 1, 4)])
def test_tokens_of_the_text_are_counted(stops: list[str], tokens: int, read: int) -> None:
    text = StoppableText(decode, stops)
    said(text, [b"abc", b"def"])
    assert (text.tokens, text.read) == (tokens, read)


@pytest.mark.parametrize("separator", ["", " "])  # some tokenizers write a space between tokens, and none in front
def test_a_long_text_is_not_decoded_from_its_beginning_each_time(separator: str) -> None:
    longest, letters = 0, list(range(5000))

    def spelled(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return separator.join(f"t{number}" for number in ids)

    text = GrowingText(spelled)
    pieces = [text.push([letter]) for letter in letters]
    assert longest <= 2 * WINDOW + 1
    assert "".join(pieces) + text.push([], last=True) == separator.join(f"t{number}" for number in letters)


def test_a_tokenizer_that_looks_back_is_given_all_its_tokens() -> None:
    """It counts its tokens."""
    counted = lambda ids: "".join(f"{place}: {number}\n" for place, number in enumerate(ids))  # noqa: E731
    text, numbers = GrowingText(counted), list(range(4 * WINDOW))
    pieces = [text.push([number]) for number in numbers]
    assert "".join(pieces) + text.push([], last=True) == counted(numbers)
