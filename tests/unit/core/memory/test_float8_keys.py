"""runtime.kv=fp8: what a model would say whose keys and values were rounded as they are made, with every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.matrix import LEGAL, Combination, completions, engine_for, outcome, requests_for
from support.models import tiny_model
from torch import Tensor

import dinfer.core.memory
from dinfer.core.engine.request import Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.kernels.rotary import put
from dinfer.core.kernels.types import FLOAT8
from dinfer.core.memory import KVPool, PoolSize
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.lab.audit import audit
from dinfer.lab.trace.record import record_request

KINDS = {(point.variant, point.cache): point for point in reversed(LEGAL)}


def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools in the model's dtype, with what is written to them rounded to float8."""
    store = dinfer.core.memory.rotate_and_store

    def rounded(qkv: Any, k_YGE: Tensor, v_YGE: Tensor, at: Tensor) -> Tensor:
        q_BWHE = store(qkv, k_YGE, v_YGE, at)
        for pool in (k_YGE, v_YGE):
            pool.copy_(pool.to(FLOAT8))
        return q_BWHE

    monkeypatch.setattr(dinfer.core.memory, "rotate_and_store", rounded)


def outcomes(recipe: Recipe, **runtime: Any) -> list[tuple[Any, ...]]:
    return [outcome(c) for c in completions(engine_for(recipe, **runtime), requests_for(recipe))]


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("point", KINDS.values(), ids=str)
def test_tokens_are_those_of_rounded_keys(point: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = point.recipe(dtype=torch.float32)
    got = outcomes(recipe, rows=2, kv="fp8")
    assert outcomes(recipe, rows=5, kv="fp8") == got
    rounding(monkeypatch)
    assert outcomes(recipe, rows=2) == got


@pytest.mark.parametrize("cache", ["dual", "block"])
def test_guidance_shared_pages_and_pieces(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins of slots, pages of several owners, prompts and finished blocks that are computed in pieces."""
    model = tiny_model("bidirectional" if cache == "dual" else "block_causal", dtype=torch.float32)
    iteration = "blockwise" if cache == "dual" else "block_diffusion"
    recipe = compose(model, iteration={"name": iteration, "block": 8}, decoder="threshold", cache=cache)
    requests = [Request.behind([*range(1, 20), i], 12) for i in (1, 2, 3)]
    requests += [Request.behind(list(range(1, 9)), 9, recipe.resolve({"guidance": 0.7}))]
    runtime = {"rows": 2, "page": 4, "positions": 8, "share": cache == "block", "favour": "throughput"}
    got = [outcome(c) for c in completions(engine_for(recipe, kv="fp8", **runtime), requests)]
    rounding(monkeypatch)
    assert [outcome(c) for c in completions(engine_for(recipe, **runtime), requests)] == got


def test_it_changes_something_and_takes_a_quarter_of_float32() -> None:
    model = tiny_model(dtype=torch.float32)
    pools = [
        KVPool.alloc(model.spec, PoolSize(2, 64, 8, 16), dtype=dtype, device="cpu") for dtype in (torch.float32, FLOAT8)
    ]
    sizes = [pool.k_JPTGE.nbytes + pool.v_JPTGE.nbytes for pool in pools]
    assert sizes[1] * 4 == sizes[0]
    recipe = compose(model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    engine = engine_for(recipe, kv="fp8")
    got = [outcome(c) for c in completions(engine, requests_for(recipe))]
    assert got != outcomes(recipe)
    held = engine.runner.state.kv
    assert held.k_JPTGE.dtype == held.v_JPTGE.dtype == FLOAT8
    assert not held.k_JPTGE[:, dinfer.core.memory.NULL].float().any() and held.k_JPTGE.float().isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_exceeds_float8_is_written_as_its_largest_value(dtype: torch.dtype) -> None:
    pool = torch.zeros(4, 1, 4).to(FLOAT8)
    put(pool, torch.tensor([2]), torch.tensor([[[1.0, 3e4, -3e4, float("nan")]]], dtype=dtype))
    assert pool[2, 0, :3].tolist() == [1, 448, -448] and pool[2, 0, 3].float().isnan()
    assert not pool[:2].float().any()


def test_audit_and_trace_run_with_them() -> None:
    model = tiny_model("block_causal", dtype=torch.float32)
    recipe = compose(model, iteration={"name": "block_diffusion", "block": 8}, decoder="threshold", cache="block")
    whole, narrow = (Pipeline(recipe, None, Runtime(kv=kv)) for kv in ("model", "fp8"))
    found = [audit(pipe, [[1, 2, 3, 4, 5]], max_new_tokens=19) for pipe in (whole, narrow)]
    assert [one.exact for one in found] == [True, False]
    assert found[0].overall["kl"] < 1e-6 < 1e-4 < found[1].overall["kl"]
    assert found[1].recipe["cache"].endswith(" with runtime.kv=fp8")
    (request,) = narrow.requests([[1, 2, 3, 4, 5]], 19, None)
    assert record_request(narrow, request).canvas == completions(narrow.engine, [request])[0].canvas


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime\.kv='int8' must be 'model' or 'fp8'"):
        Runtime(kv="int8")  # type: ignore[arg-type]
