"""Kernels of weights in 4 bits against their references: in Triton's interpreter, or on the GPU if there is one."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, CUDA, draw, expert_mlps, in_8_bits

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.kernels import norm, packed  # noqa: E402
from dinfer.kernels.triton import moe as triton_moe  # noqa: E402
from dinfer.kernels.triton import packed as triton_packed  # noqa: E402
from dinfer.kernels.triton import packed_moe as triton_packed_moe  # noqa: E402
from dinfer.kernels.triton.packed import Config  # noqa: E402


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of dinfer.kernels run torch, so that the kernels have something to be compared with."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("config", [None, Config(16, 64, 2, 4, 2), Config(32, 32, 1, 4, 2, parts=4)])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(5, 40, 512), (70, 192, 192), (33, 64, 96)])
def test_linear_in_4_bits(
    reference: None, dtype: torch.dtype, config: Config | None, rows: int, outputs: int, width: int
) -> None:
    """Tiles that do not fit, groups of every size, and sums of several parts, which come out the same each time.

    Weights are as `pack` makes them and, where 64 divides the outputs, as a GPU holds them.
    """
    x, bias_O = draw(1, rows, width, dtype=dtype), draw(outputs, dtype=dtype)
    weight_OH, scale_OG = packed.pack(draw(outputs, width) / width**0.5)
    got = triton_packed.linear(x, weight_OH, scale_OG, bias_O, config=config)
    want = packed.packed_linear(in_8_bits(x, packed.group_of(width)), weight_OH, scale_OG, bias_O)
    torch.testing.assert_close(got, want, **CLOSE[dtype])
    tiled = packed.tiled(weight_OH, scale_OG)
    assert (tiled is weight_OH) == (outputs == 40)
    assert torch.equal(packed.flat(tiled, scale_OG), weight_OH)
    assert torch.equal(got, triton_packed.linear(x, tiled, scale_OG, bias_O, config=config))
    for values in (weight_OH, tiled):
        assert torch.equal(triton_packed.unpack(values, scale_OG, dtype), packed.unpack(weight_OH, scale_OG, dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_rounding_the_inputs_keeps_nan() -> None:
    """A row with NaN comes out as NaN, so that its request ends, alone."""
    x, weight = draw(3, 64), packed.pack(draw(40, 64))
    whole = triton_packed.linear(x, *weight, None)
    x[1, 5] = float("nan")
    broken = triton_packed.linear(x, *weight, None)
    assert broken[1].isnan().all() and torch.equal(broken[::2], whole[::2])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "chosen", "hidden", "width"), [
    (1, 8, 2, 64, 32), (33, 8, 2, 128, 96), (100, 4, 3, 64, 64),
])  # fmt: skip
def test_expert_mlps_in_4_bits(
    reference: None, dtype: torch.dtype, tokens: int, experts: int, chosen: int, hidden: int, width: int
) -> None:
    x_ND = draw(tokens, hidden, dtype=dtype)
    gate_up, gate_up_scale = packed.pack(draw(experts, 2 * width, hidden) / hidden**0.5)
    down, down_scale = packed.pack(draw(experts, hidden, width) / width**0.5)
    weights_NC, experts_NC = draw(tokens, experts).softmax(-1).topk(chosen)
    plan = triton_moe.plan(experts_NC, experts, triton_packed_moe.rows_of_tile(tokens * chosen / experts))
    scales = gate_up_scale, down_scale

    def gated(both: torch.Tensor, inputs: str) -> torch.Tensor:
        return in_8_bits(norm.swiglu(both), packed.group_of(width))

    rounded_ND = in_8_bits(x_ND, packed.group_of(hidden))
    want = expert_mlps(rounded_ND, experts_NC, weights_NC, gate_up, down, gated, scales)
    for first, second in ((gate_up, down), (packed.tiled(gate_up, scales[0]), packed.tiled(down, scales[1]))):
        up_PM = triton_packed_moe.expert_linear(x_ND, first, scales[0], plan, by_token=True)
        out_PD = triton_packed_moe.expert_linear(norm.swiglu(up_PM), second, scales[1], plan, by_token=False)
        torch.testing.assert_close(triton_moe.combine(out_PD, weights_NC), want, **CLOSE[dtype])
