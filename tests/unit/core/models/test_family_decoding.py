"""Defects of published samplers of Dream, LLaDA2 and SDAR that dinfer must not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for
from support.models import MASK, VOCAB, tiny_model
from support.scripted import Scripted

from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import compose

BLOCK = 8


def table(steps: int = 1, seed: int = 0) -> torch.Tensor:
    """Logits [steps, 32, V] in which the mask token never wins, token 5 nowhere either."""
    generator = torch.Generator().manual_seed(seed)
    found = 3 * torch.randn(steps, 32, VOCAB, generator=generator, dtype=torch.float64)
    found[..., MASK] = found[..., 5] = -20.0
    return found


def canvases(decoder: dict[str, Any], logits: torch.Tensor, request: Request) -> list[list[int]]:
    """The canvas after every step, with one block of the whole length."""
    iteration = {"name": "blockwise", "block": BLOCK, "align": True, "stop": "off"}
    recipe = compose(Scripted(logits), iteration=iteration, decoder=decoder, cache="none")
    return [list(u.tokens or []) for u in engine_for(recipe).run([request], Wants(snapshots=True))]


@pytest.mark.parametrize("score", ["sequential", "low_confidence"])
def test_what_is_decoded_or_given_stays_where_the_quota_exceeds_the_masks(score: str) -> None:
    """SDAR's sampler takes the quota from neighbours, or from anywhere, and writes over them."""
    given = [1, MASK, 2, MASK, MASK, 3, 4, MASK]
    decoder = {"name": "fixed", "score": score, "split": "block", "steps": 3}  # 3, 3 and 2 of the block's 8
    seen = canvases(decoder, table(), Request(given, [token == MASK for token in given]))
    for before, after in zip([given, *seen], seen, strict=False):
        assert all(new == old or old == MASK for new, old in zip(after, before, strict=True))
    assert [canvas.count(MASK) for canvas in seen] == [1, 0]
    if score == "sequential":
        assert seen[0].index(MASK) == 7


def test_a_quota_of_the_block_is_spent_sooner_than_one_of_the_masks() -> None:
    prompt = [1] * 4
    for split, left in (("block", [2, 0]), ("masks", [3, 2, 1, 0])):
        decoder = {"name": "fixed", "split": split, "steps": 4}
        assert [canvas.count(MASK) for canvas in canvases(decoder, table(), Request.behind(prompt, 4))] == left


def test_a_quota_comes_with_all_that_are_sure() -> None:
    logits = table()
    logits[:, 2:5, 7] = 60.0
    seen = canvases({"name": "fixed", "steps": BLOCK, "threshold": 0.95}, logits, Request.behind([1], 7))
    assert seen[0][2:5] == [7, 7, 7] and [canvas.count(MASK) for canvas in seen] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("post_edits", [0, 1, 2])
def test_a_mask_token_that_always_wins_ends_with_the_budget(post_edits: int) -> None:
    """LLaDA2.1's and SGLang's loops write the mask, and are where they were."""
    logits = table()
    logits[..., MASK] = 60.0
    decoder = {"name": "joint_threshold", "threshold": 0.9, "edit_threshold": 0.0, "post_edits": post_edits}
    seen = canvases(decoder, logits, Request.behind([1], 7))
    assert len(seen) == 7 + 8 * post_edits  # 7 to fill the block, and each edit masks all of it again
    assert MASK not in seen[-1]


def test_a_step_of_editing_masks_again_what_the_mask_token_wins() -> None:
    logits = table(3)
    logits[0, :, 9], logits[1, :, 9], logits[1, 3, MASK], logits[2, :, 9] = 60.0, 60.0, 90.0, 60.0
    decoder = {"name": "joint_threshold", "post_edits": 4}
    seen = canvases(decoder, logits, Request.behind([1], 7))
    assert [canvas.count(MASK) for canvas in seen[:3]] == [0, 1, 0]


def test_every_request_has_its_own_threshold_for_edits() -> None:
    """Diffulex reads it from a field that does not exist, and takes 0 for all."""
    logits = table(2)
    logits[0, :, 9], logits[1, :, 8] = 60.0, 30.0
    logits[1, :, 9] = 29.0  # token 8 has 73% then
    iteration = {"name": "blockwise", "block": BLOCK, "align": True, "stop": "off"}
    recipe = compose(Scripted(logits), iteration=iteration, decoder="joint_threshold", cache="none")
    options = [recipe.resolve({"edit_threshold": bar, "post_edits": 1}) for bar in (0.5, 0.9)]
    found = completions(engine_for(recipe), [Request.behind([1], 7, values) for values in options])
    assert [c.canvas[1:] for c in found] == [[8] * 7, [9] * 7]


def test_the_least_number_of_fills_is_kept() -> None:
    decoder = {"name": "joint_threshold", "threshold": 1.0, "edit_threshold": 1.0, "least": 3, "post_edits": 0}
    seen = canvases(decoder, table(), Request.behind([1], 7))
    assert [canvas.count(MASK) for canvas in seen] == [4, 1, 0]


@pytest.mark.parametrize("alg", ["maskgit_plus", "entropy", "topk_margin", "origin"])
def test_dreams_counts_are_those_of_the_row_alone(alg: str) -> None:
    """The reference commits the mean number of its rows in each."""
    recipe = compose(
        tiny_model("shifted"), iteration="full", decoder={"name": "dream", "alg": alg, "steps": 5}, cache="none"
    )
    requests = [
        Request.behind([3, 4, 5], 17, recipe.resolve({"seed": 1})),
        Request.behind([6] * 9, 6, recipe.resolve({"seed": 2})),
    ]
    together = completions(engine_for(recipe), requests)
    alone = [completions(engine_for(recipe), [request])[0] for request in requests]
    assert [c.canvas for c in together] == [c.canvas for c in alone]
    assert [c.counts.forwards for c in together] == [c.counts.forwards for c in alone]
