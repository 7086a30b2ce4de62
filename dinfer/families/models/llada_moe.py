"""LLaDA-MoE: bidirectional masked diffusion with experts (arXiv:2509.24389; LLaDA-MoE-7B-A1B-Base, -Instruct, -TD)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, HubFamily, Names, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ExpertSpec, ModelSpec

EXPECTED = PLAIN | {
    "attention_bias": (False, None),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_score_function": ("softmax", None),
    "norm_topk_prob": (None, False),
    "router_num_group": (None, -2),  # -2: the default of the authors' config class
    "router_topk_group": (None, -2),
    "routed_scaling_factor": (1, None),
    "partial_rotary_factor": (1, None),
}
ABSENT = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}  # as in the authors' config class
SHARED = "model.layers.{i}.shared_expert"


@MODELS.register("llada_moe")
@dataclass(frozen=True, kw_only=True)
class LladaMoe(HubFamily):
    """LLaDA-MoE checkpoints: softmax router without renormalisation, QK-norm, no bias."""

    paper = "LLaDA-MoE, arXiv:2509.24389"
    harmless = frozenset({"intermediate_size"})  # it has one size for dense layers and one for experts
    published_mask: ClassVar[int] = 156895
    published_stops: ClassVar[tuple[int, ...]] = (156892,)

    checkpoint: str = option("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        # The dense LLaDA has the same model_type.
        return config.get("model_type") in ("llada", "llada_moe", "lladamoe") and "num_experts" in config

    def names(self) -> Names:
        return Names(
            shared_gate=f"{SHARED}.gate_proj", shared_up=f"{SHARED}.up_proj", shared_down=f"{SHARED}.down_proj"
        )

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, EXPECTED, ABSENT)
        layers, mixed = config["num_hidden_layers"], config.get("moe_layer_freq")
        mixed = [1] * layers if mixed is None else mixed
        if len(mixed) != layers or any(flag not in (0, 1) for flag in mixed):
            raise ValueError(f"config.json: moe_layer_freq={mixed!r} must be a 0 or 1 for each of {layers} layers")
        return ModelSpec(
            family="llada_moe",
            mlp=config.get("dense_intermediate_size") or config["expert_intermediate_size"],
            qk_norm=bool(config.get("qk_layernorm")),
            experts=ExpertSpec(
                experts=config["num_experts"],
                chosen=config["num_experts_per_tok"],
                width=config["expert_intermediate_size"],
                shared=config.get("shared_expert_intermediate_size") or 0,
                dense=tuple(i for i, flag in enumerate(mixed) if not flag),
            ),
            **self.body(config),
        )
