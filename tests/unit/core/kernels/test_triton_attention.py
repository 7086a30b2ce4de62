"""Triton kernels of attention beside the plain one, against torch: a key of its own, and what keys receive."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, CUDA, DEVICE, draw

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.kernels import attention  # noqa: E402
from dinfer.core.kernels.types import FLOAT8  # noqa: E402
from dinfer.kernels.triton import attention as triton_attention  # noqa: E402
from dinfer.kernels.triton import attention as triton_received  # noqa: E402
from dinfer.research.kernels import received  # noqa: E402


@pytest.mark.rest(but=1)
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


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("lanes", "width", "heads", "kv_heads", "page", "pages", "narrow"),
    [(1, 1, 2, 2, 16, 2, False), (2, 11, 4, 2, 8, 5, False), (2, 70, 3, 1, 8, 9, True)],
)
def test_what_keys_receive(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, lanes: int, width: int, heads: int, kv_heads: int, page: int,
    pages: int, narrow: bool,
) -> None:  # fmt: skip
    """Queries without weight, as padding, count for nothing; what all keys receive is what all queries weigh."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")  # what is compared with the kernel
    k_PTGE = draw(lanes * pages + 2, page, kv_heads, 32, dtype=dtype).to(FLOAT8 if narrow else dtype)
    q_BWHE = draw(lanes, width, heads, 32, dtype=dtype)
    pages_BP = torch.arange(2, 2 + lanes * pages, device=DEVICE).flip(0).view(lanes, pages)
    end_BW = torch.arange(1, width + 1, device=DEVICE).clamp_max(page * pages).repeat(lanes, 1)
    start_BW = end_BW // 3
    weight_BW = torch.rand(lanes, width, device=DEVICE).masked_fill(end_BW % 5 == 4, 0)
    got_BS = triton_received.attention_received(q_BWHE, k_PTGE, pages_BP, start_BW, end_BW, weight_BW)
    want_BS = received.attention_received(q_BWHE, k_PTGE, pages_BP, (start_BW, end_BW), weight_BW)
    torch.testing.assert_close(got_BS, want_BS, **CLOSE[dtype])
    torch.testing.assert_close(got_BS.sum(1), weight_BW.sum(1), rtol=1e-3, atol=1e-3)
