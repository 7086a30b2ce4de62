"""A tiny config.json of every family, with the fields that published ones have, and networks with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support.models import CONFIG, EOS, MASK

from dinfer.core.layers.transformer import Transformer
from dinfer.core.loading.checkpoint import family_of
from dinfer.core.models.family import ModelFamily
from dinfer.core.registry import MODELS
from dinfer.lab.random_network import random_network

REAL = Path(__file__).parents[1] / "configs" / "real"
NUMBERS = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "rope_theta": 100.0, "max_position_embeddings": 256, "bos_token_id": EOS,
    "eos_token_id": EOS, "pad_token_id": EOS, "mask_token_id": MASK,
}  # fmt: skip


def shrunk(folder: str, **numbers: Any) -> dict[str, Any]:
    """A published config.json with other numbers in the fields that it has."""
    config = json.loads((REAL / folder / "config.json").read_text())
    assert numbers.keys() <= config.keys()
    return {name: (NUMBERS | numbers).get(name, value) for name, value in config.items()}


LLADA2 = shrunk(
    "inclusionAI__LLaDA2.0-mini", head_dim=8, rotary_dim=4, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=12, n_group=4, topk_group=2,
)  # fmt: skip
SDAR = shrunk("JetLM__SDAR-8B-Chat", head_dim=16)
# Of these three families there is no published config.json to shrink: what is known of their fields.
LLADA_MOE = {
    "model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "attention_bias": False, "clip_qkv": None,
    "dense_intermediate_size": 48, "expert_intermediate_size": 16, "hidden_act": "silu", "moe_layer_freq": [0, 1, 1],
    "norm_topk_prob": None, "num_experts": 4, "num_experts_per_tok": 2, "partial_rotary_factor": 1,
    "qk_layernorm": True, "rms_norm_eps": 1e-5, "rope_scaling": None, "shared_expert_intermediate_size": None,
    "tie_word_embeddings": False,
} | NUMBERS | {"num_key_value_heads": 4}  # fmt: skip
DIFFCODER = {
    "model_type": "llama", "architectures": ["StableDiffcoderForCausalLM"], "attention_bias": False, "mlp_bias": False,
    "head_dim": 8, "hidden_act": "silu", "pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "tie_word_embeddings": False,
} | NUMBERS  # fmt: skip
RND1 = {
    "model_type": "rnd1", "architectures": ["RND1LM"], "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": 16, "hidden_act": "silu", "is_causal": False, "mlp_only_layers": [], "moe_backend": "hf",
    "moe_intermediate_size": 16, "norm_topk_prob": True, "num_diffusion_steps": 256, "num_experts": 4,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_scaling": False, "sliding_window": False,
    "tie_word_embeddings": False, "use_sliding_window": False,
} | NUMBERS  # fmt: skip
# Of these there is none either: the fields that recorded runs of the published code have.
NEMOTRON = {
    "model_type": "nemotron_labs_diffusion", "architectures": ["NemotronLabsDiffusionModel"], "attention_bias": False,
    "mlp_bias": False, "ar_loss_weight": 1.0, "dlm_loss_weight": None, "dlm_paradigm": "bidirectional",
    "dp_varying_mask_ratio": False, "attn_implementation": "sdpa", "block_size": 8, "head_dim": 8, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
} | {name: value for name, value in NUMBERS.items() if name != "rope_theta"}  # fmt: skip
WEDLM = {
    "model_type": "wedlm", "architectures": ["WeDLMForCausalLM"], "attention_bias": False, "qk_norm": True,
    "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_scaling": None, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False,
} | NUMBERS  # fmt: skip
LLADA_V = {
    "model_type": "llava_llada", "architectures": ["LlavaLLaDAModelLM"], "attention_bias": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False, "add_faster_video": False,
    "image_aspect_ratio": "anyres_max_4", "image_grid_pinpoints": "(1x1),...,(6x6)", "mm_hidden_size": 1152,
    "mm_newline_position": "grid", "mm_patch_merge_type": "spatial_unpad", "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None, "mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter,mm_language_model",
    "mm_use_im_patch_token": False, "mm_use_im_start_end": False, "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2, "mm_vision_tower": "google/siglip2-so400m-patch14-384", "mm_vision_tower_lr": 2e-6,
    "tokenizer_model_max_length": 8192, "tokenizer_padding_side": "right", "use_mm_proj": True,
} | NUMBERS  # fmt: skip
for lacking in (LLADA_MOE, DIFFCODER, LLADA_V):
    del lacking["mask_token_id"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": CONFIG,
    "llada_moe": LLADA_MOE,
    "llada2": LLADA2,
    "llada2.2": LLADA2 | {"expert_capacity": 3, "block_size": 4},
    "dream": shrunk("Dream-org__Dream-v0-Instruct-7B"),
    "sdar": SDAR,
    "sdar_moe": SDAR | {
        "model_type": "sdar_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1,
    },
    "rnd1": RND1,
    "fast_dllm_v2": shrunk("Efficient-Large-Model__Fast_dLLM_v2_1.5B", bd_size=8, layer_types=["full_attention"] * 3),
    "stable_diffcoder": DIFFCODER,
    "idlm": SDAR | {"use_regular_causal": True},
    "nemotron": NEMOTRON,
    "wedlm": WEDLM,
    "llada_v": LLADA_V,
}  # fmt: skip
EXPERTS = [name for name, config in CONFIGS.items() if "num_experts" in config]


def family_for(config: dict[str, Any]) -> ModelFamily:
    """The family, with options for what config.json is silent about and the files of a tiny model do not say."""
    name = family_of(config)
    options: dict[str, Any] = {} if config.get("eos_token_id") or "text_config" in config else {"stop_ids": [EOS]}
    options |= {} if config.get("mask_token_id") or "text_config" in config else {"mask_id": MASK}
    options |= {"block": 4} if name == "llada2" and "block_size" not in config else {}
    return MODELS.build({"name": name} | options)


def random_model(name: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Transformer:
    """Every weight differs from every other, those of norms and biases too. `fields` of its config that differ."""
    config = CONFIGS[name] | fields
    family = family_for(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = random_network(family, family.spec(config), dtype=dtype, device=torch.device("cpu"))
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network
