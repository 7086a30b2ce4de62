"""FOCUS as published: every pass of its recorded runs, and what its importance must add up to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.check import check
from tests.parity.focus import importance, selected, with_neighbours

GOLDENS = Path(__file__).parents[3] / "shared" / "goldens-focus"


@pytest.mark.skipif(not GOLDENS.is_dir(), reason=f"{GOLDENS} is not here")
def test_every_recorded_pass_is_the_same() -> None:
    report = check(GOLDENS)
    assert [result.remark for result in report.results if result.outcome != "passed"] == []
    assert report.summary == "30 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize("masks", [1, 2, 5])
def test_importances_add_up_to_heads_times_masks(masks: int) -> None:
    q_WHE, k_WGE = torch.randn(7, 4, 8), torch.randn(7, 2, 8)
    found_M = importance(q_WHE, k_WGE, torch.arange(masks))
    assert found_M.shape == (masks,)
    torch.testing.assert_close(found_M.sum(), torch.tensor(4.0 * masks))


def test_equal_rises_go_to_the_left_and_a_bar_may_keep_more_than_asked_for() -> None:
    assert selected(torch.tensor([1.0, 1.0, 1.0, 0.0]), 2) == ("rank", [0, 1])
    assert selected(torch.tensor([9.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0]), 1) == ("bar", [0, 2])


def test_left_neighbours_and_what_was_never_computed_are_kept() -> None:
    assert with_neighbours([5], [2, 4, 5, 6], progress=9) == [4, 5]
    assert with_neighbours([5], [2, 4, 5, 6], progress=1) == [2, 4, 5]
    assert with_neighbours([], [2, 4], progress=0) == [2, 4]
