"""The fields of a config.json: the types and values that they may have, and their defaults."""

import math
from collections.abc import Mapping
from typing import Any

LARGEST, EXPERTS = 2**31, 2**20  # of one field; of all layers: no checkpoint comes near, and their names fill memory
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "expert_intermediate_size", "n_group", "topk_group", "decoder_sparse_step", "d_model", "n_heads", "n_layers",
    "max_sequence_length", "mlp_ratio", "global_head_dim", "top_k_experts",
)  # fmt: skip
SIZES_OR_NULL = (
    "num_key_value_heads", "head_dim", "block_size", "bd_size", "expert_capacity", "rotary_dim",
    "dense_intermediate_size", "n_kv_heads", "mlp_hidden_size", "embedding_size", "num_global_key_value_heads",
    "sliding_window",
)  # fmt: skip
COUNTS_OR_NULL = ("num_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")
NUMBERS = ("rms_norm_eps", "rope_theta", "final_logit_softcapping")
NUMBERS_OR_NULL = ("routed_scaling_factor", "partial_rotary_factor")
FLAGS = (
    "tie_word_embeddings", "norm_topk_prob", "use_qk_norm", "qk_layernorm", "moe_router_enable_expert_bias",
    "weight_tying",
)  # fmt: skip
AT_MOST = (
    ("num_experts_per_tok", "num_experts"), ("top_k_experts", "num_experts"), ("topk_group", "n_group"),
    ("vocab_size", "embedding_size"), ("first_k_dense_replace", "num_hidden_layers"), ("rotary_dim", "head_dim"),
)  # fmt: skip
"""Fields of which the first must not exceed the second."""
DIVIDES = (
    ("num_key_value_heads", "num_attention_heads"), ("num_global_key_value_heads", "num_attention_heads"),
    ("n_group", "num_experts"), ("n_heads", "d_model"), ("n_kv_heads", "n_heads"),
)  # fmt: skip
"""Fields of which the second must be a multiple of the first."""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of the wrong type, which might be taken for a default or for true."""
    for names, least, null in ((SIZES, 1, False), (SIZES_OR_NULL, 1, True), (COUNTS_OR_NULL, 0, True)):
        for name in names:
            value = config.get(name, least)
            if not (null and value is None) and (type(value) is not int or not least <= value < LARGEST):
                allowed = f"an integer, at least {least}{', or null' if null else ''}"
                allowed = f"below {LARGEST}" if type(value) is int and value > least else allowed
                raise ValueError(f"config.json: {name}={value!r} must be {allowed}")
    rope = config.get("rope_parameters")
    if rope is not None and not isinstance(rope, Mapping):
        raise ValueError(f"config.json: rope_parameters={rope!r} must be an object")
    for part in (config, rope or {}):
        for name in (*NUMBERS, *NUMBERS_OR_NULL):
            value = part.get(name, 1.0)
            if value is None and (name in NUMBERS_OR_NULL or name in (rope or ())):
                continue
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"config.json: {name}={value!r} must be a number above 0")
        if (part.get("partial_rotary_factor") or 0) > 1:
            raise ValueError(f"config.json: partial_rotary_factor={part['partial_rotary_factor']} must be at most 1")
    for name in FLAGS:
        if type(value := config.get(name, False)) is not bool and value is not None:
            raise ValueError(f"config.json: {name}={value!r} must be true or false")
    for name in ("layer_types", "mlp_only_layers", "moe_layer_freq"):
        if not isinstance(value := config.get(name), list | type(None)):
            raise ValueError(f"config.json: {name}={value!r} must be a list")


def check_fit(config: Mapping[str, Any]) -> None:
    """Raises ValueError for two fields that contradict each other."""
    for rule, pairs in (("at most", AT_MOST), ("a divisor of", DIVIDES)):
        for name, other in pairs:
            value, bound = config.get(name), config.get(other)
            if value and bound and (value > bound if pairs is AT_MOST else bound % value):
                raise ValueError(f"config.json: {name}={value} must be {rule} {other}={bound}")
    layers, experts = config.get("num_hidden_layers"), config.get("num_experts", 1)
    if (layers or config.get("n_layers", 1)) * experts > EXPERTS:
        name = "n_layers" if layers is None else "num_hidden_layers"
        raise ValueError(f"config.json: {name}={config[name]} times num_experts={experts} must be at most {EXPERTS}")
    for name in ("layer_types", "moe_layer_freq"):
        if config.get(name) is not None and len(config[name]) != layers:
            raise ValueError(f"config.json: {name} has {len(config[name])} entries for num_hidden_layers={layers}")


def complete(
    config: Mapping[str, Any], expected: Mapping[str, tuple[Any, ...]], absent: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json with the values of `absent` for its fields that are absent or null, after all checks.

    What transformers 5 writes into `rope_parameters` comes out on the top level. Raises ValueError as `expect` does.
    """
    expect(config, expected)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type={rope['rope_type']!r} is not supported; only 'default' is")
    named = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    for name, value in named.items():
        if config.get(name) not in (None, value):
            raise ValueError(f"config.json: {name}={config[name]} contradicts rope_parameters.{name}={value}")
    config = {**config, **named}
    for name in NUMBERS_OR_NULL:
        if name in absent and config.get(name, absent[name]) is None:
            raise ValueError(f"config.json: {name}=None must be a number above 0")
    return {**absent, **{name: value for name, value in config.items() if value is not None}}


def expect(config: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError for a field of the wrong kind, at odds with another, or that would make another network.

    None among the allowed values: absent or null.
    """
    check_kinds(config)
    check_fit(config)
    for name, allowed in fields.items():
        if config.get(name) not in allowed:
            raise ValueError(f"config.json: {name}={config.get(name)!r} is not supported; only {allowed[0]!r} is")


PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None, {"type": "default"}, {"rope_type": "default"}),
    "use_sliding_window": (False, None),
    "clip_qkv": (None,),
    "quantization_config": (None,),
}
"""What transformers' names have to say for the core to be the network that is meant."""
QWEN = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
"""What the config classes that grew from Qwen's take for fields that are absent."""
