"""Checkpoints of GPTQ, AWQ and llm-compressor: integers packed in int32, held as they are or widened bit for bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import random_model
from support.files import lies_in
from support.gguf_files import LLADA, rewritten
from support.models import CONFIG
from torch import Tensor

from dinfer import Pipeline, Runtime, compose
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import CheckpointError
from dinfer.core.models.llada import Llada
from dinfer.core.ranks.split import Rank
from dinfer.formats.kernels.packed import unpack
from dinfer.formats.saving import save_network
from dinfer.lab.inspect import inspect

CPU = torch.device("cpu")
WIDE = CONFIG | {"d_model": 128, "mlp_hidden_size": 256, "n_kv_heads": 4}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
W4A16 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": GROUPS}}}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of tests are unpacked some outputs at a time, as large ones are."""
    monkeypatch.setattr("dinfer.formats.quantized.PIECE", 1300)  # 10 outputs, so that AWQ's int32 are cut


def scheme(**fields: Any) -> dict[str, Any]:
    return W4A16 | {"config_groups": {"g": {"weights": GROUPS | fields}}}


def word(values: Tensor, bits: int) -> Tensor:
    """Neighbours along the last dimension in one int32, the first in its lowest bits."""
    each = values.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    total = sum(each[..., i] << bits * i for i in range(32 // bits))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def awq_word(values: Tensor) -> Tensor:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return word(values.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)


def pack(how: dict[str, Any], shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random weight, and the weight."""
    generator = torch.Generator().manual_seed(seed)
    outputs, width = shape
    method = how["quant_method"]
    own = how if method != "compressed-tensors" else how["config_groups"]["g"]["weights"]
    bits, size = own.get("bits") or own["num_bits"], own.get("group_size", -1)
    size = width if size is None or size < 0 or own.get("strategy") == "channel" else size
    symmetric = own.get("sym", own.get("symmetric", False))
    values = torch.randint(1 << bits, shape, generator=generator)
    zero = torch.randint(1, 1 << bits, (outputs, width // size), generator=generator)
    zero = torch.full_like(zero, 1 << (bits - 1)) if symmetric else zero
    scale = (torch.rand(zero.shape, generator=generator) * 0.01 + 0.001).half()
    index = torch.arange(width) // size
    if own.get("desc_act") or own.get("actorder"):
        index = index[torch.randperm(width, generator=generator)]
    weight = (values - zero[:, index]).float() * scale[:, index].float()
    if method == "gptq":
        lag = 0 if own.get("checkpoint_format") == "gptq_v2" else 1
        parts = {"qweight": word(values, bits).T, "scales": scale.T}
        parts |= {"qzeros": word((zero - lag).T, bits), "g_idx": index.int()}
    elif method == "awq":
        parts = {"qweight": awq_word(values.T), "scales": scale.T, "qzeros": awq_word(zero.T)}
    else:
        parts = {"weight_packed": word(values, bits), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
        parts |= {} if symmetric else {"weight_zero_point": word(zero.T, bits).T}
        parts |= {"weight_g_idx": index.int()} if own.get("actorder") == "group" else {}
    return {name: tensor.contiguous() for name, tensor in parts.items()}, weight


def checkpoint(folder: Path, how: dict[str, Any], first: int = 0) -> dict[str, Tensor]:
    """A checkpoint of random integers; head and embedding as they were. Its weights by name."""
    save_network(random_model("llada", torch.float16, **WIDE), Llada(), folder, WIDE)
    found, weights = load_file(folder / "model.safetensors"), {}
    for seed, name in enumerate([name for name in found if "blocks" in name and found[name].dim() == 2], first):
        parts, weights[name] = pack(how, tuple(found.pop(name).shape), seed)
        found |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in parts.items()}
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(WIDE | {"quantization_config": how}))
    return weights


def load(folder: Path, **options: Any) -> Any:
    return load_network(folder, Llada(), **{"dtype": torch.float32, "device": CPU} | options)


def joined(weights: dict[str, Tensor], *names: str) -> Tensor:
    return torch.cat([weights[f"model.transformer.blocks.1.{name}.weight"] for name in names])


WIDENED = {
    "gptq, zeros": GPTQ | {"sym": False},
    "gptq_v2, zeros": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "group_size": -1},
    "gptq, act-order": GPTQ | {"desc_act": True},
    "gptq, 8 bits in groups": GPTQ | {"bits": 8, "group_size": 64},
    "awq": AWQ,
    "awq, groups of 32": AWQ | {"group_size": 32},
    "w4a16, zeros": scheme(symmetric=False),
    "w4a16, act-order": scheme(actorder="group", group_size=32),
    "w8a16, groups": scheme(num_bits=8, group_size=32),
}


@pytest.mark.parametrize("what", WIDENED)
def test_what_no_format_holds_is_widened(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The float32 product of integer and scale is exact; a network of the scales' dtype rounds it once."""
    weights = checkpoint(tmp_path, WIDENED[what])
    with caplog.at_level(logging.WARNING):
        network = load(tmp_path)
    assert torch.equal(network.blocks[1].qkv.weight, joined(weights, "q_proj", "k_proj", "v_proj"))
    assert torch.equal(network.blocks[1].mlp.down.weight, joined(weights, "ff_out"))
    assert "14 of 14 rounded weights are widened to torch.float32" in caplog.text
    assert torch.equal(load(tmp_path, dtype=None).blocks[1].out.weight, joined(weights, "attn_out").half())


@pytest.mark.parametrize("how", [GPTQ, GPTQ | {"group_size": 128}, scheme(), scheme(group_size=64)], ids=str)
def test_symmetric_groups_of_4_bits_stay(how: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = checkpoint(tmp_path, how)
    with caplog.at_level(logging.WARNING):
        network = load(tmp_path)
    assert not caplog.text
    linear = network.blocks[1].mlp.gate_up
    values, scale = linear.weight_of("weight")
    assert values.dtype == torch.uint8 and torch.equal(unpack(values, scale), joined(weights, "ff_proj", "up_proj"))
    table = load(tmp_path, dtype=torch.float16).embedding.weight
    assert network.embedding.weight.dtype == torch.float16, "a table stays narrow beside weights in few bits"
    assert torch.equal(network.embed(torch.tensor([[3]]))[0, 0], table[3].float())
    assert lies_in(tmp_path / "model.safetensors", network.embedding.weight) or not Path("/proc/self/maps").is_file()
    share = load(tmp_path, rank=Rank(1, 2)).blocks[1].mlp.down
    got = unpack(*share.weight_of("weight"))
    assert torch.equal(got, joined(weights, "ff_out")[:, 128:])
    found = inspect(tmp_path, {"checkpoint": str(tmp_path)})
    network = load(tmp_path, dtype=None)
    held = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    assert not found.problems and found.memory["none"] == held and "4 bits, groups of" in str(found.packing)


def test_8_bits_with_a_scale_for_each_output_stay(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, scheme(num_bits=8, strategy="channel", group_size=None))
    values, scale = load(tmp_path).blocks[1].qkv.weight_of("weight")
    assert values.dtype == torch.int8
    assert torch.equal(values.float() * scale[:, None], joined(weights, "q_proj", "k_proj", "v_proj"))
    values, scale = load(tmp_path, rank=Rank(1, 2)).blocks[1].mlp.down.weight_of("weight")
    assert torch.equal(values.float() * scale[:, None], joined(weights, "ff_out")[:, 128:])


def test_rounding_again_takes_the_values(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ)
    assert load(tmp_path, quantize="int4").blocks[0].out.weight.dtype == torch.uint8


BAD = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' is not supported"),
    "3 bits": (GPTQ | {"bits": 3}, "bits=3 is not supported; use 4, 8"),
    "a group of no size": (GPTQ | {"group_size": 0}, "group_size=0 must be"),
    "gemv": (AWQ | {"version": "gemv"}, "version='gemv' is not supported"),
    "a scheme of floats": (scheme(type="float"), "type='float' is not supported"),
    "zeros that are missing": (scheme(symmetric=False), "weight_zero_point"),
    "an order that is missing": (scheme(actorder="group"), "weight_g_idx"),
    "a group that does not divide": (scheme(group_size=96), "group_size=96 does not divide 128 inputs"),
    "Marlin's layout": (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True is not supported"),
    "a flag that is a text": (GPTQ | {"desc_act": "no"}, "desc_act='no' is not supported"),
    "an order that is none": (scheme(actorder="best"), "actorder='best' is not supported"),
    "integers said to be floats": (W4A16 | {"format": "nvfp4-pack-quantized"}, "how .*weight_packed is packed"),
    "a format of its own": (W4A16 | {"format": "marlin-24"}, "use .*'pack-quantized'"),
    "bits that differ": (
        GPTQ | {"dynamic": {"-:.*gate": {}, "+:.*q_proj": {"bits": 8}}}, "dynamic=.* may only leave weights as they are"
    ),
    "a rotation": (
        W4A16 | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config=.*'hadamard'"
    ),
    "zeros left out": (
        W4A16 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24-bitmask'"
    ),
    "keys in 8 bits": (W4A16 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme=.*'num_bits': 8"),
    "a group of tensors": (scheme(strategy="tensor_group"), "config_groups.g.weights.strategy='tensor_group'"),
    "no word of it": (None, r"does not say in quantization_config how .*weight_packed is packed"),
    "groups of another size": (scheme(group_size=64), r"groups of 64.*\n.*scale: \(128, 1\), must be \(128, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_named(what: str, tmp_path: Path) -> None:
    how, message = BAD[what]
    checkpoint(tmp_path, W4A16)
    (tmp_path / "config.json").write_text(json.dumps(WIDE | {"quantization_config": how}))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


PARTS = {
    "scales that are integers": (".scales", lambda t: t.int(), r"ff_out\.scales: I32, must be F64 or "),
    "scales that are fewer": (".scales", lambda t: t[:1], r"ff_out\.scales: \(1, 128\), must be \(8, 128\)"),
    "zeros of 64 bits": (".qzeros", lambda t: t.long(), r"ff_out\.qzeros: I64, must be I32"),
    "groups that are none": (".g_idx", lambda t: t + 1, r"ff_out\.g_idx: 1 to 8 of 8 groups"),
    "groups in another order": (".g_idx", lambda t: t.flip(0), r"ff_out\.g_idx: .*; give desc_act=true"),
}  # fmt: skip


@pytest.mark.parametrize("what", PARTS)
def test_parts_that_do_not_fit_are_named(what: str, tmp_path: Path) -> None:
    """Groups in an order that config.json denies were once read as neighbours."""
    end, change, message = PARTS[what]
    checkpoint(tmp_path, GPTQ)
    tensors, own = load_file(tmp_path / "model.safetensors"), f"model.transformer.blocks.1.ff_out{end}"
    save_file(tensors | {own: change(tensors[own]).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    checkpoint(tmp_path, GPTQ)
    tensors, own = load_file(tmp_path / "model.safetensors"), "model.transformer.blocks.1.ff_out.weight"
    save_file(tensors | {own: torch.ones(128, 256)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ff_out\.weight: it is there twice, as it is and as .*qweight"):
        load(tmp_path)


def test_biases_where_the_model_has_none(tmp_path: Path) -> None:
    """AutoGPTQ writes one of zeros beside every weight."""
    weights = checkpoint(tmp_path, GPTQ)
    tensors = load_file(tmp_path / "model.safetensors")
    zeros = {f"{name.removesuffix('weight')}bias": torch.zeros(len(weight)) for name, weight in weights.items()}
    save_file(tensors | zeros, tmp_path / "model.safetensors")
    assert not inspect(tmp_path, {"checkpoint": str(tmp_path)}).problems
    assert torch.equal(unpack(*load(tmp_path).blocks[1].out.weight_of("weight")), joined(weights, "attn_out"))
    (own, bias), *_ = zeros.items()
    save_file(tensors | zeros | {own: bias + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"biases where the model has none, and they are not 0:\n  {own}$"):
        load(tmp_path)


def test_patterns_that_leave_weights_as_they_are(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, GPTQ | {"dynamic": {"-:.*lm_head": {}}})
    linear = load(tmp_path).blocks[1].out
    assert torch.equal(unpack(*linear.weight_of("weight")), joined(weights, "attn_out"))


@pytest.mark.parametrize("how", [W4A16, scheme(num_bits=8, strategy="channel", group_size=None)], ids=["4", "8"])
def test_a_packed_embedding_is_widened(how: dict[str, Any], tmp_path: Path) -> None:
    """It was once held in a format that looks up no rows, so that the first step failed."""
    checkpoint(tmp_path, how)
    tensors, own = load_file(tmp_path / "model.safetensors"), "model.transformer.wte"
    parts, table = pack(how, tuple(tensors.pop(f"{own}.weight").shape), 99)
    save_file(tensors | {f"{own}.{end}": tensor for end, tensor in parts.items()}, tmp_path / "model.safetensors")
    network = load(tmp_path)
    assert torch.equal(network.embed(torch.tensor([[3, 7]]))[0], table[[3, 7]])
    found = inspect(tmp_path, {"checkpoint": str(tmp_path)})
    network = load(tmp_path, dtype=None)
    assert found.memory["none"] == sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))


def test_the_newer_names_of_act_order(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, scheme(actorder="group", group_size=32))
    how = scheme(actorder="dynamic", group_size=32)
    (tmp_path / "config.json").write_text(json.dumps(WIDE | {"quantization_config": how}))
    assert torch.equal(load(tmp_path).blocks[1].out.weight, joined(weights, "attn_out"))


def test_a_shape_that_lies(tmp_path: Path) -> None:
    checkpoint(tmp_path, W4A16)
    tensors, own = load_file(tmp_path / "model.safetensors"), "model.transformer.blocks.1.ff_out.weight_shape"
    save_file(tensors | {own: torch.tensor([1, 2])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ff_out\.weight_shape=\[1, 2\], but the values beside it are"):
        load(tmp_path)


def test_symmetric_in_name_only(tmp_path: Path) -> None:
    checkpoint(tmp_path, GPTQ | {"sym": False})
    (tmp_path / "config.json").write_text(json.dumps(WIDE | {"quantization_config": GPTQ}))
    with pytest.raises(CheckpointError, match="its zeros are not all 8"):
        load(tmp_path)


def in_blocks(target: Path, turn: float) -> Path:
    """A GGUF file whose matrices are in Q8_0, of weights times a number."""
    kind = gguf.GGMLQuantizationType.Q8_0
    wide = {
        one.name: np.array(one.data).astype(np.float32)
        for one in gguf.GGUFReader(LLADA).tensors
        if one.data.ndim == 2 and one.data.shape[1] % 32 == 0
    }
    return rewritten(target, tensors={name: (gguf.quantize(turn * held, kind), kind) for name, held in wide.items()})


@pytest.mark.parametrize("kind", ["gptq", "awq", "gguf"])
def test_a_checkpoint_that_is_rounded_alike_can_take_its_place(kind: str, tmp_path: Path) -> None:
    """In place, with the bits of a fresh load. Floats and other types are refused before any is written."""
    how = AWQ if kind == "awq" else GPTQ
    one, other = (tmp_path / f"{name}.gguf" if kind == "gguf" else tmp_path / name for name in "ab")
    for number, path in enumerate((one, other)):
        in_blocks(path, 1.0 + number) if kind == "gguf" else checkpoint(path, how, 100 * number)
    family, network, fresh = Llada(), load(one), load(other)
    pipe = Pipeline(
        compose(network, cache="none", iteration="blockwise", decoder="threshold"), None, Runtime(), (family, one)
    )
    held = {name: tensor.data_ptr() for name, tensor in network.named_parameters()}
    with pipe.updating() as into:
        into.from_folder(other)
    assert {name: tensor.data_ptr() for name, tensor in network.named_parameters()} == held
    wanted = dict([*fresh.named_parameters(), *fresh.named_buffers()])
    assert all(tensor.equal(wanted[name]) for name, tensor in [*network.named_parameters(), *network.named_buffers()])
    plain = tmp_path / "floats"
    save_network(random_model("llada", torch.float16, **WIDE), family, plain, WIDE)
    name = "model.transformer.blocks.0.attn_out.weight"
    if kind != "awq":  # whose zeros no format holds, so its weights are floats
        with pytest.raises(ValueError, match=r"a checkpoint that is rounded alike"), pipe.updating() as into:
            into.load_all({name: torch.zeros(family.weights(network.spec)[name].shape)})
    if kind == "gptq":
        with pytest.raises(ValueError, match=r"is rounded otherwise"), pipe.updating() as into:
            into.from_folder(plain)
        checkpoint(tmp_path / "c", GPTQ | {"group_size": 64})
        with pytest.raises(ValueError, match=r"is rounded otherwise"), pipe.updating() as into:
            into.from_folder(tmp_path / "c")
    assert pipe.weights.version == 1
    assert pipe.generate_ids([[5, 6]], max_new_tokens=4)[0].ids  # it runs: nothing is torn
