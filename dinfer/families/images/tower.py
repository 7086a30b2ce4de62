"""The vision tower of a checkpoint and its image processor, as transformers has them: pictures become embeddings.

Facts: transformers 5.23, `gemma4` and `diffusion_gemma`. Shape suffixes: P patches, X soft tokens, D hidden.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dinfer.core.loading.files import CONFIG, GGUF, CheckpointError, read_object, refuse, small_object
from dinfer.core.loading.safetensors_io import mismatches, read, stored
from dinfer.families.abilities.embedded import Embeddings, Mutual
from dinfer.families.images.pictures import INSTALL, Picture

TOWER, PROJECTION = "model.encoder.vision_tower.", "model.encoder.embed_vision."
REMEMBERED = 1 << 26  # bytes of embeddings that are kept


@dataclass(slots=True)
class Eyes:
    """What makes embeddings of pictures for one network."""

    processor: Any  # transformers' Gemma4ImageProcessorPil
    tower: Any
    projection: Any
    tokens: tuple[int, int, int]  # ids: at each soft token, before an image, behind it
    mutual: Mutual
    dtype: torch.dtype  # of the embeddings
    most: int  # positions of a request that images may take
    known: OrderedDict[bytes, Embeddings] = field(default_factory=OrderedDict)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(one.nbytes for part in (self.tower, self.projection) for one in part.state_dict().values())

    def table_bytes(self, rows: int, length: int) -> int:
        """Bytes of the embeddings that so many requests of so many positions may bring."""
        return rows * min(self.most, length) * self.projection.embedding_projection.out_features * self.dtype.itemsize

    def rehearse(self) -> None:
        """Sees an image of one colour, which takes as much memory as any other."""
        from PIL import Image

        self.see(Picture(Image.new("RGB", (64, 64), "gray"), "an image"))

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The width and the height that an image is resized to."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size as fitted

        made = self.processor
        most = made.max_soft_tokens * made.pooling_kernel_size**2
        high, wide = fitted(height, width, made.patch_size, most, made.pooling_kernel_size)
        return wide, high

    def soft_tokens(self, picture: Picture) -> int:
        """How many positions a picture takes, from its size alone. Turned by EXIF it takes as many."""
        width, height = self.size(*picture.image.size)
        return width * height // (self.processor.pooling_kernel_size * self.processor.patch_size) ** 2

    def prepared(self, picture: Picture) -> tuple[Any, Any]:
        """The patches, float32 [1, P, 3 * patch²] from 0 to 1, and their (x, y), int64 [1, P, 2], -1 at padding."""
        image, resize = picture.decoded(), self.processor.do_resize
        if image.mode == "RGB" and resize:  # the same pixels, without arrays of the whole image
            image, resize = image.resize(self.size(*image.size), self.processor.resample), False
        made = self.processor(images=image, do_resize=resize, return_tensors="pt")
        return made["pixel_values"], made["image_position_ids"]

    @torch.inference_mode()
    def see(self, picture: Picture, between: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Embeddings:
        """Its soft tokens, [X, D] on the host. Waits for the turn of the device, which `between` gives."""
        pixels_1PX, place_1P2 = self.prepared(picture)
        real_P = (place_1P2[0] >= 0).all(-1)
        sha = hashlib.sha256(repr([self.mutual, str(self.dtype), self.processor.to_dict()]).encode())
        for part in (pixels_1PX, place_1P2):
            sha.update(part[0, real_P].contiguous().numpy().tobytes())
        digest = sha.digest()
        with self.turn:
            if (known := self.known.get(digest)) is None:
                with between():
                    weight = self.projection.embedding_projection.weight
                    pixels_1PX = pixels_1PX.to(weight.device, weight.dtype)
                    seen_XD = self.tower(pixels_1PX, place_1P2.to(weight.device)).last_hidden_state
                    rows_XD = self.projection(inputs_embeds=seen_XD).to(self.dtype).cpu()
                known = self.known[digest] = Embeddings(rows_XD, digest)
            self.known.move_to_end(digest)
            while sum(one.rows_XD.nbytes for one in self.known.values()) > REMEMBERED and len(self.known) > 1:
                self.known.popitem(last=False)
        return known


def bytes_of(folder: Path, prefixes: tuple[str, ...], dtype: torch.dtype) -> int:
    """Bytes of a checkpoint's vision tower, beside a network of this dtype. Reads no weight."""
    found = {} if folder.suffix == GGUF else stored(folder)
    size = torch.float32.itemsize if dtype == torch.float16 else dtype.itemsize
    return sum(math.prod(one.shape) * size for name, one in found.items() if name.startswith(prefixes))


def eyes_of(folder: Path, network: Any, most: int) -> Eyes | str:
    """The eyes of a checkpoint for its network, or why it has none. Raises CheckpointError for another tower.

    `most`: positions of a request that images may take.
    """
    if folder.suffix == GGUF:
        return f"{folder.name}, a GGUF file, holds no vision tower: load the published safetensors, or send text alone"
    found = {name: one for name, one in stored(folder).items() if name.startswith((TOWER, PROJECTION))}
    if not found:
        return f"the checkpoint {folder.name} holds no vision tower: get one that does, or send text alone"
    config = read_object(folder / CONFIG)
    if not isinstance(vision := config.get("vision_config"), Mapping) or vision.get("model_type") != "gemma4_vision":
        raise CheckpointError(
            f"config.json: vision_config={vision!r:.80} must be of model_type 'gemma4_vision', as the checkpoint has "
            "the tensors of a vision tower"
        )
    try:
        import PIL  # noqa: F401
    except ImportError:
        return INSTALL
    try:
        tower, projection = _modules(vision, network.spec.hidden, network.device)
    except ImportError as error:
        return f"images need a transformers that has DiffusionGemma ({error}): upgrade it, or send text alone"
    own = {TOWER: tower, PROJECTION: projection}
    shapes = {
        f"{prefix}{name}": (*one.shape,) for prefix, module in own.items() for name, one in module.state_dict().items()
    }
    refuse(
        [*mismatches(found, shapes)], f"the vision tower in {folder} does not fit the vision_config of its config.json"
    )
    dtype = torch.float32 if network.dtype == torch.float16 else network.dtype  # its sums exceed float16
    held: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in own}
    for name, tensor in read(found):
        prefix = next(prefix for prefix in own if name.startswith(prefix))
        held[prefix][name.removeprefix(prefix)] = tensor.to(network.device, dtype)
    for prefix, module in own.items():
        module.load_state_dict(held[prefix], assign=True)
        module.eval().requires_grad_(False)
    text = config.get("text_config") or {}
    tokens: list[Any] = [config.get(f"{name}_token_id") for name in ("image", "boi", "eoi")]
    if not all(type(token) is int and 0 <= token < network.spec.vocab for token in tokens):
        return f"config.json: image_token_id, boi_token_id, eoi_token_id={tokens} must be ids of the vocabulary"
    mutual: Mutual = "local" if text.get("use_bidirectional_attention") == "vision" else "causal"
    try:
        processor = _processor(folder, config, vision)
    except CheckpointError as error:  # of settings that pictures alone need
        return str(error)
    return Eyes(processor, tower, projection, (tokens[0], tokens[1], tokens[2]), mutual, network.dtype, most)


def _modules(vision: Mapping[str, Any], hidden: int, device: torch.device) -> tuple[Any, Any]:
    """transformers' modules without weights. On a CPU they give its own bits; on a GPU scores fill no memory."""
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaMultimodalEmbedder
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel

    config = Gemma4VisionConfig(**vision)
    config._attn_implementation = "eager" if device.type == "cpu" else "sdpa"
    with torch.device("meta"):
        text: Any = SimpleNamespace(hidden_size=hidden)
        tower, projection = Gemma4VisionModel(config), DiffusionGemmaMultimodalEmbedder(config, text)
    tower.encoder.rotary_emb = type(tower.encoder.rotary_emb)(config)  # it has numbers, which no file holds
    return tower, projection


def _processor(folder: Path, config: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
    """The image processor with the checkpoint's settings."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    found = small_object(folder, "preprocessor_config.json")
    found = found or small_object(folder, "processor_config.json").get("image_processor") or {}
    usual = {"max_soft_tokens": config.get("vision_soft_tokens_per_image", 280)}
    sizes = {name: vision[name] for name in ("patch_size", "pooling_kernel_size") if name in vision}
    if wrong := [name for name, size in sizes.items() if found.get(name, size) != size]:
        raise CheckpointError(
            f"{wrong[0]}={found[wrong[0]]} of the image processor and {sizes[wrong[0]]} of vision_config must be equal"
        )
    own = {name: value for name, value in found.items() if name not in ("image_processor_type", "processor_class")}
    try:
        made = Gemma4ImageProcessorPil(**usual | sizes | own)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the image processor's settings: {error}") from error
    if (side := made.max_soft_tokens * made.pooling_kernel_size) > (
        rows := vision.get("position_embedding_size", 10240)
    ):
        raise CheckpointError(
            f"vision_config: position_embedding_size={rows} must be at least {side}, as images are cut"
        )
    return made
