"""DiffusionGemma's vision tower and image processor, as transformers has them.

Facts: transformers 5.23, `gemma4` and `diffusion_gemma`. Shape suffixes: P patches, X soft tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch

from dinfer.core.loading.files import CheckpointError, small_object
from dinfer.families.images.eyes import DeviceTurn, Eyes
from dinfer.families.images.pictures import Picture

TOWER, PROJECTION = "model.encoder.vision_tower.", "model.encoder.embed_vision."


class GemmaEyes(Eyes):
    """Patches of 16 pixels, of which 3 x 3 make a soft token; transformers' Gemma4ImageProcessorPil."""

    prefixes: ClassVar[tuple[str, ...]] = (TOWER, PROJECTION)
    needs: ClassVar[str] = "DiffusionGemma"

    @classmethod
    def modules(cls, config: Mapping[str, Any], network: Any) -> dict[str, Any]:
        """On a CPU they give transformers' own bits; on a GPU scores fill no memory."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping) or vision.get("model_type") != "gemma4_vision":
            raise CheckpointError(
                f"config.json: vision_config={vision!r:.80} must be of model_type 'gemma4_vision', as the checkpoint "
                "has the tensors of a vision tower"
            )
        from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaMultimodalEmbedder
        from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
        from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel

        made = Gemma4VisionConfig(**vision)
        made._attn_implementation = "eager" if network.device.type == "cpu" else "sdpa"
        with torch.device("meta"):
            text: Any = SimpleNamespace(hidden_size=network.spec.hidden)
            tower, projection = Gemma4VisionModel(made), DiffusionGemmaMultimodalEmbedder(made, text)
        tower.encoder.rotary_emb = type(tower.encoder.rotary_emb)(made)  # it has numbers, which no file holds
        return {TOWER: tower, PROJECTION: projection}

    @classmethod
    def made(cls, folder: Path, config: Mapping[str, Any], network: Any, **given: Any) -> Self:
        tokens: list[Any] = [config.get(f"{name}_token_id") for name in ("image", "boi", "eoi")]
        if not all(type(token) is int and 0 <= token < network.spec.vocab for token in tokens):
            raise CheckpointError(
                f"config.json: image_token_id, boi_token_id, eoi_token_id={tokens} must be ids of the vocabulary"
            )
        rule = (config.get("text_config") or {}).get("use_bidirectional_attention")
        return cls(
            processor=_processor(folder, config),
            token=tokens[0],
            around=((tokens[1],), (tokens[2],)),
            mutual="local" if rule == "vision" else "causal",
            **given,
        )

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The width and the height that an image is resized to."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size as fitted

        made = self.processor
        most = made.max_soft_tokens * made.pooling_kernel_size**2
        high, wide = fitted(height, width, made.patch_size, most, made.pooling_kernel_size)
        return wide, high

    def soft_tokens(self, picture: Picture, *, alone: bool = True) -> int:
        """Turned by EXIF it takes as many."""
        width, height = self.size(*picture.image.size)
        return width * height // (self.processor.pooling_kernel_size * self.processor.patch_size) ** 2

    def prepared(self, picture: Picture, *, alone: bool = True) -> tuple[torch.Tensor, ...]:
        """The patches, float32 [1, P, 3 * patch²] from 0 to 1, and their (x, y), int64 [1, P, 2], -1 at padding."""
        image, resize = picture.decoded(), self.processor.do_resize
        if image.mode == "RGB" and resize:  # the same pixels, without arrays of the whole image
            image, resize = image.resize(self.size(*image.size), self.processor.resample), False
        made = self.processor(images=image, do_resize=resize, return_tensors="pt")
        return made["pixel_values"], made["image_position_ids"]

    def seen(self, *prepared: torch.Tensor, between: DeviceTurn) -> torch.Tensor:
        pixels_1PX, place_1P2 = prepared
        tower, projection = self.parts[TOWER], self.parts[PROJECTION]
        weight = projection.embedding_projection.weight
        with between():
            pixels_1PX = pixels_1PX.to(weight.device, weight.dtype)
            seen_XD = tower(pixels_1PX, place_1P2.to(weight.device)).last_hidden_state
            return projection(inputs_embeds=seen_XD).to(self.dtype).cpu()


def _processor(folder: Path, config: Mapping[str, Any]) -> Any:
    """The image processor with the checkpoint's settings."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    vision = config["vision_config"]
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
