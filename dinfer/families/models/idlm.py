"""I-DLM: a causal model whose masks predict further tokens ahead (Introspective Diffusion, Together AI)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.gated import GatedFamily
from dinfer.families.qwen import QWEN

EXPECTED = PLAIN | {"attention_bias": (False, None), "use_regular_causal": (True, None)}


@MODELS.register("idlm")
@dataclass(frozen=True, kw_only=True)
class Idlm(GatedFamily):
    """I-DLM checkpoints, whose config is SDAR's with `use_regular_causal`."""

    paper = "I-DLM, github.com/thuEcstasy/I-DLM"
    harmless = frozenset({"block_size", "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint"})
    tokenizer: ClassVar[str | None] = "Qwen2Tokenizer"
    published_mask: ClassVar[int] = 151669
    published_stops: ClassVar[tuple[int, ...]] = (151645,)

    checkpoint: str = option("yifanyu/I-DLM-8B", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        named = "I-DLM" in str(config.get("_name_or_path"))
        return config.get("model_type") == "sdar" and (config.get("use_regular_causal") is True or named)

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, EXPECTED, QWEN)
        config.setdefault("head_dim", 128)
        return ModelSpec(
            family="idlm", mlp=config["intermediate_size"], qk_norm=True, shift=1, causal_block=1, **self.body(config)
        )
