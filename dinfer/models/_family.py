"""What model families have in common: options, special tokens, and the names of tensors as templates."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.layers.transformer import Transformer
from dinfer.loading.token_ids import PUBLISHED, listed
from dinfer.parallel.split import Placement, Section, Split
from dinfer.recipe.registry import option
from dinfer.step.contracts import ModelFamily
from dinfer.step.spec import ExpertLayout, ExpertSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A checkpoint's tensor names, without ".weight". `{i}` stands for the layer, `{e}` for the expert.

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
        None, "length of the attention blocks behind the prompt, for adapters trained so (D2F); null: bidirectional"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None and self.block < 1:
            raise ValueError(f"model.block={self.block} must be at least 1")

    @property
    def attention(self) -> dict[str, Any]:
        """Fields of `ModelSpec`."""
        return {"causal_block": self.block, "prompt_block": self.block is not None}


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


def qwen_experts(config: Mapping[str, Any]) -> ExpertSpec:
    """Qwen3-MoE's: softmax over all, then the best, renormalised if the config says so."""
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
    gate_up, down = halves(1, m), Split(2, (Section("width", m),))
    if layout == "merged":
        yield names.merged_gate, Placement(f"{ours}.gate_up", (x, m, d), 0, gate_up, x)
        yield names.merged_up, Placement(f"{ours}.gate_up", (x, m, d), m, gate_up, x)
        yield names.merged_down, Placement(f"{ours}.down", (x, d, m), 0, down, x)
    for e in range(x if layout == "separate" else 0):
        own = (name.replace("{e}", str(e)) for name in (names.expert_gate, names.expert_up, names.expert_down))
        gate_name, up_name, down_name = own
        yield f"{gate_name}.weight", Placement(f"{ours}.gate_up", (m, d), 0, gate_up, x, e)
        yield f"{up_name}.weight", Placement(f"{ours}.gate_up", (m, d), m, gate_up, x, e)
        yield f"{down_name}.weight", Placement(f"{ours}.down", (d, m), 0, down, x, e)


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
