"""LoRA adapters in PEFT's format, merged when loaded: W + scale * B A, and everything else refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import CONFIGS, family_for, random_model

from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import CheckpointError
from dinfer.core.pipeline import load
from dinfer.core.registry import MODELS
from dinfer.formats.saving import save_network

CPU = torch.device("cpu")
RANK, ALPHA = 3, 5
# What PEFT writes for D2F's adapters, as far as it matters.
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.1, "bias": "none", "fan_in_fan_out": False,
    "use_rslora": False, "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "init_lora_weights": True, "layers_to_transform": None, "target_modules": ["q_proj", "v_proj", "attn_out"],
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_network(random_model("llada"), family_for(CONFIGS["llada"]), tmp_path / "base", CONFIGS["llada"])
    return tmp_path / "base"


def write_adapter(folder: Path, base: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """An adapter for the modules that ADAPTER names; returns the tensors of the merged checkpoint."""
    config = ADAPTER | fields
    generator, merged, tensors = torch.Generator().manual_seed(1), load_file(base / "model.safetensors"), {}
    for name, weight in merged.items():
        if name.split(".")[-2] in ("q_proj", "v_proj", "attn_out"):
            out, width = weight.shape
            a = torch.randn(RANK, width, generator=generator, dtype=torch.float64)
            b = torch.randn(out, RANK, generator=generator, dtype=torch.float64)
            root = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{root}.lora_A.weight": a, f"{root}.lora_B.weight": b}
            merged[name] = weight + ALPHA / (RANK**0.5 if config["use_rslora"] else RANK) * b @ a
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


def reading(base: Path, adapter: Path, dtype: torch.dtype | None = None) -> Any:
    return load_network(base, MODELS.build({"name": "llada", "adapter": str(adapter)}), dtype=dtype, device=CPU)


@pytest.mark.parametrize(
    "fields", [{}, {"use_rslora": True}, {"target_modules": r".*\.(q_proj|v_proj|attn_out)"}, {"lora_alpha": 5.0}]
)
def test_the_weights_are_those_of_the_formula(fields: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """The model is that of a checkpoint with W + scale * B A in place of W, and nothing else differs."""
    merged = write_adapter(tmp_path / "adapter", base, **fields)
    network = reading(base, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text((base / "config.json").read_text())
    save_file(merged, tmp_path / "merged" / "model.safetensors")
    want = load_network(tmp_path / "merged", MODELS.build("llada"), dtype=None, device=CPU)
    for (name, got), expected in zip(network.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=name)
    assert not torch.equal(network.blocks[0].out.weight, random_model("llada").blocks[0].out.weight)


def test_the_sum_is_rounded_once(base: Path, tmp_path: Path) -> None:
    merged = write_adapter(tmp_path / "adapter", base)
    got = reading(base, tmp_path / "adapter", torch.bfloat16).blocks[1].out.weight
    want = merged["model.transformer.blocks.1.attn_out.weight"].to(torch.bfloat16)
    assert torch.equal(got, want)


def test_the_option_reaches_the_pipeline(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", base)
    plain, adapted = (
        load({"name": "llada", "checkpoint": str(base), "adapter": adapter}, dtype="float64", device="cpu").model
        for adapter in (None, str(tmp_path / "adapter"))
    )
    ids = torch.arange(9)[None]
    assert not torch.allclose(plain.score(ids), adapted.score(ids))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "ADALORA"}, "peft_type='ADALORA' is not supported; only 'LORA' is"),
        ({"bias": "all"}, "bias='all' is not supported; only 'none' is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern="),
        ({"layers_to_transform": [1]}, r"layers_to_transform=\[1\] is not supported; leave it out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": 0}, "r=0 must be 1 or more"),
        ({"lora_alpha": None}, "lora_alpha=None a number"),
        ({"target_modules": None}, "target_modules=None must be a list"),
        ({"target_modules": ["proj"]}, r"target_modules=\['proj'\] names no matrix"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"unexpected: .*blocks\.0\.attn_out\.lora_A\.weight"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "attn_out"]}, r"missing: .*\.1\.k_proj\.lora_B\.weight"),
        ({"r": 4}, r"shape of .*q_proj\.lora_A\.weight: \(3, 32\), must be \(4, 32\)"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", base, **fields)
    with pytest.raises(CheckpointError, match=message):
        reading(base, tmp_path / "adapter")


def test_only_safetensors_are_adapters(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", base)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        reading(base, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"base has no adapter_config\.json"):
        reading(base, base)


def test_experts_and_fused_projections_have_adapters_too(tmp_path: Path) -> None:
    """By the names of the checkpoint, each in its own rows of our matrices."""
    family, model = family_for(CONFIGS["llada2"]), random_model("llada2")
    save_network(model, family, tmp_path / "base", CONFIGS["llada2"])
    names = ["model.layers.1.attention.query_key_value", "model.layers.2.mlp.experts.5.up_proj"]
    tensors = {}
    for name in names:
        place = family.weights(model.spec)[f"{name}.weight"]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.full((RANK, place.shape[1]), 2.0)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.full((place.shape[0], RANK), 0.5)
    (tmp_path / "adapter").mkdir()
    pattern = "|".join(name.replace(".", r"\.") for name in names)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(ADAPTER | {"target_modules": pattern}))
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    adapted = replace(family, adapter=str(tmp_path / "adapter"))
    network = load_network(tmp_path / "base", adapted, dtype=None, device=CPU)
    changed = {}
    for (name, got), before in zip(network.named_parameters(), model.parameters(), strict=True):
        if not torch.equal(got, before):
            difference = (got - before).flatten(0, -2)
            changed[name] = difference.abs().amax(-1).nonzero().flatten()
            torch.testing.assert_close(difference[changed[name]].mean().item(), 1.0 * ALPHA)
    up = 2 * 12 * 5 + 12
    assert {name: (int(rows.min()), int(rows.max())) for name, rows in changed.items()} == {
        "blocks.1.qkv.weight": (0, 63), "blocks.2.mlp.gate_up": (up, up + 11),
    }  # fmt: skip
