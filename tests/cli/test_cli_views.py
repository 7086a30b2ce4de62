"""What the command line shows of an answer while it grows, on scripted steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from dinfer.cli.watch import Origin, frames, heading, line, picture, write_answer
from dinfer.core.engine.request import Completion, Counts, Update
from dinfer.core.pipeline import TextStream
from dinfer.core.step.contracts import Phase

STOP, MASK = 0, 1
PHASES = (Phase.FULL, Phase.WINDOW)
PROMPT = [ord("q"), ord("?")]


class Bytes:
    """A pipeline in which every token is a byte."""

    model = SimpleNamespace(spec=SimpleNamespace(stop_ids=(STOP,)))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def encode(self, text: str, *, chat: bool | None = None) -> list[int]:
        return list(text.encode())


def steps(*canvases: bytes, block: int = 4) -> list[Update]:
    """One update for each state of the generation; byte 1 is a mask."""
    updates = []
    for index, canvas in enumerate(canvases):
        masked = [False] * len(PROMPT) + [token == MASK for token in canvas]
        done = None
        if index == len(canvases) - 1:
            output = list(canvas.split(b"\x00")[0])
            done = Completion(
                [*PROMPT, *canvas], output, b"\x00" in canvas, Counts(index + 1, 0, 1, 4, len(output), 0.5)
            )
        region = (len(PROMPT), len(PROMPT) + block)
        updates.append(Update(0, index + 1, PHASES[min(index, 1)], region, [*PROMPT, *canvas], masked, done))
    return updates


def test_an_answer_is_printed_as_it_grows(capsys: pytest.CaptureFixture[str]) -> None:
    updates = [replace(update, new=[*new]) for update, new in zip(steps(b"ab", b"abcd"), (b"ab", b"cd"), strict=True)]
    assert write_answer(TextStream((update for update in updates), Bytes().decode)) is updates[-1].completion
    assert capsys.readouterr().out == "abcd\n"


def test_frames_tell_where_every_token_came_from() -> None:
    first, second = frames(Bytes(), PROMPT, steps(b"a\1\1\1\1", b"ab\0\1\1"))  # type: ignore[arg-type]
    origins = [[cell.origin for cell in frame.cells] for frame in (first, second)]
    assert origins[0] == [Origin.PROMPT, Origin.FRESH] + [Origin.MASK] * 4
    assert origins[1] == [Origin.PROMPT, Origin.OLD, Origin.FRESH, Origin.STOP] + [Origin.MASK] * 2
    assert [cell.active for cell in second.cells] == [False, True, True, True, True, False]
    assert (first.step, first.phase, first.fresh, first.decoded, first.length) == (1, Phase.FULL, 1, 1, 5)
    assert (second.step, second.phase, second.fresh, second.decoded, second.length) == (2, Phase.WINDOW, 2, 3, 5)
    assert second.completion is not None


def test_a_line_shows_the_active_block_and_a_picture_marks_it() -> None:
    _, frame = frames(Bytes(), PROMPT, steps(b"a\1\1\1\1", b"a\n\0\1\1"))  # type: ignore[arg-type]
    assert line(frame, 80) == "step   2 window +2    3/5 | a / ·_"
    assert line(frame, 30).endswith("…") and len(line(frame, 30)) == 30
    assert line(replace(frame, phase=Phase.PREFILL), 80).startswith("step   2 prompt +2")
    assert "· prompt " in heading(replace(frame, phase=Phase.PREFILL)) and "· window " in heading(frame)
    console = Console(width=80, record=True, file=SimpleNamespace(write=len, flush=lambda: None))  # type: ignore[arg-type]
    console.print(picture(frame))
    shown = console.export_text()
    assert "q?" in shown and "[a⏎" in shown and "·░░ ]░░" in shown
