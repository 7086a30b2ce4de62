"""What core and other layers get from this one, see `dinfer.core.provided`."""

from typing import Any

from dinfer.families.hub import FETCHED, datasets_of, download, fetched, snapshot_of

__all__ = ["FETCHED", "datasets_of", "download", "fetched", "snapshot_of"]
ADDRESSES = {
    "check_tower": "dinfer.families.models._seeing:check_tower",
    "encode_parts": "dinfer.families.images.prompts:encode_parts",
    "images": "dinfer.families.images.prompts",
}


def tower_bytes(family: Any, folder: Any, dtype: Any) -> int:
    """Bytes that a checkpoint's vision tower takes beside its network. Reads no weight."""
    from dinfer.families.models._seeing import SeeingFamily  # needs torch

    return family.tower_bytes(folder, dtype) if isinstance(family, SeeingFamily) else 0


def asks_of(prompt: Any) -> tuple[Any, ...]:
    """What a prompt asks beside its tokens: the embeddings of its images."""
    if type(prompt) is list:  # before an import that would delay the first text
        return ()
    from dinfer.families.images.prompts import PromptIds  # needs torch

    return (prompt.embedded,) if isinstance(prompt, PromptIds) and prompt.embedded is not None else ()
