"""Output that is told while a request runs: in order, never taken back, in the end all of it; and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.matrix import (
    SAMPLE,
    Combination,
    completions,
    engine_for,
    launched_ahead,
    outcome,
    requests_for,
)
from support.models import tiny_model

from dinfer.core.engine.batch import CanvasReader, CursorCopy
from dinfer.core.engine.request import Completion, Counts, Request, Update, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline, TextStream
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.cursors import Status
from dinfer.core.step.mixins import Edits
from dinfer.serving.async_engine import AsyncEngine

BLOCK = 8


def recipe_of(decoder: Any = "threshold") -> Recipe:
    iteration = {"name": "block_diffusion", "block": BLOCK, "stop": "off"}
    return compose(tiny_model("block_causal"), iteration=iteration, decoder=decoder, cache="block")


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("combination", sorted(SAMPLE, key=str)[::12], ids=str)
def test_what_is_told_is_the_output(combination: Combination, ahead: bool) -> None:
    """The snapshots of the same run say that what was told is decided."""
    recipe = combination.recipe()
    requests = requests_for(recipe)
    want = completions(engine_for(recipe), requests)
    for deltas in ("commit", "block"):
        engine = launched_ahead(engine_for(recipe, rows=3)) if ahead else engine_for(recipe, rows=3)
        told: list[list[int]] = [[] for _ in requests]
        for update in engine.run(requests, Wants(snapshots=True, deltas=deltas)):
            own, prompt = told[update.index], len(requests[update.index].prompt)
            assert update.new is not None and update.tokens is not None and update.masked is not None
            own += update.new
            assert not any(update.masked[prompt : prompt + len(own)]), "told before it was decided"
            if update.completion is None and (deltas == "block" or isinstance(recipe.decoder, Edits)):
                assert prompt + len(own) <= max(update.region[1], prompt)
            if update.completion is not None:
                assert outcome(update.completion) == outcome(want[update.index])
        assert told == [completion.output for completion in want]


def test_commits_are_told_sooner_than_blocks() -> None:
    engine, request = engine_for(recipe_of({"name": "fixed", "steps": BLOCK})), Request.behind([1, 2, 3], 2 * BLOCK - 3)
    told = {d: [len(u.new) for u in engine.run([request], Wants(deltas=d))] for d in ("commit", "block")}  # type: ignore
    assert told["block"] == [0] * 4 + [5] + [0] * 7 + [8]
    assert sum(told["commit"]) == 13 and sum(told["commit"][:5]) == 5 and any(told["commit"][:4])


def test_gaps_are_told_in_order() -> None:
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": 4}, decoder="threshold", cache="dual")
    gaps = [False, True, True, False, False, True, True, True, False, True]
    request = Request([*range(1, 11)], gaps, stops=False)
    updates = list(engine_for(recipe).run([request], Wants(deltas="commit")))
    assert updates[-1].completion is not None
    assert [token for update in updates for token in update.new or []] == updates[-1].completion.output


@pytest.mark.rest(but=12)
@pytest.mark.parametrize("combination", sorted(SAMPLE, key=str)[::8], ids=str)
def test_snapshots_are_what_the_canvas_holds(combination: Combination) -> None:
    """Noise, drafts and edits included, though no row is read for it."""
    recipe = combination.recipe()
    (request, *_) = requests_for(recipe)
    engine = engine_for(recipe)
    engine.add(request, Wants(snapshots=True))
    while engine.busy:
        for update in engine.step():
            canvas = engine.runner.state.canvas
            assert update.tokens == canvas.tokens_NS[0, : request.asked].tolist()
            assert update.masked == (canvas.status_NS[0, : request.asked] == int(Status.OPEN)).tolist()


def test_the_host_reads_nothing_but_the_copy_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of any tensor of the state would make the host wait for the device, row by row."""
    recipe = recipe_of({"name": "fixed", "steps": BLOCK})
    requests = [Request.behind([1, 2, i], 3 * BLOCK) for i in range(3)]
    engine, reads, held = launched_ahead(engine_for(recipe)), 0, set[int]()
    tolist, read = torch.Tensor.tolist, CanvasReader.read

    def counted(reader: CanvasReader, asked: CursorCopy) -> Any:
        nonlocal reads
        reads += 1
        state = engine.runner.state
        held.update(t.untyped_storage().data_ptr() for t in (state.canvas.tokens_NS, state.canvas.status_NS))
        return read(reader, asked)

    def watched(tensor: torch.Tensor) -> Any:
        assert tensor.untyped_storage().data_ptr() not in held
        return tolist(tensor)

    monkeypatch.setattr(CanvasReader, "read", counted)
    monkeypatch.setattr(torch.Tensor, "tolist", watched)
    updates = list(engine.run(requests, Wants(snapshots=True, deltas="commit")))
    assert reads == max(update.forwards for update in updates)


@pytest.mark.parametrize("deltas", [None, "commit"])
def test_blocks_are_copied_only_where_a_request_asks_for_them(deltas, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, active = 0, CanvasReader.active

    def counted(*args: Any) -> torch.Tensor:
        nonlocal copies
        copies += 1
        return active(*args)

    monkeypatch.setattr(CanvasReader, "active", counted)
    *_, last = engine_for(recipe_of()).run([Request.behind([1, 2, 3], 3 * BLOCK)], Wants(deltas=deltas))
    assert copies == (last.forwards if deltas else 0)


def test_async_streams_tell_new_output() -> None:
    recipe = recipe_of()
    requests = [Request.behind([i, 2, 3], 9 + 3 * i) for i in range(4)]
    want = [completion.output for completion in completions(engine_for(recipe), requests)]

    async def told(engine: AsyncEngine, request: Request) -> list[int]:
        return [token async for update in engine.stream(request, Wants(deltas="block")) for token in update.new or []]

    async def main() -> list[list[int]]:
        engine = AsyncEngine(engine_for(recipe, rows=2, max_length=64))
        return await asyncio.gather(*(told(engine, request) for request in requests))

    assert asyncio.run(main()) == want


def stream_of(*pieces: bytes, decode: Any = lambda ids: bytes(ids).decode(errors="replace")) -> TextStream:
    """Of a tokenizer in which every token is a byte."""

    def updates() -> Iterator[Update]:
        output = [token for piece in pieces for token in piece]
        for i, piece in enumerate(pieces):
            done = Completion(output, output, False, Counts(1, 0, 0, 0, len(output), 0.0)) if i == last else None
            yield Update(0, i + 1, 2, (0, 4), new=[*piece], completion=done)  # type: ignore[arg-type]

    last = len(pieces) - 1
    return TextStream(updates(), decode)


@pytest.mark.parametrize(
    ("told", "want"),
    [
        ([b"ab", b"", b"cd"], ["ab", "cd"]),
        ([b"a\xc3", b"\xa9", b"!"], ["a", "\u00e9", "!"]),  # a character waits for its last byte
        ([b"a\xff", b""], ["a", "\ufffd"]),  # which may never come
        ([b"a ", b"b"], ["a", " b"]),  # some tokenizers drop the space before what follows
        ([b"", b""], []),
    ],
)
def test_pieces_are_whole_characters(told: list[bytes], want: list[str]) -> None:
    stream = stream_of(*told)
    assert list(stream) == want and stream.completion is not None
    assert "".join(want) == bytes(stream.completion.output).decode(errors="replace")


def test_a_tokenizer_that_drops_spaces_takes_nothing_back() -> None:
    stream = stream_of(b"Yes ", b".", b" No", decode=lambda ids: bytes(ids).decode().replace(" .", "."))
    assert list(stream) == ["Yes", ".", " No"]


class Words:
    """A tokenizer in which token N is the word wN."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(f"w{token}" for token in ids)


@pytest.mark.parametrize("decoder", ["threshold", "joint_threshold"])
def test_a_pipeline_streams_the_text_that_it_generates(decoder: str) -> None:
    pipe = Pipeline(recipe_of(decoder), Words(), Runtime())  # type: ignore[arg-type]
    want = pipe.generate("w1 w2 w3", max_new_tokens=20)
    stream = pipe.stream("w1 w2 w3", max_new_tokens=20)
    pieces = list(stream)
    assert "".join(pieces) == want.text and len(pieces) > 1
    assert stream.completion is not None and stream.completion.canvas == want.canvas
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
        pipe.stream("w1", max_new_tokens=0)


def test_a_stream_that_is_given_up_cancels_its_request() -> None:
    pipe = Pipeline(recipe_of(), Words(), Runtime())  # type: ignore[arg-type]
    stream = pipe.stream("w1 w2", max_new_tokens=40)
    next(stream)
    assert pipe.engine.busy
    stream.close()
    assert not pipe.engine.busy and list(stream) == []
