"""Text that is never taken back, and stop strings, whatever the pieces the tokens come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dinfer.serving.text import TextStream


def decode(ids: list[int]) -> str:
    """A tokenizer whose tokens are bytes: characters may be cut in two."""
    return bytes(ids).decode("utf-8", errors="replace")


def pushed(stream: TextStream, pieces: list[bytes]) -> str:
    return "".join([*(stream.push(list(piece)) for piece in pieces), stream.finish()])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(st.text(max_size=30), st.lists(st.integers(0, 60)))
def test_the_pieces_are_the_text(text: str, places: list[int]) -> None:
    assert pushed(TextStream(decode), cut(text.encode(), places)) == text


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 60)))
def test_a_stop_string_ends_the_text_before_it(text: str, stops: list[str], places: list[int]) -> None:
    stream = TextStream(decode, stops)
    found = [text.find(stop) for stop in stops if stop in text]
    said = pushed(stream, cut(text.encode(), places))
    # Of stop strings that overlap, the one that is complete first ends the text.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(found)
    assert text.startswith(said)
    if found:
        assert min(found) <= len(said) < min(ends) or said == text[: min(found)]
        assert not any(stop in said for stop in stops)
    else:
        assert said == text


def test_what_may_be_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, ["\n\n"])
    assert stream.push(list(b"one\n")) == "one"
    assert stream.push(list(b"two")) == "\ntwo"
    assert stream.push(list(b"\n\nthree")) == ""
    assert (stream.stopped, stream.text) == (True, "one\ntwo")


@pytest.mark.parametrize(("stops", "tokens"), [([], 6), (["d"], 3), (["a"], 0)])
def test_tokens_of_the_text_are_counted(stops: list[str], tokens: int) -> None:
    stream = TextStream(decode, stops)
    pushed(stream, [b"abc", b"def"])
    assert stream.tokens == tokens
