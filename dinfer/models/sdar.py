"""SDAR: block diffusion grown from Qwen3 (arXiv:2510.06303; SDAR-1.7B/4B/8B-Chat, SDAR-30B-A3B, TraDo)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.registry import MODELS, option
from dinfer.core.spec import ExpertSpec, ModelSpec
from dinfer.models._family import PLAIN, BlockFamily, expect

EXPECTED = PLAIN | {"attention_bias": (False, None)}


@MODELS.register("sdar")
@dataclass(frozen=True, kw_only=True)
class Sdar(BlockFamily):
    """SDAR and TraDo checkpoints, dense or with experts."""

    paper = "SDAR, arXiv:2510.06303"
    tokenizer: ClassVar[str | None] = "Qwen2Tokenizer"
    trained: ClassVar[int] = 4
    published_mask: ClassVar[int] = 151669
    published_stops: ClassVar[tuple[int, ...]] = (151643, 151645)

    checkpoint: str = option("JetLM/SDAR-8B-Chat", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") in ("sdar", "sdar_moe")

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        expect(config, EXPECTED)
        mixed = config["model_type"] == "sdar_moe" or "num_experts" in config
        return ModelSpec(
            family="sdar",
            mlp=config["intermediate_size"],
            qk_norm=True,
            causal_block=self.attention_block(config),
            experts=_experts(config) if mixed else None,
            **self.body(config),
        )


def _experts(config: dict[str, Any]) -> ExpertSpec:
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
