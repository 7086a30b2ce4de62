"""`runtime.memory`: pages by what a card has, and refusals that name what would fit."""

from __future__ import annotations

from typing import Any

import pytest

import dinfer
from dinfer.speed import memory

CARD = 10 * 2**30


@pytest.mark.parametrize(
    ("value", "want"),
    [(0.5, CARD // 2), (1, CARD), (2e9, 2 * 10**9), ("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("0.25", CARD // 4)],
)
def test_memory_is_a_share_or_bytes(value: Any, want: int) -> None:
    assert memory.memory_bytes(value, CARD) == want


@pytest.mark.parametrize("value", [0, 90, -1, "", "90%", "much", "5 cards", float("nan"), float("inf")])
def test_other_memory_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"runtime.memory=.* such as 0.9, or bytes, such as 40GB"):
        dinfer.Runtime(memory=value)


def test_what_decides_pages_is_given_once() -> None:
    with pytest.raises(ValueError, match=r"runtime\.memory=0\.5 and runtime\.pages=8 both say how many .*: give one"):
        dinfer.Runtime(memory=0.5, pages=8)


def test_memory_decides_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What weights and steps leave is for keys, and a request that has no room is refused by name."""
    monkeypatch.setattr(memory, "free_and_total", lambda device: (CARD, CARD))
    pipe = dinfer.load("tiny", device="cpu", runtime=dinfer.Runtime(memory="60MB", max_length=256))
    found, page = pipe.engine.runtime.pages, memory.page_bytes(pipe.engine.loop.worker)
    assert found == (60_000_000 - memory.held(pipe.model)) // page > 16
    pipe.generate_ids([[5, 6, 7]] * 3, max_new_tokens=32)
    assert pipe.engine.runtime.memory is None
    pool = pipe.engine.runner.state.kv
    assert pool.k_JPTGE.shape[1] == found + 2 and "keys" in memory.told(pipe.engine.loop.worker)
    monkeypatch.setattr(memory, "measured", lambda worker: 60_000_000)
    with pytest.raises(ValueError, match=r"is 60\.0 MB, .* steps and graphs 69\.0 MB.*: use at least 0\.0\d, which is"):
        dinfer.Pipeline(pipe.recipe, None, dinfer.Runtime(memory="60MB", max_length=256))
    monkeypatch.setattr(memory, "measured", lambda worker: CARD)
    with pytest.raises(ValueError, match=r"steps and graphs 12\.3 GB.*: lower runtime.rows, .* or use quantize"):
        dinfer.Pipeline(pipe.recipe, None, dinfer.Runtime(memory="60MB", max_length=256))


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_do_not_fit_are_named_before_they_are_read(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any, **named: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("dinfer.core.pipeline.pipeline.load_network", never)
    monkeypatch.setattr("dinfer.scale.parallel.divided_model.started", never)
    runtime = dinfer.Runtime(memory="1MB", tensor_parallel=ranks)
    with pytest.raises(ValueError, match=r"runtime\.memory=1MB is 1\.0 MB, and the weights.* take .* MB: raise"):
        dinfer.load("tiny", device="cpu", runtime=runtime)
    monkeypatch.setattr(memory, "free_and_total", lambda device: (1_000_000, CARD))
    with pytest.raises(ValueError, match=r"the card has 1\.0 MB free of 10\.7 GB, .* use quantize, or more cards"):
        dinfer.load("tiny", device="cpu", runtime=dinfer.Runtime(memory=0.9, tensor_parallel=ranks))


def test_the_largest_steps_are_within_the_limits() -> None:
    pipe = dinfer.load("tiny-llada2", device="cpu", runtime=dinfer.Runtime(rows=8, positions=128))
    shapes = [*memory.largest(pipe.engine.loop.worker, 256, 16)]
    assert {shape.phase for shape in shapes} == {*pipe.recipe.phases}
    assert all(shape.lanes <= 8 and shape.lanes * shape.width <= 128 for shape in shapes)
    sizes = [shape.lanes * shape.width for shape in shapes]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 128
    worker = pipe.engine.loop.worker
    worker.open(dinfer.core.engine.runtime.BatchSize(8, 256, 16, 16))
    for shape in shapes:
        worker.launch(shape, [])  # of no request
