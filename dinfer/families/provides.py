"""What core and other layers get from this one, see `dinfer.core.provided`."""

from typing import Any

from dinfer.families.hub import FETCHED, datasets_of, download, fetched, snapshot_of

__all__ = ["FETCHED", "asks_of", "datasets_of", "download", "encode_parts", "fetched", "snapshot_of"]


def encode_parts(*given: Any, **how: Any) -> list[int]:
    """Token ids of a conversation with parts, see `dinfer.families.images.prompts.encode_parts`."""
    from dinfer.families.images import prompts  # needs torch

    return prompts.encode_parts(*given, **how)


def asks_of(network: Any, prompt: Any, ids: list[int], where: str) -> tuple[Any, ...]:
    """What a prompt asks beside its tokens, see `dinfer.families.images.prompts.asks_of`."""
    from dinfer.families.images import prompts  # needs torch

    return prompts.asks_of(network, prompt, ids, where)
