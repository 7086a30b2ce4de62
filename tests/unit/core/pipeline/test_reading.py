"""Structured reads against all sequences of tokens, family by family, and what cannot be read."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import EOS, MASK, UNIFORM, VOCAB, fitted, tiny_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dinfer.core.engine.request import Completion, Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import compose
from dinfer.structure.abilities.bias import TokenBias
from dinfer.structure.questions import questions

TEXTS = ["Ġ", "a", "b", "c", "d", "ab", "cd", "abc", "bc", ":", ".", "da", "db"]
MERGES = [("a", "b"), ("c", "d"), ("ab", "c"), ("b", "c"), ("d", "a"), ("d", "b")]
STOPS = (28, EOS)
SWEEP = {"name": "self_conditioned", "block": 12}
RECIPES: dict[str, dict[str, Any]] = {
    "bidirectional": {"iteration": {"name": "blockwise", "block": 32}, "decoder": "threshold", "cache": "dual"},
    "shifted": {"iteration": "full", "decoder": "dream", "cache": "none"},
    "block_causal": {"iteration": "block_diffusion", "decoder": "threshold", "cache": "block"},
    UNIFORM: {"iteration": SWEEP, "decoder": "renoise", "cache": "block", "sampling": "standard"},
}


def tokenizer() -> Any:
    """Letters and some pairs: `abc` is one token, and also a and bc, or ab and c."""
    fast = Tokenizer(BPE({text: token for token, text in enumerate(TEXTS)}, MERGES))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast)


def pipeline(variant: str = "bidirectional", **parts: Any) -> Pipeline:
    fields = {"causal_block": 16} if variant == "block_causal" else {}
    return Pipeline(compose(tiny_model(variant, **fields), **RECIPES[variant] | parts), tokenizer(), Runtime())


def requests(pipe: Pipeline, prompt: str, answer: Any = None, slots: Any = None, choice: Any = None, **how: int) -> Any:
    """What `Pipeline.read` gives the engine."""
    found = pipe.layout(answer, slots, choice)
    return found.requests(pipe.engine, pipe.encode(prompt), **{"steps": 1, "seeds": 1, "seed": 0} | how)


def opened_in(request: Request) -> list[int]:
    return [at for at, masked in enumerate(request.open) if masked]


def completions(pipe: Pipeline, requests: list[Request]) -> list[Completion]:
    updates = [update for update in pipe.engine.run(requests) if update.completion is not None]
    return [update.completion for update in sorted(updates, key=lambda update: update.index)]


def distribution(logits_V: torch.Tensor, options: list[str]) -> dict[str, float]:
    tokens = [TEXTS.index(option) for option in options]
    return dict(zip(options, logits_V[tokens].softmax(-1).tolist(), strict=True))


def logits_of(pipe: Pipeline, request: Request, seed: int = 0) -> torch.Tensor:
    """What the model says of each position of the seeded canvas, without an engine. [S, V]"""
    spec, model, open_S = pipe.model.spec, pipe.model, torch.tensor(request.open)
    place_S = torch.arange(len(open_S))
    noise = pipe.recipe.sampling.noise(torch.tensor(seed), place_S, torch.tensor(0), spec.vocab)
    blank_S = noise if spec.mask_id is None else torch.full_like(place_S, MASK)
    ids_S = torch.where(open_S, blank_S, torch.tensor(request.tokens))
    with torch.inference_mode():
        if spec.encoder:
            said = model.score(ids_S[None, : request.start], ids_S[None, request.start :])[0]
            return torch.cat((torch.zeros(request.start, spec.vocab), said))
        how = ("block_causal", spec.causal_block) if spec.causal_block else ("bidirectional", None)
        return model.score(ids_S[None], *how)[0].roll(spec.shift, 0)


def spelled(tokens: tuple[int, ...]) -> str | None:
    """The text of an answer's end: no token but stop tokens behind the first of them."""
    end = next((at for at, token in enumerate(tokens) if token in STOPS), len(tokens))
    if any(token >= len(TEXTS) for token in tokens[:end]) or any(token not in STOPS for token in tokens[end:]):
        return None
    return "".join(TEXTS[token] for token in tokens[:end])


def enumerated(logprob_PV: torch.Tensor, options: list[str]) -> list[float]:
    """The probability of each option, from all sequences of tokens."""
    rows, found = logprob_PV.tolist(), dict.fromkeys(options, 0.0)
    for tokens in itertools.product(range(VOCAB), repeat=len(rows)):
        if (text := spelled(tokens)) in found:
            found[text] += math.exp(sum(row[token] for row, token in zip(rows, tokens, strict=True)))
    return [*found.values()]


def check(slot: Any, want: list[float]) -> None:
    assert slot.mass == pytest.approx(sum(want), rel=1e-5)
    assert [*slot.probabilities.values()] == pytest.approx([one / sum(want) for one in want], rel=1e-5)
    assert slot.choice == [*slot.probabilities][want.index(max(want))]


@pytest.mark.parametrize("variant", RECIPES)
def test_options_of_one_token_have_the_models_own_probabilities(variant: str) -> None:
    pipe = pipeline(variant)
    answer, slots = "a:[SLOT:x].[SLOT:y]:c", {"x": ["b", "d", "c"], "y": ["a", "c"]}
    found = pipe.read("abcd da.bc", answer, slots=slots)
    (request,) = requests(pipe, "abcd da.bc", answer, slots)
    assert request.tokens[opened_in(request)[0] - 2 :][:2] == [TEXTS.index("a"), TEXTS.index(":")]
    logprob_SV = logits_of(pipe, request).log_softmax(-1)
    for name, at in zip(slots, opened_in(request), strict=True):
        check(found[name], [math.exp(logprob_SV[at, TEXTS.index(option)]) for option in slots[name]])
    assert found.text == f"a:{found['x'].choice}.{found['y'].choice}:c"
    assert found.counts[0].forwards - found.counts[0].prefills == 1


@pytest.mark.parametrize("variant", RECIPES)
def test_options_of_several_tokens_are_compared_by_the_posterior(variant: str) -> None:
    """`abcd` is abc and d to the tokenizer, and ab and cd are also tokens."""
    pipe, options = pipeline(variant), ["abcd", "dc", "bda"]
    (request,) = requests(pipe, "abcd", "c:[SLOT:z]", {"z": options})
    opened = opened_in(request)
    assert len(opened) == 2
    want = enumerated(logits_of(pipe, request).log_softmax(-1)[opened], options)
    check(pipe.read("abcd", "c:[SLOT:z]", slots={"z": options})["z"], want)


@pytest.mark.parametrize("options", [["abc", "b", "da.a"], ["a", "ab.a"], ["d", "d.d"]])
def test_a_slot_at_the_end_may_have_options_of_any_length(options: list[str]) -> None:
    pipe, prompt = pipeline(), "cd:"
    (request,) = requests(pipe, prompt, choice=options)
    opened = opened_in(request)
    given = "".join(TEXTS[token] for token in request.tokens[2 : opened[0]])  # what all options begin with
    logprob_PV = logits_of(pipe, request).log_softmax(-1)[opened]
    check(pipe.read(prompt, choice=options)["choice"], enumerated(logprob_PV, [o.removeprefix(given) for o in options]))


def test_with_more_steps_the_surest_slot_is_filled_first() -> None:
    pipe, answer = pipeline(cache="none"), "[SLOT:x].[SLOT:y].[SLOT:z]"
    slots = {name: ["a", "b", "d"] for name in "xyz"}
    one, found = (pipe.read("abcd", answer, slots=slots, steps=steps) for steps in (1, 3))
    (request,) = requests(pipe, "abcd", answer, slots, steps=3)
    left = dict(zip("xyz", opened_in(request), strict=True))
    while left:  # what is filled stands there for the others
        said = {name: distribution(logits_of(pipe, request)[at], slots[name]) for name, at in left.items()}
        name = max(said, key=lambda name: max(said[name].values()))
        assert found[name].probabilities == pytest.approx(said[name], rel=1e-5)
        request.tokens[left[name]], request.open[left.pop(name)] = TEXTS.index(found[name].choice), False
    assert found.counts[0].forwards == 3 and one.counts[0].forwards == 1
    assert found.slots != one.slots


def test_slots_of_later_blocks_see_what_was_read_before() -> None:
    recipe = compose(tiny_model("block_causal"), **RECIPES["block_causal"])  # blocks of 4
    pipe, slots = Pipeline(recipe, tokenizer(), Runtime()), {"x": ["a", "b"], "y": ["c", "d"]}
    answer = "[SLOT:x].:.:.:.[SLOT:y].c"
    found = pipe.read("abcd", answer, slots=slots)
    (request,) = requests(pipe, "abcd", answer, slots)
    for name, at in zip(slots, opened_in(request), strict=True):
        want = distribution(logits_of(pipe, request)[at], slots[name])
        assert found[name].probabilities == pytest.approx(want, rel=1e-5)
        request.tokens[at], request.open[at] = TEXTS.index(found[name].choice), False
    assert found.counts[0].committed == 2


def test_seeds_are_averaged_with_their_standard_error() -> None:
    pipe, options = pipeline(UNIFORM), ["a", "b", "c"]
    alone = [pipe.read("abcd", choice=options, seed=seed)["choice"] for seed in (4, 5, 6)]
    found = pipe.read("abcd", choice=options, seeds=3, seed=4)["choice"]
    for option in options:
        values = [one.probabilities[option] for one in alone]
        assert found.probabilities[option] == pytest.approx(statistics.mean(values))
        assert found.standard_errors[option] == pytest.approx(statistics.stdev(values) / 3**0.5) != 0
    assert alone[0].standard_errors is None and alone[0].probabilities != alone[1].probabilities


@pytest.mark.parametrize("variant", RECIPES)
def test_a_read_and_a_generation_come_out_as_alone(variant: str) -> None:
    pipe = pipeline(variant)
    (read,) = requests(pipe, "abcd", "a.[SLOT:x].", {"x": ["b", "d"]}, steps=2)
    (free,) = pipe.requests([pipe.encode("da.bcd:")], 20, {"sampling.seed": 3})
    both, again = completions(pipe, [read, free]), completions(pipe, [free])
    assert both[0].counts.told == completions(pipe, [read])[0].counts.told != ()
    assert both[1].canvas == again[0].canvas and both[1].counts.told == ()


OTHERS: list[dict[str, Any]] = [
    {"decoder": {"name": "insert_delete", "edit_threshold": 0.0}, "cache": "none"},
    {"decoder": {"name": "daedal", "initial": 2}, "iteration": "full", "cache": "none"},
    {"iteration": {"name": "lopa", "block": 32, "blocks": 2}, "cache": "none"},
]


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("parts", OTHERS, ids=str)
def test_a_read_takes_nothing_of_what_else_a_recipe_does(parts: dict[str, Any], steps: int) -> None:
    """Decoders that move tokens or lengthen the canvas, and versions of the blocks."""
    model = fitted(tiny_model(), "insert_delete")
    plain = Pipeline(compose(model, **RECIPES["bidirectional"] | {"cache": "none"}), tokenizer(), Runtime())
    pipe = Pipeline(compose(model, **RECIPES["bidirectional"] | parts), tokenizer(), Runtime())
    slots = {name: ["b.", "dc", "a:"] for name in "xyzuvw"}
    answer = "".join(f"[SLOT:{name}]ab" for name in slots)
    (read,) = requests(pipe, "abcd", answer, slots, steps=steps)
    (want,) = completions(plain, requests(plain, "abcd", answer, slots, steps=steps))
    (free,) = pipe.requests([pipe.encode("da.bcd:")], 20, None)
    read = replace(read, asks=(*read.asks, TokenBias(((model.spec.delete_id, 20.0),))))
    both, (alone,) = completions(pipe, [read, free]), completions(pipe, [free])
    assert both[0].canvas[: read.length] == want.canvas[: read.length]
    for got, told in zip(both[0].counts.told[0].blanks, want.counts.told[0].blanks, strict=True):
        assert torch.allclose(torch.tensor(got.logprobs), torch.tensor(told.logprobs), atol=1e-4)
    assert both[1].canvas == alone.canvas


def test_prompts_are_read_together() -> None:
    pipe, prompts = pipeline(), ["abcd", "da.bc", "c"]
    found = pipe.read(prompts, choice=["a", "b"])
    assert [one.slots for one in found] == [pipe.read(prompt, choice=["a", "b"]).slots for prompt in prompts]
    assert len({one["choice"].mass for one in found}) == 3


def test_a_marker_behind_a_backslash_is_text() -> None:
    pieces, options = questions(r"\[SLOT:x] [SLOT:y]", {"y": ["a", "b"]}, None)
    assert pieces == ["[SLOT:x] ", ("y",)] and options == {"y": ["a", "b"]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "give either slots, .* or choice"),
    ({"choice": ["a", "b"], "slots": {"x": ["a", "b"]}}, "give either slots, .* or choice"),
    ({"slots": ["x"]}, r"slots=\['x'\] must map the name"),
    ({"slots": {"x": ["a", "b"], "y": ["a", "b"]}}, "answer is missing: with several slots"),
    ({"answer": 5, "choice": ["a", "b"]}, "answer=5 must be a text"),
    ({"answer": "a", "choice": ["a", "b"]}, r"'choice' is not in the answer: put \[SLOT:choice\]"),
    ({"answer": "[SLOT:x][SLOT:y]", "slots": {"x": ["a", "b"]}}, r"\[SLOT:y\] has no options: slots has x"),
    ({"answer": "[SLOT:x].[SLOT:x]", "slots": {"x": ["a", "b"]}}, r"\[SLOT:x\] stands there 2 times"),
    ({"choice": "ab"}, "choice: the options must be a list, not 'ab'"),
    ({"slots": {"x": ["a"]}}, r"slots: 'x': \['a'\] has 1 options: give two or more"),
    ({"choice": ["a", ""]}, "choice: the option '' must be a text that is not empty"),
    ({"choice": ["a", "b", "a"]}, "choice: the option 'a' is given twice"),
    ({"answer": "[SLOT:x].", "slots": {"x": ["a", "d.d"]}}, r"'x': its options have different .*\('a': 1, 'd.d': 3\)"),
    ({"answer": "[SLOT:x][SLOT:y]", "slots": {"x": ["a", "d"], "y": ["b", "c"]}}, "'x' and 'y' share a token"),
    ({"choice": ["a", "b"], "steps": 0}, "steps=0 must be at least 1"),
    ({"choice": ["a", "b"], "steps": 65}, "a read has 64 steps at most, not 65"),
    ({"choice": ["a", "b"], "seeds": 2}, "seeds=2 and seed=0: this model has a mask token"),
    ({"choice": ["a", "b" + ".a" * 128]}, "slot 'choice': its options have up to 257 tokens; at most 256"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "what"), WRONG, ids=[what for _, what in WRONG])
def test_what_cannot_be_read_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        pipeline().read("abcd", **given)


DIVIDED: list[tuple[dict[str, Any], str]] = [
    ({"name": "blockwise", "block": 4, "align": True}, "..[SLOT:x]."),
    ({"name": "blockwise", "block": 4}, "[SLOT:y]..[SLOT:x]."),  # the second block would begin within it
]


@pytest.mark.parametrize(("iteration", "answer"), DIVIDED)
def test_a_slot_that_a_block_divides_is_refused_before_the_first_step(iteration: Any, answer: str) -> None:
    pipe = pipeline(iteration=iteration)
    slots = {"x": ["a.", "bd"]} | ({"y": ["a", "b"]} if "y" in answer else {})
    with pytest.raises(ValueError, match="slot 'x': a block of the iteration ends within it, so its 2 tokens"):
        requests(pipe, "cd", answer, slots)


def test_a_slot_that_another_block_divides_is_refused_too() -> None:
    pipe = pipeline(iteration={"name": "multi_block", "block": 4, "blocks": 2}, cache="none")
    with pytest.raises(ValueError, match="slot 'x': a block of the iteration ends within it, so its 2 tokens"):
        pipe.read("cd", "[SLOT:y]..[SLOT:x].", slots={"x": ["a.", "bd"], "y": ["a", "b"]})


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"cache": "d2cache"}, "cache=d2cache leaves out open positions"),
        ({"cache": "narrow_dual"}, "cache=narrow_dual leaves out open positions"),
    ],
)
def test_recipes_that_cannot_read_say_so(parts: dict[str, Any], what: str) -> None:
    model = fitted(tiny_model(), parts.get("decoder", "threshold"))
    pipe = Pipeline(compose(model, **RECIPES["bidirectional"] | parts), tokenizer(), Runtime())
    with pytest.raises(ValueError, match=what):
        pipe.read("abcd", choice=["a", "b"])
