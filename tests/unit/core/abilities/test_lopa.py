"""Branches of the open blocks: which one goes on, and that nothing of the others is left."""

from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, outcome, requests_for
from support.models import MASK, tiny_model

from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline.pipeline import Pipeline
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, compose
from dinfer.research.iterations.multi_block import Lopa

RULE = {"name": "threshold", "threshold": 0.6}
BLOCKS = {"blocks": 2, "block": 4, "add_at": 0.5}


def recipe(cache: str, variant: str = "bidirectional", decoder: Any = None, **iteration: Any) -> Recipe:
    align = {"align": variant == "block_causal"}
    sweep = {"name": "lopa"} | BLOCKS | align | iteration
    return compose(tiny_model(variant), iteration=sweep, decoder=RULE if decoder is None else decoder, cache=cache)


@pytest.mark.parametrize(
    ("variant", "cache"),
    [("bidirectional", "none"), ("bidirectional", "dual"), ("shifted", "prefix"), ("block_causal", "block")],
)
def test_where_the_present_state_is_worth_most_it_is_multi_block(variant: str, cache: str) -> None:
    """With trust=1 a branch is worth the probability of its token, and the present state 1."""
    branches = recipe(cache, variant, trust=1.0, by="confidence")
    plain = recipe(cache, variant, name="multi_block")
    got, want = ([outcome(c) for c in completions(engine_for(r, rows=3, page=4), requests_for(branches))]
                 for r in (branches, plain))  # fmt: skip
    assert got == want


@pytest.mark.parametrize("decoder", [RULE, {"name": "credit", "threshold": 0.6}, {"name": "entropy_bound"}])
def test_an_exact_cache_stays_exact_and_requests_do_not_notice_each_other(decoder: dict[str, Any]) -> None:
    """The keys that stay are those of the branch that went on. Decoders' states follow it too."""
    exact, cached = (recipe(cache, "block_causal", decoder) for cache in ("none", "block"))
    want = completions(engine_for(exact), requests_for(exact))
    got = completions(engine_for(cached, rows=3, page=4), requests_for(cached))
    assert [c.canvas for c in got] == [c.canvas for c in want]
    assert all(MASK not in c.canvas for c in got)
    plain = recipe("none", "block_causal", decoder, name="multi_block")
    assert [c.canvas for c in got] != [c.canvas for c in completions(engine_for(plain), requests_for(exact))]


def test_a_version_without_masks_is_worth_most_and_part_looks_at_the_worst() -> None:
    value_BX = torch.tensor([[-1.0, -3.0, -2.0, -9.0]])
    masked_BX = torch.tensor([[True, True, True, False]])
    token_B = torch.tensor([0.5], dtype=torch.float64)
    assert Lopa().worth(value_BX, masked_BX, token_B).tolist() == [-2.0]
    assert Lopa(part=0.67).worth(value_BX, masked_BX, token_B).tolist() == [-2.5]
    assert Lopa(part=0.0).worth(value_BX, masked_BX, token_B).tolist() == [-3.0]
    assert Lopa(trust=0.5).worth(value_BX, masked_BX, token_B).tolist() == [-0.75]
    assert Lopa().worth(value_BX, torch.zeros_like(masked_BX), token_B).tolist() == [1.0]


@pytest.mark.parametrize(
    ("decoder", "cache"),
    [
        ("joint_threshold", "none"),
        ("wino", "none"),
        ("threshold", "d2cache"),
        ("threshold", "delayed"),
        ("s2d2", "none"),
    ],
)
def test_what_cannot_follow_a_version_is_refused(decoder: str, cache: str) -> None:
    with pytest.raises(IncompatibleRecipe, match="side by side"):
        recipe(cache, "block_causal" if decoder == "s2d2" else "bidirectional", {"name": decoder})


def test_candidates_and_guidance_are_refused() -> None:
    branches = recipe("dual")
    with pytest.raises(IncompatibleRecipe, match="both fill a forward"):
        Pipeline(branches, None, Runtime(speculate=2))
    with pytest.raises(IncompatibleRecipe, match="guidance takes two"):
        branches.resolve({"guidance": 1.0})
