"""Fast-dLLM v2: block diffusion grown from Qwen2.5 (arXiv:2509.26328; Fast_dLLM_v2_1.5B and _7B).

The logits at a position predict the next token, across the border of blocks too. The published sampler decodes blocks
of 32 in parts of 8, and takes the first token of each block from the finished block before it:
iteration=block_diffusion with block=8 and lead=32.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, BlockFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.qwen import QWEN


@MODELS.register("fast_dllm_v2")
@dataclass(frozen=True, kw_only=True)
class FastDllmV2(BlockFamily):
    """Fast-dLLM v2 checkpoints: block-causal, with shifted logits."""

    paper = "Fast-dLLM v2, arXiv:2509.26328"
    harmless = frozenset({"bd_size", "block_size"})
    tokenizer: ClassVar[str | None] = "Qwen2Tokenizer"
    published_mask: ClassVar[int] = 151665
    published_stops: ClassVar[tuple[int, ...]] = (151645,)

    checkpoint: str = option("Efficient-Large-Model/Fast_dLLM_v2_7B", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "Fast_dLLM_Qwen"

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, PLAIN, QWEN)
        return ModelSpec(
            family="fast_dllm_v2",
            mlp=config["intermediate_size"],
            qkv_bias=True,
            shift=1,
            causal_block=self.attention_block(config, "bd_size"),
            **self.body(config),
        )
