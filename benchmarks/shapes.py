"""The config.json of published checkpoints, as far as it matters, to run their shapes with random weights."""

from __future__ import annotations

from typing import Any

import torch

from dinfer.core.loading.checkpoint import family_of
from dinfer.core.models.family import ModelFamily
from dinfer.core.registry import MODELS
from dinfer.core.step.contracts import ModelSpec
from dinfer.formats.holding import quantize
from dinfer.lab.random_network import random_network

LLADA_8B: dict[str, Any] = {
    "model_type": "llada", "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True,
    "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464,
    "embedding_size": 126464, "max_sequence_length": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "weight_tying": False, "mask_token_id": 126336, "eos_token_id": 126081,
}  # fmt: skip
SMALL = LLADA_8B | {
    "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128, "vocab_size": 512,
    "embedding_size": 512, "mask_token_id": 511, "eos_token_id": 510,
}  # fmt: skip
LLADA2_MINI: dict[str, Any] = {
    "model_type": "llada2_moe", "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 5120, "first_k_dense_replace": 1,
    "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 512, "n_group": 8,
    "topk_group": 4, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "rope_theta": 600000, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 32768, "vocab_size": 157184,
}  # fmt: skip
LLADA2_FLASH = LLADA2_MINI | {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "max_position_embeddings": 16384,
}  # fmt: skip
SDAR_4B: dict[str, Any] = {
    "model_type": "sdar", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 32768, "vocab_size": 151936,
}  # fmt: skip
SDAR_8B = SDAR_4B | {"hidden_size": 4096, "intermediate_size": 12288}
SMALL_LLADA2 = LLADA2_MINI | {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_group": 4,
    "topk_group": 2, "vocab_size": 512,
}  # fmt: skip
SMALL_SDAR = SDAR_4B | {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512, "mask_token_id": 511, "eos_token_id": 510,
}  # fmt: skip
# Two kinds of layers, no mask token, an encoder, and a network that is told what it expected.
SMALL_GEMMA: dict[str, Any] = {
    "model_type": "diffusion_gemma",
    "text_config": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
        "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}},
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "rms_norm_eps": 1e-6, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 80.0},
        },
        "final_logit_softcapping": 30.0, "max_position_embeddings": 256, "eos_token_id": [510],
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
}  # fmt: skip
# Options of the family: ids within the small vocabularies, since config.json leaves them to the authors' code, and the
# length of SDAR's attention blocks, which config.json does not have.
OPTIONS: dict[str, dict[str, Any]] = {
    "small-llada2": {"mask_id": 511, "stop_ids": [510]}, "sdar-4b": {"block": 4}, "sdar-8b": {"block": 4},
    "sdar-8b-32": {"block": 32}, "small-sdar": {"block": 4},
}  # fmt: skip
SHAPES = {
    "llada-8b": LLADA_8B, "llada2-mini": LLADA2_MINI, "llada2-flash": LLADA2_FLASH, "sdar-4b": SDAR_4B,
    "sdar-8b": SDAR_8B, "sdar-8b-32": SDAR_8B, "small": SMALL, "small-llada2": SMALL_LLADA2, "small-sdar": SMALL_SDAR,
    "small-gemma": SMALL_GEMMA,
}  # fmt: skip

SMALLER = {  # for dry runs
    "llada-8b": "small", "llada2-mini": "small-llada2", "llada2-flash": "small-llada2", "sdar-4b": "small-sdar",
    "sdar-8b": "small-sdar",
}  # fmt: skip


def shape(name: str) -> tuple[ModelFamily, ModelSpec]:
    """The family and the spec of a shape."""
    config = SHAPES[name]
    family = MODELS.build({"name": family_of(config)} | OPTIONS.get(name, {}))
    return family, family.spec(config)


def random_weights(
    family: ModelFamily, spec: ModelSpec, device: torch.device, dtype: str | None = None, **share: Any
) -> Any:
    """A network with random weights, the same at every call. `dtype`: None is bfloat16 on a card, else float32.

    `share`: what a rank holds of it, see `random_network`.
    """
    torch.manual_seed(0)
    usual = "bfloat16" if device.type == "cuda" else "float32"
    return random_network(family, spec, dtype=getattr(torch, dtype or usual), device=device, **share)


def random_model(name: str, device: torch.device, dtype: str | None = None, quantized: str | None = None) -> Any:
    """A shape with random weights, as `random_weights`."""
    model = random_weights(*shape(name), device, dtype)
    if quantized:
        quantize(model, quantized)
    return model
