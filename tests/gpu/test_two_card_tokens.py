"""One model on two cards and on four: the tokens of one card, eagerly and as CUDA graphs that hold their sums."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dinfer import Pipeline, Runtime, compose
from dinfer.core.loading.checkpoint import family_of, load_network, read_config
from dinfer.core.loading.files import locate
from dinfer.core.pipeline.tokenizer import read_tokenizer
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.core.registry import MODELS
from dinfer.speed.graphs import drop_graphs

os.environ["DINFER_CHECK_RANKS"] = "1"  # a rank that strays is found in the round in which it does


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
Case = tuple[str, torch.dtype, bool]
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {"iteration": {"name": "blockwise", "block": 16}, "cache": "dual"},
    "tiny-llada2": {"iteration": {"name": "block_diffusion", "block": 16}, "cache": "block"},
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]  # sums by symmetric memory, by NCCL, and within norms
CASES = [(name, dtype, False) for name in RECIPES for dtype in DTYPES]
CASES += [("tiny-llada2", dtype, True) for dtype in DTYPES]  # experts dealt out
LONGEST = 150.0  # seconds, most of them for Triton
TEXTS = ["Tom has 3 apples and buys 5 more. How many apples does he have?", "What is 7 + 8?"]


def decode(name: str, dtype: torch.dtype, dealt: bool, ranks: Ranks = ALONE) -> dict[str, Any]:
    """The canvases of eager steps and of graphs, and how many graphs there are."""
    ranks = replace(ranks, rank=replace(ranks.rank, expert_parallel=dealt))
    folder, device = locate(name), torch.device("cuda", ranks.index)
    family = MODELS.build({"name": family_of(read_config(folder)), "checkpoint": name})
    network = load_network(folder, family, dtype=dtype, device=device, rank=ranks.rank)
    network.join(ranks)
    recipe, tokenizer = compose(network, decoder="threshold", **RECIPES[name]), read_tokenizer(folder, None)
    assert tokenizer is not None
    prompts, found = [tokenizer(text)["input_ids"] for text in TEXTS], {}
    for graphs in (False, True):
        runtime = Runtime(graphs=graphs, tensor_parallel=ranks.size, expert_parallel=dealt)
        pipe = Pipeline(recipe, None, runtime)
        runs = [pipe.generate_ids(prompts, max_new_tokens=48) for _ in range(3 if graphs else 1)]
        found[f"graphs={graphs}"] = [[result.canvas for result in run] for run in runs]
    return found | {"captured": pipe.engine.runner.captured, "refused": [*pipe.engine.runner.refused.values()]}


def run_card(index: int, size: int, folder: str, cases: Sequence[Case]) -> None:
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meeting", rank=index, world_size=size, device_id=device
    )  # fmt: skip
    ranks = Ranks.of()
    assert ranks.small is not None and ranks.exchange is not None
    torch.save({case: decode(*case, ranks) for case in cases}, f"{folder}/rank{index}.pt")
    drop_graphs()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, Any]]:
    if torch.cuda.device_count() < (size := request.param):
        pytest.skip(f"needs {size} CUDA devices")
    folder = tmp_path_factory.mktemp("cards")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
            patch.setenv(name, value)
        end = time.monotonic() + LONGEST
        cards = mp.spawn(run_card, (size, str(folder), CASES), nprocs=size, join=False)
        try:
            while not cards.join(timeout=1):
                assert time.monotonic() < end
        finally:
            for process in cards.processes:
                process.kill()
    return [torch.load(Path(folder) / f"rank{index}.pt") for index in range(size)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cards_decode_what_one_does(case: Case, outcomes: list[dict[Case, Any]]) -> None:
    name, dtype, _ = case
    alone = outcomes[0][case] if dtype == torch.bfloat16 else decode(name, dtype, False)  # it rounds each addend
    want = alone["graphs=False"][0]
    for found in (outcome[case] for outcome in outcomes):
        assert found["captured"] > 0 and found["refused"] == []
        assert found["graphs=False"] == [want] and found["graphs=True"] == [want] * 3
