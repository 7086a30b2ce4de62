"""What model families have in common: options, the fields of a config.json, and the names of tensors as templates."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.protocols import ModelFamily
from dinfer.core.registry import option
from dinfer.core.spec import ExpertLayout, ModelSpec, Placement
from dinfer.layers.transformer import Transformer
from dinfer.loading.token_ids import PUBLISHED, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A checkpoint's tensor names, without ".weight". `{i}` stands for the layer, `{e}` for the expert.

    None: the family has no such tensor. Those that a family has may still be absent in a model without bias, QK-norm
    or experts: its `ModelSpec` says so.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    attn_norm: str = "model.layers.{i}.input_layernorm"
    q: str | None = "model.layers.{i}.self_attn.q_proj"
    k: str | None = "model.layers.{i}.self_attn.k_proj"
    v: str | None = "model.layers.{i}.self_attn.v_proj"
    qkv: str | None = None  # instead of the three
    q_norm: str = "model.layers.{i}.self_attn.q_norm"
    k_norm: str = "model.layers.{i}.self_attn.k_norm"
    out: str = "model.layers.{i}.self_attn.o_proj"
    mlp_norm: str = "model.layers.{i}.post_attention_layernorm"
    gate: str = "model.layers.{i}.mlp.gate_proj"
    up: str = "model.layers.{i}.mlp.up_proj"
    down: str = "model.layers.{i}.mlp.down_proj"
    router: str = "model.layers.{i}.mlp.gate"
    choice_bias: str = "model.layers.{i}.mlp.gate.expert_bias"  # the full name
    expert_gate: str = "model.layers.{i}.mlp.experts.{e}.gate_proj"
    expert_up: str = "model.layers.{i}.mlp.experts.{e}.up_proj"
    expert_down: str = "model.layers.{i}.mlp.experts.{e}.down_proj"
    fused_gate_up: str = "model.layers.{i}.mlp.w1"  # these five are full names, of all experts of a layer
    fused_down: str = "model.layers.{i}.mlp.w2"
    merged_gate: str = "model.layers.{i}.mlp.experts.gate_proj"
    merged_up: str = "model.layers.{i}.mlp.experts.up_proj"
    merged_down: str = "model.layers.{i}.mlp.experts.down_proj"
    shared_gate: str = "model.layers.{i}.mlp.shared_experts.gate_proj"
    shared_up: str = "model.layers.{i}.mlp.shared_experts.up_proj"
    shared_down: str = "model.layers.{i}.mlp.shared_experts.down_proj"


@dataclass(frozen=True, kw_only=True)
class HubCheckpoint(ModelFamily):
    """A family whose checkpoints are on the Hugging Face hub."""

    published_stops: ClassVar[tuple[int, ...]]  # for checkpoints whose files name none, EOS first

    checkpoint: str = option("", "hub name, folder, or the name of a model in the box")
    revision: str | None = option(None, "commit, tag or branch on the hub")
    adapter: str | None = option(None, "hub name or folder of a PEFT LoRA adapter, merged into the weights when loaded")
    stop_ids: tuple[int, ...] = option((), "token ids that end an answer, beside the checkpoint's eos_token_id")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if not all(type(token) is int and token >= 0 for token in self.stop_ids):
            raise ValueError(f"model.stop_ids={list(self.stop_ids)} must be token ids")

    def stops(self, config: Mapping[str, Any], vocab: int) -> dict[str, Any]:
        """The stop tokens, as fields of `ModelSpec`: the checkpoint's, the first of them its EOS, and the option's."""
        ids = listed(config.get("eos_token_id"), "eos_token_id") or published(
            "eos_token_id", self.published_stops, vocab, self.stop_ids, "model.stop_ids, the ids that end an answer"
        )
        return {"eos_id": ids[0], "stop_ids": tuple(dict.fromkeys(ids + self.stop_ids))}


def published(field: str, ids: tuple[int, ...], vocab: int, option: tuple[int, ...], remedy: str) -> tuple[int, ...]:
    """The token ids of a field that no file of a checkpoint names: those that the family's authors publish.

    A vocabulary that is too small for them is another one: then it is those of the option, if it is given.
    """
    if max(ids) < vocab:
        logging.getLogger(__name__).warning("no file of the checkpoint names %s: %s %s", field, PUBLISHED, [*ids])
        return ids
    if not option:
        raise ValueError(
            f"config.json has no {field}, and neither generation_config.json nor the tokenizer's files name it; the "
            f"{PUBLISHED}, {[*ids]}, is outside the vocabulary of {vocab}. Give {remedy}"
        )
    return option


@dataclass(frozen=True, kw_only=True)
class HubFamily(HubCheckpoint):
    """A family over the one transformer core. What is particular to it is in `spec` and `names`."""

    published_mask: ClassVar[int]  # for checkpoints whose files name none

    mask_id: int | None = option(None, "id of the mask token; null: as the checkpoint's config or tokenizer says")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_id is not None and self.mask_id < 0:
            raise ValueError(f"model.mask_id={self.mask_id} must be a token id")

    def names(self) -> Names:
        return Names()

    def network(self, spec: ModelSpec) -> Transformer:
        return Transformer(spec)

    def weights(self, spec: ModelSpec, experts: ExpertLayout = "separate") -> dict[str, Placement]:
        return dict(placements(spec, self.names(), experts))

    def copies(self, spec: ModelSpec) -> dict[str, str]:
        names = self.names()
        return {f"{names.head}.weight": f"{names.embedding}.weight"} if spec.tied_head else {}

    def tokens(self, config: Mapping[str, Any], vocab: int) -> dict[str, Any]:
        """The special tokens, as fields of `ModelSpec`."""
        given = listed(config.get("mask_token_id") if self.mask_id is None else self.mask_id, "mask_token_id")
        mask = given or published(
            "mask_token_id", (self.published_mask,), vocab, (),
            "model.mask_id, the id of the token that stands for what is still to be decoded",
        )  # fmt: skip
        return {"mask_id": mask[0], **self.stops(config, vocab)}

    def body(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `ModelSpec` that most families spell as transformers' Llama and Qwen do, and the special tokens."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise ValueError(f"config.json: hidden_size={hidden} must be a multiple of num_attention_heads={heads}")
            head_dim = hidden // heads
        fraction = config.get("partial_rotary_factor")
        local = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
        if local:
            raise ValueError(f"config.json: layer_types={local[0]!r} is not supported; only 'full_attention' is")
        return {
            "vocab": config["vocab_size"],
            "hidden": hidden,
            "layers": config["num_hidden_layers"],
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "norm_eps": config["rms_norm_eps"],
            "rope_theta": config["rope_theta"],
            "rope_dim": None if fraction in (None, 1) else int(head_dim * fraction),
            "tied_head": bool(config.get("tie_word_embeddings")),
            "max_length": config["max_position_embeddings"],
            **self.tokens(config, config["vocab_size"]),
        }


@dataclass(frozen=True, kw_only=True)
class BlockFamily(HubFamily):
    """A family of block-causal models."""

    published_block: ClassVar[int] = 32  # length of the attention blocks of checkpoints whose config is silent about it

    block: int | None = option(None, "length of the attention blocks; null: as the checkpoint was trained")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None and self.block < 1:
            raise ValueError(f"model.block={self.block} must be at least 1")

    def attention_block(self, config: Mapping[str, Any], field: str = "block_size") -> int:
        """Length of the attention blocks."""
        return self.block or config.get(field) or self.silent_block()

    def silent_block(self) -> int:
        """The length for a checkpoint whose config.json has none."""
        return self.published_block


TENSORS = 2**20  # layers times experts
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "expert_intermediate_size", "n_group", "topk_group", "decoder_sparse_step", "d_model", "n_heads", "n_layers",
    "max_sequence_length", "mlp_ratio", "top_k_experts",
)  # fmt: skip
SIZES_OR_NULL = (
    "num_key_value_heads", "head_dim", "block_size", "bd_size", "expert_capacity", "rotary_dim",
    "dense_intermediate_size", "n_kv_heads", "mlp_hidden_size", "embedding_size",
    "global_head_dim", "num_global_key_value_heads", "sliding_window",
)  # fmt: skip
COUNTS_OR_NULL = ("num_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")
NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "partial_rotary_factor", "final_logit_softcapping")
FLAGS = (
    "tie_word_embeddings", "norm_topk_prob", "use_qk_norm", "qk_layernorm", "moe_router_enable_expert_bias",
    "weight_tying",
)  # fmt: skip
AT_MOST = (
    ("num_experts_per_tok", "num_experts"), ("topk_group", "n_group"), ("vocab_size", "embedding_size"),
    ("first_k_dense_replace", "num_hidden_layers"), ("rotary_dim", "head_dim"),
    ("top_k_experts", "num_experts"),
)  # fmt: skip
"""Fields of which the first must not exceed the second."""
DIVIDES = (
    ("num_key_value_heads", "num_attention_heads"), ("n_group", "num_experts"), ("n_heads", "d_model"),
    ("n_kv_heads", "n_heads"), ("num_global_key_value_heads", "num_attention_heads"),
)  # fmt: skip
"""Fields of which the second must be a multiple of the first."""


def part_of(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """A field that is an object, empty if it is absent or null. ValueError for another kind."""
    value = config.get(field)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"config.json: {field}={value!r:.80} must be an object")
    return value or {}


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of another kind than it has to be, which might pass for a default or a yes."""
    for names, least, null in ((SIZES, 1, False), (SIZES_OR_NULL, 1, True), (COUNTS_OR_NULL, 0, True)):
        for name in names:
            value = config.get(name, least)
            if not (null and value is None) and (type(value) is not int or not least <= value < 2**31):
                allowed = f"an integer, at least {least} and below 2**31{', or null' if null else ''}"
                raise ValueError(f"config.json: {name}={value!r} must be {allowed}")
    for part in (config, part_of(config, "rope_parameters")):
        for name in NUMBERS:
            value = part.get(name, 1.0)
            if name != "rms_norm_eps" and value is None:
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
    if (layers or config.get("n_layers", 1)) * experts > TENSORS:
        name = "n_layers" if layers is None else "num_hidden_layers"
        raise ValueError(
            f"config.json: {name}={config[name]} with num_experts={experts} are more than {TENSORS} experts: no "
            "checkpoint has so many tensors"
        )
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
    for name in NUMBERS:
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


def placements(spec: ModelSpec, names: Names, layout: ExpertLayout) -> Iterator[tuple[str, Placement]]:
    """Every tensor that a checkpoint of this spec must have, and where it goes."""
    yield f"{names.embedding}.weight", Placement("embedding.weight", (spec.vocab, spec.hidden))
    yield f"{names.norm}.weight", Placement("norm.weight", (spec.hidden,))
    if not spec.tied_head:
        yield f"{names.head}.weight", Placement("head.weight", (spec.vocab, spec.hidden))
    for i in range(spec.layers):
        for name, place in _layer(spec, names, i, layout):
            yield name.replace("{i}", str(i)), place


def _layer(spec: ModelSpec, names: Names, layer: int, layout: ExpertLayout) -> Iterator[tuple[str, Placement]]:
    ours, d, e = f"blocks.{layer}", spec.hidden, spec.head_dim
    q, kv = spec.heads * e, spec.kv_heads * e
    yield f"{names.attn_norm}.weight", Placement(f"{ours}.attn_norm.weight", (d,))
    yield f"{names.mlp_norm}.weight", Placement(f"{ours}.mlp_norm.weight", (d,))
    yield f"{names.out}.weight", Placement(f"{ours}.out.weight", (d, q))
    parts = [(names.qkv, q + 2 * kv)] if names.qkv else [(names.q, q), (names.k, kv), (names.v, kv)]
    row = 0
    for part, rows in parts:
        yield f"{part}.weight", Placement(f"{ours}.qkv.weight", (rows, d), row)
        if spec.qkv_bias:
            yield f"{part}.bias", Placement(f"{ours}.qkv.bias", (rows,), row)
        row += rows
    if spec.qk_norm:
        yield f"{names.q_norm}.weight", Placement(f"{ours}.qk_norm.weight", (e,), 0)
        yield f"{names.k_norm}.weight", Placement(f"{ours}.qk_norm.weight", (e,), e)
    experts = spec.experts
    if experts is None or layer in experts.dense:
        yield from _mlp(names.gate, names.up, names.down, f"{ours}.mlp", spec.mlp, d)
        return
    yield f"{names.router}.weight", Placement(f"{ours}.mlp.router.weight", (experts.experts, d))
    if experts.bias:
        yield names.choice_bias, Placement(f"{ours}.mlp.choice_bias", (experts.experts,))
    x, m = experts.experts, experts.width
    if layout == "fused":
        yield names.fused_gate_up, Placement(f"{ours}.mlp.gate_up", (x, 2 * m, d))
        yield names.fused_down, Placement(f"{ours}.mlp.down", (x, d, m))
    if layout == "merged":
        yield names.merged_gate, Placement(f"{ours}.mlp.gate_up", (x, m, d))
        yield names.merged_up, Placement(f"{ours}.mlp.gate_up", (x, m, d), m)
        yield names.merged_down, Placement(f"{ours}.mlp.down", (x, d, m))
    for e in range(x if layout == "separate" else 0):
        gate, up, down = (
            name.replace("{e}", str(e)) for name in (names.expert_gate, names.expert_up, names.expert_down)
        )
        yield f"{gate}.weight", Placement(f"{ours}.mlp.gate_up", (m, d), 2 * m * e)
        yield f"{up}.weight", Placement(f"{ours}.mlp.gate_up", (m, d), 2 * m * e + m)
        yield f"{down}.weight", Placement(f"{ours}.mlp.down", (d, m), d * e)
    if experts.shared:
        shared = names.shared_gate, names.shared_up, names.shared_down
        yield from _mlp(*shared, f"{ours}.mlp.shared", experts.shared, d)


def _mlp(gate: str, up: str, down: str, ours: str, width: int, hidden: int) -> Iterator[tuple[str, Placement]]:
    yield f"{gate}.weight", Placement(f"{ours}.gate_up.weight", (width, hidden), 0)
    yield f"{up}.weight", Placement(f"{ours}.gate_up.weight", (width, hidden), width)
    yield f"{down}.weight", Placement(f"{ours}.down.weight", (hidden, width))
