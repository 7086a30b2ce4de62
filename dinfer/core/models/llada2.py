"""LLaDA2: block diffusion with experts (arXiv:2512.15745; LLaDA2.0-mini and -flash, LLaDA2.1, LLaDA2.2-flash)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, BlockFamily, Names, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ExpertSpec, ModelSpec

EXPECTED = PLAIN | {
    "use_bias": (False, None),
    "use_qkv_bias": (False, None),
    "use_rmsnorm": (True, None),
    "norm_head": (False, None),
    "norm_softmax": (False, None),
    "score_function": ("sigmoid", None),
}
# What the authors' config class takes for fields that are absent.
ABSENT = {
    "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "num_shared_experts": 0, "first_k_dense_replace": 0, "moe_router_enable_expert_bias": True, "norm_topk_prob": True,
}  # fmt: skip
ATTENTION = "model.layers.{i}.attention"


@MODELS.register("llada2")
@dataclass(frozen=True, kw_only=True)
class Llada2(BlockFamily):
    """LLaDA2 checkpoints: block-causal, grouped sigmoid router with a bias for the choice alone, shared expert."""

    paper = "LLaDA2.0, arXiv:2512.15745"
    harmless = frozenset({"moe_implementation", "n_group", "router_dtype", "topk_group"})
    published_mask: ClassVar[int] = 156895
    published_stops: ClassVar[tuple[int, ...]] = (156892,)

    checkpoint: str = option("inclusionAI/LLaDA2.0-mini", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") in ("llada2_moe", "llada2_moe_veomni")  # the latter is dFactory's

    def names(self) -> Names:
        return Names(
            embedding="model.word_embeddings", q=None, k=None, v=None, qkv=f"{ATTENTION}.query_key_value",
            q_norm=f"{ATTENTION}.query_layernorm", k_norm=f"{ATTENTION}.key_layernorm", out=f"{ATTENTION}.dense",
        )  # fmt: skip

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, EXPECTED, ABSENT)
        fields = self.body(config)
        rotary, rope_dim = config.get("rotary_dim"), fields["rope_dim"] or fields["head_dim"]
        if rotary is not None and rotary != rope_dim:
            raise ValueError(
                f"config.json: rotary_dim={rotary} and the {rope_dim} entries of a head that partial_rotary_factor "
                "rotates contradict each other"
            )
        capacity = config.get("expert_capacity")
        delete_id, split_id = config.get("delete_token_id"), config.get("split_token_id")
        if (delete_id is None) != (split_id is None):
            raise ValueError("config.json: delete_token_id and split_token_id must be there both, or neither")
        return ModelSpec(
            family="llada2",
            mlp=config["intermediate_size"],
            qk_norm=config["use_qk_norm"],
            causal_block=self.attention_block(config),
            experts=ExpertSpec(
                experts=config["num_experts"],
                chosen=config["num_experts_per_tok"],
                width=config["moe_intermediate_size"],
                scores="sigmoid",
                normalize=config["norm_topk_prob"],
                scale=config["routed_scaling_factor"],
                bias=config["moe_router_enable_expert_bias"],
                # Where blocks choose their experts (2.2), they do so among all of them.
                groups=1 if capacity else config["n_group"],
                groups_chosen=1 if capacity else config["topk_group"],
                capacity=capacity,
                shared=config["moe_intermediate_size"] * config["num_shared_experts"],
                dense=tuple(range(config["first_k_dense_replace"])),
            ),
            delete_id=delete_id,
            split_id=split_id,
            **fields,
        )
