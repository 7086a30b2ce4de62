"""Tiny seeded models of the real classes, one for each way in which models differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dinfer.checkpoint import random_network
from dinfer.layers.transformer import Transformer
from dinfer.models.llada import Llada
from dinfer.protocols import ModelSpec

VOCAB, EOS, MASK = 40, 38, 39

# Every field that `Llada.spec` reads or checks. Grouped heads, and a head that is not the embedding.
CONFIG: dict[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 32, "n_heads": 4, "n_kv_heads": 2,
    "n_layers": 2, "mlp_hidden_size": 48, "vocab_size": VOCAB, "embedding_size": VOCAB, "mask_token_id": MASK,
    "eos_token_id": [EOS, 28], "max_sequence_length": 256, "rope": True, "rope_theta": 50.0, "rms_norm_eps": 1e-5,
    "layer_norm_type": "rms", "block_type": "llama", "activation_type": "silu", "weight_tying": False,
}  # fmt: skip

# Config fields and spec fields of each variant; together they also cover every kind of head and a tied LM head.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bidirectional": ({}, {}),
    "shifted": ({"weight_tying": True}, {"shift": 1}),
    "block_causal": ({"n_kv_heads": None}, {"causal_block": 4}),
    "causal": ({"n_kv_heads": None, "multi_query_attention": True}, {"causal_block": 1}),
}


def tiny_spec(variant: str = "bidirectional", **fields: Any) -> ModelSpec:
    config, ours = VARIANTS[variant]
    return replace(Llada().spec(CONFIG | config), **(ours | fields))


def tiny_model(
    variant: str = "bidirectional",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    sharpness: float = 4.0,
    **fields: Any,
) -> Transformer:
    """Random weights. `sharpness` scales the logits, so that confidences spread over (0, 1) and commits vary."""
    spec = tiny_spec(variant, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = random_network(Llada(), spec, dtype=torch.float64, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("norm.weight"):  # ones would hide a norm applied with the wrong weight
                parameter.copy_(1 + 0.2 * torch.sin(torch.arange(len(parameter)) + len(name)))
        for block in network.blocks:  # attention that looks somewhere, so that positions differ
            block.qkv.weight[: (spec.heads + spec.kv_heads) * spec.head_dim].mul_(2.5)
        network.norm.weight.mul_(sharpness)
    return network.to(dtype=dtype, device=device)
