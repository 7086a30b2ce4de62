"""What model families have in common: fields of config.json, options, special tokens, templates of tensors' names."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.layers.transformer import Transformer
from dinfer.core.loading.files import PUBLISHED, Fields, listed
from dinfer.core.models.family import ModelFamily, Placement, Split
from dinfer.core.options import option
from dinfer.core.ranks.split import Section
from dinfer.core.terms.spec import ExpertLayout, ExpertSpec, ModelSpec

# Counts in config.json: the least, whether null is allowed, and the fields.
COUNTS: tuple[tuple[int, bool, tuple[str, ...]], ...] = (
    (1, False, (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "expert_intermediate_size", "n_group", "topk_group", "decoder_sparse_step", "d_model", "n_heads", "n_layers",
        "max_sequence_length", "mlp_ratio", "global_head_dim", "top_k_experts",
    )),
    (1, True, (
        "num_key_value_heads", "head_dim", "block_size", "bd_size", "expert_capacity", "rotary_dim",
        "dense_intermediate_size", "n_kv_heads", "mlp_hidden_size", "embedding_size", "num_global_key_value_heads",
        "sliding_window",
    )),
    (0, True, ("num_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")),
)  # fmt: skip
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
    largest = 2**31  # no checkpoint comes near
    for least, null, names in COUNTS:
        for name in names:
            value = config.get(name, least)
            if not (null and value is None) and (type(value) is not int or not least <= value < largest):
                allowed = f"an integer, at least {least}{', or null' if null else ''}"
                allowed = f"below {largest}" if type(value) is int and value > least else allowed
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
    most = 2**20  # experts of all layers: their names fill memory, and no checkpoint comes near
    if (layers or config.get("n_layers", 1)) * experts > most:
        name = "n_layers" if layers is None else "num_hidden_layers"
        raise ValueError(f"config.json: {name}={config[name]} times num_experts={experts} must be at most {most}")
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
    whole = dict(config.items()) | named
    for name in NUMBERS_OR_NULL:
        if name in absent and whole.get(name, absent[name]) is None:
            raise ValueError(f"config.json: {name}=None must be a number above 0")
    given = {**absent, **{name: value for name, value in whole.items() if value is not None}}
    return config.like(given) if isinstance(config, Fields) else given


def expect(config: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError for a field of the wrong kind, at odds with another, or that would make another network.

    None among the allowed values: absent or null.
    """
    plain = dict(config.items())  # these look at fields of all families
    check_kinds(plain)
    check_fit(plain)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A checkpoint's tensor names, without ".weight". `{i}` stands for the layer, `{e}` for the expert.

    The tensors of all experts of a layer, merged, have the name of one expert's without `{e}.` and ".weight".
    None: the family has no such tensor. A model without bias, QK-norm or experts lacks some of the others, as its
    `ModelSpec` says.
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
    fused_gate_up: str = "model.layers.{i}.mlp.w1"  # these two are full names, of all experts of a layer
    fused_down: str = "model.layers.{i}.mlp.w2"
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
        super().__post_init__()
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

    If the vocabulary is too small for them, it is another one. Then these are the ids of the option, if it is given.
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
    """A family of the one transformer core. `spec` and `names` hold all that differs."""

    published_mask: ClassVar[int]  # for checkpoints whose files name none

    mask_id: int | None = option(None, "id of the mask token; null: as the checkpoint's config or tokenizer says")

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
        name = "config.json: mask_token_id" if self.mask_id is None else "model.mask_id"
        stops = self.stops(config, vocab)
        if mask[0] in stops["stop_ids"]:
            raise ValueError(f"{name}={mask[0]} is a stop token as well: eos_token_id={[*stops['stop_ids']]}")
        return {"mask_id": mask[0], **stops}

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
class PromptBlockFamily(HubFamily):
    """A family of bidirectional models that adapters may make block-causal."""

    block: int | None = option(
        None, "length of the attention blocks right of the prompt, for adapters trained so (D2F); null: bidirectional",
        least=1,
    )  # fmt: skip

    @property
    def attention(self) -> dict[str, Any]:
        """Fields of `ModelSpec`."""
        return {"causal_block": self.block, "prompt_block": self.block is not None}


@dataclass(frozen=True, kw_only=True)
class BlockFamily(HubFamily):
    """A family of block-causal models."""

    published_block: ClassVar[int] = 32  # length of the attention blocks of checkpoints whose config is silent about it

    block: int | None = option(None, "length of the attention blocks; null: as the checkpoint was trained", least=1)

    def attention_block(self, config: Mapping[str, Any], field: str = "block_size") -> int:
        """Length of the attention blocks."""
        trained = config.get(field)
        return self.block or trained or self.silent_block()

    def silent_block(self) -> int:
        """The length for a checkpoint whose config.json has none."""
        return self.published_block


def placements(spec: ModelSpec, names: Names, layout: ExpertLayout) -> Iterator[tuple[str, Placement]]:
    """Every tensor that a checkpoint of this spec must have, and where it goes."""
    table, vocab = (spec.vocab, spec.hidden), Split(0, (Section("vocab", spec.vocab),))
    yield f"{names.embedding}.weight", Placement("embedding.weight", table, split=vocab)
    yield f"{names.norm}.weight", Placement("norm.weight", (spec.hidden,))
    if not spec.tied_head:
        yield f"{names.head}.weight", Placement("head.weight", table, split=vocab)
    for i in range(spec.layers):
        for name, place in _layer(spec, names, i, layout):
            yield name.replace("{i}", str(i)), place


def _layer(spec: ModelSpec, names: Names, layer: int, layout: ExpertLayout) -> Iterator[tuple[str, Placement]]:
    ours, d, e = f"blocks.{layer}", spec.hidden, spec.head_dim
    q, kv = spec.heads * e, spec.kv_heads * e
    yield f"{names.attn_norm}.weight", Placement(f"{ours}.attn_norm.weight", (d,))
    yield f"{names.mlp_norm}.weight", Placement(f"{ours}.mlp_norm.weight", (d,))
    heads, kv_heads = Section("heads", spec.heads, e), Section("kv_heads", spec.kv_heads, e)
    yield f"{names.out}.weight", Placement(f"{ours}.out.weight", (d, q), split=Split(1, (heads,)))
    parts = [(names.qkv, q + 2 * kv)] if names.qkv else [(names.q, q), (names.k, kv), (names.v, kv)]
    row, by_head = 0, Split(0, (heads, kv_heads, kv_heads))
    for part, rows in parts:
        yield f"{part}.weight", Placement(f"{ours}.qkv.weight", (rows, d), row, by_head)
        if spec.qkv_bias:
            yield f"{part}.bias", Placement(f"{ours}.qkv.bias", (rows,), row, by_head)
        row += rows
    if spec.qk_norm:
        yield f"{names.q_norm}.weight", Placement(f"{ours}.qk_norm.weight", (e,), 0)
        yield f"{names.k_norm}.weight", Placement(f"{ours}.qk_norm.weight", (e,), e)
    experts = spec.experts
    if experts is None or layer in experts.dense:
        yield from mlp_placements((names.gate, names.up, names.down), f"{ours}.mlp", spec.mlp, d)
        return
    yield f"{names.router}.weight", Placement(f"{ours}.mlp.router.weight", (experts.experts, d))
    if experts.bias:
        yield names.choice_bias, Placement(f"{ours}.mlp.choice_bias", (experts.experts,))
    yield from _experts(experts, names, f"{ours}.mlp", d, layout)
    if experts.shared:
        shared = names.shared_gate, names.shared_up, names.shared_down
        yield from mlp_placements(shared, f"{ours}.mlp.shared", experts.shared, d)


def _experts(
    spec: ExpertSpec, names: Names, ours: str, d: int, layout: ExpertLayout
) -> Iterator[tuple[str, Placement]]:
    x, m = spec.experts, spec.width
    if layout == "fused":
        yield from fused_placements((names.fused_gate_up, names.fused_down), ours, spec, d)
        return
    gate_up, down = halves(1, m), Split(2, (Section("width", m),))
    for e in [None] if layout == "merged" else range(x):
        all_of = (x,) if e is None else ()
        for name, place in (
            (names.expert_gate, Placement(f"{ours}.gate_up", (*all_of, m, d), 0, gate_up, x, e)),
            (names.expert_up, Placement(f"{ours}.gate_up", (*all_of, m, d), m, gate_up, x, e)),
            (names.expert_down, Placement(f"{ours}.down", (*all_of, d, m), 0, down, x, e)),
        ):
            yield name.replace("{e}.", "") if e is None else f"{name.replace('{e}', str(e))}.weight", place


def fused_placements(
    names: tuple[str, str], ours: str, spec: ExpertSpec, hidden: int
) -> Iterator[tuple[str, Placement]]:
    """Experts of which gate and up are one tensor, and down is another."""
    x, m = spec.experts, spec.width
    yield names[0], Placement(f"{ours}.gate_up", (x, 2 * m, hidden), 0, halves(1, m), x)
    yield names[1], Placement(f"{ours}.down", (x, hidden, m), 0, Split(2, (Section("width", m),)), x)


def mlp_placements(names: tuple[str, str, str], ours: str, width: int, hidden: int) -> Iterator[tuple[str, Placement]]:
    """A gated MLP, whose gate and up are one matrix of ours."""
    gate, up, down = names
    yield f"{gate}.weight", Placement(f"{ours}.gate_up.weight", (width, hidden), 0, halves(0, width))
    yield f"{up}.weight", Placement(f"{ours}.gate_up.weight", (width, hidden), width, halves(0, width))
    yield (
        f"{down}.weight",
        Placement(f"{ours}.down.weight", (hidden, width), split=Split(1, (Section("width", width),))),
    )


def halves(dim: int, width: int) -> Split:
    """The division of gate rows, followed by as many up rows."""
    return Split(dim, (Section("width", width), Section("width", width)))
