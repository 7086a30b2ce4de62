"""Weights in 8 and 4 bits: what is rounded, how much that changes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.kernels import expert_mlps
from support.models import tiny_model

import dinfer
from dinfer.core.kernels.deferred import widened
from dinfer.core.kernels.linear import check_float8, round_rows
from dinfer.core.kernels.types import FLOAT8, LARGEST
from dinfer.core.layers.format import FORMATS
from dinfer.core.layers.linear import Linear, formatted
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import locate
from dinfer.core.registry import MODELS
from dinfer.formats.holding import format_of, quantize
from dinfer.formats.kernels.packed import pack, packed_linear, tiled, unpack
from dinfer.formats.kernels.scaled import rounded, scaled_linear


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels no inputs are rounded."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_each_row_has_a_scale_of_its_own(dtype: torch.dtype) -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 3)[:, None]
    x[2] = 0
    rounded = round_rows(x, dtype)
    assert rounded.values.dtype == dtype and rounded.dtype == torch.float32
    step = 1 / 254 if dtype == torch.int8 else 1 / 16  # half of the distance of neighbours, at most
    assert ((widened(rounded) - x).abs() <= step * x.abs().amax(-1, keepdim=True) + 1e-12).all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_products_are_those_of_what_was_rounded(dtype: torch.dtype, in_torch: None) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 5, 32, generator=generator), round_rows(torch.randn(7, 32, generator=generator), dtype)
    rows = widened(round_rows(x)) if dtype == FLOAT8 else x
    bias = torch.randn(7, generator=generator)
    want = rows @ widened(weight).mT + bias
    given = rounded(x) if dtype == FLOAT8 else x
    torch.testing.assert_close(scaled_linear(given, weight.values, weight.scale, bias), want)
    assert rounded(given) is given or dtype == torch.int8


def test_experts_in_4_bits(in_torch: None) -> None:
    generator = torch.Generator().manual_seed(2)
    x_ND = torch.randn(9, 64, generator=generator)
    gate_up, down = pack(torch.randn(6, 2 * 32, 64, generator=generator)), pack(torch.randn(6, 64, 32))
    experts_NC = torch.rand(9, 6, generator=generator).topk(2).indices
    weights_NC = torch.rand(9, 2, generator=generator)
    got = expert_mlps(x_ND, experts_NC, weights_NC, gate_up[0], down[0], scales=(gate_up[1], down[1]))
    torch.testing.assert_close(got, expert_mlps(x_ND, experts_NC, weights_NC, unpack(*gate_up), unpack(*down)))


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_experts_in_8_bits(dtype: torch.dtype, in_torch: None) -> None:
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
            taken = (lambda x: rounded(x)) if dtype == FLOAT8 else (lambda x: x)
            gate, up = scaled_linear(taken(x_ND[n]), gate_up.values[expert], gate_up.scale[expert]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            want[n] += weight * scaled_linear(taken(hidden), down.values[expert], down.scale[expert])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("width", "group"), [(384, 128), (192, 64), (96, 32)])
def test_each_group_in_4_bits_has_a_scale_of_its_own(width: int, group: int) -> None:
    weight = torch.randn(6, width, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 3)[:, None]
    weight[2, :group], weight[3] = 0, weight[3].abs()
    values, scale = pack(weight)
    assert (values.shape, values.dtype) == ((6, width // 2), torch.uint8)
    assert (scale.shape, scale.dtype) == ((6, width // group), torch.bfloat16)
    got, want = (t.unflatten(-1, (-1, group)) for t in (unpack(values, scale), weight))
    step = scale.float()[..., None]
    largest = want.abs() == want.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(got[largest], want[largest], rtol=2**-8, atol=0)
    far = want / step > 7.5  # where there are 7 steps only
    assert ((got - want).abs() <= 0.51 * step.abs())[~largest & ~far].all()
    assert ((got - want).abs() <= 1.1 * step.abs()).all()
    assert not got[2, 0].any() and (got[3] >= 0).all()


def test_products_with_weights_in_4_bits(in_torch: None) -> None:
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(3, 5, 64, generator=generator), torch.randn(7, generator=generator)
    values, scale = pack(torch.randn(7, 64, generator=generator))
    want = x @ unpack(values, scale).mT + bias
    torch.testing.assert_close(packed_linear(x, values, scale, bias), want)
    torch.testing.assert_close(packed_linear(x.bfloat16(), values, scale, bias), want.bfloat16(), atol=0.1, rtol=0.1)


DTYPES = {"fp8": FLOAT8, "int8": torch.int8, "int4": torch.uint8}


@pytest.mark.parametrize("name", DTYPES)
def test_a_network_in_few_bits(name: str) -> None:
    model = tiny_model(mlp=64)
    ids = torch.arange(12)[None] % model.spec.vocab
    before = model.score(ids)
    embedding = model.embedding.weight.clone()
    plain = {path: module.get_parameter(own).shape for path, (module, own) in formatted(model).items()}
    quantize(model, name)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert layers and all(layer.weight.dtype == DTYPES[name] for layer in layers)
    assert torch.equal(model.embedding.weight, embedding)
    for path, (module, own) in formatted(model).items():
        held = sum(tensor.nbytes for tensor in module.weight_of(own))
        assert held == format_of(name).nbytes(plain[path], torch.float64)
    drift = (model.score(ids) - before).norm() / before.norm()
    assert 0 < drift < (0.6 if name == "int4" else 0.3)  # a random network magnifies it


@pytest.mark.parametrize("kind", ["plain", *DTYPES])
@pytest.mark.parametrize("made", ["rounded", "read"])
def test_a_shared_expert_as_wide_as_the_others_joins_their_launches(kind: str, made: str) -> None:
    """For weights that `quantize` rounds, and for those that a checkpoint holds in that format."""
    held = FORMATS.get(kind)()
    for shape in ((4, 64, 96), (4, 96, 32)):  # gate and up, down
        all_of, one = (
            held.make(torch.randn(own)) if made == "rounded" else held.empty(own, torch.bfloat16)
            for own in (shape, shape[1:])
        )
        assert held.experts(all_of).joined(held.experts(one)) is not None
        assert held.experts(all_of).joined(held.experts(held.empty((64, 32), torch.bfloat16))) is None


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantize='int5' is not known; use one of fp8, int4, int8, or null for none"):
        dinfer.load("tiny", quantize="int5")
    with pytest.raises(ValueError, match=r"blocks.0.mlp.down: quantize=int4 needs inputs in multiples of 32, not 48"):
        quantize(tiny_model(), "int4")


@pytest.mark.parametrize("name", ["tiny", "tiny-llada2"])
def test_the_models_in_the_box_in_4_bits(name: str) -> None:
    """A quarter of the memory of float16 and the scales, and the same answer."""
    question = "Rosa has 66 clocks, loses 27 and gets 45 from Eva. Rosa shares all clocks equally among 7 friends. " \
        "How many does each friend get?"  # fmt: skip
    cache = "dual" if name == "tiny" else "block"
    whole, packed = (dinfer.load(name, cache=cache, device="cpu", quantize=kind) for kind in (None, "int4"))
    sizes = [
        sum(tensor.nbytes for layer in layers for tensor in layer.weight_of("weight"))
        for layers in ([m for m in p.model.modules() if isinstance(m, Linear)] for p in (whole, packed))
    ]
    assert sizes[1] == sizes[0] * (4 + 16 / 128) / 32
    answers = [pipe.generate(question, max_new_tokens=96).text.split()[-1] for pipe in (whole, packed)]
    assert answers[0] == answers[1]
    ids = torch.arange(40)[None]
    before = packed.model.score(ids)
    for module, own in formatted(packed.model).values():  # as on a GPU
        values, scale = module.weight_of(own)
        module.hold(own, (tiled(values, scale), scale), module.formats[own])
        assert module.get_parameter(own).ndim == scale.ndim + (2 if scale.shape[-2] % 64 == 0 else 0)
    assert torch.equal(packed.model.score(ids), before)


def test_float8_needs_a_gpu_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards, since what a card can do is asked once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"quantize=fp8 needs .* 8\.9 or more .*cuda:70 has 8\.0; use quantize=int8"):
        check_float8(torch.device("cuda:70"), "quantize=fp8", "quantize=int8")
    check_float8(torch.device("cpu"), "quantize=fp8", "quantize=int8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(torch.device("cuda:71"), "quantize=fp8", "quantize=int8")


@pytest.mark.parametrize("name", DTYPES)
def test_loading_rounds_as_rounding_afterwards_does(name: str) -> None:
    """Experts, and matrices of several tensors; scales of 4 bits lie in memory as kernels want them."""
    folder = locate("tiny-llada2")
    family = MODELS.build({"name": "llada2", "block": 32})
    device = torch.device("cpu")
    want = load_network(folder, family, dtype=None, device=device)
    quantize(want, name)
    got = load_network(folder, family, dtype=None, device=device, quantize=name)
    for (path, one), other in zip(
        (*want.named_parameters(), *want.named_buffers()), (*got.parameters(), *got.buffers()), strict=True
    ):
        assert torch.equal(one, other) and one.stride() == other.stride(), path
