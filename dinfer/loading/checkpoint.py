"""Hugging Face checkpoints: finding them, loading them strictly, and writing them.

Only safetensors are read, and no code that comes with a checkpoint is ever run. A tensor that is missing, unknown,
of another shape or neither a plain float nor 8 bits with a scale is an error that names it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dinfer.core.protocols import ModelFamily
from dinfer.core.registry import MODELS, unknown
from dinfer.core.spec import ExpertLayout, ModelSpec, Placement
from dinfer.kernels.linear import FLOAT8, check_float8
from dinfer.loading.hub import download
from dinfer.loading.lora import CONFIG as ADAPTER
from dinfer.loading.lora import read_adapter
from dinfer.loading.quantized import FIELD, Scales, scale_block, scales_of, widened
from dinfer.loading.safetensors_io import FLOATS, CheckpointError, Stored, read, read_object, refuse, stored
from dinfer.loading.token_ids import CONFIG, token_ids

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # never code, never pickles


def boxed() -> list[str]:
    """Names of the models that come inside the package."""
    folder = resources.files("dinfer") / "demo" / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if (item / "config.json").is_file())


def locate(name: str, revision: str | None = None, needed: str = "config.json") -> Path:
    """The folder of a checkpoint: a model in the box, a local folder, or a download from the hub (cached).

    `needed`: the file that makes a folder what is looked for.
    """
    path = Path(name).expanduser()
    if revision is not None and (name in boxed() or path.is_dir()):
        raise CheckpointError(f"revision={revision!r} is for checkpoints on the hub, and {name!r} is not one")
    if name in boxed():
        path = Path(str(resources.files("dinfer") / "demo" / "checkpoints" / name))
    elif not path.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            known = unknown("checkpoint", name, boxed())
            raise CheckpointError(f"{known} A folder or a hub name such as 'GSAI-ML/LLaDA-8B-Instruct' is good too.")
        path = download(name, revision, WANTED)
    if not (path / needed).is_file():
        raise CheckpointError(f"{path} has no {needed}: a Hugging Face model folder is needed")
    return path


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the `mask_token_id` and all the `eos_token_id`s that any file of the folder names."""
    config = read_object(folder / CONFIG)
    return config | token_ids(folder, config).fields()


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


def load_network(
    folder: Path, family: ModelFamily, *, dtype: torch.dtype | None, device: torch.device,
    narrow: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """The network with the checkpoint's weights, in `dtype` (None: the checkpoint's) on `device`.

    Shards are read one tensor at a time straight to their place, so the peak is the model and one tensor. Experts may
    be stored each for itself or all of a layer together. An adapter of the family is merged in. Weights that the
    checkpoint holds in 8 bits (`loading.quantized`) stay so where the network has a place for their scales; of others,
    a warning says so. `narrow`: those in another dtype are widened too, as they are to be rounded to this one.
    """
    config = read_config(folder)
    block = scale_block(config)
    spec = read_spec(family, config | {FIELD: None})
    tensors = {name: found for name, found in stored(folder).items() if not name.startswith(family.unused)}
    tensors, scales = scales_of(without_copies(tensors, family.copies(spec)), block)
    placements = layout(family, spec, tensors)
    check(folder, tensors, placements, scales)
    adapter = read_adapter(locate(family.adapter, needed=ADAPTER), placements) if family.adapter else None
    if dtype is None:
        dtype = next(FLOATS[tensors[name].dtype] for name in placements if name not in scales.stored)
    kept = scales.kept(tensors, placements, narrow, adapter.pairs if adapter else ())
    if FLOAT8 in kept.values():
        check_float8(device, f"{folder}: what it holds in float8", "quantize=int8, which rounds anew")
    network = _empty(family, spec, dtype, device, kept)
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    scale_of = scales.read()
    wide = 0
    with torch.no_grad():
        for name, tensor in read(tensors):
            place = placements[name]
            if name in scale_of:
                scale = scale_of[name].to(device)
                if parameters[place.parameter].dtype == tensor.dtype:
                    part = scales_of_place(buffers[f"{place.parameter}_scale"], place)
                    part.copy_(scale.reshape(() if scale.numel() == 1 else part.shape))
                else:
                    tensor, wide = widened(tensor.to(device), scale, block), wide + 1
            merged = tensor if adapter is None else adapter.merged(name, tensor, device)
            place_of(parameters, place).copy_(merged)
    if wide and narrow is None:
        logging.getLogger(__name__).warning(
            "%s: %d of %d rounded weights are widened to %s: their scales are of blocks, an adapter changes them, or "
            "they share a matrix with others. quantize=fp8, int8 or int4 rounds them again.",
            folder, wide, len(scale_of), dtype,
        )  # fmt: skip
    return network


def without_copies(tensors: Mapping[str, Stored], copies: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors less those that repeat others (`ModelFamily.copies`). CheckpointError for one with other values."""
    both = {copy: name for copy, name in copies.items() if copy in tensors and name in tensors}
    problems = [
        f"{copy} differs from {name}"
        for copy, name in both.items()
        if not torch.equal(*(next(read(tensors, [one]))[1] for one in (copy, name)))
    ]
    refuse(problems, "the model has one tensor where the checkpoint has two, which must be equal")
    return {name: tensor for name, tensor in tensors.items() if name not in both}


def layout(family: ModelFamily, spec: ModelSpec, tensors: Mapping[str, Any]) -> dict[str, Placement]:
    """The names and shapes that a checkpoint must have, as its experts are stored."""
    layouts = [family.weights(spec, experts) for experts in get_args(ExpertLayout)]
    return max(layouts, key=lambda layout: len(tensors.keys() & layout.keys()))


def place_of(parameters: Mapping[str, Tensor], place: Placement) -> Tensor:
    """The part of a parameter that a checkpoint's tensor fills, in the tensor's shape."""
    return _part(parameters[place.parameter].detach(), place, place.shape)


def scales_of_place(scale: Tensor, place: Placement) -> Tensor:
    """The scales of the outputs that a checkpoint's tensor fills, in the shape of these outputs."""
    return _part(scale, place, place.shape[:-1])


def _part(whole: Tensor, place: Placement, shape: tuple[int, ...]) -> Tensor:
    """What a placement fills of a parameter or of its scales, in that shape."""
    experts = place.shape[:-2]
    rows = len(experts)  # the dimension of a matrix's rows
    return whole.view(*experts, -1, *shape[rows + 1 :]).narrow(rows, place.row, shape[rows])


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


def _empty(
    family: ModelFamily, spec: ModelSpec, dtype: torch.dtype, device: torch.device,
    narrow: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> Any:  # fmt: skip
    """The network, its weights not yet written. What chooses experts stays in float32 at least: ties are decided so.

    `narrow`: parameters in 8 bits, if the network has a place for their scales.
    """
    from dinfer.layers.linear import roundable  # only here: networks are heavy to import

    with torch.device("meta"):
        network = family.network(spec).to(dtype)
        for name, parameter in network.named_parameters():
            if name.endswith("choice_bias"):
                parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        for name, (module, own) in roundable(network).items():
            if name in narrow:
                shape = getattr(module, own).shape
                setattr(module, own, nn.Parameter(torch.empty(shape, dtype=narrow[name]), requires_grad=False))
                setattr(module, f"{own}_scale", torch.empty(shape[:-1]))
    return network.to_empty(device=device).requires_grad_(False).eval()


def save_network(
    network: Any, family: ModelFamily, folder: Path, config: dict[str, Any], experts: ExpertLayout = "separate"
) -> None:
    """Writes config.json and model.safetensors with the tensor names of the family. Overwrites both."""
    parameters = dict(network.named_parameters())
    tensors = {
        name: place_of(parameters, place).cpu().contiguous()
        for name, place in family.weights(family.spec(config), experts).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def check(
    folder: Path, tensors: Mapping[str, Stored], placements: Mapping[str, Placement], scales: Scales | None = None
) -> None:
    """CheckpointError that lists every tensor which is missing, not known, of another shape, or no float though it has
    no scale."""
    problems = [f"missing: {name}" for name in placements if name not in tensors]
    problems += [f"unexpected: {name}" for name in tensors if name not in placements]
    for name in placements.keys() & tensors.keys():
        found = tensors[name]
        if found.shape != placements[name].shape:
            problems.append(f"shape of {name}: {found.shape}, must be {placements[name].shape}")
        if found.dtype not in FLOATS and not (scales is not None and name in scales.stored):
            problems.append(f"dtype of {name}: {found.dtype}, must be one of {', '.join(FLOATS)}")
    if scales is not None:
        problems += scales.problems(tensors)
    refuse(problems, f"the tensors in {folder} do not fit its config.json")
