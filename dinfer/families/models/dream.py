"""Dream: bidirectional masked diffusion grown from Qwen2.5 (arXiv:2508.15487; Dream-v0, Dream-Coder, DiffuCoder).

The logits at a position predict the next token, as they did before the model became a diffusion model.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, PromptBlockFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.qwen import QWEN


@MODELS.register("dream")
@dataclass(frozen=True, kw_only=True)
class Dream(PromptBlockFamily):
    """Dream, Dream-Coder and DiffuCoder checkpoints."""

    paper = "Dream 7B, arXiv:2508.15487"
    tokenizer: ClassVar[str | None] = "Qwen2Tokenizer"
    published_mask: ClassVar[int] = 151666
    published_stops: ClassVar[tuple[int, ...]] = (151643,)

    checkpoint: str = option("Dream-org/Dream-v0-Instruct-7B", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "Dream"

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, PLAIN, QWEN)
        return ModelSpec(
            family="dream",
            mlp=config["intermediate_size"],
            qkv_bias=True,
            shift=1,
            **self.attention,
            **self.body(config),
        )
