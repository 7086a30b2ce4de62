"""The Triton kernel of attention with a key of its own for each query, against torch."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, CUDA, DEVICE, draw

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.kernels import attention  # noqa: E402
from dinfer.kernels.triton import attention as triton_attention  # noqa: E402


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_queries_see_a_key_of_their_own_beside_their_interval(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, splits: int
) -> None:
    """Of a query without one the result is as before; one with an empty interval takes that key's value."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")  # what is compared with the kernel
    lanes, width, heads, kv_heads, size, page, pages = 2, 7, 4, 2, 32, 8, 5
    k_PTGE, v_PTGE = (draw(lanes * pages + 2, page, kv_heads, size, dtype=dtype) for _ in range(2))
    q_BWHE = draw(lanes, width, heads, size, dtype=dtype)
    pages_BP = torch.arange(2, 2 + lanes * pages, device=DEVICE).view(lanes, pages)
    end_BW = torch.tensor([0, 0, 1, 7, 20, 33, 40], device=DEVICE).repeat(lanes, 1)
    start_BW = torch.zeros_like(end_BW)
    own_BW = torch.tensor([3, 9, 40, -1, 11, 2, -1], device=DEVICE).repeat(lanes, 1)
    tiles = (16, 16, splits, 4, 2)
    got = triton_attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, start_BW, end_BW, own_BW, tiles)
    want = attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, (start_BW, end_BW), own_BW)
    torch.testing.assert_close(got, want, **CLOSE[dtype])
    alone_BHE = v_PTGE.flatten(0, 1)[own_BW[:, :2]].repeat_interleave(heads // kv_heads, 2)
    torch.testing.assert_close(want[:, :2], alone_BHE, **CLOSE[dtype])
    plain = attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, (start_BW, end_BW.clamp_min(1)))
    torch.testing.assert_close(want[:, [3, 6]], plain[:, [3, 6]], **CLOSE[dtype])
