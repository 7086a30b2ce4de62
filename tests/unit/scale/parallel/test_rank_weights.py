"""Updates of weights that two processes divide."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from unit.rollouts.test_weights import MODELS, folders  # noqa: F401, a fixture

import dinfer
from dinfer.core.engine.errors import RankFailed
from dinfer.core.registry import values_of
from dinfer.scale.parallel.leader import leader

TWO = dinfer.Runtime(tensor_parallel=2, rows=2, page=4)
PARTS: Any = {"decoder": "threshold", "cache": "block", "iteration": {"name": "block_diffusion", "block": 8}}
PROMPTS = [[1, 5, 9, 2, 7, 3, 8, 4, 6, 1, 2, 9], [4, 4, 8]]


def loaded(folder: Path, quantize: str | None = None) -> dinfer.Pipeline:
    given = {"name": "llada2", **values_of(MODELS["wide experts"][0]), "checkpoint": str(folder)}
    return dinfer.load(given, device="cpu", quantize=quantize, runtime=TWO, **PARTS)


def answers(pipe: dinfer.Pipeline) -> list[list[int]]:
    return [result.canvas for result in pipe.generate_ids(PROMPTS, max_new_tokens=16)]


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_each_rank_writes_its_share(quantize: str | None, folders: Any) -> None:  # noqa: F811
    """Tensors that rank 0 has, and a folder of which each rank reads its own."""
    old, new = folders("wide experts", "A"), folders("wide experts", "B")
    pipe = loaded(old, quantize)
    before = answers(pipe)
    for request in pipe.requests(PROMPTS, 16, None):
        pipe.engine.add(request)
    for _ in range(3):
        pipe.engine.step()
    with pipe.updating(2, pending="recompute") as into:
        into.load_all(load_file(new / "model.safetensors"))
    while pipe.engine.busy:
        assert [update.error for update in pipe.engine.step() if update.error] == []
    fresh = loaded(new, quantize)
    assert answers(pipe) == answers(fresh) != before
    assert pipe.weights.checksums() == fresh.weights.checksums()
    with pipe.updating() as into:
        into.from_folder(old)
    assert answers(pipe) == before
    some = load_file(new / "model.safetensors")
    name = sorted(some)[-1]
    with pytest.raises(ValueError, match="not finite"), pipe.updating() as into:
        into.load(name, torch.full_like(some[name], torch.nan))
    with pytest.raises(dinfer.rollouts.weights.WeightsIncomplete):
        answers(pipe)


def test_a_rank_that_dies_within_an_update(folders: Any) -> None:  # noqa: F811
    """Nothing runs on a mixture."""
    pipe, new = loaded(folders("wide experts", "A")), load_file(folders("wide experts", "B") / "model.safetensors")
    present = leader()
    assert present is not None
    (first, tensor), *_ = new.items()
    with pytest.raises(RankFailed, match="rank 1"), pipe.updating() as into:
        into.load(first, tensor)
        os.kill(present.processes[1], signal.SIGKILL)
        into.load_all(new)
    with pytest.raises(RuntimeError, match=r"incomplete|rank 1"):
        answers(pipe)
