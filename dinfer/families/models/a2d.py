"""A2D: Llama and Qwen checkpoints that became diffusion models (github.com/ZHZisZZ/dllm; tools/convert_ar).

Two kinds share a config: mdlm, whose positions all see each other, and bd3lm, of attention blocks. Logits predict the
token at their own position; where config.json says `shift`, the next one, as tools/convert_ar trains it. A plain Llama
or Qwen checkpoint with an adapter for masks alone stays causal, and its masks draft (I-DLM's form).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dinfer.core.loading.files import ADAPTER, local, locate, read_object
from dinfer.core.models._family import PLAIN, BlockFamily, complete
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.gated import GatedFamily
from dinfer.families.stretches import RopeStretch

PARENTS = {
    "llama": {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen2": {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    "qwen3": {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
}
"""What transformers takes for absent fields of the models that these grew from."""
EXPECTED = PLAIN | {"rope_scaling": (None,), "attention_bias": (False, None), "mlp_bias": (False, None)}
DIFFUSION = "diffusion.json"  # of an adapter's folder: the fields of config.json that make its base a diffusion model
DRAFTS = "drafts"  # its field in an adapter of masks alone: how many masks were trained to stand side by side
STRETCH = {
    "factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high",
    "original_max_position_embeddings": "length",
}  # fmt: skip


@MODELS.register("a2d")
@dataclass(frozen=True, kw_only=True)
class A2d(GatedFamily, BlockFamily):
    """A2D checkpoints, and plain Llama or Qwen ones with an adapter that tools/convert_ar made."""

    paper = "github.com/ZHZisZZ/dllm"
    harmless = frozenset({"block_size", "pretraining_tp"})
    published_mask: ClassVar[int] = 151669
    published_stops: ClassVar[tuple[int, ...]] = (151645, 151643)

    checkpoint: str = option("dllm-collection/Qwen3-0.6B-diffusion-bd3lm-v0.1", "hub name, folder or GGUF file")
    bidirectional: bool = option(False, "all positions see each other, as in checkpoints whose name says mdlm")
    origin: Literal["position", "prompt"] = option(
        "position", "count attention blocks from position 0, or from the prompt's end, as dllm's bd3lm sampler does"
    )

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        kind, classes = config.get("model_type"), f"{config.get('architectures')} {config.get('auto_map')}"
        plain = kind in [*PARENTS] and "Diff" not in classes  # spec refuses those without an adapter
        return plain or kind in [f"a2d-{parent}" for parent in PARENTS]

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        config = self.converted(config)
        shift = config.get("shift", 0)
        if shift not in (0, 1) or type(shift) is not int:
            raise ValueError(f"config.json: shift={shift!r} must be 0, or 1 if logits predict the next token")
        parent = config["model_type"].removeprefix("a2d-")
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(scaling, dict):
            raise ValueError(f"config.json: rope_scaling={scaling!r:.80} must be an object or null")
        stretch = stretched(scaling) if scaling.get("rope_type") == "llama3" else None
        if stretch is not None:
            theta = scaling.get("rope_theta", config.get("rope_theta"))
            config = config | {"rope_scaling": None, "rope_parameters": None, "rope_theta": theta}
        config = complete(config, EXPECTED, PARENTS[parent])
        block, behind = self.attention(config), self.origin == "prompt"
        if behind and (block or 1) == 1:
            raise ValueError("model.origin=prompt counts attention blocks, and this model has none: leave it out")
        return ModelSpec(
            family="a2d",
            mlp=config["intermediate_size"],
            qkv_bias=parent == "qwen2",
            qk_norm=parent == "qwen3",
            rope_stretch=stretch,
            shift=shift,
            causal_block=block,
            prompt_block=behind,
            prompt_whole=not behind,
            **self.body(config),
        )

    def converted(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json of a diffusion model: the checkpoint's, or with an adapter's changes.

        Raises ValueError for an autoregressive checkpoint without an adapter that makes it a diffusion model.
        """
        kind = config.get("model_type")
        self.check_drafts(kind)
        if kind not in PARENTS:
            return config
        adapter = self.adapter or self.draft_adapter
        if adapter is None and self.block == 1:
            return config | {"shift": 1}  # the next token is all that such a block holds
        if adapter is None:
            raise ValueError(
                f"config.json: model_type={kind!r} is an autoregressive model, which fills no masks: give "
                "model.adapter, an adapter that makes it a diffusion model, as tools/convert_ar writes one, or "
                "model.block=1 to decode it token by token"
            )
        folder = locate(adapter, needed=ADAPTER)
        if not (folder / DIFFUSION).is_file():
            raise ValueError(
                f"config.json: model_type={kind!r} is an autoregressive model, and the adapter {adapter} has no "
                f"{DIFFUSION}, which would say that it makes a diffusion model of it: convert by tools/convert_ar"
            )
        changes = read_object(folder / DIFFUSION)
        if changes.get("model_type") != f"a2d-{kind}":
            raise ValueError(
                f"config.json: model_type={kind!r} is not the base of the adapter {adapter}, whose {DIFFUSION} "
                f"says {changes.get('model_type')!r}"
            )
        fits = {key: config.get(key) for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
        other = {key: value for key, value in changes.get("base", {}).items() if fits.get(key, value) != value}
        if other:
            name = next(iter(other))
            raise ValueError(
                f"config.json: {name}={config[name]} does not fit the adapter {adapter}, which was made for "
                f"another base, of {name}={other[name]}"
            )
        self.check_kind(adapter, changes)
        return config | {key: value for key, value in changes.items() if key not in ("base", DRAFTS)}

    def check_drafts(self, kind: Any) -> None:
        """Raises ValueError for options that a model whose masks draft cannot have."""
        if self.draft_adapter is None:
            return
        if self.adapter is not None:
            raise ValueError(
                "model.adapter makes a model of blocks, and model.draft_adapter one whose masks draft: give one of them"
            )
        if kind not in PARENTS:
            raise ValueError(
                f"config.json: model_type={kind!r} is a diffusion model, and model.draft_adapter is for masks of an "
                f"autoregressive one ({', '.join(PARENTS)}): leave it out"
            )
        if self.bidirectional or self.block not in (None, 1):
            raise ValueError(
                "a model with model.draft_adapter stays causal: leave out model.block and model.bidirectional"
            )

    def check_kind(self, adapter: str, said: dict[str, Any]) -> None:
        """Raises ValueError for an adapter of blocks where one of drafts is wanted, and the other way round."""
        if (DRAFTS in said) is not (self.draft_adapter is not None):
            was, option = ("draft_adapter", "masks that draft") if DRAFTS in said else ("adapter", "blocks")
            raise ValueError(
                f"{DIFFUSION} of the adapter {adapter} says that it is for {option}: give model.{was}={adapter}"
            )

    def attention(self, config: dict[str, Any]) -> int | None:
        """Length of the attention blocks; None: all positions see each other."""
        if self.draft_adapter is not None:
            return 1
        whole = self.bidirectional or (self.block is None and "mdlm" in local(self.checkpoint).name.casefold())
        return None if whole else self.attention_block(config)


def stretched(scaling: dict[str, Any]) -> RopeStretch:
    """Llama 3's scaling of rotary frequencies. Raises ValueError for a field that is absent or no number above 0."""
    for name in STRETCH:
        if type(scaling.get(name)) not in (int, float) or not scaling[name] > 0:
            raise ValueError(f"config.json: rope_scaling.{name}={scaling.get(name)!r} must be a number above 0")
    return RopeStretch(**{ours: scaling[theirs] for theirs, ours in STRETCH.items()})
