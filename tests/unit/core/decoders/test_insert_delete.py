"""Insertions and deletions: what moves where, what is never moved, and that every block comes to an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for
from support.models import DELETE, MASK, SPLIT, VOCAB, tiny_model
from support.scripted import Scripted
from torch import Tensor

from dinfer.core.engine.request import Request, Wants
from dinfer.core.models.llada2 import Llada2
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose

CONFIG = Path(__file__).parents[3] / "goldens" / "models" / "llada2_moe" / "config.json"


def script(*pages: list[int]) -> Tensor:
    """Logits by step and position behind a prompt of one token: the named token is almost certain."""
    table = torch.zeros(len(pages), len(pages[0]) + 1, VOCAB, dtype=torch.float64)
    for step, page in enumerate(pages):
        for place, token in enumerate(page):
            table[step, place + 1, token] = 20.0
    return table


def recipe_of(table: Tensor, decoder: Any = "insert_delete", block: int = 4) -> Any:
    model = Scripted(table, delete_id=DELETE, split_id=SPLIT)
    return compose(model, iteration={"name": "blockwise", "block": block, "stop": "off"}, decoder=decoder, cache="none")


def steps(table: Tensor, **options: float) -> list[list[int]]:
    """The block after each step."""
    recipe = recipe_of(table, block=table.shape[1] - 1)
    request = Request.behind([1], table.shape[1] - 1, recipe.resolve(options))
    return [(update.tokens or [])[1:] for update in engine_for(recipe).run([request], Wants(snapshots=True))]


def test_a_deletion_closes_the_gap_and_leaves_a_mask_at_the_end() -> None:
    table = script([5, 6, 7, 8], [5, DELETE, 7, 8], [5, 7, 8, 9], [5, 7, 8, 9])
    assert steps(table) == [[5, 6, 7, 8], [5, 7, 8, MASK], [5, 7, 8, 9], [5, 7, 8, 9]]


def test_a_split_makes_room_for_a_token_and_pushes_the_last_one_out() -> None:
    table = script([5, 6, 7, 8], [5, SPLIT, 7, 8], [5, 9, 6, 7], [5, 9, 6, 7])
    assert steps(table) == [[5, 6, 7, 8], [5, MASK, 6, 7], [5, 9, 6, 7], [5, 9, 6, 7]]


def test_several_moves_of_a_step_count_from_the_places_before_it() -> None:
    table = script([5, 6, 7, 8, 9, 10], [DELETE, SPLIT, 7, DELETE, SPLIT, 11])
    assert steps(table, post_edits=2)[1] == [MASK, 6, 7, MASK, 9, 11]


def test_without_steps_of_editing_the_block_ends_as_it_is_filled() -> None:
    table = script([5, DELETE, MASK, SPLIT])
    table[0, 2:, 9] = 10.0  # the best token that is text
    assert steps(table, threshold=0.0, post_edits=0) == [[5, 9, 9, 9]]


def test_a_block_that_was_there_before_takes_another_token() -> None:
    """6 and 7 would replace each other for ever; the third time, the next best token comes in."""
    table = script([6, 6, 6, 6], [7, 6, 6, 6])
    table[:, 1, 9] = 15.0
    found = steps(table, post_edits=8)
    assert found[:3] == [[6, 6, 6, 6], [7, 6, 6, 6], [6, 6, 6, 6]]
    assert found[3] == [9, 6, 6, 6]


@pytest.mark.parametrize("post_edits", [0, 1, 7, 128])
def test_every_block_ends_in_text_whatever_the_model_says(post_edits: int) -> None:
    """A model that wants to move something almost everywhere: the budgets bound it, and no special token is left."""
    table = 3 * torch.randn(23, 14, VOCAB, generator=torch.Generator().manual_seed(post_edits), dtype=torch.float64)
    table[..., [DELETE, SPLIT, MASK]] += 6
    recipe = recipe_of(table, {"name": "insert_delete", "threshold": 0.2, "edit_threshold": 0.0}, block=8)
    requests = [Request.behind([1], new, recipe.resolve({"post_edits": post_edits})) for new in (8, 13)]
    for done, request in zip(completions(engine_for(recipe), requests), requests, strict=True):
        assert not {DELETE, SPLIT, MASK} & set(done.canvas)
        assert done.counts.committed == request.new_tokens
        assert done.counts.forwards <= sum(size + post_edits + 1 for size in (8, request.new_tokens - 8))


@pytest.mark.parametrize("decoder", ["threshold", "joint_threshold", "credit"])
def test_other_decoders_are_never_offered_the_two(decoder: str) -> None:
    table = script([DELETE, SPLIT, DELETE, SPLIT])
    recipe = recipe_of(table, decoder)
    (done,) = completions(engine_for(recipe), [Request.behind([1], 4, recipe.resolve({}))])
    assert not {DELETE, SPLIT} & set(done.canvas)


def test_a_model_without_the_two_tokens_is_refused() -> None:
    with pytest.raises(IncompatibleRecipe, match=r"names none. Use decoder=.*joint_threshold"):
        compose(tiny_model(), iteration="blockwise", decoder="insert_delete", cache="none")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"delete_token_id": 318}, "must be there both, or neither"),
        ({"delete_token_id": 318, "split_token_id": 318}, "must differ"),
        ({"delete_token_id": 318, "split_token_id": 320}, "split_id must be a token of the vocabulary of 320"),
    ],
)
def test_a_config_with_half_of_them_is_refused(given: dict[str, int], complaint: str) -> None:
    family = Llada2(checkpoint="x", mask_id=319)
    config = json.loads(CONFIG.read_text())
    assert family.spec(config | {"delete_token_id": 318, "split_token_id": 317}).moving_ids == (318, 317)
    with pytest.raises(ValueError, match=complaint):
        family.spec(config | given)
