"""NVFP4 and MXFP4 checkpoints: the values of the packers' own code, bit for bit; wrong parts named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import CONFIGS, family_for, random_model

from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import CheckpointError
from dinfer.formats.saving import save_network
from dinfer.lab.inspect import inspect

CPU = torch.device("cpu")
NVFP4 = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
    }}},
}  # fmt: skip
MXFP4 = NVFP4 | {"format": "mxfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LLADA2 = CONFIGS["llada2"] | {"moe_intermediate_size": 32}


def halves(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def reference(packed: torch.Tensor, factor: torch.Tensor, group: int) -> torch.Tensor:
    """By the formats' documents: the low half first, bit 3 the sign, the product in float32."""
    codes = torch.stack((packed % 16, packed // 16), -1).flatten(-2).int()
    values = LEVELS[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)
    return values * factor.repeat_interleave(group, -1)


def rounded(folder: Path, how: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random checkpoint in that format; returns its family, and the tensors of the widened one."""
    config = LLADA2 if how == "mxfp4" else CONFIGS["llada"]
    layout: Any = "fused" if how == "mxfp4" else "separate"
    family, generator = family_for(config), torch.Generator().manual_seed(0)
    fields = {"moe_intermediate_size": 32} if how == "mxfp4" else {}
    network = random_model("llada2" if how == "mxfp4" else "llada", torch.bfloat16, **fields)
    save_network(network, family, folder, config, layout)
    tensors = load_file(folder / "model.safetensors")
    want, found = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        experts = weight.dim() == 3 and how == "mxfp4"
        if not experts and (
            how == "mxfp4" or not name.endswith(("q_proj.weight", "ff_proj.weight", "attn_out.weight"))
        ):
            continue
        base, (*lead, width), group = name.removesuffix(".weight"), weight.shape, 16 if "nvfp4" in how else 32
        packed = halves((*lead, width // 2), generator)
        scale = torch.rand((*lead, width // group), generator=generator) + 0.5
        del found[name]
        if how == "nvfp4":
            own, divisor = scale.to(torch.float8_e4m3fn), torch.tensor([37.25])
            found |= {
                f"{base}.weight_packed": packed, f"{base}.weight_scale": own, f"{base}.weight_global_scale": divisor,
                f"{base}.input_global_scale": torch.tensor([3.0]),
            }  # fmt: skip
            factor = own.float() / divisor
        elif how == "modelopt_nvfp4":
            own, times = scale.to(torch.float8_e4m3fn), torch.tensor(0.03)
            found |= {name: packed, f"{base}.weight_scale": own, f"{base}.weight_scale_2": times,
                      f"{base}.input_scale": torch.tensor(3.0)}  # fmt: skip
            factor = own.float() * times
        else:
            exponent = torch.randint(118, 129, scale.shape, generator=generator, dtype=torch.uint8)
            blocks, ends = (".weight_packed", ".weight_scale") if how == "mxfp4_packed" else ("_blocks", "_scales")
            found |= {f"{base}{blocks}": packed if how == "mxfp4_packed" else packed.unflatten(-1, (-1, 16)),
                      f"{base}{ends}": exponent}  # fmt: skip
            factor = 2.0 ** (exponent.float() - 127)
        want[name] = reference(packed, factor, group)
    said = {"nvfp4": NVFP4, "mxfp4_packed": MXFP4, "modelopt_nvfp4": MODELOPT, "mxfp4": {"quant_method": "mxfp4"}}[how]
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return family, want


@pytest.mark.parametrize("how", ["nvfp4", "mxfp4_packed", "modelopt_nvfp4", "mxfp4"])
def test_the_values_are_those_of_the_format(how: str, tmp_path: Path) -> None:
    family, want = rounded(tmp_path / "packed", how)
    (tmp_path / "wide").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in want.items()}, tmp_path / "wide" / "model.safetensors")
    (tmp_path / "wide" / "config.json").write_text(json.dumps(LLADA2 if how == "mxfp4" else CONFIGS["llada"]))
    for dtype in (torch.float32, torch.bfloat16):
        got, expected = (load_network(tmp_path / f, family, dtype=dtype, device=CPU) for f in ("packed", "wide"))
        for (name, wide), found in zip(expected.named_parameters(), got.parameters(), strict=True):
            assert torch.equal(found, wide), name
    assert (
        inspect(
            tmp_path / "packed",
            {"name": "llada2", "block": 4, "mask_id": 39, "stop_ids": [38]} if how == "mxfp4" else {},
        ).problems
        == []
    )


@pytest.mark.parametrize("how", ["nvfp4", "mxfp4_packed"])
def test_the_values_are_those_of_compressed_tensors(how: str, tmp_path: Path) -> None:
    """Its decompressor gives bfloat16."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    family, _ = rounded(tmp_path / "packed", how)
    network = load_network(tmp_path / "packed", family, dtype=torch.bfloat16, device=CPU)
    tensors, base = load_file(tmp_path / "packed" / "model.safetensors"), "model.transformer.blocks.1.attn_out"
    group, strategy = (16, "tensor_group") if how == "nvfp4" else (32, "group")
    args = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=group, symmetric=True)
    kind = NVFP4PackedCompressor if how == "nvfp4" else MXFP4PackedCompressor
    own = {name.removeprefix(f"{base}."): t for name, t in tensors.items() if name.startswith(base)}
    want = kind.decompress(own, QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    assert torch.equal(network.blocks[1].out.weight, want)


def test_experts_are_those_of_transformers(tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    family, _ = rounded(tmp_path / "packed", "mxfp4")
    network = load_network(tmp_path / "packed", family, dtype=torch.bfloat16, device=CPU)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    name = next(name.removesuffix("_blocks") for name in tensors if name.endswith("w1_blocks"))
    want = module.convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    assert torch.equal(network.blocks[int(name.split(".")[2])].mlp.gate_up, want.transpose(1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, base: t.pop(f"{base}.weight_scale"), r"tensors are missing:\n  missing: .*attn_out\.weight_scale"),
        (lambda t, base: t.update({f"{base}.weight": torch.ones(32, 32)}), "it is there twice"),
        (lambda t, base: t.update({f"{base}.weight_scale": torch.ones(32, 2)}), r"F32 \(32, 2\), must be F8_E4M3"),
        (lambda t, base: t.update({f"{base}.weight_global_scale": torch.ones(2)}), r"F32 \(2,\), must be one F32"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    family, _ = rounded(tmp_path, "nvfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors, "model.transformer.blocks.0.attn_out")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_network(tmp_path, family, dtype=None, device=CPU)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"quant_algo": "W4A8"}, "quant_algo='W4A8' is not supported"),
        ({"kv_cache_quant_algo": "FP8"}, "runtime.kv=fp8"),
    ],
)
def test_other_schemes_of_modelopt_are_refused(field: dict[str, str], message: str, tmp_path: Path) -> None:
    family, _ = rounded(tmp_path, "modelopt_nvfp4")
    config = CONFIGS["llada"] | {"quantization_config": MODELOPT | field}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_network(tmp_path, family, dtype=None, device=CPU)
