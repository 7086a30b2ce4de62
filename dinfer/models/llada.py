"""LLaDA: dense bidirectional masked diffusion (arXiv:2502.09992; LLaDA-8B-Base and -Instruct, LLaDA-1.5).

A LLaMA-like body without biases. The checkpoints' config has OLMo's field names, many of them for variants that were
never released; those are refused by name rather than loaded wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dinfer.layers.transformer import Transformer
from dinfer.protocols import ModelFamily, ModelSpec, Placement
from dinfer.registry import MODELS, option

# Fields that would change the network if they differed. None: absent or null.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True, None),
    "activation_type": ("silu",),  # of the gate; the published code's "swiglu" halves it, which no llama block fits
    "rope": (True,),
    "alibi": (False, None),
    "attention_layer_norm": (False, None),
    "include_bias": (False, None),
    "include_qkv_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "input_emb_norm": (False, None),
    "scale_logits": (False, None),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
}
PREFIX = "model.transformer"


@MODELS.register("llada")
@dataclass(frozen=True, kw_only=True)
class Llada(ModelFamily):
    """Dense LLaDA checkpoints, from the Hugging Face hub or a folder."""

    paper = "LLaDA, arXiv:2502.09992"

    checkpoint: str = option("GSAI-ML/LLaDA-8B-Instruct", "hub name, folder, or the name of a model in the box")
    revision: str | None = option(None, "commit, tag or branch on the hub")
    stop_ids: tuple[int, ...] = option((), "token ids that end an answer, beside the checkpoint's eos_token_id")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if not all(type(token) is int and token >= 0 for token in self.stop_ids):
            raise ValueError(f"model.stop_ids={list(self.stop_ids)} must be token ids")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        # LLaDA-MoE has the same model_type, but fields of its own.
        return config.get("model_type") == "llada" and "num_experts" not in config

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        for name, allowed in EXPECTED.items():
            if config.get(name) not in allowed:
                raise ValueError(f"config.json: {name}={config.get(name)!r} is not supported; only {allowed[0]!r} is")
        hidden, heads = config["d_model"], config["n_heads"]
        if not heads or hidden % heads:
            raise ValueError(f"config.json: d_model={hidden} must be a multiple of n_heads={heads}")
        kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
        if heads % kv_heads:
            raise ValueError(f"config.json: n_heads={heads} must be a multiple of n_kv_heads={kv_heads}")
        eos = config["eos_token_id"]
        eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        return ModelSpec(
            family="llada",
            vocab=config.get("embedding_size") or config["vocab_size"],
            hidden=hidden,
            layers=config["n_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            mlp=config.get("mlp_hidden_size") or config["mlp_ratio"] * hidden,
            norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
            tied_head=config["weight_tying"],
            max_length=config["max_sequence_length"],
            mask_id=config["mask_token_id"],
            eos_id=eos_ids[0],
            stop_ids=eos_ids + tuple(token for token in self.stop_ids if token not in eos_ids),
        )

    def network(self, spec: ModelSpec) -> Transformer:
        return Transformer(spec)

    def weights(self, spec: ModelSpec) -> dict[str, Placement]:
        d, m, q, kv = spec.hidden, spec.mlp, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        tensors = {
            f"{PREFIX}.wte.weight": Placement("embedding.weight", (spec.vocab, d)),
            f"{PREFIX}.ln_f.weight": Placement("norm.weight", (d,)),
        }
        if not spec.tied_head:
            tensors[f"{PREFIX}.ff_out.weight"] = Placement("head.weight", (spec.vocab, d))
        for i in range(spec.layers):
            theirs, ours = f"{PREFIX}.blocks.{i}", f"blocks.{i}"
            tensors |= {
                f"{theirs}.attn_norm.weight": Placement(f"{ours}.attn_norm.weight", (d,)),
                f"{theirs}.q_proj.weight": Placement(f"{ours}.qkv.weight", (q, d), 0),
                f"{theirs}.k_proj.weight": Placement(f"{ours}.qkv.weight", (kv, d), q),
                f"{theirs}.v_proj.weight": Placement(f"{ours}.qkv.weight", (kv, d), q + kv),
                f"{theirs}.attn_out.weight": Placement(f"{ours}.out.weight", (d, q)),
                f"{theirs}.ff_norm.weight": Placement(f"{ours}.mlp_norm.weight", (d,)),
                f"{theirs}.ff_proj.weight": Placement(f"{ours}.gate_up.weight", (m, d), 0),
                f"{theirs}.up_proj.weight": Placement(f"{ours}.gate_up.weight", (m, d), m),
                f"{theirs}.ff_out.weight": Placement(f"{ours}.down.weight", (d, m)),
            }
        return tensors
