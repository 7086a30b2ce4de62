"""RND1: bidirectional masked diffusion grown from Qwen3-30B-A3B (Radical Numerics; RND1-Base-0910).

The logits at a position predict the next token, as they did before the model became a diffusion model.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, HubFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.qwen import qwen_experts

EXPECTED = PLAIN | {
    "attention_bias": (False, None),
    "is_causal": (False, None),
    "decoder_sparse_step": (1, None),  # every layer has experts
    "mlp_only_layers": (None, []),
    "routed_scaling_factor": (None, 1),
}
ABSENT = {
    "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "norm_topk_prob": True,
}  # as in the authors' config class  # fmt: skip
OFF = ("rope_scaling", "sliding_window")  # that class writes false for these, where others write null


@MODELS.register("rnd1")
@dataclass(frozen=True, kw_only=True)
class Rnd1(HubFamily):
    """RND1 checkpoints: Qwen3-MoE's network with bidirectional attention."""

    paper = "RND1, github.com/RadicalNumerics/RND1"
    harmless = frozenset({"moe_backend", "num_diffusion_steps"})
    tokenizer: ClassVar[str | None] = "Qwen2Tokenizer"
    published_mask: ClassVar[int] = 151669
    published_stops: ClassVar[tuple[int, ...]] = (151645,)

    checkpoint: str = option("radicalnumerics/RND1-Base-0910", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "rnd1" or config.get("architectures") in (["RND1"], ["RND1LM"])

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        off = {name: None for name in OFF if config.get(name) is False}
        config = complete(config | off, EXPECTED, ABSENT)
        return ModelSpec(
            family="rnd1",
            mlp=config["intermediate_size"],
            qk_norm=True,
            shift=1,
            experts=qwen_experts(config),
            **self.body(config),
        )
