"""What core gets from this layer, see `dinfer.core.provided`."""

from pathlib import Path
from typing import Any

from dinfer.formats.lora import read_adapter
from dinfer.formats.quantized import rounded_tensors
from dinfer.formats.saving import save_checkpoint

__all__ = ["fill", "format_of", "gguf_file", "kept_formats", "read_adapter", "rounded_tensors", "save_checkpoint"]


def adapters() -> Any:
    """Loads and unloads adapters for the requests that ask for them, see `dinfer.formats.adapters`."""
    from dinfer.formats import adapters

    return adapters


def gguf_file(path: Path) -> Any:
    """A GGUF file as a checkpoint, see `dinfer.formats.gguf_file.gguf_file`."""
    from dinfer.formats import gguf_file as module  # slow to import

    return module.gguf_file(path)


def format_of(name: str, device: Any = None) -> Any:
    """The format that `quantize=name` rounds to. Raises ValueError."""
    from dinfer.formats import holding  # needs torch

    return holding.format_of(name, device)


def kept_formats(*given: Any) -> dict[str, Any]:
    """The formats that keep a checkpoint's values bit for bit, see `dinfer.formats.holding.kept_formats`."""
    from dinfer.formats import holding

    return holding.kept_formats(*given)


def fill(*given: Any) -> None:
    """Fills a network that holds or rounds weights in few bits, see `dinfer.formats.filling.fill`."""
    from dinfer.formats import filling

    filling.fill(*given)
