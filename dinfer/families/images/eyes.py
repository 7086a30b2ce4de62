"""What makes embeddings of pictures for one network: a checkpoint's vision tower and its image processor.

Shape suffixes: X soft tokens, D hidden.
"""

from __future__ import annotations

import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from dinfer.core.loading.files import CONFIG, GGUF, CheckpointError, read_object, refuse
from dinfer.core.loading.safetensors_io import mismatches, read, stored
from dinfer.core.ranks.split import Rank
from dinfer.families.abilities.embedded import Embeddings, Mutual
from dinfer.families.images.pictures import INSTALL, Picture

DeviceTurn = Callable[[], AbstractContextManager[Any]]
"""Waits for the turn of the device, and gives it back at the end."""
REMEMBERED = 1 << 26  # bytes of embeddings that are kept


@dataclass(kw_only=True)
class Eyes(ABC):
    """What makes embeddings of pictures for one network."""

    prefixes: ClassVar[tuple[str, ...]]  # how the names of its tensors begin
    needs: ClassVar[str]  # a model that transformers must have
    largest: ClassVar[tuple[int, int]] = (64, 64)  # width and height of an image that takes as much memory as any

    parts: Mapping[str, Any]  # modules by the beginning of their tensors' names
    processor: Any  # transformers' image processor
    token: int  # the id at each soft token
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # ids before an image and behind it
    mutual: Mutual = "causal"
    hidden: int
    dtype: torch.dtype  # of the embeddings
    most: int  # positions of a request that images may take
    known: OrderedDict[bytes, Embeddings] = field(default_factory=OrderedDict)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    @abstractmethod
    def modules(cls, config: Mapping[str, Any], network: Any) -> dict[str, Any]:
        """transformers' modules without weights, for a config.json. Raises CheckpointError for another tower."""

    @classmethod
    @abstractmethod
    def made(cls, folder: Path, config: Mapping[str, Any], network: Any, **given: Any) -> Self:
        """With the settings of a checkpoint. `given`: `parts`, `hidden`, `dtype`, `most`. Raises CheckpointError."""

    @abstractmethod
    def soft_tokens(self, picture: Picture, *, alone: bool = True) -> int:
        """How many positions a picture takes, from its size. `alone`: it is the only one of its request."""

    @abstractmethod
    def prepared(self, picture: Picture, *, alone: bool = True) -> tuple[torch.Tensor, ...]:
        """What the tower is given: float32 pixels, and where they belong."""

    @abstractmethod
    def seen(self, *prepared: torch.Tensor, between: DeviceTurn) -> torch.Tensor:
        """The soft tokens of a picture that is `prepared`. [X, D] on the host"""

    def chat(self, tokenizer: Any) -> dict[str, Any]:
        """What `apply_chat_template` is told of conversations with images, beside the checkpoint's own template."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that this process holds."""
        held = (one for part in self.parts.values() for one in part.state_dict().values() if not one.is_meta)
        return sum(one.nbytes for one in held)

    def table_bytes(self, rows: int, length: int) -> int:
        """Bytes of the embeddings that so many requests of so many positions may bring."""
        return rows * min(self.most, length) * self.hidden * self.dtype.itemsize

    def rehearse(self) -> None:
        """Sees an image of one colour, which takes as much memory as any other."""
        from PIL import Image

        self.see(Picture(Image.new("RGB", self.largest, "gray"), "an image"))

    @torch.inference_mode()
    def see(self, picture: Picture, between: DeviceTurn = nullcontext, *, alone: bool = True) -> Embeddings:
        """Its soft tokens, [X, D] on the host."""
        prepared = self.prepared(picture, alone=alone)
        sha = hashlib.sha256(repr([self.mutual, str(self.dtype), self.processor.to_dict()]).encode())
        for part in prepared:
            sha.update(repr([*part.shape]).encode() + part.contiguous().numpy().tobytes())
        digest = sha.digest()
        with self.turn:
            if (known := self.known.get(digest)) is None:
                known = self.known[digest] = Embeddings(self.seen(*prepared, between=between), digest)
            self.known.move_to_end(digest)
            while sum(one.rows_XD.nbytes for one in self.known.values()) > REMEMBERED and len(self.known) > 1:
                self.known.popitem(last=False)
        return known


def bytes_of(folder: Path, prefixes: tuple[str, ...], dtype: torch.dtype) -> int:
    """Bytes of a checkpoint's vision tower, beside a network of this dtype. Reads no weight."""
    found = {} if folder.suffix == GGUF else stored(folder)
    size = _dtype(dtype).itemsize
    return sum(math.prod(one.shape) * size for name, one in found.items() if name.startswith(prefixes))


def eyes_of(kind: type[Eyes], folder: Path, network: Any, most: int, rank: Rank) -> Eyes | str:
    """The eyes of a checkpoint for its network, or why it has none. Raises CheckpointError for another tower.

    `most`: positions of a request that images may take. The first rank alone reads the weights: it sees for the others.
    """
    if folder.suffix == GGUF:
        return f"{folder.name}, a GGUF file, holds no vision tower: load the published safetensors, or send text alone"
    found = {name: one for name, one in stored(folder).items() if name.startswith(kind.prefixes)}
    if not found:
        return f"the checkpoint {folder.name} holds no vision tower: get one that does, or send text alone"
    config = read_object(folder / CONFIG)
    try:
        import PIL  # noqa: F401
    except ImportError:
        return INSTALL
    try:
        parts = kind.modules(config, network)
    except ImportError as error:
        return f"images need a transformers that has {kind.needs} ({error}): upgrade it, or send text alone"
    names = ((f"{prefix}{name}", one) for prefix, module in parts.items() for name, one in module.state_dict().items())
    refuse(
        [*mismatches(found, {name: (*one.shape,) for name, one in names})],
        f"the vision tower in {folder} does not fit its config.json",
    )
    if not rank.rank:
        _fill(found, parts, network)
    given = {"parts": parts, "hidden": network.spec.hidden, "dtype": network.dtype, "most": most}
    try:
        return kind.made(folder, config, network, **given)
    except CheckpointError as error:  # of settings that pictures alone need
        return str(error)


def _fill(found: Mapping[str, Any], parts: Mapping[str, Any], network: Any) -> None:
    held: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in parts}
    for name, tensor in read(found):
        prefix = next(prefix for prefix in parts if name.startswith(prefix))
        held[prefix][name.removeprefix(prefix)] = tensor.to(network.device, _dtype(network.dtype))
    for prefix, module in parts.items():
        module.load_state_dict(held[prefix], assign=True)
        module.eval().requires_grad_(False)


def _dtype(network: torch.dtype) -> torch.dtype:
    """Of a tower, whose sums exceed float16."""
    return torch.float32 if network == torch.float16 else network
