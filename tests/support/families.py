"""A tiny config.json of every family, with every field that makes a difference, and networks with random weights."""

from __future__ import annotations

from typing import Any

import torch

from dinfer.core.protocols import ModelFamily
from dinfer.core.registry import MODELS
from dinfer.layers.transformer import Transformer
from dinfer.loading.checkpoint import family_of, random_network
from support.models import CONFIG

BODY: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 100.0, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "eos_token_id": 38, "mask_token_id": 39, "intermediate_size": 48,
}  # fmt: skip
LLADA2 = BODY | {
    "model_type": "llada2_moe", "head_dim": 8, "use_qk_norm": True, "partial_rotary_factor": 0.5, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 4, "topk_group": 2, "num_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "block_size": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": CONFIG,
    "llada_moe": BODY | {
        "model_type": "llada", "num_key_value_heads": 4, "qk_layernorm": True, "num_experts": 4,
        "num_experts_per_tok": 2, "expert_intermediate_size": 16, "dense_intermediate_size": 48,
        "moe_layer_freq": [0, 1, 1],
    },
    "llada2": LLADA2,
    "llada2.2": LLADA2 | {"expert_capacity": 3},
    "dream": BODY | {"model_type": "Dream"},
    "sdar": BODY | {"model_type": "sdar", "head_dim": 16},
    "sdar_moe": BODY | {
        "model_type": "sdar_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "fast_dllm_v2": BODY | {"model_type": "Fast_dLLM_Qwen", "bd_size": 8, "tie_word_embeddings": True},
    "stable_diffcoder": BODY | {"model_type": "llama", "architectures": ["StableDiffcoderForCausalLM"]},
}  # fmt: skip
EXPERTS = [name for name, config in CONFIGS.items() if "num_experts" in config]


def family_for(config: dict[str, Any]) -> ModelFamily:
    return MODELS.build(family_of(config))


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
