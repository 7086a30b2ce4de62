"""What families that grew from Qwen's models have in common."""

from collections.abc import Mapping
from typing import Any

from dinfer.core.terms.spec import ExpertSpec

QWEN = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
"""What the config classes that grew from Qwen's take for fields that are absent."""


def qwen_experts(config: Mapping[str, Any]) -> ExpertSpec:
    """Qwen3-MoE's: softmax over all, then the best, renormalised if the config says so. Raises ValueError."""
    layers, every = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    only = config.get("mlp_only_layers") or []
    if not all(type(layer) is int and 0 <= layer < layers for layer in only):
        raise ValueError(f"config.json: mlp_only_layers={only!r} must be layers, 0 to {layers - 1}")
    dense = {*only, *(i for i in range(layers) if (i + 1) % every)}
    return ExpertSpec(
        experts=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        normalize=bool(config.get("norm_topk_prob")),
        dense=tuple(sorted(dense)),
    )
