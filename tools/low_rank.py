"""Trains a LoRA adapter (arXiv:2106.09685): low-rank updates of some matrices of a frozen network.

The network computes with merged weights, as with a loaded adapter. Their gradients give those of A and B.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dinfer.core.layers.transformer import Transformer
from dinfer.core.models.family import ModelFamily, Placement
from dinfer.formats.lora import CONFIG, PREFIX


class LowRank:
    """W + B A for every matrix whose whole name in the checkpoint matches `pattern`."""

    def __init__(self, network: Transformer, family: ModelFamily, pattern: str, rank: int, seed: int) -> None:
        generator = torch.Generator(network.device).manual_seed(seed)
        parameters = dict(network.named_parameters())
        self.pattern, self.rank = pattern, rank
        self.pairs: dict[str, tuple[Placement, Tensor, Tensor]] = {}
        for name, place in family.weights(network.spec).items():
            name, is_weight = name.removesuffix(".weight"), name.endswith(".weight")
            if is_weight and len(place.shape) == 2 and re.fullmatch(pattern, name):
                out, width = place.shape
                a = torch.randn(rank, width, device=network.device, generator=generator) * width**-0.5
                b = torch.zeros(out, rank, device=network.device)
                self.pairs[name] = place, a.requires_grad_(), b.requires_grad_()
        if not self.pairs:
            raise ValueError(f"pattern={pattern!r} matches no matrix of the checkpoint, such as {name!r}")
        changed = {place.parameter for place, _, _ in self.pairs.values()}
        network.requires_grad_(False)
        self.weights = {name: parameters[name].requires_grad_() for name in changed}
        self.base = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def parameters(self) -> list[Tensor]:
        """Every A and B."""
        return [tensor for _, *pair in self.pairs.values() for tensor in pair]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Loads an adapter of the same rank and matrices that `save` wrote."""
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, (_, a, b) in self.pairs.items():
            a.copy_(tensors[f"{PREFIX}{name}.lora_A.weight"])
            b.copy_(tensors[f"{PREFIX}{name}.lora_B.weight"])

    @torch.no_grad()
    def merge(self) -> None:
        """Writes the updates into the network's weights."""
        for name, weight in self.weights.items():
            weight.copy_(self.base[name])
        for place, a, b in self.pairs.values():
            self.weights[place.parameter][place.at].addmm_(b, a)

    @torch.no_grad()
    def pull(self) -> None:
        """Computes the gradients of A and B from those of the merged weights, and clears the latter."""
        for place, a, b in self.pairs.values():
            whole = self.weights[place.parameter].grad
            if whole is None:
                raise ValueError(f"{place.parameter} has no gradient; call backward first")
            a.grad, b.grad = b.mT @ whole[place.at], whole[place.at] @ a.mT
        for weight in self.weights.values():
            weight.grad = None

    def save(self, folder: Path, base: str) -> None:
        """Writes PEFT's two files. `base` is the checkpoint that the adapter changes."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": False,
            "lora_alpha": self.rank,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": self.pattern,
            "task_type": None,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        tensors = {}
        for name, (_, a, b) in self.pairs.items():
            tensors[f"{PREFIX}{name}.lora_A.weight"] = a.detach().half().cpu().contiguous()
            tensors[f"{PREFIX}{name}.lora_B.weight"] = b.detach().half().cpu().contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
