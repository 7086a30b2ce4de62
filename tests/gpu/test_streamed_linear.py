"""Linear maps that fetch weights before they wait, on a Hopper card, against torch."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, SHORT, draw

from dinfer.core.kernels.linear import round_rows
from dinfer.core.kernels.types import PartialSums

pytest.importorskip("triton")
from dinfer.kernels.triton import linear, norm, streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper card"
    ),
]


@pytest.mark.parametrize(
    ("rows", "width", "outputs", "rounded", "split"),
    [
        (1, 256, 64, False, False), (32, 4096, 3072, False, True), (17, 1024, 4096, False, True),
        (32, 4096, 12288, False, False), (64, 4096, 6144, True, False), (33, 3072, 4096, True, True),
        (5, 2048, 24576, True, False),
    ],
)  # fmt: skip
def test_it_is_the_product_of_what_the_kernel_before_writes(
    rows: int, width: int, outputs: int, rounded: bool, split: bool
) -> None:
    """Maps of a chain are launched before their inputs are written, each time with others."""
    weight_OK, weight_D = draw(outputs, width, dtype=SHORT) / width**0.5, draw(width, dtype=SHORT)
    bias_O, scale_O = draw(outputs, dtype=SHORT), None
    if rounded:
        weight_OK, scale_O = round_rows(weight_OK)[:2]
    feed_RK = torch.empty(rows, width, dtype=SHORT, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        _, x_RK = norm.add_rms_norm(feed_RK, None, weight_D, 1e-6, "rounded" if rounded else "plain")
        assert streamed.pays(x_RK.values if rounded else x_RK, weight_OK, 1)
        out = linear.linear(x_RK, weight_OK, bias_O, scale_O, split=split)
        return x_RK, out.values.sum(0).to(SHORT) if isinstance(out, PartialSums) else out

    graph = torch.cuda.CUDAGraph()
    step()
    with torch.cuda.graph(graph):
        x_RK, got_RO = step()
    for _ in range(3):
        feed_RK.copy_(draw(rows, width, dtype=SHORT))
        graph.replay()
        x = x_RK.values.float() * x_RK.scale[:, None] if rounded else x_RK.float()
        weight = weight_OK.float() if scale_O is None else weight_OK.float() * scale_O[:, None]
        torch.testing.assert_close(got_RO, (x @ weight.T + bias_O.float()).to(SHORT), **CLOSE[SHORT])
        assert torch.equal(got_RO, step()[1])
