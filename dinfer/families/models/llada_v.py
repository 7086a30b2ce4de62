"""LLaDA-V: LLaDA with a SigLIP 2 vision tower (arXiv:2505.16933), under transformers' Llama names."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.layers.transformer import Transformer
from dinfer.core.models._family import PLAIN, HubFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.images import Seeing
from dinfer.families.images.llava import LlavaEyes
from dinfer.families.models._seeing import SeeingFamily

EXPECTED = PLAIN | {"attention_bias": (False, None), "add_faster_video": (False, None)}
ABSENT = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


class SeeingTransformer(Seeing, Transformer):
    """The network of the core, which may see pictures."""


@MODELS.register("llada_v")
@dataclass(frozen=True, kw_only=True)
class LladaV(SeeingFamily, HubFamily):
    """LLaDA-V checkpoints, with their vision tower if they have one and Pillow is installed."""

    paper = "LLaDA-V, arXiv:2505.16933"
    harmless = frozenset({  # which its training writes
        "add_time_instruction", "delay_load", "faster_token_stride", "force_sample", "freeze_mm_mlp_adapter",
        "freeze_mm_vision_resampler", "image_aspect_ratio", "image_crop_resolution", "image_grid_pinpoints",
        "image_split_resolution", "image_token_index", "max_sequence_length", "mm_hidden_size", "mm_newline_position",
        "mm_patch_merge_type", "mm_projector_lr", "mm_projector_type", "mm_resampler_type", "mm_spatial_pool_mode",
        "mm_spatial_pool_out_channels", "mm_spatial_pool_stride", "mm_tunable_parts", "mm_use_im_patch_token",
        "mm_use_im_start_end", "mm_vision_select_feature", "mm_vision_select_layer", "mm_vision_tower",
        "mm_vision_tower_lr", "pos_skipping_range", "tokenizer_model_max_length", "tokenizer_padding_side",
        "tune_mm_mlp_adapter", "tune_mm_vision_resampler", "unfreeze_mm_vision_tower", "use_mm_proj",
        "use_pos_skipping", "vision_config", "vision_tower_pretrained",
    })  # fmt: skip
    eyes = LlavaEyes
    unused: ClassVar[tuple[str, ...]] = LlavaEyes.prefixes  # of the network; its eyes take them
    published_mask: ClassVar[int] = 126336
    published_stops: ClassVar[tuple[int, ...]] = (126081,)

    checkpoint: str = option("GSAI-ML/LLaDA-V", "hub name or folder")
    image_tokens: int = option(
        5840, "positions of a request that images may take, for which memory is kept; 0: no vision tower is loaded",
        least=0,
    )  # fmt: skip

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        # The text alone, before images, says model_type=llada, but has fields under transformers' names.
        kind, theirs = config.get("model_type"), "hidden_size" in config and "num_experts" not in config
        return kind == "llava_llada" or (kind == "llada" and theirs and "d_model" not in config)

    def network(self, spec: ModelSpec) -> Transformer:
        return SeeingTransformer(spec)

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        if "d_model" in config:
            raise ValueError("config.json: d_model is a field of LaViDa, which is not supported: load LLaDA-V")
        config = complete(config, EXPECTED, ABSENT)
        return ModelSpec(family="llada_v", mlp=config["intermediate_size"], **self.body(config))
