"""Nemotron-Labs-Diffusion: NVIDIA's 3B, 8B and 14B, which decode left to right, in blocks, and by verified drafts."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import PLAIN, Names, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.gated import GatedFamily
from dinfer.families.nemotron import TwoModeSpec, TwoModeTransformer
from dinfer.families.stretches import Yarn

EXPECTED = PLAIN | {
    "attention_bias": (False, None), "mlp_bias": (False, None), "dlm_paradigm": ("bidirectional", None),
    "sliding_window": (None,),
}  # fmt: skip
ABSENT = {"rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
NUMBERS = ("factor", "original_max_position_embeddings", "rope_theta")
OPTIONAL = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}


@MODELS.register("nemotron")
@dataclass(frozen=True, kw_only=True)
class Nemotron(GatedFamily):
    """Nemotron-Labs-Diffusion checkpoints, the language model alone."""

    paper = "NVIDIA Nemotron-Labs-Diffusion, huggingface.co/nvidia"
    harmless = frozenset({
        "block_size", "ar_loss_weight", "dlm_loss_weight", "dp_varying_mask_ratio", "attn_implementation",
    })  # fmt: skip
    published_mask: ClassVar[int] = 100
    published_stops: ClassVar[tuple[int, ...]] = (11,)

    checkpoint: str = option("nvidia/Nemotron-Labs-Diffusion-8B", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "nemotron_labs_diffusion"

    def names(self) -> Names:
        own = {field: re.sub(r"^model\.", "encoder.", name) for field, name in asdict(Names()).items() if name}
        return Names(**own | {"head": "diffusion_head"})

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        rope = numbers(config.get("rope_parameters") or {})
        plain = config | {"rope_parameters": None, "rope_theta": rope["rope_theta"]}
        plain = complete(plain, EXPECTED, ABSENT)
        length, factor = rope["original_max_position_embeddings"], rope["factor"]
        stretch = Yarn(
            factor=factor, fast=rope["beta_fast"], slow=rope["beta_slow"], length=length, theta=rope["rope_theta"]
        )
        scales = rope["mscale"], rope["mscale_all_dim"]
        return TwoModeSpec(
            family="nemotron",
            mlp=plain["intermediate_size"],
            shift=1,
            causal_block=1,
            rope_stretch=stretch,
            turn_scale=grown(factor, scales[0]) / grown(factor, scales[1]) if all(scales) else grown(factor, 1.0),
            query_growth=rope["llama_4_scaling_beta"],
            query_length=length,
            **self.body(plain),
        )

    def network(self, spec: ModelSpec) -> TwoModeTransformer:
        return TwoModeTransformer(spec)


def grown(factor: float, scale: float) -> float:
    """YaRN's scale of cos and sin."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1


def numbers(rope: Mapping[str, Any]) -> dict[str, float]:
    """The fields of `rope_parameters`. Raises ValueError for one that is absent, or no number above 0."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: rope_parameters={rope!r:.80} must be an object")
    if rope.get("rope_type") != "yarn":
        raise ValueError(f"config.json: rope_parameters.rope_type={rope.get('rope_type')!r} must be 'yarn'")
    found: dict[str, Any] = {name: rope.get(name) for name in NUMBERS}
    found |= {name: default if (value := rope.get(name)) is None else value for name, default in OPTIONAL.items()}
    for name, value in found.items():
        least = 0 if name in OPTIONAL and not OPTIONAL[name] else None
        if type(value) not in (int, float) or not (value > 0 or value == least) or value == math.inf:
            raise ValueError(f"config.json: rope_parameters.{name}={value!r} must be a number above 0")
    return found
