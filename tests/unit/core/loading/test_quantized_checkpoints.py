"""Checkpoints in 8 bits: values times scales, held as they are where all inputs of an output have the same scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import CONFIG, tiny_model
from torch import Tensor

import dinfer
import dinfer.formats.quantized
from dinfer.core.kernels.deferred import widened
from dinfer.core.kernels.linear import round_rows
from dinfer.core.kernels.types import FLOAT8
from dinfer.core.layers.linear import Linear
from dinfer.core.loading.checkpoint import load_network, place_of
from dinfer.core.loading.files import CheckpointError
from dinfer.core.models.llada import Llada
from dinfer.formats.saving import save_network

CPU = torch.device("cpu")
IDS = torch.arange(12)[None]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [16, 24]}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "block_structure": None}
CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": None, "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}  # fmt: skip

Parts = tuple[Tensor, dict[str, Tensor], Tensor]
"""The values, the scales by the end of their names, and the weight that they stand for."""


def per_tensor(weight: Tensor) -> Parts:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FLOAT8)
    return values, {"weight_scale_inv": scale, "input_scale": torch.tensor([0.1])}, values.float() * scale


def per_output(weight: Tensor) -> Parts:
    made = round_rows(weight)
    return made.values, {"weight_scale": made.scale[:, None]}, widened(made)


def per_output_int8(weight: Tensor) -> Parts:
    made = round_rows(weight, torch.int8)
    return made.values, {"weight_scale": made.scale[:, None]}, widened(made)


def per_block(weight: Tensor) -> Parts:
    rows, width = weight.shape
    scale = torch.zeros(-(-rows // 16), -(-width // 24))
    whole = torch.zeros_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(16 * i, 16 * i + 16), slice(24 * j, 24 * j + 24))
            scale[i, j] = weight[part].abs().max() / 448
            whole[part] = scale[i, j]
    values = (weight / whole).to(FLOAT8)
    return values, {"weight_scale_inv": scale}, values.float() * whole


CASES: dict[str, tuple[Callable[[Tensor], Parts], dict[str, Any]]] = {
    "tensor": (per_tensor, FP8), "channel": (per_output, CHANNELS), "int8": (per_output_int8, CHANNELS),
    "block": (per_block, BLOCKS),
}  # fmt: skip
BLOCK_WEIGHTS = WEIGHTS | {"strategy": "block", "block_structure": "16x24"}
ALSO_BLOCKS = CHANNELS | {"config_groups": {"group_0": {"weights": BLOCK_WEIGHTS}}}


def written(folder: Path, rounding: Callable[[Tensor], Parts], config: dict[str, Any], spared: str = "wte") -> Any:
    """A checkpoint whose matrices are rounded, and the network that its weights stand for."""
    whole = tiny_model(dtype=torch.float32)
    save_network(whole, Llada(), folder, CONFIG | {"quantization_config": None})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name, t in tensors.items() if t.dim() == 2 and spared not in name]:
        values, scales, meant[name] = rounding(tensors[name])
        stem = name.removesuffix("weight")
        tensors |= {name: values} | {stem + end: scale.contiguous() for end, scale in scales.items()}
    save_file(tensors, folder / "model.safetensors")
    parameters = dict(whole.named_parameters())
    for name, place in Llada().weights(whole.spec).items():
        if name in meant:
            place_of(parameters, place).copy_(meant[name])
    return whole


def reading(folder: Path, **options: Any) -> Any:
    return load_network(folder, Llada(), **{"dtype": None, "device": CPU} | options)


@pytest.mark.parametrize("name", ["tensor", "channel", "int8"])
def test_what_has_a_scale_for_each_output_stays_as_it_is(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rounding, config = CASES[name]
    meant = written(tmp_path, rounding, config)
    network = reading(tmp_path)
    layers = {n: m for n, m in network.named_modules() if isinstance(m, Linear)}
    assert {m.weight.dtype for m in layers.values()} == {torch.int8 if name == "int8" else FLOAT8}
    for n, layer in layers.items():
        assert layer.weight_scale is not None and layer.weight_scale.shape == layer.weight.shape[:1]
        whole = layer.weight.float() * layer.weight_scale[:, None]
        torch.testing.assert_close(whole, meant.get_submodule(n).weight, rtol=1e-6, atol=0)
    assert network.embedding.weight.dtype == torch.float32 and not caplog.messages
    got, want = network.score(IDS), meant.score(IDS)
    assert (got - want).norm() < (1e-3 if name == "int8" else 0.3) * want.norm()  # inputs are rounded too


def test_an_embedding_in_8_bits_is_widened(tmp_path: Path) -> None:
    meant = written(tmp_path, per_output_int8, CHANNELS, spared="none")
    got = reading(tmp_path).embed(IDS)
    torch.testing.assert_close(got, meant.embed(IDS), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [*CASES])
def test_a_checkpoint_of_the_same_kind_can_take_its_place(tmp_path: Path, name: str) -> None:
    """In place, with the bits of a fresh load."""
    for folder, turn in (("a", 1.0), ("b", 1.7)):
        written(tmp_path / folder, lambda weight, turn=turn: CASES[name][0](weight * turn), CASES[name][1])
    pipe, fresh = (dinfer.load({"name": "llada", "checkpoint": str(tmp_path / one)}, device="cpu") for one in "ab")
    held = {name: tensor.data_ptr() for name, tensor in pipe.model.named_parameters()}
    with pipe.updating() as into:
        into.from_folder(tmp_path / "b")
    assert {name: tensor.data_ptr() for name, tensor in pipe.model.named_parameters()} == held
    wanted = {**dict(fresh.model.named_parameters()), **dict(fresh.model.named_buffers())}
    found = {**dict(pipe.model.named_parameters()), **dict(pipe.model.named_buffers())}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    prompts = [[5, 6]]
    got, want = (one.generate_ids(prompts, max_new_tokens=4)[0].canvas for one in (pipe, fresh))
    assert got == want


@pytest.mark.parametrize("config", [BLOCKS, ALSO_BLOCKS], ids=["fp8", "compressed-tensors"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_blocks_are_widened(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype | None, caplog: pytest.LogCaptureFixture
) -> None:
    meant = written(tmp_path, per_block, config)
    network = reading(tmp_path, dtype=dtype)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, meant.get_parameter(name).to(dtype or torch.float32)), name
    assert "15 of 15 rounded weights are widened" in caplog.messages[0] and len(caplog.messages) == 1


def test_as_many_blocks_as_outputs_are_blocks_still() -> None:
    scale, part = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (slice(1, 4), slice(2, 8))
    got = dinfer.formats.quantized.scale_at(scale, (4, 8), (2, 4), part)
    assert torch.equal(got, scale.repeat_interleave(2, 0).repeat_interleave(4, 1)[part])


def test_quantize_keeps_what_is_so_already_and_rounds_the_rest(tmp_path: Path) -> None:
    meant = written(tmp_path, per_output, CHANNELS, spared="q_proj")
    kept = reading(tmp_path)
    assert kept.blocks[0].qkv.weight.dtype == torch.float32 and kept.blocks[0].out.weight.dtype == FLOAT8
    pipes = {name: dinfer.load({"name": "llada", "checkpoint": str(tmp_path)}, quantize=name, device="cpu")
             for name in ("fp8", "int8")}  # fmt: skip
    for name, pipe in pipes.items():
        out, qkv = pipe.model.blocks[0].out, pipe.model.blocks[0].qkv
        assert out.weight.dtype == qkv.weight.dtype == (FLOAT8 if name == "fp8" else torch.int8)
        want = meant.blocks[0].out.weight
        whole = out.weight.float() * out.weight_scale[:, None]
        assert (whole - want).norm() <= (0 if name == "fp8" else 0.01) * want.norm() + 1e-6


def _broken(**fields: Any) -> dict[str, Any]:
    return CHANNELS | {"config_groups": {"group_0": {"weights": WEIGHTS | fields}}}


@pytest.mark.parametrize(("config", "message"), [
    ({"quant_method": "hqq"}, r"quant_method='hqq' is not supported; 'fp8', 'gptq', 'awq', "),
    ("fp8", r"quantization_config='fp8' must be an object"),
    (FP8 | {"fmt": "e5m2"}, r"quantization_config.fmt='e5m2' is not supported"),
    (FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two sizes"),
    (CHANNELS | {"format": "marlin-24"}, r"format='marlin-24' is not supported; use 'float-quantized'"),
    (CHANNELS | {"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme=.* is not supported; use None"),
    (CHANNELS | {"config_groups": {}}, r"config_groups={} must be an object that is not empty"),
    (_broken(num_bits=4), r"config_groups.group_0.weights.num_bits=4 is not supported; use 8"),
    (_broken(symmetric=False), r"weights.symmetric=False is not supported; use True"),
    (_broken(strategy="group"), r"weights.strategy='group' is not supported; use 'channel'"),
    (_broken(block_structure="128"), r"weights.block_structure=\[128\] must be two sizes"),
])  # fmt: skip
def test_what_would_be_read_wrongly_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    written(tmp_path, per_output, config)
    with pytest.raises(CheckpointError, match=message):
        reading(tmp_path)


def test_every_weight_in_8_bits_needs_its_scale(tmp_path: Path) -> None:
    written(tmp_path, per_block, BLOCKS)
    tensors = load_file(tmp_path / "model.safetensors")
    root = "model.transformer.blocks"
    tensors[f"{root}.0.ff_proj.weight_scale_inv"] = torch.ones(2, 7)
    tensors[f"{root}.1.ff_proj.weight_scale_inv"] = torch.ones(3, 2, dtype=torch.int32)
    tensors[f"{root}.1.ff_norm.weight_scale_inv"] = torch.ones(1)
    tensors[f"{root}.1.attn_out.weight_scale"] = torch.ones(1)
    tensors[f"{root}.0.ff_norm.weight"] = torch.ones(32).to(FLOAT8)
    del tensors[f"{root}.0.ff_out.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        reading(tmp_path)
    for line in (
        f"dtype of {root}.0.ff_out.weight: F8_E4M3, must be one of",
        f"unexpected: {root}.1.ff_norm.weight_scale_inv",
        f"unexpected: {root}.1.attn_out.weight_scale",
        f"dtype of {root}.0.ff_norm.weight: F8_E4M3, must be one of",
        f"{root}.0.ff_proj.weight_scale_inv: F32 (2, 7), must be floats: one for (48, 32), one an output, or one a "
        "block of 16 x 24",
        f"{root}.1.ff_proj.weight_scale_inv: I32 (3, 2), must be floats",
    ):
        assert line in str(error.value)
