"""LoRA adapters in PEFT's format (arXiv:2106.09685), merged into the weights while these are read.

A merged model costs as much as its base. D2F publishes its models as adapters (arXiv:2508.09192).
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.core.loading.files import ADAPTER as CONFIG
from dinfer.core.loading.files import CheckpointError, read_object, refuse
from dinfer.core.loading.safetensors_io import mismatches, read, stored_in
from dinfer.core.models.family import Placement

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
ROUNDED = "F8_E4M3"  # what an adapter may be stored in, its factor being that of lora_alpha
# Fields that change an adapter's meaning, and their supported values; null and absent always are.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "exclude_modules": ([],),
    "layers_to_transform": (),
    "layer_replication": (),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "corda_config": (),
    "kasa_config": (),
    "lora_ga_config": (),
    "monteclora_config": (),
    "velora_config": (),
    "use_bdlora": (False,),
    "init_lora_weights": (True, False, "gaussian"),  # others change the weights of the base model too
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank updates of some of a checkpoint's tensors."""

    # By the name of the tensor: A [r, in] and B [out, r], or of one that all experts of a layer share, a pair of each.
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    def merged(self, name: str, weight: Tensor, device: torch.device, part: tuple[slice, ...]) -> Tensor:
        """W + scale * B A, summed in float32 or wider on `device`; W itself if the adapter does not change it.

        `weight` is `part` of the tensor W, [out, in] or [experts, out, in].
        """
        if name not in self.pairs:
            return weight
        (a, b), (*experts, rows, columns) = self.pairs[name], part
        a, b = a[*experts, :, columns], b[*experts, rows]
        dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
        a, b = a.to(device, dtype), b.to(device, dtype)
        return (torch.baddbmm if experts else torch.addmm)(weight.to(device, dtype), b, a, alpha=self.scale)


def read_adapter(folder: Path, placements: Mapping[str, Placement]) -> Adapter:
    """The adapter in a folder, for a checkpoint with these tensors.

    Raises a CheckpointError that names the fields or tensors that are not supported or do not fit.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}: give a folder that PEFT wrote")
    config = read_object(folder / CONFIG)
    for field, allowed in SUPPORTED.items():
        if (value := config.get(field)) is not None and value not in allowed:
            only = f"only {allowed[0]!r} is" if allowed else "leave it out"
            raise CheckpointError(f"{folder / CONFIG}: {field}={value!r} is not supported; {only}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{folder / CONFIG}: r={rank!r} must be 1 or more, and lora_alpha={alpha!r} a number")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS} (adapters in other formats are not read)")
    tensors = stored_in(folder / WEIGHTS)
    fused = _of_network(tensors, placements)
    owners = fused or _owners(config, placements, folder)
    wanted: dict[str, tuple[int, ...]] = {}
    for name, owner in owners.items():
        *experts, out, width = placements[name].shape
        ranks, first = rank * math.prod(experts), placements[name].row if fused else 0
        below, above = (f"{PREFIX}{owner}.lora_{part}.weight" for part in "AB")
        wanted[below], wanted[above] = (ranks, width), (max(first + out, *wanted.get(above, (0,))[:1]), ranks)
    rounded = [name for name, one in tensors.items() if one.dtype == ROUNDED]
    wrong = [*mismatches(tensors, wanted, rounded)]
    refuse(wrong, f"the adapter in {folder} does not fit its {CONFIG} and the checkpoint")
    values = {name: tensor.half() if name in rounded else tensor.clone() for name, tensor in read(tensors)}
    pairs = {}
    for name, owner in owners.items():
        a, b = (values[f"{PREFIX}{owner}.lora_{part}.weight"] for part in "AB")
        if len(shape := placements[name].shape) == 3:  # peft numbers the ranks of A by expert first, those of B last
            a, b = a.unflatten(0, (shape[0], -1)), b.unflatten(1, (-1, shape[0])).permute(2, 0, 1)
        pairs[name] = a, b[placements[name].at[-2]] if fused else b
    return Adapter(pairs, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_network(names: Collection[str], placements: Mapping[str, Placement]) -> dict[str, str]:
    """The tensors and modules of an adapter that was trained on dinfer's own network, whose modules hold several.

    Nothing for one that names the checkpoint's modules.
    """
    found = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names}
    modules = {name: one.parameter.removesuffix(".weight") for name, one in placements.items() if not one.experts}
    if not found <= {*modules.values()} or found <= {name.removesuffix(".weight") for name in placements}:
        return {}
    return {name: module for name, module in modules.items() if module in found}


def _owners(config: Mapping[str, Any], placements: Mapping[str, Placement], folder: Path) -> dict[str, str]:
    """The tensors that an adapter changes, and the modules under whose names it has their parts.

    Those of `target_parameters` are under the module that holds them. Where it holds several, peft wraps it once for
    each, in their order, and the last wrapper is the outermost.
    """
    named, modules = config.get("target_parameters") or [], config.get("target_modules")
    if not (isinstance(named, list) and all(isinstance(name, str) and name for name in named)):
        raise CheckpointError(f"{folder / CONFIG}: target_parameters={named!r:.80} must be a list of names")
    found = {} if named and not modules else {f"{name}.weight": name for name in _targets(modules, placements, folder)}
    stacked = [
        name
        for name, place in placements.items()
        if len(place.shape) == 3 and any(f".{name}".endswith(f".{own}") for own in named)
    ]
    if lost := [own for own in named if not any(f".{name}".endswith(f".{own}") for name in stacked)]:
        raise CheckpointError(
            f"{folder / CONFIG}: target_parameters={lost!r} names no tensor that holds a layer's experts; python -m "
            "tools.convert IN OUT --experts fused makes such a checkpoint"
        )
    for name in stacked:
        module = name.rpartition(".")[0]
        behind = sum(other.rpartition(".")[0] == module for other in stacked[stacked.index(name) + 1 :])
        found[name] = ".".join([module, *["base_layer"] * behind])
    return found


def _targets(given: Any, placements: Mapping[str, Placement], folder: Path) -> Collection[str]:
    """The modules that `target_modules` names: a list of name endings, or a pattern for whole names."""
    if isinstance(given, str):
        pattern = given
    elif isinstance(given, list) and given and all(isinstance(name, str) for name in given):
        pattern = rf"(.*\.)?({'|'.join(map(re.escape, given))})"
    else:
        raise CheckpointError(f"{folder / CONFIG}: target_modules={given!r} must be a list of names or a pattern")
    matrices = [name for name, place in placements.items() if name.endswith(".weight") and len(place.shape) == 2]
    found = [name.removesuffix(".weight") for name in matrices if re.fullmatch(pattern, name.removesuffix(".weight"))]
    if not found:
        raise CheckpointError(f"{folder / CONFIG}: target_modules={given!r} names no matrix of the checkpoint")
    return found
