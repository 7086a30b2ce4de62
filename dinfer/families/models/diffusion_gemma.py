"""DiffusionGemma: text by uniform renoising, a causal encoder and a bidirectional decoder (google/diffusiongemma)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dinfer.core.models._family import check_kinds, complete, expect, fused_placements, mlp_placements
from dinfer.core.models.family import Placement, Split
from dinfer.core.ranks.split import Section
from dinfer.core.registry import MODELS, option
from dinfer.core.terms.spec import ExpertLayout, ExpertSpec, LocalAttention, ModelSpec
from dinfer.families.gemma import Gemma
from dinfer.families.images.gemma import GemmaEyes
from dinfer.families.models._seeing import SeeingFamily

EXPECTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "use_bidirectional_attention": (None, "vision"),  # "vision": image tokens see each other
    "tie_word_embeddings": (True, None),
}
LOCAL, FULL = "sliding_attention", "full_attention"
# What transformers' DiffusionGemmaTextConfig takes for fields that are absent.
ABSENT: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0, "max_position_embeddings": 131072, "sliding_window": 512,
    "global_head_dim": 512, "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}  # fmt: skip
DECODER, ENCODER = "model.decoder", "model.encoder.language_model"


@MODELS.register("diffusion_gemma")
@dataclass(frozen=True, kw_only=True)
class DiffusionGemma(SeeingFamily):
    """DiffusionGemma checkpoints, with their vision tower if they have one and Pillow is installed.

    Published decoding: iteration=self_conditioned, decoder=renoise, sampling.temperature=1 and cache=block.
    """

    paper = "DiffusionGemma, transformers 5.23"
    harmless = frozenset({
        "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "canvas_length", "eoa_token_id",
        "eoi_token_id", "image_token_id", "tie_word_embeddings", "video_token_id", "vision_config",
        "vision_soft_tokens_per_image",
    })  # fmt: skip
    eyes = GemmaEyes
    unused: ClassVar[tuple[str, ...]] = GemmaEyes.prefixes  # of the network; its eyes take them
    published_stops: ClassVar[tuple[int, ...]] = (1, 106, 50)

    checkpoint: str = option("google/diffusiongemma-26B-A4B-it", "hub name or folder")

    @classmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "diffusion_gemma"

    def network(self, spec: ModelSpec) -> Gemma:
        return Gemma(spec)

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        if not isinstance(text := config.get("text_config"), Mapping):
            raise ValueError(f"config.json: text_config={text!r:.80} must be an object")
        text = complete(text, EXPECTED, ABSENT)
        layers = range(text["num_hidden_layers"])
        text.setdefault("layer_types", [LOCAL if (layer + 1) % 6 else FULL for layer in layers])
        kinds, ropes = text["layer_types"], text["rope_parameters"]
        if kinds[-1] != FULL or any(kind not in (LOCAL, FULL) for kind in kinds):
            raise ValueError(f"config.json: layer_types={kinds} must name {LOCAL} or {FULL}, and {FULL} for the last")
        if missing := [kind for kind in {*kinds} if not isinstance(ropes.get(kind), Mapping)]:
            raise ValueError(f"config.json: rope_parameters={ropes!r:.80} must have an object {missing[0]!r}")
        expect(ropes[FULL], {"rope_type": ("proportional",), "factor": (None, 1.0)})
        head_dim, kv_heads = _heads(text, FULL)
        return ModelSpec(
            family="diffusion_gemma",
            vocab=text["vocab_size"],
            hidden=text["hidden_size"],
            layers=text["num_hidden_layers"],
            heads=text["num_attention_heads"],
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=text["intermediate_size"],
            norm_eps=text["rms_norm_eps"],
            rope_theta=ropes[FULL]["rope_theta"],
            rope_pairs=int((ropes[FULL].get("partial_rotary_factor") or 1.0) * head_dim // 2),
            qk_norm=True,
            local=_local(text) if LOCAL in kinds else None,
            softcap=text["final_logit_softcapping"],
            experts=ExpertSpec(
                experts=text["num_experts"],
                chosen=text["top_k_experts"],
                width=text["moe_intermediate_size"],
                normalize=True,
            ),
            tied_head=True,
            max_length=text["max_position_embeddings"],
            mask_id=None,
            encoder=True,
            self_conditioning=True,
            **self.stops({"eos_token_id": text.get("eos_token_id")} | dict(config.items()), text["vocab_size"]),
        )

    def weights(self, spec: ModelSpec, experts: ExpertLayout = "separate") -> dict[str, Placement]:
        """As the published checkpoints store it, whatever the layout: experts of a layer are always fused."""
        return dict(_placements(spec))

    def copies(self, spec: ModelSpec) -> dict[str, str]:
        """The LM head, and the encoder's side of all that it shares with the decoder."""
        own = (f"{DECODER}.self_conditioning.", f"{ENCODER}.")
        shared = (name for name in self.weights(spec) if not name.startswith(own) and not name.endswith("layer_scalar"))
        encoder = {name.replace(DECODER, ENCODER): name for name in shared}
        return encoder | {"lm_head.weight": f"{DECODER}.embed_tokens.weight"}


def _heads(text: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """Head size and key heads of the layers of a kind, which must be alike."""
    if "per_layer_config" in text:
        own = text["per_layer_config"]
        if not isinstance(own, Mapping) or not all(isinstance(part, Mapping) for part in own.values()):
            raise ValueError(f"config.json: per_layer_config={own!r:.80} must be an object of objects")
        parts = [own.get(str(i), {}) for i, other in enumerate(text["layer_types"]) if other == kind]
        for part in parts:
            check_kinds(part)
        found = {tuple(part.get(name) or text[name] for name in ("head_dim", "num_key_value_heads")) for part in parts}
    elif kind == FULL:
        found = {(text["global_head_dim"], text.get("num_global_key_value_heads") or text["num_key_value_heads"])}
    else:
        found = {(text["head_dim"], text["num_key_value_heads"])}
    if len(found) > 1:
        raise ValueError(f"config.json: per_layer_config gives layers of {kind} several shapes of heads: {found}")
    head_dim, kv_heads = found.pop()
    return head_dim, kv_heads


def _local(text: Mapping[str, Any]) -> LocalAttention:
    rope = text["rope_parameters"][LOCAL]
    expect(rope, {"rope_type": ("default",), "partial_rotary_factor": (None, 1.0)})
    head_dim, kv_heads = _heads(text, LOCAL)
    return LocalAttention(
        layers=tuple(i for i, kind in enumerate(text["layer_types"]) if kind == LOCAL),
        window=text["sliding_window"],
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=rope["rope_theta"],
    )


def _placements(spec: ModelSpec) -> Iterator[tuple[str, Placement]]:
    """Every tensor of the text part. Encoder and decoder share all, under the decoder's names, but a scalar a layer."""
    yield (
        f"{DECODER}.embed_tokens.weight",
        Placement("embedding.weight", (spec.vocab, spec.hidden), split=Split(0, (Section("vocab", spec.vocab),))),
    )
    yield f"{DECODER}.norm.weight", Placement("norm.weight", (spec.hidden,))
    yield f"{DECODER}.self_conditioning.pre_norm.weight", Placement("conditioning.norm.weight", (spec.hidden,))
    yield from _mlp(f"{DECODER}.self_conditioning", "conditioning.mlp", spec)
    for layer in range(spec.layers):
        ours, name = f"blocks.{layer}", f"layers.{layer}"
        yield f"{ENCODER}.{name}.layer_scalar", Placement(f"{ours}.scale", (1,), 0)
        yield f"{DECODER}.{name}.layer_scalar", Placement(f"{ours}.scale", (1,), 1)
        yield from _block(f"{DECODER}.{name}", ours, spec, layer)


def _block(theirs: str, ours: str, spec: ModelSpec, layer: int) -> Iterator[tuple[str, Placement]]:
    d, experts = spec.hidden, spec.experts
    if experts is None:
        raise ValueError(f"{spec.family} has no experts")
    norms = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "attn_out_norm",
        "pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm_1": "mlp_out_norm",
        "pre_feedforward_layernorm_2": "experts_norm", "post_feedforward_layernorm_2": "experts_out_norm",
        "post_feedforward_layernorm": "out_norm",
    }  # fmt: skip
    for name, norm in norms.items():
        yield f"{theirs}.{name}.weight", Placement(f"{ours}.{norm}.weight", (d,))
    local = spec.local if spec.local is not None and layer in spec.local.layers else None
    e, kv = (spec.head_dim, spec.kv_heads) if local is None else (local.head_dim, local.kv_heads)
    query_heads, kv_heads = Section("heads", spec.heads, e), Section("kv_heads", kv, e)
    parts = {"q": query_heads, "k": kv_heads} | ({} if local is None else {"v": kv_heads})
    row, by_head = 0, Split(0, tuple(parts.values()))
    for part, (_, heads, size) in parts.items():
        place = Placement(f"{ours}.attention.qkv.weight", (heads * size, d), row, by_head)
        yield f"{theirs}.self_attn.{part}_proj.weight", place
        row += heads * size
    for part in ("q", "k"):
        yield f"{theirs}.self_attn.{part}_norm.weight", Placement(f"{ours}.attention.{part}_norm.weight", (e,))
    yield (
        f"{theirs}.self_attn.o_proj.weight",
        Placement(f"{ours}.attention.out.weight", (d, spec.heads * e), split=Split(1, (query_heads,))),
    )
    yield from _mlp(f"{theirs}.mlp", f"{ours}.mlp", spec)
    yield f"{theirs}.router.scale", Placement(f"{ours}.experts.router_norm.weight", (d,))
    yield f"{theirs}.router.proj.weight", Placement(f"{ours}.experts.router.weight", (experts.experts, d))
    yield f"{theirs}.router.per_expert_scale", Placement(f"{ours}.experts.expert_scale", (experts.experts,))
    fused = f"{theirs}.experts.gate_up_proj", f"{theirs}.experts.down_proj"
    yield from fused_placements(fused, f"{ours}.experts", experts, d)


def _mlp(theirs: str, ours: str, spec: ModelSpec) -> Iterator[tuple[str, Placement]]:
    names = f"{theirs}.gate_proj", f"{theirs}.up_proj", f"{theirs}.down_proj"
    yield from mlp_placements(names, ours, spec.mlp, spec.hidden)
