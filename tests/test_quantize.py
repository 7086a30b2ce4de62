"""Weights in 8 bits: what is rounded, how much that changes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.models import tiny_model

import dinfer
from dinfer.kernels.linear import FLOAT8, LARGEST, linear, round_rows, widened
from dinfer.kernels.moe import expert_mlps
from dinfer.layers.linear import QUANTIZED, Linear, quantize


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_each_row_has_a_scale_of_its_own(dtype: torch.dtype) -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 3)[:, None]
    x[2] = 0
    rounded = round_rows(x, dtype)
    assert rounded.values.dtype == dtype and rounded.dtype == torch.float32
    step = 1 / 254 if dtype == torch.int8 else 1 / 16  # half of the distance of neighbours, at most
    assert ((widened(rounded) - x).abs() <= step * x.abs().amax(-1, keepdim=True) + 1e-12).all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_products_are_those_of_what_was_rounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 5, 32, generator=generator), round_rows(torch.randn(7, 32, generator=generator), dtype)
    rows = widened(round_rows(x)) if dtype == FLOAT8 else x
    bias = torch.randn(7, generator=generator)
    want = rows @ widened(weight).mT + bias
    torch.testing.assert_close(linear(x, weight.values, bias, weight.scale), want)
    if dtype == FLOAT8:
        torch.testing.assert_close(linear(round_rows(x), weight.values, bias, weight.scale), want)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_experts_in_8_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x_ND = torch.randn(9, 32, generator=generator)
    gate_up = round_rows(torch.randn(6, 2 * 24, 32, generator=generator) / 6, dtype)
    down = round_rows(torch.randn(6, 32, 24, generator=generator) / 5, dtype)
    experts_NC = torch.rand(9, 6, generator=generator).topk(2).indices
    weights_NC = torch.rand(9, 2, generator=generator)
    got = expert_mlps(x_ND, experts_NC, weights_NC, gate_up.values, down.values, scales=(gate_up.scale, down.scale))
    want = torch.zeros_like(x_ND)
    for n in range(9):
        for expert, weight in zip(experts_NC[n].tolist(), weights_NC[n], strict=True):
            gate, up = linear(x_ND[n], gate_up.values[expert], None, gate_up.scale[expert]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            want[n] += weight * linear(hidden, down.values[expert], None, down.scale[expert])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_network_in_8_bits(name: str) -> None:
    model = tiny_model()
    ids = torch.arange(12)[None] % model.spec.vocab
    before = model.score(ids)
    embedding = model.embedding.weight.clone()
    quantize(model, QUANTIZED[name])
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert layers and all(layer.weight.dtype == QUANTIZED[name] for layer in layers)
    assert torch.equal(model.embedding.weight, embedding)
    drift = (model.score(ids) - before).norm() / before.norm()
    assert 0 < drift < 0.3  # a random network magnifies it


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantize='int4' is not known; use one of fp8, int8, or null for none"):
        dinfer.load("tiny", quantize="int4")
