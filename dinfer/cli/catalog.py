"""Published checkpoints, read from `conf/catalog.yaml`: what `dinfer models` lists."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dinfer.cli import conf


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint on the Hugging Face hub."""

    checkpoint: str  # hub name; of an adapter, its own
    size: str  # parameters, those active for a token behind the dash
    family: str
    preset: str  # the choice of `model` with the published decoding, in conf/model
    mask_id: int | None  # None: what is still to be decoded holds uniform noise
    eos_ids: list[int]  # those of its files, and those that the preset adds
    block: int | None = None  # length of its attention blocks; None: bidirectional
    canvas: int | None = None  # length of the canvas; a causal encoder reads what stands before it
    prompt_block: bool = False  # the prompt is an attention block of its own, and the others are counted from its end
    shifted: bool = False  # logits predict the next token

    @property
    def attention(self) -> str:
        """The kind of attention, in words."""
        if self.canvas is not None:
            return f"causal encoder, bidirectional canvas of {self.canvas}"
        return attention(self.block, self.prompt_block)


def attention(block: int | None, prompt_block: bool) -> str:
    """The kind of attention, in words. `block`: length of attention blocks; `prompt_block`: the prompt is one."""
    if block is None:
        return "bidirectional"
    return f"block-causal, {block}{' behind the prompt' if prompt_block else ''}"


@cache
def catalog() -> tuple[Published, ...]:
    """All of them, in the order of the file."""
    groups: Any = OmegaConf.to_container(OmegaConf.load(conf.folder() / "catalog.yaml"))
    return tuple(Published(name, size, **group) for group in groups for name, size in group.pop("sizes").items())


def entry_of(name: str, family: str) -> Published | None:
    """The entry of the checkpoint with this hub name, or in a folder called like it."""
    parts = {re.split("__|--", part)[-1].casefold() for part in Path(name).parts}  # folders as the hub's cache has them
    entries = (entry for entry in catalog() if entry.family == family)
    return next((entry for entry in entries if entry.checkpoint.split("/")[1].casefold() in parts), None)
