"""Safetensors files of a folder: what is in them, and reading it tensor by tensor in little memory.

Nothing but safetensors is ever read: a pickle may run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NARROW = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
"""What weights may be rounded to, with scales beside them (`dinfer.loading.quantized`)."""
PARTS = 32  # pages of a file stay in memory while it is open: it is closed whenever so small a part has been read


class CheckpointError(ValueError):
    """The checkpoint is not what its family says it must be; the message lists every difference."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not read yet."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * (FLOATS | NARROW)[self.dtype].itemsize


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint's model.safetensors, or of the shards that its index names."""
    return {name: tensor for path in _shards(folder) for name, tensor in stored_in(path).items()}


def stored_in(path: Path) -> dict[str, Stored]:
    """Every tensor of one file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, a file is no mapping
            return {name: Stored(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def read(tensors: Mapping[str, Stored], names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors on the CPU, by default all of them, file by file; each is to be dropped before the next is taken."""
    names = list(tensors) if names is None else names
    most = sum(tensors[name].size for name in names) // PARTS
    while names:
        path, taken, size = tensors[names[0]].path, 0, 0
        with safe_open(path, framework="pt") as file:
            while taken < len(names) and tensors[names[taken]].path == path and (not taken or size < most):
                yield names[taken], file.get_tensor(names[taken])
                size += tensors[names[taken]].size
                taken += 1
        names = names[taken:]


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {found!r:.80}")
    return found


def refuse(problems: Sequence[str], what: str) -> None:
    """Raises CheckpointError if there are any problems: `what`, and the first twenty of them."""
    if problems:
        shown = "\n  ".join(sorted(problems)[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{what}:\n  {shown}{more}")


def _shards(folder: Path) -> Iterator[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        where = read_object(index).get("weight_map")
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
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "*.bin"
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json. Weights in pickles ({found}) "
            "are not read: a pickle may run code. Save the model as safetensors with the program that wrote it."
        )
