"""Attention of many queries on a Hopper card, against torch."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, SHORT, draw

from dinfer.core.kernels.attention import paged_attention

pytest.importorskip("triton")
from dinfer.kernels.triton import hopper_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper card"
    ),
]


# Each value of a column comes with most values of the others.
@pytest.mark.parametrize(
    ("lanes", "width", "heads", "groups", "size", "page", "pages", "kind", "dtype", "splits"),
    [
        (1, 1, 4, 4, 64, 8, 3, "all", torch.float16, 1),
        (2, 100, 16, 4, 128, 16, 13, "block", SHORT, 4),
        (3, 33, 8, 8, 128, 8, 20, "window", torch.float16, 32),
        (3, 129, 8, 1, 64, 32, 9, "window", SHORT, 2),
        (2, 70, 4, 2, 128, 64, 8, "all", torch.float16, 2),
        (40, 50, 16, 4, 128, 16, 20, "all", SHORT, 8),
        (300, 32, 16, 4, 128, 16, 35, "block", SHORT, 1),
        (5, 260, 16, 4, 64, 64, 40, "block", torch.float16, 1),
    ],
)
def test_it_is_the_softmax_over_what_each_query_sees(
    monkeypatch: pytest.MonkeyPatch, lanes: int, width: int, heads: int, groups: int, size: int, page: int, pages: int,
    kind: str, dtype: torch.dtype, splits: int,
) -> None:  # fmt: skip
    """Rows have different lengths, pages in any order, a table longer than that, and padding at the end."""
    keys = page * pages
    k_PTGE, v_PTGE = (draw(lanes * pages + 1, page, groups, size, dtype=dtype) for _ in range(2))
    q_BWHE = draw(lanes, width, heads, size, dtype=dtype)
    pages_BP = torch.zeros(lanes, pages + 3, dtype=torch.int64, device="cuda")
    pages_BP[:, :pages] = torch.randperm(lanes * pages, device="cuda").view(lanes, pages) + 1
    length_B1 = (keys - torch.arange(lanes, device="cuda")[:, None] * 37 % (keys - 1)).clamp_min(1)
    pos_BW = torch.arange(width, device="cuda").repeat(lanes, 1)
    end_BW = torch.minimum((pos_BW // 32 + 1) * 32 if kind == "block" else pos_BW + 1, length_B1)
    end_BW = length_B1.repeat(1, width) if kind == "all" else end_BW
    start_BW = (end_BW - 40).clamp_min(0) if kind == "window" else torch.zeros_like(end_BW)
    start_BW[:, width - width // 10 :], end_BW[:, width - width // 10 :] = 0, 1
    tiles = hopper_attention.Tiles(64, 5, 2, splits) if size == 128 else hopper_attention.Tiles(128, 3, 1, splits)
    args = (q_BWHE, k_PTGE, v_PTGE, pages_BP, start_BW, end_BW, tiles)
    monkeypatch.setenv("DINFER_KERNELS", "torch")  # what is compared with the kernel
    want = paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, (start_BW, end_BW))
    torch.testing.assert_close(hopper_attention.paged_attention(*args), want, **CLOSE[SHORT])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = hopper_attention.paged_attention(*args)
    got.zero_()
    graph.replay()
    torch.testing.assert_close(got, want, **CLOSE[SHORT])
    q_BWHE.copy_(draw(lanes, width, heads, size, dtype=dtype))  # another replay reads the tensors anew
    graph.replay()
    want = paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, (start_BW, end_BW))
    torch.testing.assert_close(got, want, **CLOSE[SHORT])
