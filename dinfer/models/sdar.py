"""SDAR: block diffusion grown from Qwen3 (arXiv:2510.06303; SDAR-1.7B/4B/8B-Chat, SDAR-30B-A3B, TraDo)."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.loading.hub import local
from dinfer.models._config import PLAIN, QWEN, complete
from dinfer.models._family import BlockFamily, qwen_experts
from dinfer.recipe.registry import MODELS, option
from dinfer.step.spec import ModelSpec

SUFFIX = re.compile(r"-b([1-9][0-9]*)$")
OF_FOUR = re.compile(r"(^|__|--)(SDAR-(1\.7B|4B|8B|30B-A3B)-(Chat|Sci)|TraDo-[48]B-(Instruct|Thinking))$")
EXPECTED = PLAIN | {"attention_bias": (False, None)}


@MODELS.register("sdar")
@dataclass(frozen=True, kw_only=True)
class Sdar(BlockFamily):
    """SDAR and TraDo checkpoints, dense or with experts."""

    paper = "SDAR, arXiv:2510.06303"
    tokenizer: ClassVar[str | None] = "Qwen2Tokenizer"
    published_mask: ClassVar[int] = 151669
    published_stops: ClassVar[tuple[int, ...]] = (151643, 151645)

    checkpoint: str = option("JetLM/SDAR-8B-Chat", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") in ("sdar", "sdar_moe")

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, EXPECTED, QWEN)
        mixed = config["model_type"] == "sdar_moe" or "num_experts" in config
        if not mixed:
            config.setdefault("head_dim", 128)
        return ModelSpec(
            family="sdar",
            mlp=config["intermediate_size"],
            qk_norm=True,
            causal_block=self.attention_block(config),
            experts=qwen_experts(config) if mixed else None,
            **self.body(config),
        )

    def silent_block(self) -> int:
        """As the name says: N of those that end in -bN, and 4 of the others that were published."""
        path = local(self.checkpoint).absolute()
        cached = [part for part in path.parts if part.startswith("models--")]  # a folder of the hub's cache
        for name in (path.name, *cached):
            if found := SUFFIX.search(name):
                return int(found[1])
            if OF_FOUR.search(name):
                return 4
        raise ValueError(
            f"config.json has no block_size, and the name {path.name!r} does not say it as SDAR-8B-Chat-b32 does. "
            "Give model.block, the length of the attention blocks that the checkpoint was trained with"
        )
