"""LLaDA: dense bidirectional masked diffusion (arXiv:2502.09992; LLaDA-8B-Base and -Instruct, LLaDA-1.5).

A LLaMA-like body without biases. The checkpoints' config has OLMo's field names, many of them for variants that were
never released; those are refused by name rather than loaded wrongly.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import Names, PromptBlockFamily, expect
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec

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
LAYER = "model.transformer.blocks.{i}"


@MODELS.register("llada")
@dataclass(frozen=True, kw_only=True)
class Llada(PromptBlockFamily):
    """Dense LLaDA checkpoints, from the Hugging Face hub or a folder."""

    paper = "LLaDA, arXiv:2502.09992"
    harmless = frozenset({
        "alibi_bias_max", "attention_layer_norm_with_affine", "block_group_size", "flash_attention",
        "flash_attn_varlen", "init_cutoff_factor", "init_device", "init_fn", "init_std", "mlp_ratio",
        "precision", "rope_full_precision", "vocab_size",
    })  # fmt: skip
    published_mask: ClassVar[int] = 126336
    published_stops: ClassVar[tuple[int, ...]] = (126081,)

    checkpoint: str = option("GSAI-ML/LLaDA-8B-Instruct", "hub name, folder, or the name of a model in the box")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        # LLaDA-MoE and the text of LLaDA-V have the same model_type, but fields of their own.
        return config.get("model_type") == "llada" and not {"num_experts", "hidden_size"} & config.keys()

    def names(self) -> Names:
        return Names(
            embedding="model.transformer.wte", norm="model.transformer.ln_f", head="model.transformer.ff_out",
            attn_norm=f"{LAYER}.attn_norm", mlp_norm=f"{LAYER}.ff_norm", out=f"{LAYER}.attn_out",
            q=f"{LAYER}.q_proj", k=f"{LAYER}.k_proj", v=f"{LAYER}.v_proj",
            gate=f"{LAYER}.ff_proj", up=f"{LAYER}.up_proj", down=f"{LAYER}.ff_out",
        )  # fmt: skip

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        expect(config, EXPECTED)
        hidden, heads = config["d_model"], config["n_heads"]
        kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
        vocab = config.get("embedding_size") or config["vocab_size"]
        return ModelSpec(
            family="llada",
            vocab=vocab,
            hidden=hidden,
            layers=config["n_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            mlp=config.get("mlp_hidden_size") or config["mlp_ratio"] * hidden,
            norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
            tied_head=bool(config["weight_tying"]),
            max_length=config["max_sequence_length"],
            **self.attention,
            **self.tokens(config, vocab),
        )
