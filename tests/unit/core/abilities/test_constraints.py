"""Every answer is in its language, whatever the logits, with every recipe; rows without one do not notice."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.matrix import completions, engine_for, general, observed, settings_of
from support.models import EOS, MASK, VOCAB, fitted, tiny_model
from support.scripted import Scripted, scripted_spec

from dinfer.core.engine.request import Request, Resolved, Update
from dinfer.core.engine.runtime import BatchSize
from dinfer.core.recipe.presets import component
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS
from dinfer.core.step.mixins import Verifies
from dinfer.core.step.request import DEFAULTS
from dinfer.families.decoders.isd import ISD
from dinfer.scale.parallel.leader_worker import read, spelled
from dinfer.speed import memory
from dinfer.structure.abilities import constraints
from dinfer.structure.abilities.bias import TokenBias
from dinfer.structure.abilities.constraints import Constraints, ForcedCount, InLanguage
from dinfer.structure.compiler import compile_automaton
from dinfer.structure.constraint import choice, regex
from dinfer.structure.kernels.lines import Line
from dinfer.structure.language import Language, Vocabulary, language
from tests.support.structure_reference import Row

REFUSED = {"insert_delete", "daedal"}  # what is committed would move
TEXTS = [
    *"abcdefghij0123456789",
    "ab",
    "cd",
    "abc",
    "12",
    "é",
    "\u00e9a",
    '{"',
    '":',
    '"}',
    '"',
    "{",
    "}",
    ",",
    "1,",
    " ",
]
BYTES = [*(text.encode() for text in TEXTS), "é".encode()[:1], "é".encode()[1:], b"x"]
WORDS = Vocabulary([*BYTES, None, None], frozenset({EOS}), frozenset({EOS}))
PATTERNS = [
    "ab|cd", "[a-j]{3,6}", r'\{"(a|b)":\d{1,3}(,\d)*"\}', "(ab|é)*x?", "abc(12)+", "(a|b|c|d){2}[0-9]*", "x", "(1,)*1",
]  # fmt: skip


@cache
def language_of(pattern: str) -> Language:
    return language(compile_automaton(regex(pattern))[0], WORDS)


def accepted(found: Language, answer: list[int]) -> bool:
    return Row(found, answer).feasible


def bound(request: Request, found: Language) -> Request:
    first = len(request.prompt)
    return replace(request, asks=(InLanguage(found, first, first + request.new_tokens),))


def adversarial(kind: str, seed: int) -> torch.Tensor:
    """Logits [5 calls, 7 positions, V]."""
    table = torch.randn(5, 7, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    match kind:
        case "wrong":  # all mass on a token that no pattern allows first
            table[..., TEXTS.index(" ")] = 50.0
        case "ties":
            return torch.zeros_like(table)
        case "mask":
            table[..., MASK] = 60.0
        case "ends":
            table[:, 0, EOS] = 40.0
        case "holes":
            table = table.masked_fill(table > 3, -1e4)
        case "goes_on":
            table[..., EOS] = -60.0
    return table


@st.composite
def recipes(draw: st.DrawFn, decoder: dict[str, Any]) -> Recipe:
    """Any recipe that a constraint may meet."""
    block = draw(st.integers(2, 9))
    verifies = issubclass(DECODERS.get(decoder["name"]), Verifies)
    masks = {} if verifies or DECODERS.build(decoder).incompatibility(scripted_spec()) is None else {"mask_id": None}
    kind = draw(st.sampled_from(["random", "wrong", "ties", "mask", "ends", "holes", "goes_on"]))
    model = Scripted(
        adversarial(kind, draw(st.integers(0, 10_000))),
        causal_block=1 if verifies else draw(st.sampled_from([None, block])),
        **masks,
    )
    model = fitted(model, decoder["name"])
    iteration: dict[str, Any] = {"name": draw(st.sampled_from(general(ITERATIONS))), "block": block, "stop": "block"}
    try:
        recipe = compose(
            model, iteration=iteration, decoder=decoder, cache=dict(draw(st.sampled_from(settings_of(CACHES))))
        )
    except (IncompatibleRecipe, ValueError):
        recipe = compose(model, iteration={"name": "blockwise", "block": block}, decoder=decoder, cache="none")
    if recipe.refused(request=bound(Request.behind([1], 1), language_of("a"))) is not None:
        recipe = compose(
            recipe.model, iteration={"name": "blockwise", "block": block}, decoder="threshold", cache="none"
        )
    return recipe


WISHES: list[dict[str, float]] = [
    {}, {}, {"temperature": 1.3, "seed": 3}, {"temperature": 0.7, "top_p": 0.4, "top_k": 3}, {"ban_eos": 1},
    {"repetition_penalty": 1.8}, {"frequency_penalty": 1.5, "presence_penalty": -1.0}, {"eos_last": 1}, {"leftmost": 1},
]  # fmt: skip


def wished(recipe: Recipe, wish: dict[str, float]) -> Resolved:
    """The options of a request; none where the decoder has other ones or refuses these."""
    try:
        return recipe.resolve(wish)
    except ValueError:
        return DEFAULTS


def some_request(recipe: Recipe, random: Random) -> tuple[Request, Language]:
    found = replace(language_of(random.choice(PATTERNS)), posterior=random.random() < 0.3)
    options = wished(recipe, random.choice(WISHES))
    room = max(random.randint(found.shortest, found.shortest + 12), 1)
    asked = bound(Request.behind([random.randrange(1, 9)] * random.randint(1, 9), room, options), found)
    bias = random.choice([(), ((EOS, 100.0), (3, -100.0)), ((EOS, -100.0), (20, 100.0))])
    return replace(asked, asks=(*asked.asks, TokenBias(bias))), found


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("name", [name for name in general(DECODERS) if name not in REFUSED])
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.rest)])
@examples(4)
@given(st.data())
def test_every_answer_is_in_its_language(part: int, name: str, data: st.DataObject) -> None:
    """Thousands of answers: of 16 decoders, in two parts, four examples with 43 answers on average."""
    decoder = data.draw(st.sampled_from([s for s in settings_of(DECODERS) if dict(s)["name"] == name]))
    recipe = data.draw(recipes(dict(decoder)))
    count, random = data.draw(st.sampled_from([2, 64, 64])), Random(data.draw(st.integers(0, 2**32)))
    requests, languages = zip(*(some_request(recipe, random) for _ in range(count)), strict=True)
    engine = engine_for(recipe, rows=2 if count == 2 else 32, page=4)
    for request, found, done in zip(requests, languages, completions(engine, requests), strict=True):
        assert accepted(found, done.canvas[len(request.prompt) :]), (str(recipe), done.canvas)
        assert MASK not in done.canvas


@pytest.mark.parametrize("seed", range(6))
def test_rows_without_a_language_do_not_notice(seed: int) -> None:
    recipe = compose(
        Scripted(adversarial("random", seed)[:1]),
        iteration={"name": "blockwise", "block": 5},
        decoder="threshold",
        cache="dual",
    )
    free = [Request.behind([1, 2, 3 + i], 17) for i in range(2)]
    beside = [bound(Request.behind([1, 2, 3 + i], 17), language_of(pattern)) for i, pattern in enumerate(PATTERNS[1:4])]
    alone = [completions(engine_for(recipe, rows=1), [request])[0].canvas for request in (*free, *beside)]
    together = [done.canvas for done in completions(engine_for(recipe, rows=5), [*free, *beside])]
    assert together == alone


def test_forced_text_takes_no_forward() -> None:
    """Only one answer is possible, so the first step commits all of it, and all that lies behind its end."""
    recipe = compose(
        Scripted(adversarial("random", 1)),
        iteration={"name": "blockwise", "block": 32},
        decoder="threshold",
        cache="none",
    )
    (done,) = completions(engine_for(recipe), [bound(Request.behind([1], 32), language_of("abc(12){1}x"))])
    assert done.counts.forwards <= 2
    assert b"".join(BYTES[token] for token in done.output) == b"abc12x"
    forced = done.counts.tells(ForcedCount)
    assert forced is not None and 0 < forced.tokens <= done.counts.tokens


def test_candidates_change_no_token() -> None:
    recipe = compose(
        Scripted(adversarial("random", 3)[:1]),
        iteration={"name": "blockwise", "block": 8},
        decoder="threshold",
        cache="none",
    )
    requests = [bound(Request.behind([1, 2], 20), language_of(pattern)) for pattern in PATTERNS]
    plain, tried = (
        [done.canvas for done in completions(engine_for(recipe, rows=3, speculate=count), requests)] for count in (0, 4)
    )
    assert all(accepted(language_of(p), canvas[2:]) for p, canvas in zip(PATTERNS, tried, strict=True))
    assert plain == tried


@pytest.mark.parametrize("rejected", ["cold", "branches"])
def test_drafts_change_no_token_of_an_answer(rejected: str) -> None:
    """What a form wrote behind a corrected draft had keys of masks, and drafts were judged by what any answer has.

    Rows without a form read a language that nobody was in, of more states than the step had: an index out of bounds.
    """
    isd = {"iteration": {"name": "sliding", "block": 7}, "decoder": {"name": "isd", "rejected": rejected}}
    written = []
    for parts in ({"iteration": {"name": "block_diffusion", "block": 1}, "decoder": "threshold"}, isd):
        recipe = compose(tiny_model("drafts"), cache="block", **parts)
        asked = [
            (Request.behind([1, 2, 3 + i], 17), replace(language_of(p), posterior=i % 3 == 0))
            for i, p in enumerate(PATTERNS * 3)
        ]
        requests = [one if i % 5 == 4 else bound(one, found) for i, (one, found) in enumerate(asked)]
        done = completions(engine_for(recipe, rows=24), requests)
        written.append([one.output for one in done])
    assert written[0] == written[1]


@pytest.mark.parametrize("rejected", ["cold", "branches"])
def test_drafts_go_on_with_an_answer_of_the_form(monkeypatch: pytest.MonkeyPatch, rejected: str) -> None:
    """Each position's likeliest token made no answer with the others, so that drafts were refused."""
    isd = {"iteration": {"name": "sliding", "block": 7}, "decoder": {"name": "isd", "rejected": rejected}}
    forwards, written = [], []
    for _ in range(2):
        recipe = compose(tiny_model("drafts"), cache="block", **isd)
        asked = ("(abc12){4}", "(ab|cd)(abc|12){3}x", "(é|a){6}")
        requests = [bound(Request.behind([1, 2, 3], 22), language_of(pattern)) for pattern in asked]
        done = [completions(engine_for(recipe), [one])[0] for one in requests]
        forwards.append(sum(one.counts.forwards for one in done))
        written.append([one.output for one in done])
        monkeypatch.setattr(ISD, "within", lambda self, find, state: None)
    assert written[0] == written[1] and forwards[0] < forwards[1]


@pytest.mark.parametrize(("speculate", "lanes"), [(0, 64), (4, 45)])
def test_memory_is_planned_for_versions_and_forms(speculate: int, lanes: int) -> None:
    """Plans had a lane for each row, where forms try paths in 64, and no table of languages."""
    isd = {"iteration": {"name": "sliding", "block": 7}, "decoder": {"name": "isd", "rejected": "branches"}}
    usual = {"iteration": "blockwise", "decoder": "threshold", "cache": "none"}
    recipe = compose(tiny_model(), **usual) if speculate else compose(tiny_model("drafts"), cache="block", **isd)
    engine = engine_for(recipe, rows=9, max_length=24, page=4, speculate=speculate)
    block, worker = min(recipe.iteration.block, 24), engine.loop.worker
    planned = [*memory.largest(worker, 24, block)]
    assert max(shape.lanes * (1 + shape.versions) for shape in planned) == lanes
    with torch.inference_mode():
        worker.open(BatchSize(9, 24, block, 60))
        for shape in planned:
            worker.launch(shape, [])  # of no request
    assert worker.runner.state.kept[Constraints].languages is not None
    worker.close()
    shapes, requests = observed(engine), [Request.behind([1, 2, 3 + i], 17) for i in range(9)]
    completions(engine, [bound(one, language_of("[a-j]{3,6}")) for one in requests])
    assert max(map(memory.computed, shapes)) <= memory.computed(planned[0])


@pytest.mark.parametrize("kind", ["random", "wrong", "ties", "goes_on"])
def test_a_branch_adds_what_leaves_an_answer(kind: str) -> None:
    """A branch's token is written without the projection, so it is tested before the branch is made."""
    iteration = {"name": "lopa", "block": 4, "blocks": 2, "branches": 3}
    recipe = compose(Scripted(adversarial(kind, 5)), iteration=iteration, decoder="threshold", cache="none")
    requests = [bound(Request.behind([1, 2], language_of(p).shortest + 6), language_of(p)) for p in PATTERNS]
    done = completions(engine_for(recipe, rows=3), requests)
    assert all(accepted(language_of(p), one.canvas[2:]) for p, one in zip(PATTERNS, done, strict=True))
    free = [Request.behind([1, 2, 3 + i], 17) for i in range(2)]
    together = completions(engine_for(recipe, rows=4), [*free, *requests[:2]])[:2]
    assert [one.canvas for one in together] == [one.canvas for one in completions(engine_for(recipe), free)]


def test_a_language_reaches_other_processes_as_text() -> None:
    found = replace(language_of(PATTERNS[2]), posterior=True)
    sent = json.loads(json.dumps(spelled(InLanguage(found, 3, 9, None))))
    came, again = (read(sent) for _ in range(2))
    assert (
        came.language is again.language
        and came.language.posterior
        and (came.first, came.until, came.kinds) == (3, 9, None)
    )
    assert all(np.array_equal(came.language.arrays[name], array) for name, array in found.arrays.items())


@pytest.mark.parametrize("decoder", ["insert_delete", "daedal"])
def test_decoders_that_move_or_grow_are_refused_by_name(decoder: str) -> None:
    model = fitted(Scripted(adversarial("random", 0)), decoder)
    recipe = compose(model, iteration="full" if decoder == "daedal" else "blockwise", decoder=decoder, cache="none")
    with pytest.raises(ValueError, match=decoder):
        engine_for(recipe).check(bound(Request.behind([1], 8), language_of("ab|cd")))


def test_a_least_number_of_tokens_contradicts_a_constraint() -> None:
    recipe = compose(Scripted(adversarial("random", 0)), iteration="blockwise", decoder="threshold", cache="none")
    with pytest.raises(ValueError, match=r"sampling\.min_tokens=3 contradicts the constraint"):
        engine_for(recipe).check(bound(Request.behind([1], 8, recipe.resolve({"min_tokens": 3})), language_of("ab|cd")))


def test_a_canvas_that_is_too_short_is_refused_with_the_shortest_answer() -> None:
    recipe = compose(Scripted(adversarial("random", 0)), iteration="blockwise", decoder="threshold", cache="none")
    with pytest.raises(ValueError, match="has 3 tokens"):
        engine_for(recipe).check(bound(Request.behind([1], 2), language_of("abcdx|cdabx")))


def test_a_language_without_room_beside_others_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    large, other, third = (language_of(pattern) for pattern in ("[a-j]{3,6}", "[a-j]{2,6}", "[a-j]{1,6}"))
    monkeypatch.setattr(constraints, "ROOM", large.states * large.classes + 10)
    monkeypatch.setattr(constraints, "ENTRIES", 0)
    monkeypatch.setattr(constraints, "PAIRS", 1)
    monkeypatch.setattr(constraints, "EDGES", 1)
    recipe = compose(
        Scripted(adversarial("random", 2)), iteration={"name": "blockwise", "block": 4}, decoder="threshold",
        cache="none",
    )  # fmt: skip
    engine, ended = engine_for(recipe, rows=3), dict[int, Update]()
    asked = [engine.add(bound(Request.behind([1], 8), found)) for found in (large, other)] + [
        engine.add(Request.behind([1], 8))
    ]
    while engine.busy:
        ended |= {update.index: update for update in engine.step() if update.completion or update.error}
    first, second, free = (ended[index] for index in asked)
    assert first.completion is not None and accepted(large, first.completion.canvas[1:])
    assert isinstance(second.error, MemoryError) and "too large together" in str(second.error)
    assert free.completion is not None
    (later,) = completions(engine, [bound(Request.behind([1], 8), third)])  # nobody is in the first any more
    assert accepted(third, later.canvas[1:])


def test_a_language_that_no_device_holds_is_refused_with_what_is_too_much() -> None:
    words = Vocabulary([*BYTES, *(f"w{i}".encode() for i in range(1100)), None], frozenset({EOS}), frozenset({EOS}))
    many = language(compile_automaton(choice([f"w{i}{chr(97 + i % 10)}{i}" for i in range(1100)]))[0], words)
    recipe = compose(Scripted(adversarial("random", 0)), iteration="blockwise", decoder="threshold", cache="none")
    with pytest.raises(ValueError, match=r"classes of tokens; at most 1,024 are possible"):
        engine_for(recipe).check(bound(Request.behind([1], 60), many))


@pytest.mark.rest(but=9)
@pytest.mark.parametrize("decoder", ["joint_threshold", "joint_threshold_speed", "wino", "remasking", "dmax"])
@pytest.mark.parametrize("kind", ["random", "wrong", "ties", "ends", "goes_on"])
def test_editing_ends_where_nothing_changes_any_more(decoder: str, kind: str) -> None:
    """The logits of each position stay the same, so an answer takes a forward for each position at most, and one more
    for each block, in which nothing changes."""
    recipe = compose(
        Scripted(adversarial(kind, 4)[:1]), iteration={"name": "blockwise", "block": 8},
        decoder=component("decoder", decoder), cache="none",
    )  # fmt: skip
    for pattern in PATTERNS:
        found = language_of(pattern)
        (done,) = completions(engine_for(recipe), [bound(Request.behind([1], found.shortest + 8), found)])
        assert accepted(found, done.canvas[1:])
        assert done.counts.forwards <= len(done.canvas) + 4, (pattern, done.counts)


@pytest.mark.parametrize(("later", "end"), [("cd", 9.0), ("cb", 4.0)])
def test_edits_that_are_only_possible_together_are_written(later: str, end: float) -> None:
    """The model says "ab" first, and then "cd", or "c" and less surely "b": that is taken back, and d is left."""
    table = torch.zeros(12, 3, VOCAB, dtype=torch.float64)
    for call in range(12):
        for place, letter in enumerate("ab" if call == 0 else later, start=1):
            table[call, place, TEXTS.index(letter)] = 9.0 if place == 1 else end
    decoder = component("decoder", "joint_threshold_speed")
    recipe = compose(Scripted(table), iteration="blockwise", decoder=decoder, cache="none")
    (done,) = completions(engine_for(recipe), [bound(Request.behind([1], 2), language_of("ab|cd"))])
    assert [TEXTS[token] for token in done.canvas[1:]] == ["c", "d"]


def test_edits_that_go_round_in_circles_end() -> None:
    """Each step turns the second letter into the other one, which contradicts what the mask before it would become."""
    table = torch.zeros(2, 3, VOCAB, dtype=torch.float64)
    for call, (first, second) in enumerate(("eb", "ad")):
        table[call, 1, TEXTS.index(first)], table[call, 2, TEXTS.index(second)] = 2.0, 9.0
    recipe = compose(Scripted(table), iteration="blockwise", decoder="joint_threshold", cache="none")
    found = language_of("[a-d]b|[e-h]d")
    (done,) = completions(engine_for(recipe), [bound(Request.behind([1], 2), found)])
    assert accepted(found, done.canvas[1:])
    assert constraints.TAKEN_BACK < done.counts.forwards <= 2 * constraints.TAKEN_BACK + 3


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sets_are_those_of_the_reference(pattern: str) -> None:
    from support.languages import sweeps_of

    found, generator = language_of(pattern), np.random.default_rng(0)
    sweeps, end = sweeps_of([found]), found.end
    for _ in range(20):
        canvas = np.where(generator.random(7) < 0.5, -1, generator.integers(0, VOCAB - 1, 7)).tolist()
        row = Row(found, canvas)
        tokens = torch.tensor([canvas])
        nowhere, start = torch.zeros_like(tokens, dtype=torch.bool), torch.tensor([0])
        line = Line(tokens.clamp_min(0), tokens < 0, nowhere, start, torch.tensor([0]))
        forward, backward = sweeps.forward(line), sweeps.backward(line)
        assert torch.equal(torch.stack(forward, 1)[0, :, : end + 1], torch.from_numpy(row.forward_XQ))
        assert torch.equal(torch.stack(backward, 1)[0, :, : end + 1], torch.from_numpy(row.backward_XQ))
        allowed_XC = sweeps.allowed(line)[0, :, : found.classes]
        assert torch.equal(allowed_XC, torch.from_numpy(np.stack([row.allowed_classes(i) for i in range(7)])))
        assert bool((forward[-1] & backward[-1]).any()) == row.feasible
        tokens, confidence = torch.randint(0, VOCAB - 1, (1, 7)), torch.rand(1, 7, dtype=torch.float64)
        commits = (torch.rand(1, 7) < 0.7) & line.open_BX
        want = []
        for i in sorted(commits[0].nonzero()[:, 0].tolist(), key=lambda i: (-float(confidence[0, i]), i)):
            want += [i] if row.put(i, int(tokens[0, i])) else []
        if math.isfinite(row.language.shortest) and row.feasible:
            assert sweeps.admitted(line, commits, tokens, confidence)[0].nonzero()[:, 0].tolist() == sorted(want)
