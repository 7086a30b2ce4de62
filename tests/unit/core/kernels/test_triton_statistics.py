"""The Triton kernels of statistics and draws against their torch reference, as in test_triton.py."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, CUDA, DEVICE, draw

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.kernels import token_stats  # noqa: E402
from dinfer.core.terms.stats import Draw  # noqa: E402
from dinfer.kernels.triton import token_stats as triton_stats  # noqa: E402


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of dinfer.kernels run torch, so that the kernels have something to be compared with."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("vocab", "some"), [(7, False), (5000, True)])
def test_token_stats(
    reference: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, precision: torch.dtype, vocab: int, some: bool
) -> None:
    if some:  # also by several programs
        monkeypatch.setattr(triton_stats, "PIECE", 512)
    inf, nan = float("inf"), float("nan")
    logits_RLV = draw(2, 6, vocab, dtype=dtype) * 3
    logits_RLV[0, 0, 3] = 60.0  # the mask token is by far the likeliest
    logits_RLV[0, 1, 2] = logits_RLV[0, 1, 5] = 50.0  # the first of equals
    logits_RLV[0, 2, 4] = nan
    logits_RLV[0, 3, -1] = inf
    logits_RLV[0, 4] = -inf
    logits_RLV[0, 4, 3] = 1.0  # nothing but the mask token
    logits_RLV[1, 0, : vocab - 2] = -inf
    logits_RLV[1, 1, 6:] = -inf  # whole pieces are empty
    logits_RLV[1, 2, vocab // 2 :: 2] = 40.0  # of equals in many pieces too, the first
    wanted_RL = torch.arange(12, device=DEVICE).view(2, 6) % 3 > 0 if some else None
    got = triton_stats.token_stats(logits_RLV, 3, precision, wanted_RL=wanted_RL, needs=("entropy", "margin"))
    want = token_stats.token_stats(logits_RLV, 3, precision, wanted_RL=wanted_RL, needs=("entropy", "margin"))
    assert torch.equal(got.finite_RL, want.finite_RL)
    sure = want.finite_RL
    assert torch.equal(got.token_RL[sure], want.token_RL[sure])
    near = {"atol": 1e-6, "rtol": 1e-4} if precision == torch.float32 else {"atol": 1e-12, "rtol": 1e-9}
    assert want.entropy_RL is not None and want.margin_RL is not None
    for name in ("confidence_RL", "mask_confidence_RL", "entropy_RL", "margin_RL"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine is not None and mine.dtype == theirs.dtype
        torch.testing.assert_close(mine[sure], theirs[sure], **near)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask_id", [3, None])
@pytest.mark.parametrize("vocab", [7, 2100])
def test_drawn_tokens(reference: None, precision: torch.dtype, mask_id: int | None, vocab: int) -> None:
    inf, nan = float("inf"), float("nan")
    logits_RLV = draw(4, 5, vocab) * 3
    logits_RLV[2, 0, 4] = nan
    logits_RLV[2, 1, 2] = logits_RLV[2, 1, 5] = 50.0  # the first of equals, without noise
    logits_RLV[3, 1] = -inf
    logits_RLV[3, 1, 5] = 1.0  # nothing but one token, which the belief rules out
    belief_RLV = logits_RLV.clone()
    belief_RLV[3, :, 5] = -inf
    drawn = Draw(
        belief_RLV, logits_RLV,
        scale_R1=torch.tensor([[1.0], [0.3], [0.0], [1.0]], dtype=torch.float64, device=DEVICE),
        noisy_R1=torch.tensor([[True], [True], [False], [True]], device=DEVICE),
        seed_R=torch.tensor([0, 5, 2**52, 7], device=DEVICE),
        pos_RL=torch.arange(20, device=DEVICE).view(4, 5) - 1,
        step_R=torch.tensor([0, 3, 4, 500], device=DEVICE),
    )  # fmt: skip
    some_RL, most_RL = (torch.arange(20, device=DEVICE).view(4, 5) % each > 0 for each in (3, 4))
    for wanted_RL, drawn_RL in ((None, None), (some_RL, None), (some_RL, most_RL)):
        given = {"draw": drawn, "wanted_RL": wanted_RL, "drawn_RL": drawn_RL, "needs": ("entropy", "best")}
        got = triton_stats.token_stats(logits_RLV, mask_id, precision, **given)
        want = token_stats.token_stats(logits_RLV, mask_id, precision, **given)
        sure = want.finite_RL
        assert torch.equal(got.finite_RL, sure) and 0 < sure.sum() < 20
        for name in ("token_RL", "best_RL", "mask_drawn_RL"):
            assert torch.equal(getattr(got, name)[sure], getattr(want, name)[sure]), name
        near = {"atol": 1e-6, "rtol": 1e-4} if precision == torch.float32 else {"atol": 1e-12, "rtol": 1e-9}
        for name in ("confidence_RL", "mask_confidence_RL", "entropy_RL"):
            torch.testing.assert_close(getattr(got, name)[sure], getattr(want, name)[sure], **near)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("mask_id", [3, None])
@pytest.mark.parametrize("places", [(20,), (1100, 1900), (0, 2099), (600, 7)])
def test_the_lowest_float32_is_a_token_where_all_others_are_ruled_out(
    reference: None, monkeypatch: pytest.MonkeyPatch, mask_id: int | None, places: tuple[int, ...]
) -> None:
    """It is what programs write to make a token as unlikely as can be."""
    monkeypatch.setattr(triton_stats, "PIECE", 256)
    logits_RLV = torch.full((1, 1, 2100), float("-inf"), device=DEVICE)
    logits_RLV[..., list(places)] = torch.finfo(torch.float32).min
    got = triton_stats.token_stats(logits_RLV, mask_id, torch.float32)
    want = token_stats.token_stats(logits_RLV, mask_id, torch.float32)
    assert got.token_RL.item() == want.token_RL.item() == min(places)
    assert got.confidence_RL.item() == want.confidence_RL.item() == 1 / len(places)


def test_token_stats_without_a_mask_token(reference: None) -> None:
    logits_RLV = draw(1, 3, 40)
    got = triton_stats.token_stats(logits_RLV, None, torch.float32)
    assert torch.equal(got.token_RL, logits_RLV.argmax(-1)) and not got.mask_confidence_RL.any()
