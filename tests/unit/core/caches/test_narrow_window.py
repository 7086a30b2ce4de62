"""Narrow windows: what they compute, that a step always decodes there, and what stays exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, launched_ahead, outcome
from support.models import EOS, MASK, VOCAB, tiny_model
from support.scripted import Heard

from dinfer.core.engine.request import Completion, Request, Wants
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.core.registry import ITERATIONS
from dinfer.core.step.contracts import Phase

BLOCK, NEW = 16, 40
CASES = [("block_causal", "block"), ("bidirectional", "dual"), ("shifted", "dual")]


def recipe_of(model: Any, cache: Any, **sampling: int) -> Recipe:
    return compose(
        model, iteration={"name": "blockwise", "block": BLOCK, "align": True, "stop": "off"},
        decoder={"name": "threshold", "threshold": 0.6}, cache=cache, sampling={"name": "standard", **sampling},
    )  # fmt: skip


def requests_for(recipe: Recipe) -> list[Request]:
    """Three prompts, gaps, and a row that draws."""
    plain = [Request.behind([1 + (7 * i + j) % 30 for i in range(5 + j)], NEW, recipe.resolve({})) for j in range(3)]
    causal = recipe.model.spec.causal_block is not None  # which fills gaps at the end alone
    gaps = [at > 29 if causal else at % 3 == 1 for at in range(35)]
    drawn = Request.behind([3, 1, 4], NEW, recipe.resolve({"temperature": 0.8, "seed": 5}))
    return [*plain, Request([2] * 41, [*gaps, *[True] * 6], recipe.resolve({})), drawn]


def answers(recipe: Recipe, **runtime: Any) -> list[Completion]:
    return completions(engine_for(recipe, **runtime), requests_for(recipe))


@pytest.mark.parametrize(("variant", "cache"), CASES)
def test_a_window_as_long_as_the_block_gives_the_tokens_of_the_plain_cache(variant: str, cache: str) -> None:
    model = tiny_model(variant)
    whole = recipe_of(model, {"name": f"narrow_{cache}", "ahead": BLOCK})
    assert [outcome(done) for done in answers(whole)] == [outcome(done) for done in answers(recipe_of(model, cache))]


@pytest.mark.rest(but=3)
@pytest.mark.parametrize(("variant", "cache"), CASES)
@pytest.mark.parametrize("window", [{"ahead": 4, "back": 2}, {"ahead": 1, "back": 0}, {"ahead": 5, "back": 5}], ids=str)
def test_neither_rows_nor_rounds_launched_ahead_change_a_token(
    variant: str, cache: str, window: dict[str, int]
) -> None:
    recipe = recipe_of(tiny_model(variant), {"name": f"narrow_{cache}", **window})
    alone = [outcome(done) for done in answers(recipe, rows=1)]
    assert [outcome(done) for done in answers(recipe, rows=5, page=4)] == alone
    ahead = launched_ahead(engine_for(recipe, rows=5))
    assert [outcome(done) for done in completions(ahead, requests_for(recipe))] == alone


@pytest.mark.parametrize(("variant", "cache"), CASES)
def test_each_step_computes_and_decodes_around_the_first_mask(variant: str, cache: str) -> None:
    shift, spec = int(variant == "shifted"), {"causal_block": BLOCK} if cache == "block" else {}
    table = torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Heard(table, shift=shift, **spec)
    recipe = recipe_of(model, {"name": f"narrow_{cache}", "ahead": 4, "back": 2})
    request, narrow = Request.behind([1] * BLOCK, 2 * BLOCK, recipe.resolve({})), 0
    masked, seen = {*range(BLOCK, 3 * BLOCK)}, 0
    for update in engine_for(recipe).run([request], Wants(snapshots=True)):
        positions, (start, end) = model.fed[-1], update.region
        left = {at for at, is_masked in enumerate(update.masked or []) if is_masked}
        gained = masked - left
        if update.phase == Phase.PREFILL:
            continue
        assert gained and {at - shift for at in gained} <= {*positions}
        assert min(masked) - shift in positions  # the first mask is never left out
        if end == seen:
            narrow += 1
            first = min(max(min(masked) - shift - 2, start - shift), end - shift - 6)
            assert positions == [*range(first, first + 6)]
        else:
            assert {*range(start, end - shift)} <= {*positions}
        masked, seen = left, end
        if update.completion is not None:
            assert update.completion.counts.positions == sum(map(len, model.fed))
    assert narrow > 4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ahead", "back"), [(3, 2), (9, 0), (5, 4)])
def test_of_several_blocks_a_step_computes_what_has_no_keys_what_became_final_and_the_window(
    ahead: int, back: int, seed: int
) -> None:
    """A slow loop over lists: which positions each step computes, and what it commits."""
    size, blocks, new, sure, add_at, force_at = 8, 3, 37, 0.5, 0.4, 0.8
    table = 3 * torch.randn(5, 7, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table[..., [EOS, MASK]] = -50.0
    model, tops = Heard(table, causal_block=size), table.softmax(-1).amax(-1).tolist()
    recipe = compose(
        model, decoder={"name": "threshold", "threshold": sure},
        cache={"name": "narrow_block", "ahead": ahead, "back": back},
        iteration={
            "name": "multi_block", "block": size, "blocks": blocks, "align": True, "add_at": add_at,
            "force_at": force_at,
        },
    )  # fmt: skip
    start, end, kept, seen, masked, holed = size, 2 * size, size, 0, {*range(size, size + new)}, 0

    def open_in(first: int) -> list[int]:
        return [at for at in range(first, min(first + size, size + new)) if at in masked]

    def share(first: int) -> float:
        return 1 - len(open_in(first)) / (min(first + size, size + new) - first)

    for update in engine_for(recipe).run([Request.behind([1] * size, new, recipe.resolve({}))], Wants(snapshots=True)):
        if update.phase == Phase.PREFILL:
            continue
        assert update.region == (start, end)
        computed, page = [*range(kept, end)], tops[len(model.fed) % 5 - 1]
        if seen > start:
            width = min(ahead + back, seen - start)
            first = min(max(min(masked) - back, start), seen - width)
            computed = [*range(kept, start), *range(first, first + width), *range(seen, end)]
            holed += [*range(computed[0], computed[-1] + 1)] != computed
        assert model.fed[-1] == computed
        chosen: set[int] = set()
        for first in range(start, end, size):
            mine = [at for at in open_in(first) if at in computed]
            certain = [at for at in mine if page[at % 7] >= sure]
            forced = mine and (first == start or share(first - size) >= force_at)
            chosen |= {*certain} or ({max(mine, key=lambda at: page[at % 7])} if forced else set())
        kept, seen, masked = start, end, masked - chosen
        assert {at for at, is_masked in enumerate(update.masked or []) if is_masked} == masked
        last = start + (end - start - 1) // size * size
        opens, room = share(last) >= add_at and end < size + new, (end - start - 1) // size + 1 < blocks
        while start < end and not open_in(start):
            start = min(start + size, end)
        end = min(end + size, size + new) if start == end or (opens and room) else end
    assert not masked and (holed or ahead + back > 6)


@pytest.mark.parametrize("blocks", [1, 3])
def test_keys_of_finished_blocks_are_those_of_the_block_cache(blocks: int) -> None:
    """A second turn reads the keys of the first one's answer. It decodes as it does without them."""
    model = tiny_model("block_causal")
    recipe = recipe_of(model, {"name": "narrow_block", "ahead": 3, "back": 1})
    if blocks > 1:
        recipe = replace(recipe, iteration=ITERATIONS.build({"name": "multi_block", "block": BLOCK, "blocks": blocks}))
    first = Request.behind([1 + 3 * i % 30 for i in range(BLOCK)], 3 * BLOCK, recipe.resolve({}))
    canvas = completions(engine_for(recipe), [first])[0].canvas
    turn = Request.behind([*canvas, 7], BLOCK, recipe.resolve({}))
    updates = [
        update for update in engine_for(recipe, rows=1, page=4, share=True).run([first, turn]) if update.index == 1
    ]
    assert updates[0].cached > 2 * BLOCK and updates[-1].completion is not None
    alone = completions(engine_for(recipe), [turn])[0]
    assert outcome(updates[-1].completion)[0] == outcome(alone)[0]


@pytest.mark.parametrize(
    ("variant", "parts", "said"),
    [
        ("bidirectional", {}, "Use cache=.*narrow_dual"),
        ("block_causal", {"decoder": "joint_threshold"}, "judges decoded tokens"),
        ("block_causal", {"decoder": "entropy_bound"}, "leaves masks out"),
        ("block_causal", {"iteration": {"name": "smooth", "block": BLOCK}}, "computes the first masks"),
        ("block_causal", {"iteration": {"name": "lopa", "block": BLOCK}}, "versions of the active blocks"),
        ("block_causal", {"cache": {"name": "narrow_block", "ahead": 0}}, "cache.ahead=0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(variant: str, parts: dict[str, Any], said: str) -> None:
    given = {"iteration": {"name": "blockwise", "block": BLOCK}, "decoder": "threshold", "cache": "narrow_block"}
    with pytest.raises((IncompatibleRecipe, ValueError), match=said):
        compose(tiny_model(variant), **(given | parts))


@pytest.mark.parametrize(("variant", "cache"), CASES)
@pytest.mark.parametrize("window", [False, True])
def test_a_limit_commits_the_first_masks_alone(variant: str, cache: str, window: bool) -> None:
    setting = {"name": f"narrow_{cache}", "ahead": 6, "back": 2} if window else cache
    recipe = recipe_of(tiny_model(variant), setting)
    request = Request.behind([1] * BLOCK, 2 * BLOCK, recipe.resolve({"leftmost": 2, "threshold": 0.0}))
    masked, most = [*range(BLOCK, 3 * BLOCK)], 0
    for update in engine_for(recipe).run([request], Wants(snapshots=True)):
        left = [at for at, is_masked in enumerate(update.masked or []) if is_masked]
        gained = [at for at in masked if at not in left]
        assert gained == masked[: len(gained)] and len(gained) <= 2
        masked, most = left, max(most, len(gained))
    assert most == 2 and not masked


def test_a_limit_is_of_one_request_alone() -> None:
    recipe = recipe_of(tiny_model("block_causal"), "block")
    plain, limited = (Request.behind([1, 2, 3], NEW, recipe.resolve(given)) for given in ({}, {"leftmost": 1}))
    together = [outcome(done) for done in completions(engine_for(recipe, rows=2), [plain, limited])]
    assert together == [outcome(completions(engine_for(recipe), [each])[0]) for each in (plain, limited)]
    assert together[0] != together[1]
