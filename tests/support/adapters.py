"""Random LoRA adapters in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WEIGHTS = "adapter_model.safetensors"


def save_adapter(folder: Path, family: Any, spec: Any, rank: int, names: str = "", **fields: Any) -> Path:
    """Random parts of all matrices of linear layers, or of those that end so."""
    generator, tensors, modules = torch.Generator().manual_seed(rank), {}, []
    for name, place in family.weights(spec).items():
        module = name.removesuffix(".weight")
        block = ".layers." in name or ".blocks." in name
        wanted = module.endswith(names) if names else block and not module.endswith((".gate", "router.proj"))
        if len(place.shape) == 2 and not place.experts and wanted:
            modules.append(module)
            root, (out, width) = f"base_model.model.{module}", place.shape
            tensors[f"{root}.lora_A.weight"] = torch.randn(rank, width, generator=generator, dtype=torch.float64)
            tensors[f"{root}.lora_B.weight"] = torch.randn(out, rank, generator=generator, dtype=torch.float64)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.5, "target_modules": modules} | fields
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder
