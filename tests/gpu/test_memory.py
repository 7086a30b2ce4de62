"""What graphs and keys take of a card."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import dinfer
from dinfer.speed import memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGEST = 320  # MB


@pytest.mark.skipif("PYTORCH_CUDA_ALLOC_CONF" in os.environ, reason="the environment says how memory is taken")
def test_a_large_graph_takes_the_memory_of_small_ones_and_what_is_missing() -> None:
    memory.extend_segments()
    device, pool, graphs = torch.device("cuda", 0), torch.cuda.graph_pool_handle(), []
    before = memory.graph_bytes(device)
    for size in range(64, LARGEST + 1, 64):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            torch.ones(size << 20, dtype=torch.uint8, device=device)
    assert LARGEST << 20 <= memory.graph_bytes(device) - before < 1.25 * (LARGEST << 20)


def test_a_share_of_a_card_is_for_keys_beside_weights_and_steps() -> None:
    share, total = 0.2, torch.cuda.get_device_properties(0).total_memory
    pipe = dinfer.load("tiny", device="cuda", runtime=dinfer.Runtime(memory=share, graphs=True, max_length=512))
    worker = pipe.engine.loop.worker
    assert pipe.engine.runtime.pages is not None
    keys = pipe.engine.runtime.pages * memory.page_bytes(worker)
    assert 0.8 * share * total < keys < share * total
    for _ in range(3):
        pipe.generate(["What is 3 + 4?"] * 3)
    assert worker.runner.captured and not worker.runner.refused
    assert torch.cuda.memory_reserved() <= share * total
    with pytest.raises(ValueError, match=r"runtime\.memory=50MB .* what else this process holds .*: use at least"):
        dinfer.Pipeline(pipe.recipe, None, dinfer.Runtime(memory="50MB", graphs=True, max_length=512))


@pytest.mark.parametrize("level", [1, 2])
def test_what_has_slept_once_keeps_its_addresses_and_graphs(level: int) -> None:
    """Though others take the memory meanwhile."""
    pipe = dinfer.load("tiny", device="cuda", runtime=dinfer.Runtime(rows=4, graphs=True, max_length=256, share=True))
    held, texts = {name: one.cpu() for name, one in pipe.weights.tensors().items()}, ["3 + 4 = ?", "12 - 5 = ?"]

    def answers() -> list[str]:
        return [one.text for one in pipe.generate(texts, max_new_tokens=32)]

    def slept(**how: Any) -> dict[str, int]:
        found = pipe.weights.sleep(level, **how)
        filled = [torch.full((1 << 26,), 1e30, device="cuda") for _ in range(4)]
        del filled
        torch.cuda.empty_cache()
        pipe.weights.wake()
        if level == 2:
            with pipe.updating() as into:
                into.load_all(held)
        return found

    def places() -> list[int]:
        held = runner.state.kv.k_JPTGE, runner.state.canvas.tokens_NS
        return [one.data_ptr() for one in (*pipe.model.parameters(), *held)]

    *_, before = (answers() for _ in range(3))
    runner = pipe.engine.runner
    assert runner.captured
    slept()
    assert not runner.captured
    *_, after = (answers() for _ in range(3))
    assert after == before and runner.captured
    state, at = runner.state, places()
    for turn in range(4):
        graphs = runner.captured
        found = slept() if turn < 3 else slept(tags=["keys"])
        assert turn == 3 or found["after"] < found["before"] - sum(one.nbytes for one in held.values())
        assert runner.captured == graphs and runner.state is state
        assert answers() == before and places() == at
    pipe.engine.loop.close()
    assert not runner.captured and answers() == before
