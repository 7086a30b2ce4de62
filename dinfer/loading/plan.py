"""Works out how a checkpoint's tensors fill a network, from its small files and the headers of its weights alone.

It reads only safetensors and GGUF, and never runs a checkpoint's code. A tensor that is missing, unknown, of another
shape, or in an unknown dtype is a problem that names it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from dinfer.loading.files import CheckpointError, Folder, read_object, refuse
from dinfer.loading.hub import GGUF, locate
from dinfer.loading.lora import CONFIG as ADAPTER
from dinfer.loading.lora import Adapter, read_adapter
from dinfer.loading.packed import FIELD, PACKED, kept, packed, packing, spare_biases
from dinfer.loading.quantized import Scales, scale_block, scales_of
from dinfer.loading.safetensors_io import FLOATS, Stored, mismatches, read, stored
from dinfer.loading.token_ids import CONFIG, token_ids
from dinfer.parallel.split import WHOLE, Placement, Rank
from dinfer.recipe.registry import MODELS
from dinfer.step.model import ModelFamily
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


def layout(family: ModelFamily, spec: ModelSpec, tensors: Mapping[str, Any]) -> dict[str, Placement]:
    """The names and shapes that a checkpoint must have, for the way in which its experts are stored."""
    layouts = [family.weights(spec, experts) for experts in get_args(ExpertLayout)]
    return max(layouts, key=lambda layout: len(tensors.keys() & layout.keys()))


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
    adapter: Adapter | None = None  # merged in

    @classmethod
    def of(
        cls, folder: Path, family: ModelFamily, spec: ModelSpec, config: Mapping[str, Any], stored: Mapping[str, Stored]
    ) -> "LoadPlan":
        """The plan for tensors with these headers. Raises CheckpointError for headers that cannot be understood."""
        how = packing(config)
        names = {name: None for experts in get_args(ExpertLayout) for name in family.weights(spec, experts)}
        spare = spare_biases(stored, how, names)
        found = {
            name: one for name, one in packed(stored, how).items() if not name.startswith((*spare, *family.unused))
        }
        copies = {copy: name for copy, name in family.copies(spec).items() if copy in found and name in found}
        tensors, scales = scales_of(
            {name: one for name, one in found.items() if name not in copies}, scale_block(config)
        )
        return cls(folder, family, spec, stored, tensors, layout(family, spec, tensors), scales, copies, spare)

    @classmethod
    def read(cls, folder: Path, family: ModelFamily) -> "LoadPlan":
        """The plan for a checkpoint whose files are all there. Raises CheckpointError."""
        config = read_config(folder)
        spec = read_spec(family, config | {FIELD: None}, folder)
        return cls.of(folder, family, spec, config, headers(folder, family, spec))

    def problems(self) -> Iterator[str]:
        """Every tensor that is missing, unknown, of another shape, or no float and without a scale."""
        if words := next(
            (name for name in self.tensors if name.endswith(PACKED) and name not in self.placements), None
        ):
            yield f"config.json does not say in {FIELD} how {words} is packed: add quant_method, bits and group_size"
        yield from mismatches(
            self.tensors, {name: one.shape for name, one in self.placements.items()}, self.scales.stored
        )
        yield from self.scales.problems(self.tensors)

    def verified(self) -> "LoadPlan":
        """The plan with the family's adapter. Raises CheckpointError for problems, and values that must be others."""
        self.check_values()
        whose = "metadata" if self.folder.suffix == GGUF else "config.json"
        refuse([*self.problems()], f"the tensors in {self.folder} do not fit its {whose}")
        if not self.family.adapter:
            return self
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
    def table(self) -> str | None:
        """The name of the tensor that is the embedding."""
        return next((name for name, place in self.placements.items() if place.parameter == TABLE), None)

    def formats(
        self, dtype: torch.dtype, quantize: str | None = None, rank: Rank = WHOLE, *, blocks: bool = False
    ) -> dict[str, Any]:
        """The formats of parameters that keep the checkpoint's values bit for bit, on a rank of a network in `dtype`.

        `blocks`: a GGUF file's blocks stay, as on a CPU. The embedding stays in floats that are narrower than `dtype`,
        and its rows are widened when they are looked up: beside weights in few bits a wide table would be a large part
        of the model. A table that is also the head is widened, for speed.
        """
        from dinfer.layers.formats.int4 import Int4  # only here: networks are heavy to import
        from dinfer.layers.formats.plain import Plain
        from dinfer.layers.linear import taken

        takes, changed = taken(quantize), () if self.adapter is None else self.adapter.pairs
        same = self.scales.kept(self.tensors, self.placements, takes, changed)
        found: dict[str, Any] = {name: takes[kind] for name, kind in same.items()}
        for name, weight in kept(self.tensors, self.placements, changed, rank).items():
            if weight.dtype in takes:
                found[name] = Int4(weight.group, weight.scales) if weight.dtype == Int4.stored else takes[weight.dtype]
        found.pop(TABLE, None)  # none of these formats looks up rows
        if blocks:
            from dinfer.loading.gguf_file import blocks_of  # slow to import

            found |= blocks_of(self.tensors, self.placements, changed)
        own = None if self.spec.tied_head or self.table in changed else self.table
        narrow = None if own is None else FLOATS.get(self.tensors[own].dtype)
        if narrow is not None and narrow.itemsize < dtype.itemsize and (found or quantize):
            found.setdefault(TABLE, Plain(narrow))
        return found


def headers(folder: Path, family: ModelFamily, spec: ModelSpec) -> dict[str, Stored]:
    """All tensors of a folder, or of a GGUF file under the family's names. Raises CheckpointError."""
    if folder.suffix != GGUF:
        return stored(folder)
    from dinfer.loading.gguf_file import gguf_file  # slow to import

    return gguf_file(folder).stored(
        {name: None for experts in get_args(ExpertLayout) for name in family.weights(spec, experts)}
    )
