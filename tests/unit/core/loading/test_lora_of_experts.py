"""LoRA on the experts of a layer (peft's `target_parameters`), as peft itself makes, saves and merges it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import CONFIGS, family_for, random_model
from support.models import GEMMA, tiny_gemma
from torch import nn

from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import CheckpointError
from dinfer.formats.saving import save_network

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")


def tree(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Modules whose parameters have these names; a matrix `weight` is a linear layer's."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, own = name.split(".")
        node = root
        for part in path[:-1]:
            if not hasattr(node, part):
                node.add_module(part, nn.Module())
            node = getattr(node, part)
        if own == "weight" and tensor.dim() == 2:
            layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=tensor.dtype)
            layer.weight.data.copy_(tensor)
            node.add_module(path[-1], layer)
            continue
        if path and not hasattr(node, path[-1]):
            node.add_module(path[-1], nn.Module())
        getattr(node, path[-1]).register_parameter(own, nn.Parameter(tensor))
    return root


def adapted(folder: Path, base: Path, names: Iterable[str], **config: Any) -> dict[str, torch.Tensor]:
    """An adapter that peft saves for a checkpoint whose modules hold these in order; returns what it is merged into."""
    tensors = load_file(base / "model.safetensors")
    wanted = {n: tensors[n].clone() for n in names if tensors[n].dim() == 3 or n.endswith("o_proj.weight")}
    model = peft.get_peft_model(tree(wanted), peft.LoraConfig(r=3, lora_alpha=5, **config))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    model.save_pretrained(str(folder))
    merged = model.merge_and_unload().state_dict()
    assert any(not torch.equal(merged[name], tensors[name]) for name in merged)
    return tensors | merged


CASES = [
    ("llada2", "fused", {"target_modules": [], "target_parameters": ["mlp.w1", "mlp.w2"]}),
    ("llada2", "merged", {"target_modules": [], "target_parameters": ["experts.up_proj"]}),
    ("llada2", "merged", {"target_modules": [], "target_parameters": ["experts.up_proj", "down_proj", "gate_proj"]}),
    ("gemma", "fused", {"target_parameters": ["1.experts.down_proj", "experts.gate_up_proj"],
                        "target_modules": ["o_proj"], "use_rslora": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "config"), CASES)
def test_the_merged_experts_are_peft_s(name: str, layout: Any, config: Any, tmp_path: Path) -> None:
    network: Any = tiny_gemma() if name == "gemma" else random_model(name)
    fields = GEMMA if name == "gemma" else CONFIGS[name]
    family = family_for(fields)
    for folder in ("base", "merged"):
        save_network(network, family, tmp_path / folder, fields, layout)
    merged = adapted(tmp_path / "adapter", tmp_path / "base", family.weights(network.spec, layout), **config)
    save_file({n: t.contiguous() for n, t in merged.items()}, tmp_path / "merged" / "model.safetensors")
    want = load_network(tmp_path / "merged", family, dtype=None, device=CPU)
    got = load_network(tmp_path / "base", replace(family, adapter=str(tmp_path / "adapter")), dtype=None, device=CPU)
    for (parameter, expected), found in zip(want.named_parameters(), got.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=parameter)


def test_parameters_that_no_tensor_of_the_checkpoint_has_are_named(tmp_path: Path) -> None:
    family, config = family_for(CONFIGS["llada2"]), tmp_path / "adapter" / "adapter_config.json"
    for layout in ("fused", "separate"):
        save_network(random_model("llada2"), family, tmp_path / layout, CONFIGS["llada2"], layout)
    names = family.weights(random_model("llada2").spec, "fused")
    adapted(tmp_path / "adapter", tmp_path / "fused", names, target_modules=[], target_parameters=["mlp.w1"])
    family = replace(family, adapter=str(tmp_path / "adapter"))
    with pytest.raises(
        CheckpointError, match=r"target_parameters=\['mlp.w1'\] names no tensor that .* --experts fused"
    ):
        load_network(tmp_path / "separate", family, dtype=None, device=CPU)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_parameters": "mlp.w1"}))
    with pytest.raises(CheckpointError, match=r"target_parameters='mlp.w1' must be a list of names"):
        load_network(tmp_path / "fused", family, dtype=None, device=CPU)
