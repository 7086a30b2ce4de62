"""LLaDA-V's vision tower, its tiles of an image, and the rows of soft tokens that they become.

Facts: github.com/ML-GSAI/LLaDA-V at 2252769, whose tower is SigLIP 2 without its last layer and without a norm behind
the others. Shape suffixes: T tiles, P pixels of a side, H, W soft tokens down and across, X soft tokens, D hidden.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F

from dinfer.core.loading.files import CheckpointError
from dinfer.families.images.eyes import DeviceTurn, Eyes
from dinfer.families.images.pictures import Picture

TOWER, PROJECTION, NEWLINE = "model.vision_tower.vision_tower.vision_model.", "model.mm_projector.", "model."
# What the published code takes for the tower, whatever config.json says. A config may have a `vision_config` instead.
VISION: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
EXPECTED: dict[str, tuple[Any, ...]] = {
    "mm_projector_type": ("mlp2x_gelu",), "mm_patch_merge_type": ("spatial_unpad",),
    "mm_vision_select_layer": (-2, None), "mm_vision_select_feature": ("patch", None),
    "mm_resampler_type": (None, "identity"), "mm_use_im_start_end": (False, None),
}  # fmt: skip
PLACEHOLDER = 126084  # <|reserved_token_0|>: the published code has -200 there, which is no token
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
TEMPLATE = """{{ bos_token }}\
{%- if messages[0]['role'] != 'system' %}\
{{- '<|start_header_id|>system<|end_header_id|>\n\n@SYSTEM@<|eot_id|>' }}{% endif %}\
{%- for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\
{%- if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}\
{%- if not loop.first %}{{ ' ' if part['type'] == loop.previtem['type'] == 'image' else '\n' }}{% endif %}\
{{- '@IMAGE@' if part['type'] == 'image' else part['text'] | trim }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}\
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
BLIND = ": model.image_tokens=0 loads the text alone"
TOGETHER = 8  # tiles that the tower sees at a time: more take more memory, and others wait for longer
BREATH = 0.001  # seconds in which others take the device's turn


@dataclass(kw_only=True)
class LlavaEyes(Eyes):
    """An image as a whole, and in tiles; transformers' SiglipVisionModel and LlavaOnevisionImageProcessorPil."""

    prefixes: ClassVar[tuple[str, ...]] = (TOWER, PROJECTION, f"{NEWLINE}image_newline")
    needs: ClassVar[str] = "LLaVA-OneVision"

    grids: list[list[int]]  # heights and widths that an image may be cut at, in pixels
    tile: int  # pixels of a tile's side
    side: int  # soft tokens of a tile's side
    tiles: int  # of so many tiles the soft tokens are kept; those of more are shrunk

    @property
    def largest(self) -> tuple[int, int]:  # type: ignore[override]
        high, wide = max(self.grids, key=math.prod)
        return wide, high

    @classmethod
    def modules(cls, config: Mapping[str, Any], network: Any) -> dict[str, Any]:
        from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
        from transformers.models.siglip.modeling_siglip import SiglipVisionModel

        for name, allowed in EXPECTED.items():
            if config.get(name) not in allowed:
                raise CheckpointError(
                    f"config.json: {name}={config.get(name)!r:.80} is not supported; only {allowed[0]!r} is{BLIND}"
                )
        if "siglip" not in str(published := config.get("mm_vision_tower")).casefold():
            raise CheckpointError(f"config.json: mm_vision_tower={published!r:.80} must be a SigLIP tower{BLIND}")
        made = SiglipVisionConfig(**VISION | dict(config.get("vision_config") or {}), vision_use_head=False)
        made._attn_implementation = "sdpa"
        with torch.device("meta"):
            tower: Any = SiglipVisionModel(made)
            wide, hidden = made.hidden_size, network.spec.hidden
            projection = nn.Sequential(nn.Linear(wide, hidden), nn.GELU(), nn.Linear(hidden, hidden))
            newline = nn.ParameterDict({"image_newline": nn.Parameter(torch.empty(hidden))})
        places = tower.embeddings.num_positions
        tower.embeddings.position_ids = torch.arange(places, device=network.device)[None]  # which no file holds
        return {TOWER: tower, PROJECTION: projection, NEWLINE: newline}

    @classmethod
    def made(cls, folder: Path, config: Mapping[str, Any], network: Any, **given: Any) -> Self:
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
            LlavaOnevisionImageProcessorPil,
        )

        vision = given["parts"][TOWER].config
        tile = vision.image_size
        if (most := re.fullmatch(r"anyres_max_([1-9]\d{0,3})", str(ratio := config.get("image_aspect_ratio")))) is None:
            raise CheckpointError(
                f"config.json: image_aspect_ratio={ratio!r:.80} must be anyres_max_ and a number{BLIND}"
            )
        token = config.get("image_token_index")
        token = token if type(token) is int and token >= 0 else PLACEHOLDER
        if token >= network.spec.vocab:
            raise CheckpointError(f"config.json: image_token_index={token} must be an id of the vocabulary{BLIND}")
        grids = _grids(config.get("image_grid_pinpoints"), tile)
        half = [0.5] * 3
        processor = LlavaOnevisionImageProcessorPil(
            image_grid_pinpoints=grids, size={"height": tile, "width": tile}, image_mean=half, image_std=half
        )
        return cls(
            processor=processor, token=token, grids=grids, tile=tile, side=tile // vision.patch_size,
            tiles=int(most[1]), **given,
        )  # fmt: skip

    def chat(self, tokenizer: Any) -> dict[str, Any]:
        """The published conversation. The checkpoint's own template knows texts alone."""
        image = tokenizer.convert_ids_to_tokens(self.token)
        if image not in tokenizer.all_special_tokens:
            raise ValueError(
                f"config.json: image_token_index={self.token} stands at images, and the tokenizer has no such special "
                "token: name the id of one that is reserved"
            )
        return {"chat_template": TEMPLATE.replace("@SYSTEM@", SYSTEM).replace("@IMAGE@", image)}

    def soft_tokens(self, picture: Picture, *, alone: bool = True) -> int:
        if not alone:
            return self.side**2 + 1
        high, wide = self.kept(*self.cut(*picture.size), *picture.size)[1]
        return self.side**2 + high * (wide + 1)

    def cut(self, width: int, height: int) -> tuple[int, int]:
        """How many tiles an image of this size is cut into, down and across."""
        from transformers.image_processing_utils import select_best_resolution

        high, wide = select_best_resolution((height, width), self.grids)
        return high // self.tile, wide // self.tile

    def kept(self, down: int, across: int, width: int, height: int) -> tuple[tuple[slice, slice], tuple[int, int]]:
        """Of the soft tokens of so many tiles: those that show the image and no border, and the shape they become."""
        high, wide = down * self.side, across * self.side
        rows, columns = slice(0, high), slice(0, wide)
        if width / height > wide / high:
            border = (high - int(height * (wide / width))) // 2
            rows, high = slice(border, high - border), high - 2 * border
        else:
            border = (wide - int(width * (high / height))) // 2
            columns, wide = slice(border, wide - border), wide - 2 * border
        if (times := math.sqrt(high * wide / (self.tiles * self.side**2))) > 1.1:
            high, wide = max(int(high // times), 1), max(int(wide // times), 1)
        return (rows, columns), (high, wide)

    def prepared(self, picture: Picture, *, alone: bool = True) -> tuple[torch.Tensor, ...]:
        """float32 [T, 3, P, P], from -1 to 1, the whole image first; its width and height, int64, 0 if not `alone`.

        An image among several is not cut, but made square by a border.
        """
        size, image = picture.size, picture.decoded()
        if alone:
            if image.size != size:
                raise ValueError(f"{picture.where}: its EXIF data stand behind its pixels: save it once more")
            return self.processor(image, return_tensors="pt")["pixel_values"][0], torch.tensor(image.size)
        from PIL import Image

        (wide, high), longest = image.size, max(image.size)
        square = Image.new("RGB", (longest, longest), (127, 127, 127))
        square.paste(image.convert("RGB"), ((longest - wide) // 2, (longest - high) // 2))
        whole = self.processor(square, image_grid_pinpoints=[[self.tile] * 2], return_tensors="pt")
        return whole["pixel_values"][0, :1], torch.tensor([0, 0])

    def seen(self, *prepared: torch.Tensor, between: DeviceTurn) -> torch.Tensor:
        tower, projection, newline_D = self.parts[TOWER], self.parts[PROJECTION], self.parts[NEWLINE]["image_newline"]
        seen = []
        for pixels_T3PP in prepared[0].split(TOGETHER):
            with between():
                x_TXD = tower.embeddings(pixels_T3PP.to(newline_D))
                seen.append(projection(tower.encoder(inputs_embeds=x_TXD).last_hidden_state))
            time.sleep(BREATH)
        with between():
            return self.packed(torch.cat(seen), *prepared[1].tolist()).to(self.dtype).cpu()

    def packed(self, whole_TXD: torch.Tensor, width: int, height: int) -> torch.Tensor:
        """The tokens of the whole image, then rows of those of its tiles, each with a newline. [X, D]"""
        newline_D = self.parts[NEWLINE]["image_newline"]
        if not width:
            return torch.cat((whole_TXD[0], newline_D[None]))
        down, across = self.cut(width, height)
        (rows, columns), shape = self.kept(down, across, width, height)
        grid = whole_TXD[1:].unflatten(1, (self.side, self.side)).unflatten(0, (down, across))
        grid_HWD = grid.transpose(1, 2).flatten(2, 3).flatten(0, 1)[rows, columns]
        if shape != grid_HWD.shape[:2]:
            grid_DHW = F.interpolate(grid_HWD.permute(2, 0, 1)[None], shape, mode="bilinear")[0]
            grid_HWD = grid_DHW.permute(1, 2, 0)
        ends_H1D = newline_D.expand(shape[0], 1, -1)
        return torch.cat((whole_TXD[0], torch.cat((grid_HWD, ends_H1D), 1).flatten(0, 1)))


def _grids(given: Any, tile: int) -> list[list[int]]:
    """The heights and widths that images may be cut at, in pixels. A config has widths first."""
    if isinstance(given, str) and len(ends := re.findall(r"\((\d{1,2})x(\d{1,2})\)", given)) > 1:  # "(1x1),...,(6x6)"
        (first, low), (last, high) = (map(int, pair) for pair in (ends[0], ends[-1]))
        given = [[i * tile, j * tile] for i in range(first, last + 1) for j in range(low, high + 1)]
    if not (
        isinstance(given, list)
        and given
        and all(
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(one) is int and one > 0 and not one % tile for one in pair)
            for pair in given
        )
    ):
        raise CheckpointError(
            f"config.json: image_grid_pinpoints={given!r:.80} must be pairs of multiples of {tile}, the tower's "
            f"image_size{BLIND}"
        )
    return [[high, wide] for wide, high in given]
