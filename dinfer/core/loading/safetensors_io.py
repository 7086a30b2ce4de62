"""The safetensors files of a folder: lists their tensors, and reads them one by one in little memory.

It reads no other files of weights, because a pickle may run code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dinfer.core.loading.files import QUANTIZATION, CheckpointError, damaged, read_object

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NARROW = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
"""Dtypes of rounded weights, which have scales (`dinfer.formats.quantized`)."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
INTEGERS = {"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
"""Dtypes of packed weights, and of their shapes and orders (`dinfer.formats.quantized`)."""
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not read yet."""

    path: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name

    @property
    def floats(self) -> torch.dtype | None:
        """The dtype of a network that holds its values as they are; None: they need scales."""
        return FLOATS.get(self.dtype)

    def bytes_of(self, part: Slices | None) -> int:
        """The bytes of a part of it; None: of all."""
        sizes = self.shape if part is None else (piece.stop - piece.start for piece in part)
        return math.prod(sizes) * (FLOATS | NARROW | INTEGERS)[self.dtype].itemsize

    packed: ClassVar[bool] = False  # whether several values stand in each integer of the file

    def mapped(self) -> Tensor:
        """What a format that holds it unchanged has, in a private mapping of the file.

        A page of it takes memory from its first use on.
        """
        with self.opened() as file:
            return self.values(file, None)

    def opened(self) -> AbstractContextManager[Any]:
        """Its file, for the `values` of all its tensors."""
        return safe_open(self.path, framework="pt")

    def values(self, file: Any, part: Slices | None) -> Tensor:
        """It or a part of it, from its open file."""
        return file.get_tensor(self.name) if part is None else file.get_slice(self.name)[part]


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a checkpoint's rounded weights, by the weight's name. A plain checkpoint has none."""

    stored: Mapping[str, Stored]

    def problems(self, weights: Mapping[str, Stored], placements: Collection[str]) -> Iterator[str]:
        """The scales with a wrong shape or dtype, and packed weights of which nobody says how."""
        yield from ()


def plain(
    config: Mapping[str, Any], tensors: Mapping[str, Stored], expected: Collection[str]
) -> tuple[dict[str, Stored], list[str], Scales]:
    """The tensors of a checkpoint, its biases that must be 0, and its scales, where nothing is rounded.

    `expected`: the names that the network wants. Raises CheckpointError for a checkpoint that says it is rounded.
    """
    if config.get(QUANTIZATION) is not None:
        raise CheckpointError(f"config.json: {QUANTIZATION} needs dinfer.formats, which this installation leaves out")
    return dict(tensors), [], Scales({})


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint's model.safetensors, or of the shards that its index names.

    If several shards have a tensor, the index decides. Raises CheckpointError.
    """
    where = weight_map(folder) if (folder / INDEX).is_file() else {}
    found: dict[str, Stored] = {}
    for path in _shards(folder):
        own = stored_in(path)
        found |= {name: one for name, one in own.items() if name not in found or where.get(name) == path.name}
    return found


def stored_in(path: Path) -> dict[str, Stored]:
    """Every tensor of one file. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, a file is no mapping
            return {name: Stored(path, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise damaged(path, "safetensors", error) from error


def mismatches(
    tensors: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], scaled: Collection[str] = ()
) -> Iterator[str]:
    """Tensors that are missing or unexpected, that have another shape, or that are neither floats nor `scaled`."""
    for part, whole, what in ((shapes, tensors, "begin"), (tensors, shapes, "do not begin")):
        some = next(iter(part), ".")
        for lead in [name.removesuffix(some) for name in whole if name.endswith(f".{some}")]:
            if all(lead + name in whole for name in part):
                yield f"names {what} with {lead!r}: save the model itself, neither a wrapper of it nor a part of it"
                return
    yield from (f"missing: {name}" for name in shapes if name not in tensors)
    yield from (f"unexpected: {name}" for name in tensors if name not in shapes)
    for name in shapes.keys() & tensors.keys():
        found = tensors[name]
        if found.shape != shapes[name]:
            yield f"shape of {name}: {found.shape}, must be {shapes[name]}"
        if found.floats is None and name not in scaled:
            yield f"dtype of {name}: {found.dtype}, must be one of {', '.join(FLOATS)}"


def read(tensors: Mapping[str, Stored], names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors on the CPU, by default all, file by file. Drop each before taking the next."""
    names = list(tensors) if names is None else names
    yield from zip(names, read_slices([(tensors[name], None) for name in names]), strict=True)


def read_slices(parts: Sequence[tuple[Stored, Slices | None]]) -> Iterator[Tensor]:
    """Parts of tensors on the CPU, in order; None: the whole tensor. Drop each before taking the next."""
    # Files are closed after each such part of all bytes, since an open file keeps its pages in memory.
    most = sum(one.bytes_of(part) for one, part in parts) // 32
    path, size = None, 0
    with ExitStack() as files:
        for one, part in parts:
            if one.path != path or size >= most:
                files.close()
                file, path, size = files.enter_context(one.opened()), one.path, 0
            yield one.values(file, part)
            size += one.bytes_of(None)  # pages between slices are in memory too


def weight_map(folder: Path) -> dict[str, str]:
    """The name of each tensor's file, from the index in `folder`. Raises CheckpointError."""
    found: Any = read_object(folder / INDEX).get("weight_map")
    files = [*found.values()] if isinstance(found, dict) else []
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise CheckpointError(f"{folder / INDEX}: weight_map={found!r:.80} must name a file beside it for each tensor")
    return found


def _shards(folder: Path) -> Iterator[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(weight_map(folder).values()))
        refuse_absent(folder, [name for name in names if not (folder / name).is_file()])
        yield from (folder / name for name in names)
    elif (folder / SINGLE).is_file():
        yield folder / SINGLE
    else:
        absent = f"{folder} has neither {SINGLE} nor {INDEX}"
        if others := sorted(path.name for path in folder.glob("*.safetensors")):
            raise CheckpointError(f"{absent}: put the index beside {', '.join(others)}, or name a single file {SINGLE}")
        if pickles := sorted(path.name for path in folder.glob("*.bin")):
            raise CheckpointError(
                f"{absent}. Weights in pickles ({', '.join(pickles)}) are not read: a pickle may run code. Save the "
                "model as safetensors with the program that wrote it."
            )
        raise CheckpointError(f"{absent}: its weights are not there. Get them from the source of the other files")


def refuse_absent(folder: Path, names: Sequence[str]) -> None:
    """Raises CheckpointError if the index names files that `folder` lacks."""
    if names:
        raise CheckpointError(f"{folder / INDEX} names files that are not there: {', '.join(names)}")
