"""config.json of published checkpoints, for running their shapes with random weights."""

from __future__ import annotations

from typing import Any

from dinfer.protocols import ModelFamily, ModelSpec
from dinfer.registry import MODELS

LLADA_8B: dict[str, Any] = {
    "model_type": "llada",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "weight_tying": False,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
}
SMALL = LLADA_8B | {
    "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128, "vocab_size": 512,
    "embedding_size": 512, "mask_token_id": 511, "eos_token_id": 510,
}  # fmt: skip
SHAPES = {"llada-8b": LLADA_8B, "small": SMALL}


def shape(name: str) -> tuple[ModelFamily, ModelSpec]:
    """The family and the spec of a shape."""
    config = SHAPES[name]
    family = MODELS.build("llada")
    return family, family.spec(config)
