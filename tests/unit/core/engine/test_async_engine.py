"""Requests of several callers at once, through asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.matrix import completions, engine_for, outcome
from support.models import tiny_model

from dinfer.core.engine.request import Completion, Request, Update, Wants
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import StepShape
from dinfer.serving import async_engine
from dinfer.serving.async_engine import AsyncEngine, EngineHung, EngineThread


def recipe_of() -> Recipe:
    model = tiny_model("block_causal")
    return compose(model, iteration={"name": "block_diffusion", "block": 8}, decoder="threshold", cache="block")


def requests_of(recipe: Recipe, count: int) -> list[Request]:
    return [Request.behind([i % 30, 2, 3] * (1 + i % 4), 9 + 3 * i, recipe.resolve({})) for i in range(count)]


async def last(engine: AsyncEngine, request: Request, delay: int = 0) -> Completion:
    for _ in range(delay):
        await asyncio.sleep(0)
    updates = [update async for update in engine.stream(request)]
    assert [u.forwards for u in updates] == list(range(1, len(updates) + 1))
    completion = updates[-1].completion
    assert completion is not None
    return completion


def test_callers_get_what_they_would_get_alone() -> None:
    recipe = recipe_of()
    requests = requests_of(recipe, 6)
    want = [outcome(completions(engine_for(recipe), [request])[0]) for request in requests]
    engine = engine_for(recipe, rows=2, max_length=64)

    async def main() -> None:
        served = AsyncEngine(engine)
        for _ in range(2):  # the loop of steps ends where nothing is to do, and begins again
            got = await asyncio.gather(*(last(served, request, 3 * i) for i, request in enumerate(requests)))
            assert [outcome(c) for c in got] == want

    asyncio.run(main())
    assert not engine.busy


def test_who_leaves_off_cancels_his_request_alone() -> None:
    recipe = recipe_of()
    first, second, third = requests_of(recipe, 3)
    want = outcome(completions(engine_for(recipe), [third])[0])
    engine = engine_for(recipe, rows=2, page=4, max_length=64)

    async def some(served: AsyncEngine, request: Request) -> Update:
        async with contextlib.aclosing(served.stream(request, Wants(snapshots=True))) as updates:
            async for update in updates:
                return update
        raise AssertionError

    async def main() -> None:
        served = AsyncEngine(engine)
        stopped = asyncio.create_task(last(served, second))
        kept = asyncio.create_task(last(served, third))
        assert (await some(served, first)).tokens is not None
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        assert outcome(await kept) == want

    asyncio.run(main())
    assert not engine.busy and engine.occupancy()["pages_free"] == 2 * 16


def test_errors_reach_whom_they_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    engine = engine_for(recipe, max_length=64)

    async def refused(served: AsyncEngine) -> None:
        with pytest.raises(ValueError, match=r"runtime\.max_length=64"):
            await last(served, Request.behind([1] * 90, 8, recipe.resolve({})))

    async def broken(served: AsyncEngine, request: Request) -> None:
        with pytest.raises(MemoryError, match="full"):
            await last(served, request)

    async def main() -> None:
        served = AsyncEngine(engine)
        await asyncio.gather(refused(served), last(served, requests_of(recipe, 1)[0]))

        def fail() -> list[Update]:
            raise MemoryError("full")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", fail)
            await asyncio.gather(*(broken(served, request) for request in requests_of(recipe, 3)))
        await last(served, requests_of(recipe, 1)[0])

    asyncio.run(main())


def test_engines_that_share_a_thread_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    requests = requests_of(recipe, 4)
    want = [outcome(completion) for completion in completions(engine_for(recipe), requests)]
    monkeypatch.setattr(async_engine, "SHIFT", 0.0)

    async def main() -> None:
        thread = EngineThread()
        engines = [AsyncEngine(engine_for(recipe, rows=2, max_length=64), thread) for _ in range(2)]
        got = await asyncio.gather(*(last(engines[i % 2], request) for i, request in enumerate(requests)))
        assert [outcome(completion) for completion in got] == want

    asyncio.run(main())


@pytest.mark.parametrize("drafts", [False, True])
def test_steps_come_together_for_callers_that_are_not_due(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    request = Request.behind([1, 2, 3], 29, recipe.resolve({}))
    (want,) = completions(engine_for(recipe), [request])
    monkeypatch.setattr(async_engine, "PAUSE", 1e9)
    monkeypatch.setattr(async_engine, "FRAME", 1e9)

    async def main() -> list[Update]:
        served = AsyncEngine(engine_for(recipe))
        return [update async for update in served.stream(request, Wants(deltas="commit", drafts=drafts))]

    updates = asyncio.run(main())
    assert [token for update in updates for token in update.new or []] == want.output
    regions = [update.region for update in updates]
    if drafts:  # the first at once; then the last of each region, of which none is lost
        assert len(regions) < want.counts.forwards and len({*regions}) == len({*regions[1:]}) == len(regions) - 1
    else:
        assert len(updates) == 2


def test_a_round_that_hangs_is_told_but_not_one_that_meets_a_new_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    engine, began, awake = engine_for(recipe, max_length=64), threading.Event(), threading.Event()

    def hang() -> list[Update]:
        began.set()
        awake.wait()
        return []

    async def main() -> None:
        served = AsyncEngine(engine)
        asked = asyncio.create_task(last(served, requests_of(recipe, 1)[0]))
        await asyncio.to_thread(began.wait)
        served.check_alive(1e-9)
        assert served.failure is None
        monkeypatch.setattr(engine.runner, "meeting", None)
        served.check_alive(1e-9)
        assert isinstance(served.failure, EngineHung)
        with pytest.raises(EngineHung):
            await asked
        awake.set()

    monkeypatch.setattr(async_engine, "NEW_SHAPE", 1e12)
    monkeypatch.setattr(engine, "step", hang)
    monkeypatch.setattr(engine.runner, "meeting", StepShape(Phase.WINDOW, 1, 8, 1, 8, 1))
    asyncio.run(main())


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "engine.md").read_text()
    for example in page.split("```python\n")[1:]:
        exec(compile(example.split("```")[0], "docs/engine.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "tokens in" in said and "cancelled" in said


def test_a_process_ends_after_the_piece_of_work_that_runs() -> None:
    program = """
import asyncio, threading, time
from dinfer.serving.async_engine import EngineThread

started = threading.Event()

def work():
    started.set()
    time.sleep(0.3)
    print("whole")

async def main():
    task = asyncio.create_task(EngineThread().run(work))
    await asyncio.to_thread(started.wait)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")
