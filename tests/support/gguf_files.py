"""GGUF files for the tests: one that llama.cpp's converter wrote, and others made of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

GOLDENS = Path(__file__).parents[1] / "goldens"
LLADA = GOLDENS / "gguf" / "llada.gguf"  # goldens/models/llada in 16 bits, by convert_hf_to_gguf.py
Blocks = tuple[np.ndarray, GGMLQuantizationType]


def rewritten(
    target: Path, fields: Mapping[str, Any] = {}, tensors: Mapping[str, Blocks | None] = {}, source: Path = LLADA
) -> Path:
    """The file with other fields and tensors; None leaves one out."""
    reader = GGUFReader(source)
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")} | fields
    writer = GGUFWriter(target, found.pop("general.architecture"))
    for name, value in found.items():
        if value is not None:
            kind = GGUFValueType.get_type(value)
            kind = GGUFValueType.UINT32 if kind is GGUFValueType.INT32 and value >= 0 else kind
            writer.add_key_value(
                name, value, kind, GGUFValueType.get_type(value[0]) if kind is GGUFValueType.ARRAY else None
            )
    held: dict[str, Blocks | None] = {one.name: (np.array(one.data), one.tensor_type) for one in reader.tensors}
    for name, blocks in (held | dict(tensors)).items():
        if blocks is not None:
            writer.add_tensor(name, blocks[0], raw_dtype=blocks[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
