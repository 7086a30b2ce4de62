"""Linear maps that fetch weights before they wait, on a Hopper card, against torch."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, SHORT, draw

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
    ("rows", "width", "outputs", "split"),
    [
        (1, 256, 64, False), (32, 2048, 1536, True), (17, 1024, 2048, True), (32, 2048, 256, True),
        (5, 1280, 2048, False),
    ],
)  # fmt: skip
def test_it_is_the_product_of_what_the_kernel_before_writes(rows: int, width: int, outputs: int, split: bool) -> None:
    """Maps are launched before their inputs are written, each time with others."""
    weight_OK, weight_D = draw(outputs, width, dtype=SHORT) / width**0.5, draw(width, dtype=SHORT)
    bias_O, feed_RK = draw(outputs, dtype=SHORT), torch.empty(rows, width, dtype=SHORT, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        _, x_RK = norm.add_rms_norm(feed_RK, None, weight_D, 1e-6)
        out = linear.linear(x_RK, weight_OK, bias_O, None, split=split)
        assert streamed.pays(x_RK, weight_OK, len(out.values) if isinstance(out, PartialSums) else 1)
        return x_RK, out.values.sum(0).to(SHORT) if isinstance(out, PartialSums) else out

    graph = torch.cuda.CUDAGraph()
    step()
    with torch.cuda.graph(graph):
        x_RK, got_RO = step()
    for _ in range(3):
        feed_RK.copy_(draw(rows, width, dtype=SHORT))
        graph.replay()
        want_RO = (x_RK.float() @ weight_OK.float().T + bias_O.float()).to(SHORT)
        torch.testing.assert_close(got_RO, want_RO, **CLOSE[SHORT])
        assert torch.equal(got_RO, step()[1])
