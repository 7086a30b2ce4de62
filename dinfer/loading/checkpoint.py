"""Loads Hugging Face checkpoints strictly, and writes them.

It reads only safetensors and GGUF, and never runs a checkpoint's code. A tensor that is missing, unknown, of another
shape, or in an unknown dtype raises an error that names it.
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dinfer.loading.files import CheckpointError, Folder, read_object, refuse
from dinfer.loading.hub import GGUF, locate
from dinfer.loading.lora import CONFIG as ADAPTER
from dinfer.loading.lora import read_adapter
from dinfer.loading.packed import FIELD, PACKED, PackedWeight, kept, packed, packing, spare_biases
from dinfer.loading.quantized import Scales, scale_at, scale_block, scales_of
from dinfer.loading.rounding import Rounding
from dinfer.loading.safetensors_io import FLOATS, Stored, mismatches, read, read_slices, stored
from dinfer.loading.token_ids import CONFIG, token_ids
from dinfer.parallel.split import WHOLE, Placement, Rank, Split
from dinfer.recipe.registry import MODELS
from dinfer.step.contracts import ModelFamily
from dinfer.step.spec import ExpertLayout, ModelSpec

TABLE = "embedding.weight"  # the embedding of every network


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the `mask_token_id` and all `eos_token_id`s that any file of the folder names."""
    files = small_files(folder)
    config = read_object(files / CONFIG)
    return config | token_ids(files, config).fields()


def small_files(folder: Path) -> Folder:
    """The small files of a checkpoint: its folder, or the metadata of its GGUF file."""
    if folder.suffix != GGUF:
        return folder
    from dinfer.loading.gguf_file import gguf_file  # slow to import

    return gguf_file(folder)


def tensors_of(folder: Path, family: ModelFamily, spec: ModelSpec) -> dict[str, Stored]:
    """The tensors of a checkpoint, without those that the family does not use. Raises CheckpointError."""
    names = {name: None for experts in get_args(ExpertLayout) for name in family.weights(spec, experts)}
    if folder.suffix != GGUF:
        found, how = stored(folder), packing(read_object(folder / CONFIG))
        spare = spare_biases(found, how, names)
        wrong = [name for name, bias in read(found, spare) if bias.any()]
        refuse(wrong, f"{folder} has biases where the model has none, and they are not 0")
        drop = (*spare, *family.unused)
        return {name: one for name, one in packed(found, how).items() if not name.startswith(drop)}
    from dinfer.loading.gguf_file import gguf_file

    return gguf_file(folder).stored(names)


def family_of(config: dict[str, Any]) -> str:
    """The name of the family that a config.json belongs to. Raises CheckpointError."""
    for name in MODELS.names():
        if MODELS.get(name).matches(config):
            return name
    raise CheckpointError(
        f"config.json: model_type={config.get('model_type')!r}, architectures={config.get('architectures')!r} belong "
        f"to no family that dinfer knows. Known: {', '.join(MODELS.names())}."
    )


def read_spec(family: ModelFamily, config: dict[str, Any], folder: Path | None = None) -> ModelSpec:
    """The model that a config.json describes. `folder`: where it is from. Raises CheckpointError."""
    if not family.matches(config):
        own = family_of(config)
        raise CheckpointError(
            f"config.json: model_type={config.get('model_type')!r} is of the family {own!r}, not of "
            f"{type(family).__name__}: give model={own}"
        )
    try:
        return family.spec(config)
    except (KeyError, ValueError) as error:
        said = f"config.json lacks the field {error}" if isinstance(error, KeyError) else str(error)
        if folder is not None and folder.suffix == GGUF:
            from dinfer.loading.gguf_file import gguf_file

            said = gguf_file(folder).retold(said)
        raise CheckpointError(said) from error


def load_network(
    folder: Path, family: ModelFamily, *, dtype: torch.dtype | None, device: torch.device,
    quantize: str | None = None, rank: Rank = WHOLE,
) -> Any:  # fmt: skip
    """The network with the checkpoint's weights, in `dtype` (None: the checkpoint's) on `device`.

    Each tensor is read straight to its place, so memory peaks at the model and one tensor; with `quantize`, at the
    rounded model and one unrounded weight. Experts may be stored one by one or all of a layer together. An adapter of
    the family is merged in. Weights that the checkpoint holds in few bits (`loading.quantized`, `loading.packed`) keep
    them if a format can hold them; a warning names the number of others. `quantize`: the final format of all weights of
    linear layers and experts; None: the checkpoint's. A `rank` reads only its share, and has parameters of its shape.
    Raises CheckpointError, or ValueError for a format that the device cannot compute with.
    """
    import dinfer.startup.prepare as compilers
    from dinfer.kernels.cpu.linear import prepare  # only here: networks are heavy to import
    from dinfer.layers import linear

    if alone := rank.ranks == 1:  # ranks that share a model compile a kernel at its first launch
        compilers.prepare(device)
    takes = linear.taken(quantize)
    config = read_config(folder)
    block = scale_block(config)
    spec = read_spec(family, config | {FIELD: None}, folder)
    tensors = tensors_of(folder, family, spec)
    tensors, scales = scales_of(without_copies(tensors, family.copies(spec)), block)
    placements = layout(family, spec, tensors)
    check(folder, tensors, placements, scales)
    adapter = read_adapter(locate(family.adapter, needed=ADAPTER), placements) if family.adapter else None
    if dtype is None:
        dtype = next(dtype for name in placements if (dtype := tensors[name].floats) is not None)
    if dtype == torch.float32:
        prepare(device)
    changed = adapter.pairs if adapter else ()
    held = formats_of(tensors, placements, scales, takes, changed, rank)
    whole_on_cpu = alone and device.type == "cpu"
    if folder.suffix == GGUF and quantize is None and whole_on_cpu:
        from dinfer.loading.gguf_blocks import blocks_of  # slow to import

        held |= blocks_of(tensors, placements, changed)
    for format in {type(format): format for format in held.values()}.values():
        format.check(device, f"{folder}: what it holds in {format.stored}")
    wanted = None if quantize is None else linear.format_of(quantize)
    if wanted is not None:
        wanted.check(device, f"quantize={quantize}")
    table = narrow_table(spec, tensors, placements, dtype, changed) if held or wanted else {}
    network = empty_network(family, spec, dtype, device, table | held, rank, wanted)
    weights, scale_of, wide = linear.formatted(network, embeddings=True), scales.read(), set()
    mapped = table_of(placements) if whole_on_cpu and TABLE in table | held else None
    if mapped is not None:  # only rows that are looked up take memory
        module, own = weights[TABLE]
        module.hold(own, (tensors[mapped].mapped(mapped),), module.formats[own])
    every = [(name, *piece) for name in tensors if name != mapped for piece in placements[name].pieces(rank)]
    words = {name for name, one in tensors.items() if isinstance(one, PackedWeight)}
    whole = {name for name in tensors if placements[name].parameter in held.keys() & weights.keys()} - scale_of.keys()
    pieces = [piece for piece in every if piece[0] not in whole]
    rounding = None
    if wanted is not None:
        pieces.sort(
            key=lambda piece: placements[piece[0]].parameter
        )  # so that the parts of a weight follow one another
        rest = {name: one for name, one in weights.items() if name not in held and one[0].rounds}
        targets = [(placements[name].parameter, target) for name, _, target in pieces]
        rounding = Rounding(wanted, rest, (one for one in targets if one[0] in rest), dtype, device)
    parts = [(name, None if alone else source) for name, source, _ in pieces]
    with torch.no_grad():
        for name, source, target in (piece for piece in every if piece[0] in whole):
            module, own = weights[placements[name].parameter]
            tensors[name].fill(module.formats[own], module.weight_of(own), source, target)
        for (name, source, target), tensor in zip(pieces, read_slices(tensors, parts), strict=True):
            parameter = placements[name].parameter
            if name in scale_of:
                scale = scale_at(scale_of[name].to(device), tensors[name].shape, block, source)
                if parameter in held and parameter in weights:
                    module, own = weights[parameter]
                    held[parameter].take(module.weight_of(own), target, tensor, scale)
                    continue
                tensor = tensor.to(device).float() * scale
                wide.add(name)
            merged = tensor if adapter is None else adapter.merged(name, tensor, device, source)
            if rounding is not None and parameter in rounding.weights:
                rounding.of(parameter)[target].copy_(merged)
                rounding.filled(parameter)
            else:
                network.get_parameter(parameter).detach()[target].copy_(merged)
    if quantize is None and (wide := wide | words - whole):
        logging.getLogger(__name__).warning(
            "%s: %d of %d rounded weights are widened to %s. Either no format holds their scales (of blocks), zeros or "
            "order of inputs, or an adapter changes them, or they share a matrix with others. quantize=fp8, int8 or "
            "int4 rounds them again.",
            folder, len(wide), len(scale_of) + len(words), dtype,
        )  # fmt: skip
    linear.settle(network)
    if alone:
        compilers.imported(device)
    return network


def formats_of(
    tensors: Mapping[str, Stored], placements: Mapping[str, Placement], scales: Scales, takes: Mapping[str, Any],
    changed: Collection[str] = (), rank: Rank = WHOLE,
) -> dict[str, Any]:  # fmt: skip
    """The formats of `takes` that hold the checkpoint's values bit for bit, by the parameters that can have them.

    The embedding is not among them, since none of these formats looks up rows. `changed`: weights that an adapter
    changes.
    """
    from dinfer.layers.formats.int4 import Int4  # only here: networks are heavy to import

    found: dict[str, Any] = {
        name: takes[kind] for name, kind in scales.kept(tensors, placements, takes, changed).items()
    }
    for name, weight in kept(tensors, placements, changed, rank).items():
        if weight.dtype in takes:
            found[name] = Int4(weight.group, weight.scales) if weight.dtype == Int4.stored else takes[weight.dtype]
    found.pop(TABLE, None)
    return found


def table_of(placements: Mapping[str, Placement]) -> str | None:
    """The name of the tensor that is the embedding."""
    return next((name for name, place in placements.items() if place.parameter == TABLE), None)


def narrow_table(
    spec: ModelSpec, tensors: Mapping[str, Stored], placements: Mapping[str, Placement], dtype: torch.dtype,
    changed: Collection[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The format of an embedding that a checkpoint has in narrower floats than `dtype`, which it keeps.

    Its rows are widened when they are looked up. Beside weights in few bits a wide table would be a large part of the
    model. A table that is also the head is widened, for speed. `changed`: as in `formats_of`.
    """
    from dinfer.layers.formats.plain import Plain  # only here: networks are heavy to import

    own = table_of(placements)
    found = None if own is None or own in changed or spec.tied_head else FLOATS.get(tensors[own].dtype)
    return {} if found is None or found.itemsize >= dtype.itemsize else {TABLE: Plain(found)}


def without_copies(tensors: Mapping[str, Stored], copies: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors without copies of others (`ModelFamily.copies`). Raises CheckpointError if a copy differs."""
    both = {copy: name for copy, name in copies.items() if copy in tensors and name in tensors}
    problems = [
        f"{copy} differs from {name}"
        for copy, name in both.items()
        if not torch.equal(*(next(read(tensors, [one]))[1] for one in (copy, name)))
    ]
    refuse(problems, "the model has one tensor where the checkpoint has two, so they must be equal")
    return {name: tensor for name, tensor in tensors.items() if name not in both}


def layout(family: ModelFamily, spec: ModelSpec, tensors: Mapping[str, Any]) -> dict[str, Placement]:
    """The names and shapes that a checkpoint must have, for the way in which its experts are stored."""
    layouts = [family.weights(spec, experts) for experts in get_args(ExpertLayout)]
    return max(layouts, key=lambda layout: len(tensors.keys() & layout.keys()))


def place_of(parameters: Mapping[str, Tensor], place: Placement) -> Tensor:
    """The part of a parameter that a checkpoint's tensor fills, in the tensor's shape."""
    return parameters[place.parameter].detach()[place.at].view(place.shape)


def random_network(
    family: ModelFamily, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, quantize: str | None = None,
    rank: Rank = WHOLE,
) -> Any:  # fmt: skip
    """A network with random weights of a trained model's scale, to measure speed and memory.

    A `rank` gets its share of the network that torch's seed makes. `quantize`: the format of all weights of linear
    layers and experts, each rounded as soon as it is made. Raises ValueError.
    """
    from dinfer.layers import linear  # only here: networks are heavy to import

    wanted = None if quantize is None else linear.format_of(quantize)
    if wanted is not None:
        wanted.check(device, f"quantize={quantize}")
    network, divided = empty_network(family, spec, dtype, device, rank=rank, rest=wanted), divisions(family, spec, rank)
    shapes = dict(empty_network(family, spec, dtype, torch.device("meta")).named_parameters())
    rounded = {} if wanted is None else linear.formatted(network)
    for name, parameter in network.named_parameters():
        split, whole = divided.get(name), parameter
        if split is not None or name in rounded:
            whole = torch.empty_like(shapes[name], device=device)
        if name.endswith(("norm.weight", "scale")):
            whole.fill_(1.0)
        elif whole.dim() == 1:  # a bias
            whole.normal_(0.0, 0.1)
        else:
            whole.normal_(0.0, whole.shape[-1] ** -0.5)
        if split is not None:
            shares = [whole.narrow(split.dim, first, end - first) for first, end in split.ranges(rank)]
            whole = torch.cat(shares, split.dim)
        if name in rounded and wanted is not None:
            module, own = rounded[name]
            for held, made in zip(module.weight_of(own), wanted.make(whole), strict=True):
                held.detach().copy_(made)
        elif split is not None:
            parameter.copy_(whole)
    linear.settle(network)
    return network


def divisions(family: ModelFamily, spec: ModelSpec, rank: Rank) -> dict[str, Split]:
    """How the parameters that ranks share are divided. Raises ValueError if they cannot be."""
    found = {place.parameter: place.division(rank) for place in family.weights(spec).values()}
    return {name: split for name, split in found.items() if split is not None}


def resized(parameter: Tensor, split: Split, rank: Rank) -> list[int]:
    """The shape of a rank's share of a parameter."""
    size = sum(end - first for first, end in split.ranges(rank))
    return [size if dim == split.dim else old for dim, old in enumerate(parameter.shape)]


class Uninitialised(TorchFunctionMode):
    """Skips the initialisers of parameters, which import torch's compiler for meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return (*args, *(kwargs or {}).values())[0]
        return func(*args, **(kwargs or {}))


def empty_network(
    family: ModelFamily, spec: ModelSpec, dtype: torch.dtype, device: torch.device,
    formats: Mapping[str, Any] = MappingProxyType({}), rank: Rank = WHOLE, rest: Any = None,
) -> Any:  # fmt: skip
    """The network with unwritten weights, in the shapes of the rank's share.

    Biases that choose experts stay in float32 or wider, since they decide ties. `formats`: of parameters that a format
    may hold; `rest`: the format of the others. Raises ValueError for a shape that a format cannot hold.
    """
    from dinfer.layers.linear import formatted  # only here: networks are heavy to import

    with torch.device("meta"), Uninitialised():
        network = family.network(spec).to(dtype)
        for name, parameter in network.named_parameters():
            if name.endswith("choice_bias"):
                parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        for name, split in divisions(family, spec, rank).items():
            (path, _, own), whole = name.rpartition("."), network.get_parameter(name)
            share = nn.Parameter(torch.empty(resized(whole, split, rank), dtype=dtype))
            setattr(network.get_submodule(path), own, share)
        for name, (module, own) in formatted(network, embeddings=True).items():
            if (format := formats.get(name, rest if module.rounds else None)) is not None:
                try:
                    module.hold(own, format.empty(module.get_parameter(own).shape, dtype), format)
                except ValueError as error:
                    raise ValueError(f"{name.removesuffix(f'.{own}')}: {error}") from error
    _place(network, device)
    return network.eval()


def _place(network: nn.Module, device: torch.device) -> None:
    """Does the work of `to_empty`, which would make torch import sympy. That takes over a second."""
    for module in network.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(_empty(parameter, device), requires_grad=False))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, _empty(buffer, device))


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if like.is_contiguous():
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    return torch.empty_like(like, device=device)  # keeps the memory layout of 4-bit scales


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


def differences(
    tensors: Mapping[str, Stored], placements: Mapping[str, Placement], scales: Scales | None
) -> Iterator[str]:
    """Every tensor that is missing, unknown, of another shape, or no float and without a scale."""
    if words := next((name for name in tensors if name.endswith(PACKED) and name not in placements), None):
        yield f"config.json does not say in {FIELD} how {words} is packed: add quant_method, bits and group_size"
    shapes = {name: place.shape for name, place in placements.items()}
    yield from mismatches(tensors, shapes, () if scales is None else scales.stored)
    if scales is not None:
        yield from scales.problems(tensors)


def check(
    folder: Path, tensors: Mapping[str, Stored], placements: Mapping[str, Placement], scales: Scales | None = None
) -> None:
    """Raises a CheckpointError that lists the differences."""
    whose = "metadata" if folder.suffix == GGUF else "config.json"
    refuse([*differences(tensors, placements, scales)], f"the tensors in {folder} do not fit its {whose}")
