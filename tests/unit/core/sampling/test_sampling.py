"""Drawn tokens: the right distribution, the same in every batch and after a restart, and nothing ignored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.matrix import completions, engine_for, observed, outcome
from support.models import EOS, MASK, VOCAB, tiny_model
from support.scripted import Scripted

from dinfer.core.engine.request import Request, Wants
from dinfer.core.kernels.random import uniform
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import SAMPLINGS
from dinfer.core.sampling.gumbel import nucleus
from dinfer.core.step.shape import Sampled
from dinfer.core.terms.stats import VocabularySlice

PROMPT = [1, 2, 3, 4, 5]
HOT: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 3},
    {},
    {"temperature": 1.3, "top_k": 3, "seed": 4},
    {"temperature": 1.0, "top_p": 0.6},
    {"repetition_penalty": 1.5},
    {"eos_last": 1, "ban_eos": 1},
]


def recipe_for(sampling: Any = "standard", decoder: Any = "threshold", model: Any = None, **more: Any) -> Recipe:
    iteration = {"name": "blockwise", "block": 8} | more
    return compose(model or tiny_model(), iteration=iteration, decoder=decoder, cache="dual", sampling=sampling)


def outputs(recipe: Recipe, options: list[dict[str, Any]], **runtime: Any) -> list[tuple]:
    requests = [Request.behind(PROMPT, 21, recipe.resolve(given)) for given in options]
    return [outcome(c) for c in completions(engine_for(recipe, **runtime), requests)]


def test_a_batch_equals_each_row_alone_and_a_restart_gives_it_again() -> None:
    recipe = recipe_for()
    alone = [outputs(recipe, [given])[0] for given in HOT]
    assert outputs(recipe, HOT) == alone
    assert outputs(recipe_for(), HOT[::-1], rows=2, page=4) == alone[::-1]


def test_a_row_that_does_not_sample_is_not_changed_by_one_that_does() -> None:
    """Exactly, in float32 and bfloat16 too, where another precision of the softmax would show."""
    for dtype in (torch.float32, torch.bfloat16):
        for sampling in SAMPLINGS.names():
            recipe = recipe_for(sampling, model=tiny_model(dtype=dtype))
            plain = Request.behind(PROMPT, 21, recipe.resolve({}))
            pair = [plain, Request.behind(PROMPT, 21, recipe.resolve({"seed": 5}))]  # the same shapes, not sampled
            hot = [plain, Request.behind(PROMPT, 21, recipe.resolve({"temperature": 1.0, "seed": 5}))]
            one, other = (completions(engine_for(recipe), requests)[0] for requests in (pair, hot))
            assert outcome(one) == outcome(other)


def test_seeds_differ_and_temperature_zero_does_not_look_at_them() -> None:
    recipe = recipe_for()
    hot = outputs(recipe, [{"temperature": 1.0, "seed": seed} for seed in range(6)])
    assert len({str(row[0]) for row in hot}) == 6
    cold = outputs(recipe, [{"seed": seed} for seed in range(3)])
    assert len({str(row[0]) for row in cold}) == 1


def drawn(options: dict[str, Any], sampling: str = "standard", count: int = 4000) -> torch.Tensor:
    """How often each token is drawn at one position, which no other draw tells anything about."""
    table = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table[..., MASK] = -math.inf
    recipe = recipe_for(sampling, {"name": "fixed", "steps": 1}, Scripted(table, max_length=5000), block=count)
    tokens = completions(engine_for(recipe), [Request.behind([1], count, recipe.resolve(options))])[0].canvas[1:]
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB) / count


def expected(temperature: float) -> torch.Tensor:
    table = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table[..., MASK] = -math.inf
    return (table[0, 0] / temperature).softmax(-1)


@pytest.mark.parametrize("sampling", SAMPLINGS.names())
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_tempered_softmax(sampling: str, temperature: float) -> None:
    want = expected(temperature)
    got = drawn({"temperature": temperature, "seed": 11, "ban_eos": 0}, sampling)
    assert (got - want).abs().sum() < 0.12  # total variation of 4000 draws


def test_top_k_and_top_p_restrict_the_draw() -> None:
    want = expected(1.0)
    order = want.argsort(descending=True)
    few = drawn({"temperature": 1.0, "top_k": 3})
    assert set(few.nonzero().flatten().tolist()) == set(order[:3].tolist())
    size = int((want[order].cumsum(-1) < 0.5).sum()) + 1
    some = drawn({"temperature": 1.0, "top_p": 0.5})
    assert set(some.nonzero().flatten().tolist()) == set(order[:size].tolist())


@examples(100)
@given(st.integers(0, 2**31), st.integers(0, 12), st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]), st.booleans())
def test_the_nucleus_is_that_of_a_stable_sort(seed: int, top_k: int, top_p: float, masked: bool) -> None:
    """However many are sorted, and with many equals."""
    logits = torch.randint(-3, 4, (3, 2, 12), generator=torch.Generator().manual_seed(seed)).double()
    others, mask_id = logits.clone(), 5 if masked else None
    if masked:
        others[..., 5] = -torch.inf
    order = others.argsort(dim=-1, descending=True, stable=True)
    prob = others.gather(-1, order).softmax(-1)
    place = torch.arange(12)
    keep = (place == 0) | (prob.cumsum(-1) - prob < top_p) | (top_p >= 1)
    keep = keep & ((place < top_k) | (top_k == 0))
    want = torch.zeros_like(keep).scatter(-1, order, keep)
    if masked:
        want[..., 5] = True
    given = {"top_k": top_k, "top_p": top_p, "min_p": 0}
    options = {name: torch.full((3, 1), value, dtype=torch.float64) for name, value in given.items()}
    least = top_k or (12 if top_p < 1 else 0)
    for most in {least, max(least, 9), 12}:
        got = nucleus(logits, options, mask_id, most, VocabularySlice(0, 12, 12))
        near = ((prob.cumsum(-1) - prob - top_p).abs() < 1e-12).any() and top_p < 1
        assert near or torch.equal(got, logits.masked_fill(~want, -torch.inf))


def sorted_tokens(recipe: Recipe, options: dict[str, Any]) -> int:
    """How many tokens the steps of such a request sort."""
    return next(
        (
            extra.top
            for extra in recipe.extras(Request.behind([1], 1, recipe.resolve(options)))
            if isinstance(extra, Sampled)
        ),
        0,
    )


def test_no_vocabulary_is_sorted_that_need_not_be() -> None:
    recipe = recipe_for()
    for options, most in (({}, 0), ({"top_k": 3}, 3), ({"top_p": 0.5}, VOCAB), ({"top_k": 3, "top_p": 0.5}, 3),
                          ({"top_k": 10**6}, VOCAB)):  # fmt: skip
        assert sorted_tokens(recipe, options | {"temperature": 1.0}) == most
        assert sorted_tokens(recipe, options) == 0  # the most likely token is among them
    assert sorted_tokens(recipe, {"temperature": 1.0, "top_k": 1}) == 0
    assert sorted_tokens(recipe_for("tempered"), {"top_k": 3}) == 3


def test_the_nucleus_by_hand() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125, 9.0]).log().expand(5, 1, 5)  # the last one is the mask
    options = {"top_k": [0, 2, 0, 3, 0], "top_p": [1.0, 1.0, 0.7, 0.5, 1.0], "min_p": [0, 0, 0, 0, 0.4]}
    columns = {name: torch.tensor(values)[:, None] for name, values in options.items()}
    kept = nucleus(logits, columns, 4, 5, VocabularySlice(0, 5, 5)).isfinite()[:, 0].tolist()
    two = [True, True, False, False, True]
    assert kept == [[True] * 5, two, two, [True, False, False, False, True], two]


def test_uniform_numbers_are_strictly_between_0_and_1() -> None:
    numbers = uniform(torch.tensor(3), torch.arange(50_000))
    assert numbers.min() > 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01


def stats_of(
    options: dict[str, Any], logits: list[float], *, sampling: str = "standard", mask_id: int | None = 5
) -> tuple[int, float]:
    """The first commit of a canvas of one position, and the confidence that the decoder saw."""
    seen = []
    base = recipe_for(sampling, model=Scripted(torch.tensor([[logits]], dtype=torch.float64), mask_id=mask_id, eos_id=4,
                                               stop_ids=(3, 4)))  # fmt: skip

    class Spy(type(base.decoder)):  # type: ignore[misc]
        def select(self, stats: Any, view: Any, state: Any) -> Any:
            seen.append(float(stats.confidence_RL[0, 0]))
            return super().select(stats, view, state)

    recipe = replace(base, decoder=Spy())
    canvas = completions(engine_for(recipe), [Request.behind([0], 1, recipe.resolve(options))])[0].canvas
    return canvas[1], seen[0]


LOGITS = [math.log(p) for p in (0.4, 0.1, 0.1, 0.1, 0.2, 0.1)]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.1}, {"temperature": 2.0}, {"temperature": 0.7, "top_k": 2}, {"temperature": 1, "top_p": 0.5},
        {"top_k": 1}, {"top_p": 0.1}, {"repetition_penalty": 5.0}, {"temperature": 0.3, "repetition_penalty": 0.2},
    ],
    ids=str,
)  # fmt: skip
def test_a_confidence_is_the_models_own_however_the_token_is_drawn(options: dict[str, Any]) -> None:
    for seed in range(5):
        token, confidence = stats_of(options | {"seed": seed}, LOGITS)
        assert confidence == pytest.approx(math.exp(LOGITS[token]), rel=1e-5)


def test_tempered_confidences_are_those_of_the_distribution_that_is_drawn_from() -> None:
    """As Dream and D2F publish it."""
    tempered = [p**2 for p in (0.4, 0.1, 0.1, 0.1, 0.2, 0.1)]
    token, confidence = stats_of({"temperature": 0.5, "seed": 1}, LOGITS, sampling="tempered")
    assert confidence == pytest.approx(tempered[token] / sum(tempered), rel=1e-5)
    assert stats_of({"top_k": 1}, LOGITS, sampling="tempered")[1] == pytest.approx(0.8)  # the mask stays in the draw
    assert stats_of({}, LOGITS, sampling="tempered")[1] == pytest.approx(0.4)


@pytest.mark.parametrize("decoder", ["threshold", "factor", "joint_threshold"])
def test_top_k_1_is_greedy_at_every_temperature(decoder: str) -> None:
    """Beside rows that do draw, too; the mask token is often the most likely here."""
    recipe = recipe_for(decoder=decoder)
    greedy = outputs(recipe, [{}])[0]
    options = [{"top_k": 1, "temperature": 0.7, "seed": 3}, {"top_k": 1}, {"top_p": 0.2}, {"temperature": 1.0}]
    assert outputs(recipe, options)[:3] == [greedy] * 3


def test_a_low_temperature_commits_no_more_at_once() -> None:
    """Sharper logits made every token sure: 8 masks went at once, and most answers were wrong."""
    table = torch.zeros(1, 8, VOCAB, dtype=torch.float64)
    table[..., 7] = 3.0  # likeliest of all, and far from sure
    recipe = recipe_for(model=Scripted(table))
    for options in ({}, {"temperature": 0.1}, {"temperature": 0.7, "top_p": 0.3}, {"temperature": 1.0, "top_k": 1}):
        request = Request.behind([1] * 8, 8, recipe.resolve(options))
        steps = [sum(u.masked or []) for u in engine_for(recipe).run([request], Wants(snapshots=True))]
        assert steps == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_penalty_leaves_the_mask_token_as_likely_as_it_is() -> None:
    """The token is chosen by lowered logits, and so it is where the mask token competes."""
    logits = [3.0, 0.0, -5.0, -5.0, -5.0, 1.0]  # 5 is the mask; 0 is in the prompt
    token, confidence = stats_of({"repetition_penalty": 2.0}, logits)
    assert token == 0 and confidence == pytest.approx(torch.tensor(logits).softmax(-1)[0].item(), rel=1e-5)


def test_penalties_count_how_often_the_canvas_holds_a_token() -> None:
    logits = [3.0, 2.0, 1.9, -5.0, -5.0, -9.0]  # the prompt is token 0
    for name, penalty, token in (
        ("presence_penalty", 0.9, 0), ("presence_penalty", 1.1, 1), ("frequency_penalty", 1.1, 1),
        ("presence_penalty", -2.0, 0),
    ):  # fmt: skip
        assert stats_of({name: penalty}, logits)[0] == token, (name, penalty)


def test_no_stop_token_comes_before_min_tokens() -> None:
    table = torch.zeros(1, 8, VOCAB, dtype=torch.float64)
    table[..., EOS] = 9.0
    recipe = recipe_for(model=Scripted(table))
    for least in (0, 3, 8):
        request = Request.behind([1] * 8, 8, recipe.resolve({"min_tokens": least}))
        (done,) = completions(engine_for(recipe), [request])
        assert len(done.output) == least


@pytest.mark.rest(but=6)
@pytest.mark.parametrize("decoder", ["joint_threshold", "remasking", "wino", "dmax"])
@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.2, "temperature": 1.0, "min_tokens": 9},
        {"temperature": 1.5},
        {"temperature": 0.5, "top_p": 0.7},
        {"repetition_penalty": 2.0},
    ],
)
def test_decoders_that_edit_take_every_sampling_and_end(decoder: str, options: dict[str, Any]) -> None:
    recipe = recipe_for(decoder=decoder)
    for (output, *_), seed in zip(outputs(recipe, [options | {"seed": s} for s in range(3)]), range(3), strict=True):
        assert MASK not in output, seed


def test_decoded_tokens_are_compared_with_the_most_likely_ones() -> None:
    """A draw at a decoded position would rewrite it at every step. Masks are drawn all the same."""
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    base = recipe_for(decoder={"name": "joint_threshold", "threshold": 0.0, "edit_threshold": 1.0})

    class Spy(type(base.decoder)):  # type: ignore[misc]
        def select(self, stats: Any, view: Any, state: Any) -> Any:
            seen.append((stats.token_RL.clone(), view.masked_RL.clone(), view.given_RL.clone()))
            return super().select(stats, view, state)

    greedy, drawn = ([], [])
    for options, kept in (({}, greedy), ({"temperature": 2.0, "repetition_penalty": 3.0}, drawn)):
        table = torch.randn(1, 8, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        recipe = replace(base, model=Scripted(table), decoder=Spy(**{"threshold": 0.0, "edit_threshold": 1.0}))
        completions(engine_for(recipe), [Request.behind([1] * 8, 8, recipe.resolve(options))])
        kept.extend(seen)
        seen.clear()
    best_RL, first_RL = greedy[0][0], drawn[0][0]
    assert not torch.equal(first_RL, best_RL)
    for token_RL, masked_RL, given_RL in drawn[1:]:
        judged_RL = ~masked_RL & ~given_RL
        assert torch.equal(token_RL[judged_RL], best_RL[judged_RL])


@pytest.mark.parametrize("sampling", SAMPLINGS.names())
def test_eos_options(sampling: str) -> None:
    likely = [0.0, -1.0, -9.0, 1.0, 2.0, -9.0]  # 4 is EOS, 3 another stop token
    assert stats_of({}, likely, sampling=sampling)[0] == 4
    assert stats_of({"ban_eos": 1}, likely, sampling=sampling)[0] == 3
    for temperature in (0.0, 0.01):  # LLaDA forgets EOS where it draws
        token, confidence = stats_of({"eos_last": 1, "temperature": temperature}, likely, sampling=sampling)
        assert (token, confidence) == (4, 0.0)
        alone = [-math.inf] * 4 + [0.0, -math.inf]  # as where a form is over, and the model has no mask token
        token, confidence = stats_of(
            {"eos_last": 1, "temperature": temperature}, alone, sampling=sampling, mask_id=None
        )
        assert token == 4 and math.isfinite(confidence)
    assert stats_of({}, likely, sampling={"name": sampling, "suppress": [4, 3]})[0] == 0  # type: ignore[arg-type]


def test_eos_last_commits_stop_tokens_last() -> None:
    table = torch.zeros(1, 8, VOCAB, dtype=torch.float64)
    table[..., 7] = 3.0
    table[0, ::2, EOS] = 9.0  # at every other position the surest of all
    recipe = recipe_for("standard", {"name": "fixed", "steps": 8}, Scripted(table))
    request = Request.behind([1] * 8, 8, recipe.resolve({"eos_last": 1}))
    steps = [u.masked for u in engine_for(recipe).run([request], Wants(snapshots=True))]
    assert steps[3] is not None and steps[3][8:] == [True, False] * 4


def test_repetition_penalty_lowers_positive_and_negative_logits() -> None:
    """By what is drawn: 2 beats 3 / 1.5 - 0.1, and -4 beats -3 * 1.5."""
    for first, second, token in ((3.0, 1.9, 0), (3.0, 2.1, 1), (-3.0, -4.0, 1), (-3.0, -5.0, 0)):
        likely = [first, second, -9.0, -9.0, -9.0, -9.0]
        assert stats_of({"repetition_penalty": 1.5}, likely)[0] == token


def test_repetition_penalty_counts_prompt_and_decoded_tokens() -> None:
    table = torch.zeros(1, 1, VOCAB, dtype=torch.float64)
    table[..., 1], table[..., 2], table[..., 3] = 3.0, 2.9, 2.8
    recipe = recipe_for(decoder={"name": "fixed", "steps": 8}, model=Scripted(table))
    request = Request.behind([1], 3, recipe.resolve({"repetition_penalty": 1.2, "steps": 3}))
    assert completions(engine_for(recipe), [request])[0].output == [2, 3, 1]


def test_the_mask_token_takes_part_in_the_draw() -> None:
    table = torch.zeros(1, 1, VOCAB, dtype=torch.float64)
    table[..., MASK] = math.log(VOCAB)  # as likely as all others together
    recipe = recipe_for("standard", {"name": "threshold", "threshold": 0.0}, Scripted(table), block=64)
    request = Request.behind([1], 64, recipe.resolve({"temperature": 1.0}))
    left = [sum(u.masked or []) for u in engine_for(recipe).run([request], Wants(snapshots=True))]
    assert 20 < left[0] < 44 and left[-1] == 0


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"temperature": -1.0}, "must be 0"),
        ({"temperature": 1e-9}, "between 0.001"),
        ({"temperature": math.nan}, "must be 0"),
        ({"temperature": math.inf}, "must be 0"),
        ({"seed": -2}, "between -1"),
        ({"top_p": 0.0}, "above 0"),
        ({"top_p": 1.5}, "at most 1"),
        ({"top_k": -2}, "must be 0 or more"),
        ({"repetition_penalty": 0.0}, "between 0.001"),
        ({"eos_last": 2}, "must be between 0 and 1"),
        ({"seed": 1.5}, "must be of type int"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        recipe_for().resolve(wrong)


@pytest.mark.parametrize(
    ("decoder", "option", "value"),
    [
        ("threshold", "sampling.temperature", 1e39),
        ("threshold", "sampling.repetition_penalty", 1e-39),
        ("threshold", "sampling.guidance", 1e39),
        ("credit", "decoder.alpha", 1e39),
        ("joint_threshold", "decoder.penalty", -1e39),
    ],
)
def test_a_number_that_would_make_logits_infinite_is_refused(decoder: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{option}=.* must be .*between"):
        recipe_for(decoder=decoder).resolve({option: value})


def test_what_cannot_be_honoured_is_refused() -> None:
    for decoder in ("joint_threshold", "remasking"):
        with pytest.raises(IncompatibleRecipe, match=r"cannot honour sampling.eos_last=1"):
            recipe_for(decoder=decoder).resolve({"eos_last": 1})
    with pytest.raises(IncompatibleRecipe, match="eos_last"):
        recipe_for(decoder={"name": "fixed", "score": "random"}).resolve({"eos_last": 1})
    with pytest.raises(IncompatibleRecipe, match="vocabulary"):
        recipe_for({"name": "standard", "suppress": [VOCAB]})


@pytest.mark.parametrize(
    ("given", "sampled"), [({}, False), ({"seed": 7}, False), ({"temperature": 0.5}, True), ({"eos_last": 1}, True)]
)
def test_defaults_need_no_sampled_step(given: dict[str, Any], sampled: bool) -> None:
    recipe = recipe_for()
    engine = engine_for(recipe)
    shapes = observed(engine)
    completions(engine, [Request.behind(PROMPT, 9, recipe.resolve(given))])
    assert {shape.extras for shape in shapes} == {(Sampled(),) if sampled else ()}
