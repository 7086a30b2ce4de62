"""Networks: how a checkpoint's tensors fill one, one that is filled, random or empty, and writing one as a checkpoint.

It reads only safetensors and GGUF, and never runs a checkpoint's code. `LoadPlan` needs the small files and the headers
of the weights alone. A tensor that is missing, unknown, of another shape, or in an unknown dtype is a problem that
names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dinfer.core.loading.files import (
    ADAPTER,
    CONFIG,
    GGUF,
    QUANTIZATION,
    CheckpointError,
    Fields,
    SmallFiles,
    locate,
    refuse,
    small_object,
    token_ids,
)  # fmt: skip
from dinfer.core.loading.safetensors_io import (
    Scales,
    Slices,
    Stored,
    mismatches,
    plain,
    read,
    read_slices,
    stored,
)
from dinfer.core.models.family import ModelFamily, Placement, Split
from dinfer.core.provided import needed, provided
from dinfer.core.ranks.split import WHOLE, Rank
from dinfer.core.registry import MODELS
from dinfer.core.terms.spec import ExpertLayout, ModelSpec


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the `mask_token_id` and all `eos_token_id`s that any file of the folder names."""
    files = small_files(folder)
    config = small_object(files, CONFIG)
    return config | token_ids(files, config).fields()


def small_files(folder: Path) -> SmallFiles:
    """The small files of a checkpoint. `folder`: also a GGUF file."""
    return folder if folder.suffix != GGUF else _gguf(folder).files


def _gguf(file: Path) -> Any:
    return needed("gguf_file", f"{file.name}, a GGUF file,", "formats")(file)


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
        spec = family.spec(fields := Fields(config))
        if unread := fields.unread(family.harmless):
            raise ValueError(
                f"config.json: {', '.join(f'{name}={value!r:.40}' for name, value in unread.items())}: the family "
                f"{family_of(config)!r} does not know this and would compute another network. Take the field out if it "
                "changes nothing"
            )
        return spec
    except (KeyError, ValueError) as error:
        said = f"config.json lacks the field {error}" if isinstance(error, KeyError) else str(error)
        if folder is not None and folder.suffix == GGUF:
            said = _gguf(folder).retold(said)
        raise CheckpointError(said) from error


def layout(family: ModelFamily, spec: ModelSpec, tensors: Mapping[str, Any]) -> dict[str, Placement]:
    """The names and shapes that a checkpoint must have, for the way in which its experts are stored."""
    layouts = [family.weights(spec, experts) for experts in get_args(ExpertLayout)]
    return max(layouts, key=lambda layout: len(tensors.keys() & layout.keys()))


class Adapter(Protocol):
    """Updates of some of a checkpoint's tensors."""

    @property
    def pairs(self) -> Mapping[str, Any]:
        """By the name of the tensor that they change."""

    def merged(self, name: str, weight: Tensor, device: torch.device, part: Slices) -> Tensor:
        """`part` of a tensor with its update, on `device`; as it is, if there is none."""


def spec_of(family: ModelFamily, folder: Path) -> ModelSpec:
    """The model that a checkpoint holds, without a look at its weights. Raises CheckpointError."""
    return read_spec(family, read_config(folder) | {QUANTIZATION: None}, folder)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What loading a checkpoint does. No value of a tensor has been read for it."""

    folder: Path  # or a GGUF file
    family: ModelFamily
    spec: ModelSpec
    stored: Mapping[str, Stored]  # all tensors of the files
    tensors: Mapping[str, Stored]  # those to be read: without scales, copies, spare biases and what the family leaves
    placements: Mapping[str, Placement]  # where each tensor that the network wants goes
    scales: Scales  # of rounded weights
    copies: Mapping[str, str]  # tensors that must equal others
    spare: Sequence[str]  # biases that the model does not have, which must be 0
    adapter: Adapter | None = None  # merged in; a layer reads it

    @classmethod
    def of(
        cls, folder: Path, family: ModelFamily, spec: ModelSpec, config: Mapping[str, Any], stored: Mapping[str, Stored]
    ) -> LoadPlan:
        """The plan for tensors with these headers. Raises CheckpointError for headers that cannot be understood."""
        names = {name: None for experts in get_args(ExpertLayout) for name in family.weights(spec, experts)}
        found, spare, scales = (provided("rounded_tensors") or plain)(config, stored, names)
        left_out = tuple(family.unused)
        found = {name: one for name, one in found.items() if not name.startswith(left_out)}
        copies = {copy: name for copy, name in family.copies(spec).items() if copy in found and name in found}
        tensors = {name: one for name, one in found.items() if name not in copies}
        return cls(folder, family, spec, stored, tensors, layout(family, spec, tensors), scales, copies, spare)

    @classmethod
    def read(cls, folder: Path, family: ModelFamily) -> LoadPlan:
        """The plan for a checkpoint whose files are all there. Raises CheckpointError."""
        config = read_config(folder)
        spec = read_spec(family, config | {QUANTIZATION: None}, folder)
        return cls.of(folder, family, spec, config, headers(folder, family, spec))

    def problems(self) -> Iterator[str]:
        """Every tensor that is missing, unknown, of another shape, or no float and without a scale."""
        shapes = {name: one.shape for name, one in self.placements.items()}
        wrong = [*self.scales.problems(self.tensors, self.placements)]
        yield from mismatches(self.tensors, shapes, self.scales.stored)
        yield from wrong

    def verified(self) -> LoadPlan:
        """The plan with the family's adapter. Raises CheckpointError for problems, and values that must be others."""
        self.check_values()
        whose = "metadata" if self.folder.suffix == GGUF else "config.json"
        refuse([*self.problems()], f"the tensors in {self.folder} do not fit its {whose}")
        if not self.family.adapter:
            return self
        read_adapter = needed("read_adapter", f"model.adapter={self.family.adapter}", "formats")
        return replace(self, adapter=read_adapter(locate(self.family.adapter, needed=ADAPTER), self.placements))

    def check_values(self) -> None:
        """Reads the tensors that must be 0 or equal to others. Raises CheckpointError."""
        wrong = [name for name, bias in read(self.stored, self.spare) if bias.any()]
        refuse(wrong, f"{self.folder} has biases where the model has none, and they are not 0")
        differ = [
            f"{copy} differs from {name}"
            for copy, name in self.copies.items()
            if not torch.equal(*(next(read(self.stored, [one]))[1] for one in (copy, name)))
        ]
        refuse(differ, "the model has one tensor where the checkpoint has two, so they must be equal")

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's own."""
        return next(dtype for name in self.placements if (dtype := self.tensors[name].floats) is not None)

    @property
    def plain(self) -> bool:
        """Whether its tensors are the network's, in floats."""
        return not (self.adapter or self.scales.stored or any(one.packed for one in self.tensors.values()))

    def formats(
        self, dtype: torch.dtype, quantize: str | None = None, rank: Rank = WHOLE, *, blocks: bool = False
    ) -> Mapping[str, Any]:
        """The formats of parameters that keep the checkpoint's values bit for bit, see `formats.holding.kept_formats`.
        Raises ValueError for a `quantize` that is none."""
        if quantize is None and provided("kept_formats") is None:
            return {}
        return needed("kept_formats", f"quantize={quantize}", "formats")(self, dtype, quantize, rank, blocks)


def headers(folder: Path, family: ModelFamily, spec: ModelSpec) -> dict[str, Stored]:
    """All tensors of a folder, or of a GGUF file under the family's names. Raises CheckpointError."""
    if folder.suffix != GGUF:
        return stored(folder)
    return _gguf(folder).stored(
        {name: None for experts in get_args(ExpertLayout) for name in family.weights(spec, experts)}
    )


def load_network(
    folder: Path, family: ModelFamily, *, dtype: torch.dtype | None, device: torch.device,
    quantize: str | None = None, rank: Rank = WHOLE,
) -> Any:  # fmt: skip
    """The network with the checkpoint's weights, in `dtype` (None: the checkpoint's) on `device`.

    Each tensor is read straight to its place, so memory peaks at the model and one tensor; with `quantize`, at the
    rounded model and one unrounded weight. Experts may be stored one by one or all of a layer together. An adapter of
    the family is merged in. Weights that the checkpoint holds in few bits (`loading.quantized`) keep
    them if a format can hold them; a warning names the number of others. `quantize`: the final format of all weights of
    linear layers and experts; None: the checkpoint's. A `rank` reads only its share, and has parameters of its shape.
    Raises CheckpointError, or ValueError for a format that the device cannot compute with.
    """
    from dinfer.core.kernels.dispatch import prepare_native  # only here: networks are heavy to import

    alone = rank.ranks == 1  # ranks that share a model compile a kernel at its first launch
    compilers = provided("prepare_compilers") if alone else None
    imported = compilers(device) if compilers else lambda: None
    wanted = None if quantize is None else needed("format_of", f"quantize={quantize}", "formats")(quantize, device)
    plan = LoadPlan.read(folder, family).verified()
    dtype = dtype or plan.dtype
    if dtype == torch.float32:
        prepare_native(device)
    blocks = alone and device.type == "cpu" and folder.suffix == GGUF and quantize is None
    formats = plan.formats(dtype, quantize, rank, blocks=blocks)
    for format in {type(format): format for format in formats.values()}.values():
        format.check(device, f"{folder}: what it holds in {format.stored}")
    network = empty_network(family, plan.spec, dtype, device, formats, rank, wanted)
    with torch.no_grad():
        if plan.plain and not formats and wanted is None:
            fill(plan, network, rank)
        else:
            needed("fill", f"{folder}, which holds rounded weights,", "formats")(
                plan, network, formats, rank, dtype, wanted
            )
    imported()
    return family.finished(network, folder, rank)


def fill(plan: LoadPlan, network: Any, rank: Rank) -> None:
    """Fills an empty network with the tensors of a plan that is `plain`."""
    pieces = [(name, *piece) for name in plan.tensors for piece in plan.placements[name].pieces(rank)]
    parts = [(plan.tensors[name], None if rank.ranks == 1 else source) for name, source, _ in pieces]
    for (name, _, target), tensor in zip(pieces, read_slices(parts), strict=True):
        network.get_parameter(plan.placements[name].parameter).detach()[target].copy_(tensor)


def place_of(parameters: Mapping[str, Tensor], place: Placement) -> Tensor:
    """The part of a parameter that a checkpoint's tensor fills, in the tensor's shape."""
    return parameters[place.parameter].detach()[place.at].view(place.shape)


def divisions(family: ModelFamily, spec: ModelSpec, rank: Rank) -> dict[str, Split]:
    """How the parameters that ranks share are divided. Raises ValueError if they cannot be."""
    found = {place.parameter: place.division(rank) for place in family.weights(spec).values()}
    return {name: split for name, split in found.items() if split is not None}


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
    from dinfer.core.layers.linear import formatted  # only here: networks are heavy to import

    with torch.device("meta"), Uninitialised():
        network = family.network(spec).to(dtype)
        for name, parameter in network.named_parameters():
            if name.endswith("choice_bias"):
                parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        for name, split in divisions(family, spec, rank).items():
            (path, _, own), whole = name.rpartition("."), network.get_parameter(name)
            shape = [*whole.shape]
            shape[split.dim] = sum(end - first for first, end in split.ranges(rank))
            setattr(network.get_submodule(path), own, nn.Parameter(torch.empty(shape, dtype=dtype)))
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

    def empty(like: Tensor) -> Tensor:
        if like.is_contiguous():
            return torch.empty(like.shape, dtype=like.dtype, device=device)
        return torch.empty_like(like, device=device)  # keeps the memory layout of 4-bit scales

    for module in network.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(empty(parameter), requires_grad=False))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, empty(buffer))
