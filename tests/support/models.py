"""Tiny seeded models of the real classes, one for each way in which models differ."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from dinfer.core.models.llada import Llada
from dinfer.core.registry import DECODERS
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.mixins import Moves
from dinfer.families.abilities.fed_order import FedOrderSpec
from dinfer.families.gemma import Gemma
from dinfer.families.models.diffusion_gemma import DiffusionGemma
from dinfer.families.nemotron import TwoModeSpec
from dinfer.lab.random_network import random_network

VOCAB, EOS, MASK = 40, 38, 39
DELETE, SPLIT = 33, 34  # of models that predict them

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
# Those of single families, whose specs are of classes of their own.
OF_FAMILIES: dict[str, type[ModelSpec]] = {"drafts": ModelSpec, "two_modes": TwoModeSpec, "fed_order": FedOrderSpec}


# Every field that `DiffusionGemma.spec` reads or checks. The two kinds of layers have other heads each.
GEMMA: dict[str, Any] = {
    "model_type": "diffusion_gemma",
    "text_config": {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
        "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 80.0},
        },
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12, "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0, "max_position_embeddings": 256, "eos_token_id": [EOS, 28],
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
}  # fmt: skip
UNIFORM = "uniform"  # the variant without a mask token, with an encoder and self-conditioning


def tiny_gemma(*, seed: int = 0, dtype: torch.dtype = torch.float64, sharpness: float = 4.0) -> Gemma:
    """Random weights. Scalars and norms differ from 1 and from each other, so that none can be left out."""
    family = DiffusionGemma()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = random_network(family, family.spec(GEMMA), dtype=torch.float64, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(("norm.weight", "scale")):
                parameter.copy_(1 + 0.2 * torch.sin(torch.arange(len(parameter)) + len(name)))
        network.norm.weight.mul_(sharpness)
    return network.to(dtype)


def tiny_spec(variant: str = "bidirectional", **fields: Any) -> ModelSpec:
    if variant in OF_FAMILIES:
        spec = replace(Llada().spec(CONFIG), causal_block=1, shift=int(variant != "fed_order"), **fields)
        return OF_FAMILIES[variant](**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})
    config, ours = VARIANTS[variant]
    return replace(Llada().spec(CONFIG | config), **(ours | fields))


def tiny_model(variant: str = "bidirectional", **given: Any) -> Any:
    """A copy, since a test may change it: that takes a fifth of the time of making one. `given`: see `made`."""
    return copy.deepcopy(made(variant, **given))


@lru_cache(64)
@torch.inference_mode(False)  # the first caller's mode is not that of the others
def made(
    variant: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    sharpness: float = 4.0,
    **fields: Any,
) -> Any:
    """Random weights. `sharpness` scales the logits, so that confidences spread over (0, 1) and commits vary."""
    if variant == UNIFORM:
        return tiny_gemma(seed=seed, dtype=dtype, sharpness=sharpness).to(device)
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


def fitted(model: Any, decoder: str) -> Any:
    """The model, with a delete and a split token for decoders that take them."""
    if not issubclass(DECODERS.get(decoder), Moves) or model.spec.mask_id is None:
        return model
    model = copy.copy(model)  # shares the weights
    model.spec = replace(model.spec, delete_id=DELETE, split_id=SPLIT)
    return model
