"""SDAR: block diffusion grown from Qwen3 (arXiv:2510.06303; SDAR-1.7B/4B/8B-Chat, SDAR-30B-A3B, TraDo)."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.loading.files import local
from dinfer.core.models._family import PLAIN, BlockFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.models.idlm import Idlm
from dinfer.families.qwen import QWEN, qwen_experts

SUFFIX = re.compile(r"-b([1-9][0-9]*)(-|$)")  # SDAR-8B-Chat-b32, SeqD-SDAR-8B-b64-Thinking
# Checkpoints with SDAR's config that are decoded in another way, by their names and the titles of their cards.
OTHERS = {
    re.compile(r"\bI-?DLM\b|introspective diffusion", re.I): (
        "I-DLM: its attention is strictly causal and its logits predict the next token. Put "
        '"use_regular_causal": true into config.json, as its authors do, and it loads as model=idlm'
    ),
    re.compile(r"\bRCD-|residual context diffusion", re.I): (
        "RCD: it is fed what earlier steps expected at the masks. dinfer has no such family yet, and as SDAR its "
        "answers would be wrong"
    ),
}
OF_FOUR = re.compile(r"(^|__|--)(SDAR-(1\.7B|4B|8B|30B-A3B)-(Chat|Sci)|TraDo-[48]B-(Instruct|Thinking))$")
EXPECTED = PLAIN | {"attention_bias": (False, None)}


@MODELS.register("sdar")
@dataclass(frozen=True, kw_only=True)
class Sdar(BlockFamily):
    """SDAR and TraDo checkpoints, dense or with experts."""

    paper = "SDAR, arXiv:2510.06303"
    harmless = frozenset({
        "block_size", "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint",
        "use_deepep",
    })  # fmt: skip
    tokenizer: ClassVar[str | None] = "Qwen2Tokenizer"
    published_mask: ClassVar[int] = 151669
    published_stops: ClassVar[tuple[int, ...]] = (151643, 151645)

    checkpoint: str = option("JetLM/SDAR-8B-Chat", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") in ("sdar", "sdar_moe") and not Idlm.matches(config)

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        self.refuse_others(config)
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

    def refuse_others(self, config: dict[str, Any]) -> None:
        """Raises ValueError for a checkpoint that is no SDAR, though its config says so."""
        said = [*self.own_names(), str(config.get("_name_or_path"))]
        card = local(self.checkpoint) / "README.md"
        if card.is_file():
            said += [line for line in card.read_text("utf-8", "replace").splitlines() if line.startswith("# ")][:1]
        for pattern, what in OTHERS.items():
            if any(pattern.search(text) for text in said):
                raise ValueError(
                    f"config.json: model_type={config['model_type']!r} says SDAR, but this checkpoint is {what}"
                )

    def own_names(self) -> list[str]:
        """The name of the checkpoint's folder, and that of its repository in the hub's cache."""
        path = local(self.checkpoint).absolute()
        return [path.name, *(part for part in path.parts if part.startswith("models--"))]

    def silent_block(self) -> int:
        """As the name says: N of those that end in -bN, and 4 of the others that were published. Raises ValueError."""
        names = self.own_names()
        for name in names:
            if found := SUFFIX.search(name):
                return int(found[1])
            if OF_FOUR.search(name):
                return 4
        raise ValueError(
            f"config.json has no block_size, and the name {names[0]!r} does not say it as SDAR-8B-Chat-b32 does. "
            "Give model.block, the length of the attention blocks that the checkpoint was trained with"
        )
