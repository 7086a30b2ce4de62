"""What graphs and keys take of a card."""

from __future__ import annotations

import os

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
