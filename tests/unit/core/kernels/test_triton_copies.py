"""The Triton kernel that copies many tensors, as in test_triton.py."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CUDA, DEVICE, SHORT, draw

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.kernels.triton import copies  # noqa: E402


@pytest.mark.parametrize("types", [(torch.float32, SHORT), (SHORT, SHORT), (torch.float32, torch.float32)], ids=str)
def test_many_tensors_are_copied_and_what_is_not_finite_is_noted(
    types: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "P", 32)
    torch.manual_seed(0)
    source, target = types
    values = [draw(*shape, dtype=source) for shape in ((1,), (128,), (3, 5, 7), (129,), (16, 16), (200,))]
    values[1][3], values[4][15, 3], values[5][199] = float("nan"), float("inf"), -float("inf")
    fused = torch.zeros(40, 16, dtype=target, device=DEVICE)
    held = [torch.zeros_like(one, dtype=target) for one in values]
    held[4] = fused
    parts = [(*pair, one) for pair, one in zip(zip(held, [0, 0, 0, 0, 8 * 16, 0], strict=True), values, strict=True)]
    assert all(copies.takes(*part) for part in parts)
    broken = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    copies.copy(parts, broken)
    assert broken.tolist() == [0, 1, 0, 0, 1, 1]
    held[4] = fused[8:24]
    for mine, one in zip(held, values, strict=True):
        torch.testing.assert_close(mine, one.to(target), rtol=0, atol=0, equal_nan=True)
    assert not fused[:8].any() and not fused[24:].any()


def test_what_is_not_one_piece_of_memory_is_left_to_torch() -> None:
    wide = draw(8, 8)
    for held, first, values in (
        (wide, 0, wide.T), (wide[:, :4], 0, draw(8, 4)), (wide, 1, draw(4)), (wide, 0, wide.long())
    ):  # fmt: skip
        assert not copies.takes(held, first, values)
