"""What core gets from this layer, see `dinfer.core.provided`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dinfer.formats.lora import read_adapter
from dinfer.formats.quantized import rounded_tensors
from dinfer.formats.saving import save_checkpoint

__all__ = ["gguf_blocks", "gguf_file", "read_adapter", "rounded_tensors", "save_checkpoint"]


def gguf_file(path: Path) -> Any:
    """A GGUF file as a checkpoint, see `dinfer.formats.gguf_file.gguf_file`."""
    from dinfer.formats import gguf_file as module  # slow to import

    return module.gguf_file(path)


def gguf_blocks(tensors: Mapping[str, Any], placements: Mapping[str, Any], changed: Any) -> dict[str, Any]:
    """The formats that keep a file's blocks, see `blocks_of`."""
    from dinfer.formats import gguf_file as module

    return module.blocks_of(tensors, placements, changed)
