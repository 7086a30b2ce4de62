"""Cards with ranks that dinfer starts: what one card says, as CUDA graphs, and what a killed rank leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from support.rank_processes import Program, kill

import dinfer
from dinfer.scale.parallel.leader import leader

os.environ["DINFER_CHECK_RANKS"] = "1"  # a rank that strays is found in the round in which it does


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TEXTS = ["Tom has 3 apples and buys 5 more. How many apples does he have?", "What is 7 + 8?"]


@pytest.mark.parametrize("stage", ["start", "loading", "capturing", "running"])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_a_rank_that_is_killed_ends_the_others(ranks: int, victim: int, stage: str) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    kill(Program("tiny", ranks, "cuda"), stage, victim, signal.SIGKILL)


def test_cards_say_what_one_does() -> None:
    said = []
    for count in (1, min(torch.cuda.device_count(), 4)):
        runtime = dinfer.Runtime(graphs=True, tensor_parallel=count)
        pipe = dinfer.load("tiny", device="cuda", dtype="float32", runtime=runtime)
        for _ in range(3):
            results = pipe.generate(TEXTS, max_new_tokens=48)
        assert pipe.engine.runner.captured > 0 and not pipe.engine.runner.refused
        said.append([(result.canvas, result.counts.forwards) for result in results])
    assert said[0] == said[1]
    ranks = leader()
    assert ranks is not None
    ranks.close()


def test_a_command_ends_when_it_has_answered() -> None:
    """Its graphs hold collectives of NCCL, which would not let the process leave the group."""
    command = [sys.executable, "-m", "dinfer", "generate", TEXTS[1], "model=tiny", "runtime.tensor_parallel=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr
