"""The host loop: faults are named and contained, slots and pages come back, counts add up."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for, outcome
from support.models import EOS, tiny_model

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.errors import NonFiniteLogits
from dinfer.core.engine.pages import PageAllocator
from dinfer.core.engine.request import Ask, Request, Resolved, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.memory import RESERVED
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.told import Report
from dinfer.structure.abilities.bias import TokenBias

POISON = 37  # the token whose embedding is NaN


def poisoned_recipe(cache: str = "dual", value: float = float("nan")) -> Recipe:
    model = tiny_model()
    with torch.no_grad():
        model.embedding.weight[POISON] = value
    return compose(model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache=cache)


RECIPE = poisoned_recipe()


def at(threshold: float) -> Resolved:
    return RECIPE.resolve({"threshold": threshold})


CLEAN = [Request.behind([1, 2, 3], 16, at(0.5)), Request.behind(list(range(4, 14)), 9, at(0.9))]
POISONED = [Request.behind([5, POISON, 6], 30, at(0.5)), Request.behind([POISON] * 4, 29, at(0.5))]


def outcomes(engine: Engine, requests: list[Request]) -> list[tuple]:
    return [outcome(c) for c in completions(engine, requests)]


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a_fault_names_request_and_step(cache: str) -> None:
    engine = engine_for(poisoned_recipe(cache))
    with pytest.raises(NonFiniteLogits, match=r"request 1: .* denoise step 1, in the block at positions 3 to 10"):
        completions(engine, [CLEAN[0], POISONED[0]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("batch", [POISONED[:1], POISONED, [CLEAN[0], *POISONED]], ids=["one", "two", "mixed"])
def test_no_nan_outlives_a_fault(batch: list[Request], value: float) -> None:
    """Several rows at fault in one step, then other requests in the same slots and pages."""
    recipe = poisoned_recipe(value=value)
    want = outcomes(engine_for(recipe), CLEAN)
    engine = engine_for(recipe)
    for _ in range(2):
        with pytest.raises(NonFiniteLogits):
            completions(engine, batch)
        assert outcomes(engine, CLEAN) == want


def test_no_nan_outlives_an_abandoned_run() -> None:
    """The consumer goes away after the step that broke a row, before that row is looked at."""
    recipe = poisoned_recipe()
    engine = engine_for(recipe)
    updates = engine.run([CLEAN[0], *POISONED])
    next(updates)
    updates.close()
    assert outcomes(engine, CLEAN) == outcomes(engine_for(recipe), CLEAN)


def test_rows_beside_a_faulty_one_are_not_touched() -> None:
    """What was yielded before the fault is right, token for token."""
    recipe = poisoned_recipe()
    want = next(engine_for(recipe).run(CLEAN[:1], Wants(snapshots=True)))
    got = next(engine_for(recipe).run([CLEAN[0], POISONED[0]], Wants(snapshots=True)))
    assert (got.tokens, got.masked) == (want.tokens, want.masked)


def test_an_abandoned_run_frees_its_slots() -> None:
    recipe = poisoned_recipe()
    engine = engine_for(recipe, rows=2)
    want = outcomes(engine_for(recipe), CLEAN)
    for steps in (1, 2, 3):
        updates = engine.run(CLEAN)
        for _ in range(steps):
            next(updates)
        updates.close()
    assert outcomes(engine, CLEAN) == want


@pytest.mark.parametrize("rows", [1, 2])
def test_two_runs_of_one_engine_do_not_mix(rows: int) -> None:
    """They share slots and steps, and each is given its own rows."""
    recipe = poisoned_recipe()
    engine, want = engine_for(recipe, rows=rows), outcomes(engine_for(recipe), CLEAN)
    done = {}
    for update in engine.run(
        CLEAN, Wants(snapshots=True)
    ):  # also right after a row has left its slot, while others wait
        assert outcomes(engine, CLEAN[::-1]) == want[::-1]
        if update.completion:
            done[update.index] = outcome(update.completion)
    assert [done[0], done[1]] == want


def test_who_waits_for_a_turn_between_rounds_has_it_after_the_round_that_runs() -> None:
    """However busy another thread keeps the engine. That thread used to take round after round first."""
    recipe = compose(tiny_model(), iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="none")
    engine, begun, ended, seen = Engine(recipe, Runtime()), threading.Event(), threading.Event(), list[Any]()

    def talk() -> None:
        while not ended.is_set():
            for update in engine.run([Request.behind([1, 2, 3], 200, recipe.resolve({"threshold": 1.0}))]):
                seen.append(update)
                begun.set()

    (thread := threading.Thread(target=talk)).start()
    begun.wait()
    rounds = []
    for _ in range(9):
        before = len(seen)
        with engine.between_rounds():
            rounds.append(len(seen) - before)
    ended.set()
    thread.join()
    assert sorted(rounds)[4] <= 3, "a thread that the system stops before it asks sees more, now and then"


def test_a_batch_that_grows_between_runs() -> None:
    recipe = poisoned_recipe()
    engine = engine_for(recipe)
    small, large = CLEAN, [Request.behind([i, i + 1], 70 + i, at(0.6)) for i in range(5)]
    for requests in (small, large, small, [], large[:2]):
        assert outcomes(engine, requests) == outcomes(engine_for(recipe), requests)


def test_a_failed_allocation_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = poisoned_recipe()
    engine = engine_for(recipe)
    completions(engine, CLEAN)
    large = [Request.behind([1, 2], 200, at(0.6))]
    with monkeypatch.context() as patch:
        patch.setattr(
            "dinfer.core.engine.worker.BatchState.alloc", lambda *a, **k: (_ for _ in ()).throw(MemoryError())
        )
        with pytest.raises(MemoryError):
            completions(engine, large)
    assert outcomes(engine, large) == outcomes(engine_for(recipe), large)
    assert outcomes(engine, CLEAN) == outcomes(engine_for(recipe), CLEAN)


@pytest.mark.parametrize("stop", ["block", "cut", "off"])
def test_counts_add_up(stop: str) -> None:
    recipe = poisoned_recipe("prefix")
    recipe = compose(
        recipe.model,
        iteration={"name": "blockwise", "block": 8, "stop": stop},
        decoder="threshold",
        cache="prefix",
    )
    requests = [Request.behind([i, 2 * i], 40, at(0.1 * i)) for i in range(1, 10)]
    found = stopped = 0
    open_before = {i: r.new_tokens for i, r in enumerate(requests)}
    refreshes = dict.fromkeys(open_before, 0)
    steps = dict.fromkeys(open_before, 0)
    for update in engine_for(recipe, rows=4).run(requests, Wants(snapshots=True)):
        steps[update.index] += 1
        refreshes[update.index] += update.full
        assert update.forwards == steps[update.index]
        left = sum(update.masked)
        assert left < open_before[update.index]  # every step commits
        open_before[update.index] = left
        if (completion := update.completion) is None:
            continue
        request, counts = requests[update.index], completion.counts
        generated = completion.canvas[len(request.prompt) :]
        assert counts.forwards == steps[update.index]
        assert counts.refreshes == refreshes[update.index]
        assert counts.committed == request.new_tokens - left
        assert stop != "off" or left == 0
        stops = [i for i, token in enumerate(generated) if token in recipe.model.spec.stop_ids]
        assert counts.tokens == (stops[0] if stops else len(generated)) == len(completion.output)
        assert completion.output == generated[: counts.tokens]
        assert completion.stopped == bool(stops)
        assert generated[len(generated) - left :] == [EOS] * left or stop == "cut"
        assert generated[counts.tokens :].count(EOS) >= left
        assert counts.tpf == counts.tokens / counts.forwards
        assert (
            counts.positions_per_committed == update.positions / update.committed == counts.positions / counts.committed
        )
        assert counts.seconds > 0
        found, stopped = found + 1, stopped + bool(left)
    assert found == len(requests)
    assert stop == "off" or stopped


def test_no_cache_counts_no_refresh() -> None:
    assert completions(engine_for(poisoned_recipe("none")), CLEAN)[0].counts.refreshes == 0


def test_pages_are_shared_until_the_last_owner_lets_go() -> None:
    pages = PageAllocator(4)
    mine = pages.claim([], 3)
    assert mine is not None and len(set(mine)) == 3 and min(mine) >= RESERVED and pages.free == 1
    assert pages.claim(mine[:1], 0) == mine[:1]
    pages.release(mine)
    assert pages.free == 3
    assert pages.claim([], 4) is None and pages.claim(mine[:1], 4) is None and pages.free == 3
    pages.release(mine[:1])
    assert sorted(pages.claim([], 4) or []) == list(range(RESERVED, RESERVED + 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 0}, "rows=0 must be between 1 and"),
        ({"page": 0}, "page=0 must be between 1 and 4096"),
        ({"page": 10**9}, "page=1000000000 must be between 1 and 4096"),
        ({"pages": -1}, "pages=-1 must be at least 1"),
        ({"rows": 1.5}, r"rows=1\.5 must be an integer"),
        ({"rows": math.nan}, "rows=nan must be an integer"),
        ({"rows": "8"}, "rows='8' must be an integer"),
        ({"rows": True}, "rows=True must be an integer"),
        ({"max_length": 2.0}, r"max_length=2\.0 must be an integer or null"),
        ({"graphs": "x"}, "graphs='x' must be true or false"),
        ({"share": 1}, "share=1 must be true or false"),
        ({"kv": None}, "kv=None must be 'model' or 'fp8'"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be at least 1"),
        ({"tensor_parallel": 2, "compile": "default"}, "compile=default is for one card"),
    ],
)
def test_runtime_refuses_nonsense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"runtime\.{message}"):
        Runtime(**wrong)


def test_graphs_need_a_cuda_device() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        engine_for(poisoned_recipe(), graphs=True)


FIXED = compose(tiny_model(), iteration={"name": "blockwise", "block": 8}, decoder="fixed", cache="dual")


@dataclass(frozen=True)
class Unheard(Ask):
    """Of no ability."""


@pytest.mark.parametrize("token", [-1, 40])
def test_a_prompt_with_a_token_that_is_none_is_refused(token: int) -> None:
    engine = engine_for(poisoned_recipe())
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 40"):
        engine.add(Request.behind([1, token], 4, at(0.6)))
    engine.add(Request([1, token, 0, 0, 0, 0], [False, *[True] * 5], at(0.6)))  # what is in a gap is replaced


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"open": [False] * 3}, "nothing to decode"),
        ({"padding": 1}, "nothing to decode"),
        ({"tokens": [], "open": []}, "prompt is empty"),
        ({"padding": -4}, "padding=-4 must be an integer, 0 or more"),
        ({"padding": 1.0}, r"padding=1\.0 must be an integer, 0 or more"),
        ({"open": [True]}, "open has 1 entries for 3 tokens"),
        ({"open": [False] * 4}, "open has 4 entries for 3 tokens"),
        ({"open": [0, 1, 0]}, "open=.* must be a list of true or false"),
        ({"open": 4}, "open=.* must be a list of true or false"),
        ({"tokens": "abc"}, "tokens=.* must be a list of token ids"),
        ({"tokens": [1, 2.0, 3]}, "tokens=.* must be a list of token ids"),
        ({"tokens": [1, True, 3]}, "tokens=.* must be a list of token ids"),
        ({"stops": 1}, "stops=1 must be true or false"),
        ({"options": [0.6, 1]}, "options=.* must be what Recipe.resolve returns"),
        ({"options": {"threshold": 0.6}}, "options=.* must be what Recipe.resolve returns"),
        ({"options": FIXED.resolve({})}, "options are of Recipe.*Fixed.*resolve them with the recipe that runs it"),
        ({"asks": [Report(1)]}, "asks=.* must be a tuple of Ask"),
        ({"asks": (Report(1), Report(2))}, "asks=.* has two of one kind"),
        ({"asks": (Unheard(),)}, "asks=.*Unheard.* is answered by no ability"),
        ({"asks": (TokenBias(only=(40,)),)}, "a bias of token 40 is outside the vocabulary of 40"),
    ],
)
def test_what_can_never_run_is_refused_when_it_is_added(fields: dict[str, Any], message: str) -> None:
    engine = engine_for(poisoned_recipe())
    engine.add(CLEAN[0])
    with pytest.raises(ValueError, match=message):
        engine.add(Request(**({"tokens": [1, 2, 3], "open": [False, False, True]} | fields)))
    done = [update.completion for _ in range(99) if engine.busy for update in engine.step()]
    assert done[-1] is not None and not engine.busy


@pytest.mark.parametrize("block", [10**6, 10**9, 2**40])
@pytest.mark.parametrize(
    ("iteration", "variant", "fields"),
    [
        ({"name": "blockwise"}, "bidirectional", {}),
        ({"name": "blockwise", "align": True}, "bidirectional", {}),
        ({"name": "smooth"}, "bidirectional", {}),
        ({"name": "block_diffusion"}, "block_causal", {}),
        ({"name": "block_diffusion", "lead": True}, "block_causal", {"shift": 1}),
    ],
)
def test_a_block_longer_than_the_canvas_is_one_block(
    iteration: dict[str, Any], variant: str, fields: dict[str, Any], block: int
) -> None:
    """It takes no more memory than the canvas: a rank among the positions of a block is a square of its length."""
    model = tiny_model(variant, **fields)

    def run(length: int) -> list[tuple]:
        grid = {"block": length} | ({"lead": length} if "lead" in iteration else {})
        recipe = compose(model, iteration=iteration | grid, decoder={"name": "threshold", "least": 2}, cache="none")
        engine = engine_for(recipe)
        return outcomes(engine, CLEAN)

    assert run(block) == run(32)
