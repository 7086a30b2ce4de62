"""Hugging Face checkpoints: finding them, loading them strictly, and writing them.

Only safetensors are read, and no code that comes with a checkpoint is ever run. A tensor that is missing, unknown,
of another shape or not a plain float is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dinfer.protocols import ModelFamily
from dinfer.registry import MODELS, unknown
from dinfer.spec import ModelSpec, Placement

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # never code, never pickles


class CheckpointError(ValueError):
    """The checkpoint is not what its family says it must be; the message lists every difference."""


def boxed() -> list[str]:
    """Names of the models that come inside the package."""
    folder = resources.files("dinfer") / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if (item / "config.json").is_file())


def locate(name: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: a model in the box, a local folder, or a download from the hub (cached)."""
    path = Path(name).expanduser()
    if revision is not None and (name in boxed() or path.is_dir()):
        raise CheckpointError(f"revision={revision!r} is for checkpoints on the hub, and {name!r} is not one")
    if name in boxed():
        return Path(str(resources.files("dinfer") / "checkpoints" / name))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json: a Hugging Face model folder is needed")
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = unknown("checkpoint", name, boxed())
        raise CheckpointError(f"{known} A folder or a hub name such as 'GSAI-ML/LLaDA-8B-Instruct' is good too.")
    from huggingface_hub import snapshot_download  # only here: loading a folder needs no network code

    return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, and the tokenizer's mask token as `mask_token_id` where config.json is silent about it."""
    config = _read_object(folder / "config.json")
    if config.get("mask_token_id") is None and (folder / "tokenizer_config.json").is_file():
        tokenizer = _read_object(folder / "tokenizer_config.json")
        mask, added = tokenizer.get("mask_token"), tokenizer.get("added_tokens_decoder") or {}
        mask = mask.get("content") if isinstance(mask, dict) else mask
        ids = [int(token) for token, entry in added.items() if mask is not None and entry.get("content") == mask]
        config |= {"mask_token_id": ids[0]} if ids else {}
    return config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {found!r:.80}")
    return found


def family_of(config: dict[str, Any]) -> str:
    """The registered family that a config.json belongs to."""
    for name in MODELS.names():
        if MODELS.get(name).matches(config):
            return name
    raise CheckpointError(
        f"config.json: model_type={config.get('model_type')!r}, architectures={config.get('architectures')!r} belong "
        f"to no family that dinfer knows. Known: {', '.join(MODELS.names())}."
    )


def read_spec(family: ModelFamily, config: dict[str, Any]) -> ModelSpec:
    if not family.matches(config):
        raise CheckpointError(
            f"config.json: model_type={config.get('model_type')!r} is not of the family {type(family).__name__}; "
            f"it is {family_of(config)!r}"
        )
    try:
        return family.spec(config)
    except KeyError as error:
        raise CheckpointError(f"config.json lacks the field {error}") from error


def load_network(folder: Path, family: ModelFamily, *, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The network with the checkpoint's weights, in `dtype` (None: the checkpoint's) on `device`.

    Shards are read one tensor at a time straight to their place, so the peak is the model and one tensor.
    """
    spec = read_spec(family, read_config(folder))
    placements = family.weights(spec)
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        tensors = {name: file for name, file in tensors.items() if not name.startswith(family.unused)}
        _check(folder, tensors, placements)
        if dtype is None:
            dtype = FLOATS[tensors[next(iter(placements))].get_slice(next(iter(placements))).get_dtype()]
        network = _empty(family, spec, dtype, device)
        parameters = dict(network.named_parameters())
        with torch.no_grad():
            for name, place in placements.items():
                rows = parameters[place.parameter].narrow(0, place.row, place.shape[0])
                rows.copy_(tensors[name].get_tensor(name))
    return network


def random_network(family: ModelFamily, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> Any:
    """A network of that shape with random weights of a trained model's scale, for measuring speed and memory."""
    network = _empty(family, spec, dtype, device)
    for name, parameter in network.named_parameters():
        if name.endswith(("norm.weight", "scale")):
            parameter.fill_(1.0)
        elif parameter.dim() == 1:  # a bias
            parameter.normal_(0.0, 0.1)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return network


def _empty(family: ModelFamily, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """The network, its weights not yet written. What chooses experts stays in float32 at least: ties are decided so."""
    with torch.device("meta"):
        network = family.network(spec).to(dtype)
        for name, parameter in network.named_parameters():
            if name.endswith("choice_bias"):
                parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    return network.to_empty(device=device).requires_grad_(False).eval()


def save_network(network: Any, family: ModelFamily, folder: Path, config: dict[str, Any]) -> None:
    """Writes config.json and model.safetensors with the tensor names of the family. Overwrites both."""
    placements = family.weights(family.spec(config))
    parameters = dict(network.named_parameters())
    tensors = {
        name: parameters[place.parameter].detach().narrow(0, place.row, place.shape[0]).cpu().contiguous()
        for name, place in placements.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Which open file holds each tensor."""
    tensors: dict[str, Any] = {}
    for path in _shards(folder):
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
        tensors |= dict.fromkeys(handle.keys(), handle)
    return tensors


def _shards(folder: Path) -> Iterator[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        where = _read_object(index).get("weight_map")
        if not isinstance(where, dict):
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted(set(where.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
        yield from (folder / name for name in names)
    elif single.is_file():
        yield single
    else:
        raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def _check(folder: Path, tensors: dict[str, Any], placements: dict[str, Placement]) -> None:
    problems = [f"missing: {name}" for name in placements if name not in tensors]
    problems += [f"unexpected: {name}" for name in tensors if name not in placements]
    for name in placements.keys() & tensors.keys():
        found = tensors[name].get_slice(name)
        shape = tuple(found.get_shape())
        if shape != placements[name].shape:
            problems.append(f"shape of {name}: {shape}, must be {placements[name].shape}")
        if found.get_dtype() not in FLOATS:
            problems.append(f"dtype of {name}: {found.get_dtype()}, must be one of {', '.join(FLOATS)}")
    if problems:
        shown = "\n  ".join(sorted(problems)[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"the tensors in {folder} do not fit its config.json:\n  {shown}{more}")
