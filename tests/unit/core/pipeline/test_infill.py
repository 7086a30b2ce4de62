"""Gaps anywhere: markers, promises about what is given, blocks without gaps, and what a stop token does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, general, outcome
from support.models import EOS, MASK, VOCAB, tiny_model
from support.scripted import Scripted
from support.tokenizer import save_tokenizer
from transformers import AutoTokenizer

from dinfer.core.engine.request import Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.registry import CACHES, ITERATIONS
from dinfer.structure.form import gaps_of
from dinfer.structure.infilling import parse

CANVAS = [1, 2, MASK, MASK, 3, MASK, *range(4, 30), MASK, MASK, MASK, 5, 6]


def pipeline(model: Any = None, tokenizer: Any = None, cache: str = "dual", **iteration: Any) -> Pipeline:
    recipe = compose(
        model or tiny_model(),
        iteration={"name": "blockwise", "block": 8} | iteration,
        decoder={"name": "threshold", "threshold": 0.6},
        cache=cache,
    )
    return Pipeline(recipe, tokenizer, Runtime())


@pytest.fixture
def words(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_markers() -> None:
    assert parse("The capital of [MASK:4] is Paris.") == ["The capital of ", 4, " is Paris."]
    assert parse("[MASK:2][MASK:3]") == [2, 3]
    assert parse(r"a \[MASK:4] b") == ["a [MASK:4] b"]
    assert parse(r"a \\[MASK:4] b\c") == ["a \\", 4, r" b\c"]
    assert parse("[MASK] [mask:2] x") == ["[MASK] [mask:2] x"]
    for wrong in ("[MASK:0]", "[MASK:-1]", "[MASK:]", "[MASK:two]", "[MASK:²]", f"[MASK:{'9' * 5000}]"):
        with pytest.raises(ValueError, match=r"write \[MASK:n\]"):
            parse(f"a {wrong} b")
    assert gaps_of(CANVAS, MASK) == [range(2, 4), range(5, 6), range(32, 35)]


def test_log_probabilities_of_what_fills_a_gap(words: Any) -> None:
    pipe = pipeline(tokenizer=words)
    plain, result = (pipe.infill("w1 w2 [MASK:1] w4 [MASK:2] w5", logprobs=told) for told in (False, True))
    assert plain.logprobs is None and result.gaps == plain.gaps and [len(gap) for gap in result.logprobs] == [1, 2]
    first = pipe.model.score(torch.tensor([[1, 2, MASK, 4, MASK, MASK, 5]]), "bidirectional")[0].log_softmax(-1)
    told = dict(zip([2, 4, 5], [*result.logprobs[0], *result.logprobs[1]], strict=True))
    by_first = [place for place in told if first[place].max().exp() > 0.6]  # the decoder's threshold
    assert by_first
    for place, one in told.items():
        assert one.logprob == dict(one.top)[result.ids[place]] <= one.top[0][1]
        if place in by_first:
            assert one.logprob == pytest.approx(first[place, result.ids[place]].item(), abs=1e-5)


def test_a_text_is_filled(words: Any) -> None:
    pipe = pipeline(tokenizer=words)
    result = pipe.infill("w1 w2 [MASK:3] w4 [MASK:1] w5", trace=True)
    assert [len(gap) for gap in result.gaps] == [3, 1]
    assert result.ids == [1, 2, *result.gaps[0], 4, *result.gaps[1], 5]
    assert result.gap_texts == [words.decode(gap, skip_special_tokens=True) for gap in result.gaps]
    assert result.text == words.decode(result.ids, skip_special_tokens=True)
    assert result.counts.tokens == result.counts.committed == 4
    assert result.trace is not None and len(result.trace) == result.counts.forwards
    many = pipe.infill(["w1 w2 [MASK:3] w4 [MASK:1] w5", "[MASK:30] w1"])
    assert many[0].ids == result.ids and len(many[1].gaps[0]) == 30


PLAIN = ("blockwise", "full", "multi_block")  # fed as tokens and masks
FOLLOW = ("adaptive", "d2cache", "delayed")  # one version of the blocks, and lopa runs several


@pytest.mark.rest(but=6)
@pytest.mark.parametrize(
    ("iteration", "cache"),
    [
        (iteration, cache)
        for iteration in sorted({*general(ITERATIONS)} - {"block_diffusion", "self_conditioned"})
        for cache in general(CACHES)
        if cache not in ("block", "narrow_block") and not (iteration == "lopa" and cache in FOLLOW)
        if cache != "narrow_dual" or iteration in PLAIN
    ],
)
@pytest.mark.parametrize("variant", ["bidirectional", "shifted"])
def test_every_iteration_and_cache_fills_every_gap_and_nothing_else(variant: str, iteration: str, cache: str) -> None:
    config = {"name": iteration} | ({} if iteration == "full" else {"block": 8})
    recipe = compose(tiny_model(variant), iteration=config, decoder="threshold", cache=cache)
    pipe = Pipeline(recipe, None, Runtime(page=4))
    canvases = [CANVAS, [MASK], [MASK, 7], [9, *[MASK] * 11, 8]]
    together = pipe.infill_ids(canvases)
    for canvas, result in zip(canvases, together, strict=True):
        assert MASK not in result.ids
        assert all(got == want for got, want in zip(result.ids, canvas, strict=True) if want != MASK)
        assert sum(map(len, result.gaps)) == canvas.count(MASK) == result.counts.committed
        assert pipe.infill_ids([canvas])[0].ids == result.ids


@pytest.mark.parametrize("align", [False, True])
def test_blocks_without_gaps_cost_no_forward(align: bool) -> None:
    """Two gaps of one token, 90 given tokens apart: a step each."""
    canvas = [MASK, *[3] * 90, MASK, *[4] * 40]
    for cache in ("none", "prefix", "dual"):
        assert pipeline(align=align, cache=cache).infill_ids([canvas])[0].counts.forwards == 2


def test_what_stands_behind_a_gap_matters() -> None:
    pipe = pipeline()
    one, other = pipe.infill_ids([[1, 2, *[MASK] * 6, *[3] * 8], [1, 2, *[MASK] * 6, *[9] * 8]])
    assert one.gaps != other.gaps


def test_a_gap_at_the_end_is_a_generation() -> None:
    pipe = pipeline(stop="off")
    prompt = [1, 2, 3]
    assert pipe.infill_ids([prompt + [MASK] * 20])[0].ids == pipe.generate_ids([prompt], max_new_tokens=20)[0].canvas


def test_stop_tokens_are_tokens_unless_asked_for() -> None:
    table = torch.zeros(1, 1, VOCAB, dtype=torch.float64)
    table[..., EOS] = 9.0
    canvas = [1, MASK, 2, *[3] * 20, MASK, MASK]
    for stop in ("block", "cut"):
        pipe = pipeline(Scripted(table), stop=stop)
        result = pipe.infill_ids([canvas])[0]
        assert result.gaps == [[EOS], [EOS, EOS]] and result.counts.committed == 3
        assert pipe.infill_ids([canvas], stop=True)[0].counts.committed == 1


@pytest.mark.parametrize(
    ("canvas", "reason"),
    [
        ([1, 2], "has no gap"),
        ([], "has no gap"),
        ([1, VOCAB, MASK], "outside the vocabulary"),
        ([MASK] * 257, "exceed the model's 256"),
        (["a", MASK], "must be an integer"),
        (7, "canvas 0"),
    ],
)
def test_wrong_canvases_are_refused(canvas: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pipeline().infill_ids([canvas])


def test_wrong_texts_are_refused(words: Any) -> None:
    pipe = pipeline(tokenizer=words)
    for text, reason in (
        ("w1 w2", "no gap"), ("[MASK:9999]", "exceeds"), ("[MASK:0]", "is no gap"), (3, "must be"),
        ("\ud800 [MASK:1]", "surrogate"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            pipe.infill([text])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no tokenizer"):
        pipeline().infill("[MASK:1]")


def test_a_model_that_cannot_see_behind_a_gap_refuses() -> None:
    for variant in ("block_causal", "causal"):
        pipe = pipeline(tiny_model(variant))
        with pytest.raises(ValueError, match="text behind a gap"):
            pipe.infill_ids([CANVAS])
        assert MASK not in pipe.infill_ids([[1, 2, MASK, MASK]])[0].ids


def stop_table() -> torch.Tensor:
    """EOS at position 6 is the surest, then positions to its left, then those to its right."""
    table = torch.zeros(1, 64, VOCAB, dtype=torch.float64)
    for position in range(64):
        table[0, position, 7] = 8.0 - position / 16
    table[0, 6, EOS], table[0, 6, 7] = 20.0, 0.0
    return table


def test_stop_policies() -> None:
    """From position 2 on, blocks of 8 at one token a step: EOS first, then 2, 3, 4, 5, which completes the answer."""
    forwards, answers = {}, set()
    for stop in ("block", "cut", "off"):
        recipe = compose(
            Scripted(stop_table()), iteration={"name": "blockwise", "block": 8, "stop": stop},
            decoder={"name": "fixed", "steps": 8}, cache="none",
        )  # fmt: skip
        completion = completions(engine_for(recipe), [Request.behind([1, 1], 24)])[0]
        forwards[stop] = completion.counts.forwards
        answers.add((tuple(completion.output), completion.stopped))
    assert forwards == {"block": 8, "cut": 5, "off": 24}
    assert answers == {((7, 7, 7, 7), True)}


@pytest.mark.parametrize("variant", ["bidirectional", "block_causal"])
def test_cut_gives_the_same_answer_in_fewer_forwards(variant: str) -> None:
    rows = {}
    for stop in ("block", "cut"):
        recipe = compose(
            tiny_model(variant), iteration={"name": "blockwise", "block": 8, "stop": stop}, decoder="threshold",
            cache="dual",
        )  # fmt: skip
        requests = [Request.behind([i, 3, 2 * i], 30) for i in range(1, 12)]
        rows[stop] = [outcome(c) for c in completions(engine_for(recipe), requests)]
    assert [row[1:3] for row in rows["block"]] == [row[1:3] for row in rows["cut"]]
    assert sum(row[3] for row in rows["cut"]) < sum(row[3] for row in rows["block"])


def test_cut_is_refused_where_decoded_tokens_change() -> None:
    with pytest.raises(IncompatibleRecipe, match="stop=cut"):
        compose(tiny_model(), iteration={"name": "blockwise", "stop": "cut"}, decoder="remasking", cache="none")
