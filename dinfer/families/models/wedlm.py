"""WeDLM: Tencent's 7B and 8B, causal in the order in which tokens are fed, known ones before masks."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, HubFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.abilities.fed_order import FedOrderSpec
from dinfer.families.qwen import QWEN


@MODELS.register("wedlm")
@dataclass(frozen=True, kw_only=True)
class Wedlm(HubFamily):
    """WeDLM checkpoints: Qwen2.5's network (7B) or Qwen3's (8B)."""

    paper = "WeDLM, github.com/Tencent/WeDLM"
    harmless = frozenset({"pad_token_id"})
    published_mask: ClassVar[int] = 151665
    published_stops: ClassVar[tuple[int, ...]] = (151643,)

    checkpoint: str = option("tencent/WeDLM-8B-Instruct", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "wedlm"

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = complete(config, PLAIN, QWEN)
        biased, normed = (config.get(name) for name in ("attention_bias", "qk_norm"))
        if (biased, normed) not in ((True, False), (True, None), (False, True), (False, None), (None, True)):
            raise ValueError(
                f"config.json: attention_bias={biased!r} and qk_norm={normed!r} must be true and false (grown from "
                "Qwen2.5), or false and true (from Qwen3)"
            )
        return FedOrderSpec(
            family="wedlm", mlp=config["intermediate_size"], qkv_bias=bool(biased), qk_norm=not biased, causal_block=1,
            **self.body(config),
        )  # fmt: skip
