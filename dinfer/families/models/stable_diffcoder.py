"""Stable-DiffCoder: block diffusion grown from Seed-Coder (arXiv:2601.15892; Stable-DiffCoder-8B-Base, -Instruct)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, BlockFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec

ABSENT = {
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}  # as LlamaConfig
EXPECTED = PLAIN | {"attention_bias": (False, None), "mlp_bias": (False, None)}


@MODELS.register("stable_diffcoder")
@dataclass(frozen=True, kw_only=True)
class StableDiffcoder(BlockFamily):
    """Stable-DiffCoder checkpoints: a Llama body, block-causal."""

    paper = "Stable-DiffCoder, arXiv:2601.15892"
    published_block: ClassVar[int] = 4
    published_mask: ClassVar[int] = 5
    published_stops: ClassVar[tuple[int, ...]] = (2,)

    checkpoint: str = option("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        # The model_type is that of any Llama. Early revisions are of the class SeedDiffcoderForCausalLM.
        return "DiffcoderForCausalLM" in f"{config.get('architectures')} {config.get('auto_map')}"

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, EXPECTED, ABSENT)
        return ModelSpec(
            family="stable_diffcoder",
            mlp=config["intermediate_size"],
            causal_block=self.attention_block(config),
            **self.body(config),
        )
