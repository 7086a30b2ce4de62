"""One model on several ranks: the tokens and forwards of one rank, whatever is divided. Processes speak over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from support.ranks import CASES, ROUNDED, WIDE, Case, decode, run_rank, save, scores

NAMES = [case.name for case in CASES]


pytestmark = pytest.mark.rest  # half a minute; test_rank_processes and test_divided_statistics run by default


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name in dict.fromkeys([*(case.model for case in CASES), *(f"{name}, wide" for name in WIDE)]):
        save(name, folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[tuple[str, int], Any]]:
    """What each of four processes decoded, by case and number of ranks."""
    mp.spawn(run_rank, (4, str(folder), NAMES), nprocs=4)
    return [torch.load(folder / f"rank{index}.pt") for index in range(4)]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_ranks_decode_what_one_does(case: Case, folder: Path, outcomes: list[dict[tuple[str, int], Any]]) -> None:
    want = decode(case, folder)
    for ranks in (2, 3, 4):
        for found in outcomes[:ranks]:
            assert found[case.name, ranks] == want


@pytest.mark.parametrize("quantize", ROUNDED)
@pytest.mark.parametrize("model", WIDE)
def test_ranks_round_weights_as_well_as_one(
    model: str, quantize: str, folder: Path, outcomes: list[dict[Any, Any]]
) -> None:
    """A rank has a scale for its part of an output, so the logits are others, and about as near to the truth."""
    exact, whole = (scores(f"{model}, wide", folder, kind) for kind in (None, quantize))
    for ranks in (2, 3, 4):
        first, *others = (found[model, quantize, ranks] for found in outcomes[:ranks])
        assert all(torch.equal(first, other) for other in others)
        assert 0 < (first - exact).norm() < 1.75 * (whole - exact).norm()
