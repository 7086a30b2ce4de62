"""Every legal recipe as CUDA graphs: the tokens of eager steps, whichever kernels run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix import (
    LEGAL,
    SAMPLE,
    Combination,
    completions,
    engine_for,
    every_recipe,
    may_speculate,
    observed,
    outcome,
    over_shared_model,
    requests_for,
)
from support.models import tiny_model

from dinfer.core.decoders.threshold import Threshold
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request, Wants
from dinfer.core.kernels.dispatch import VARIABLE
from dinfer.core.recipe.recipe import compose
from dinfer.core.step.contracts import BlockView, Proposal, State, TokenStats
from dinfer.research.abilities.following import Watches
from dinfer.speed.abilities.slices import Sliced

compiles = torch._dynamo.utils.counters["stats"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def recipe_for(combination: Combination):
    """Heads of 16, the least that the Triton kernels take."""
    model = tiny_model(combination.variant, dtype=torch.float32, device="cuda", head_dim=16)
    return combination.recipe(model)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@every_recipe()
def test_graphs_give_the_tokens_of_eager_steps(
    combination: Combination, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came up once is captured when it comes again. After a few runs nothing is captured or compiled any more.

    Lookahead learns from run to run, so a shape may come up late.
    """
    monkeypatch.setenv(VARIABLE, kernels)
    recipe = recipe_for(combination)
    requests = requests_for(recipe)
    want = [outcome(c) for c in completions(engine_for(recipe, rows=3), requests)]
    engine = engine_for(recipe, rows=3, graphs=True)
    made = [(0, 0)]
    while len(made) < 3 or made[-1] != made[-2]:
        assert [outcome(c) for c in completions(engine, requests)] == want
        made.append((engine.runner.captured, compiles["unique_graphs"]))
        assert len(made) <= 6, made
    assert engine.runner.captured > 0 and engine.runner.refused == {}


@pytest.mark.parametrize("combination", SAMPLE[::12], ids=str)
def test_graphs_tell_what_eager_steps_tell(combination: Combination) -> None:
    recipe = recipe_for(combination)
    requests = requests_for(recipe)

    def told(engine: Engine) -> list[list[tuple[int, float, int]]]:
        rows: list[list[tuple[int, float, int]]] = [[] for _ in requests]
        for update in engine.run(requests, Wants(deltas="commit", drafts=True, logprobs=True)):
            assert len(update.drafts) == update.region[1] - update.region[0]
            pairs = zip(update.new or [], update.logprobs or [], strict=True)
            rows[update.index] += [(token, entry.logprob, entry.top[0][0]) for token, entry in pairs]
        return rows

    want = told(engine_for(recipe, rows=3))
    engine = engine_for(recipe, rows=3, graphs=True)
    # Which positions such a cache recomputes may hang on the last bit of a distance.
    close = 1e-2 if isinstance(recipe.cache, Watches) else 1e-4
    for _ in range(2):
        got = told(engine)
        assert [[token for token, *_ in row] for row in got] == [[token for token, *_ in row] for row in want]
        for mine, theirs in zip(got, want, strict=True):
            assert [logprob for _, logprob, _ in mine] == pytest.approx([p for _, p, _ in theirs], abs=close)
    assert engine.runner.captured > 0 and engine.runner.refused == {}


@pytest.mark.parametrize("combination", [c for c in SAMPLE if may_speculate(over_shared_model(c))][::6], ids=str)
def test_speculation_under_graphs_gives_the_tokens_of_plain_steps(combination: Combination) -> None:
    recipe = recipe_for(combination)
    requests = [r for r in requests_for(recipe) if not recipe.guided(r.options)]
    want = completions(engine_for(recipe, rows=3), requests)
    engine = engine_for(recipe, rows=3, graphs=True, speculate=2)
    for _ in range(3):
        got = completions(engine, requests)
        assert [(c.canvas, c.output) for c in got] == [(c.canvas, c.output) for c in want]
        assert all(a.counts.forwards <= b.counts.forwards for a, b in zip(got, want, strict=True))
    assert engine.runner.captured > 0 and engine.runner.refused == {}


@pytest.mark.parametrize(
    "iteration", [{"name": "block_diffusion"}, {"name": "multi_block", "blocks": 2, "align": True}]
)
def test_sliced_steps_under_graphs_give_the_tokens_of_one_row_alone(
    iteration: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("block_causal", dtype=torch.float32, device="cuda", head_dim=16)
    cache = {"name": "narrow_block", "ahead": 4, "back": 2}
    recipe = compose(model, iteration={**iteration, "block": 16}, decoder="threshold", cache=cache)
    requests = [Request.behind([5, 6, 7 + i], 30 + 7 * i, recipe.resolve({})) for i in range(6)]
    want = [outcome(c) for c in completions(engine_for(recipe, rows=1), requests)]
    monkeypatch.setattr("dinfer.speed.grouping.FREE", 1)
    engine = engine_for(recipe, rows=6, graphs=True)
    shapes = observed(engine)
    for _ in range(3):
        assert [outcome(c) for c in completions(engine, requests)] == want
    assert any(shape.extra(Sliced) for shape in shapes)
    assert engine.runner.captured > 0 and engine.runner.refused == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("point", {p.cache: p for p in reversed(LEGAL)}.values(), ids=str)
def test_float8_keys_under_graphs(point: Combination, dtype: torch.dtype) -> None:
    recipe = point.recipe(tiny_model(point.variant, dtype=dtype, device="cuda", head_dim=16))
    requests = requests_for(recipe)
    engine = engine_for(recipe, rows=3, graphs=True, kv="fp8")
    want = [outcome(c) for c in completions(engine_for(recipe, rows=3, kv="fp8"), requests)]
    for _ in range(2):
        assert [outcome(c) for c in completions(engine, requests)] == want
    assert engine.runner.captured > 0 and engine.runner.refused == {}


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
@pytest.mark.parametrize("variant,cache", [("bidirectional", "dual"), ("block_causal", "block")])
def test_a_compiled_body_gives_the_same_tokens_under_graphs(variant: str, cache: str, mode: str) -> None:
    model = tiny_model(variant, dtype=torch.float32, device="cuda", head_dim=16)
    recipe = compose(model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache=cache)
    requests = requests_for(recipe)
    want = [outcome(c) for c in completions(engine_for(recipe, rows=3), requests)]
    engine = engine_for(recipe, rows=3, graphs=True, compile=mode)
    for _ in range(2):
        assert [outcome(c) for c in completions(engine, requests)] == want
    captured, compiled = engine.runner.captured, compiles["unique_graphs"]
    assert captured > 0 and compiled > 0 and engine.runner.refused == {}
    assert [outcome(c) for c in completions(engine, requests)] == want
    assert (engine.runner.captured, compiles["unique_graphs"]) == (captured, compiled)


class Peeking(Threshold):
    """Asks the device for a number in the middle of a step."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        if view.masked_RL.sum().item() < 0:
            raise AssertionError
        return super().select(stats, view, state)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(dtype=torch.float32, device="cuda", head_dim=16)
    plain, peeking = (
        compose(model, iteration={"name": "blockwise", "block": 8}, decoder=decoder, cache="dual")
        for decoder in (Threshold(), Peeking())
    )
    requests = requests_for(plain)
    want = [outcome(c) for c in completions(engine_for(plain), requests)]
    engine = engine_for(peeking, graphs=True)
    assert [outcome(c) for c in completions(engine, requests)] == want
    assert engine.runner.captured == 0 and len(engine.runner.refused) == len(caplog.messages) > 0
    assert all("runs eagerly" in text and "synchroniz" in text for text in caplog.messages)
    torch.rand(3, device="cuda")  # no capture was left open


def test_requests_enter_while_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that waits would have the device idle until the host has planned the next round."""
    model = tiny_model("block_causal", dtype=torch.float32, device="cuda", head_dim=16)
    recipe = compose(model, iteration={"name": "block_diffusion", "block": 8}, decoder="threshold", cache="block")
    requests, engine, admitted = requests_for(recipe), engine_for(recipe, graphs=True), list[int]()
    completions(engine, requests)
    admit = engine.loop.worker.admit

    def watched(entries: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return admit(entries)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            admitted.append(len(entries))

    monkeypatch.setattr(engine.loop.worker, "admit", watched)
    completions(engine, requests)
    assert sum(admitted) == len(requests)


def test_other_threads_may_wait_for_the_device_while_graphs_are_captured() -> None:
    model = tiny_model(dtype=torch.float32, device="cuda", head_dim=16)
    recipe = compose(model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    requests = requests_for(recipe)
    engine, done = engine_for(recipe, graphs=True), threading.Event()

    def wait() -> int:
        waits = 0
        while not done.is_set():
            torch.ones(3, device="cuda").sum().item()
            waits += 1
        return waits

    with ThreadPoolExecutor() as pool:
        waited = pool.submit(wait)
        try:
            for _ in range(3):
                completions(engine, requests)
        finally:
            done.set()
    assert waited.result() > 0 and engine.runner.captured > 0 and engine.runner.refused == {}


def test_requests_that_come_and_go_at_any_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next round launched before the last one is looked at; cancelled rows leave while the device works."""
    model = tiny_model("block_causal", dtype=torch.float32, device="cuda", head_dim=16)
    recipe = compose(model, iteration={"name": "block_diffusion", "block": 8}, decoder="threshold", cache="block")
    requests = requests_for(recipe) * 3
    want = [outcome(c) for c in completions(engine_for(recipe), requests)]
    monkeypatch.setattr("dinfer.speed.grouping.settling_pays", lambda *rows: True)
    monkeypatch.setattr("dinfer.speed.settling.settling_pays", lambda *rows: True)
    for favour in ("latency", "throughput"):
        engine = engine_for(recipe, rows=4, graphs=True, max_length=64, positions=16, favour=favour)
        names, done, cancelled = {}, {}, set()
        for i, request in enumerate(requests):
            names[engine.add(request)] = i
            done |= {names[u.index]: u.completion for u in engine.step() if u.completion is not None}
            if i % 5 == 4 and engine.cancel(i - 1):
                cancelled.add(i - 1)
        while engine.busy:
            done |= {names[u.index]: u.completion for u in engine.step() if u.completion is not None}
        assert {i: c.canvas for i, c in done.items()} == {i: w[0] for i, w in enumerate(want) if i not in cancelled}
        assert cancelled and engine.occupancy()["pages_free"] == 16


def test_the_kernels_of_a_first_request_are_compiled_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is left to its launch, which would wait for it. The cache is empty, and no other test has such heads."""
    threads: list[str] = []
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: threads.append(threading.current_thread().name))
    model = tiny_model("bidirectional", dtype=torch.bfloat16, device="cuda", head_dim=128)
    recipe = compose(model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    completions(engine_for(recipe, rows=1, graphs=True), requests_for(recipe)[:1])
    assert threads and threading.current_thread().name not in threads
