"""GGUF files of diffusion models: their metadata as the small files of a checkpoint, and their tensors.

The `gguf` package reads headers and dequantises. Tensors get their names in the family's checkpoints on the hub, so
that a family needs nothing more for its GGUF files. The tokenizer is a byte-level BPE: all diffusion models with GGUF
files have one. `tokenizer.ggml.pre` names the pattern that cuts text into words; the patterns are those of the models'
own tokenizer.json files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFEndian, GGUFReader
from torch import Tensor

from dinfer.core.loading.files import CheckpointError, damaged, refuse
from dinfer.core.loading.safetensors_io import FLOATS, Slices, Stored
from dinfer.core.models.family import Placement

if TYPE_CHECKING:
    from dinfer.formats.rounding.blocks import Blocks, Section


TEXTS = "tokenizer.ggml.tokens"
WHOLE = "tokenizer.huggingface.json"  # the GGUF standard's key for a whole tokenizer.json
TEMPLATE = "tokenizer.chat_template"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST,)
QWEN2 = (ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST,)
BAILING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
PATTERNS: dict[str, tuple[str, ...]] = {
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "llada": LLAMA3, "qwen2": QWEN2, "dream": QWEN2,
    "bailingmoe": BAILING, "bailingmoe2": BAILING, "llada2": BAILING, "llada-moe": BAILING, "gpt-2": (GPT2 + r"|\s+",),
    "smollm": (r"\p{N}", GPT2 + r"|\s+"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}  # fmt: skip
"""The patterns that cut text into words, by `tokenizer.ggml.pre`. Each cuts the pieces that those before it left."""
SPECIAL, PLAIN = 3, 4  # kinds of token in `tokenizer.ggml.token_type`: control, and added by a user
ROLES = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id", "mask_token": "mask_token_id",
}  # fmt: skip

KINDS: dict[str, tuple[type, type | None, str]] = {
    **{f"tokenizer.ggml.{role}": (int, None, "a token id") for role in (*ROLES.values(), "eot_token_id")},
    **{name: (str, None, "a text") for name in ("tokenizer.ggml.model", "tokenizer.ggml.pre", WHOLE, TEMPLATE)},
    **{name: (list, str, "a list of texts") for name in (TEXTS, "tokenizer.ggml.merges")},
    "tokenizer.ggml.token_type": (list, int, "a list of integers"),
    **{f"split.{name}": (int, None, "an integer") for name in ("count", "no", "tensors.count")},
}  # fmt: skip


def check_kinds(path: Path, fields: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a value whose type is not that of the GGUF standard."""
    for name, (kind, inside, must) in KINDS.items():
        found = fields.get(name)
        each = found if isinstance(found, list) else []
        if found is not None and (type(found) is not kind or any(type(one) is not inside for one in each)):
            raise CheckpointError(f"{path}: {name}={found!r:.60} must be {must}")


def tokenizer_files(path: Path, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; empty if the metadata has no tokenizer.

    Raises CheckpointError for a tokenizer that is not supported.
    """
    texts = fields.get(TEXTS)
    if texts is None:
        return {}
    roles = {role: fields.get(f"tokenizer.ggml.{key}") for role, key in ROLES.items()}
    for role, token in roles.items():
        if token is not None and not 0 <= token < len(texts):
            key = f"tokenizer.ggml.{ROLES[role]}"
            raise CheckpointError(f"{path}: {key}={token} is outside the vocabulary of {len(texts)}")
    named = {role: texts[token] for role, token in roles.items() if token is not None}
    if TEMPLATE in fields:
        named["chat_template"] = fields[TEMPLATE]
    if WHOLE in fields:
        try:
            whole = json.loads(fields[WHOLE])
        except ValueError as error:
            raise CheckpointError(f"{path}: {WHOLE} is not JSON: {error}") from error
        if not isinstance(whole, dict):
            raise CheckpointError(f"{path}: {WHOLE}={whole!r:.80} must hold a JSON object")
        return {"tokenizer.json": whole, "tokenizer_config.json": named}
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if model != GEMMA_MODEL and (model != "gpt2" or pre not in PATTERNS):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={pre!r} is not supported; 'gpt2' is, with "
            f"{', '.join(PATTERNS)}. tools.convert writes GGUF files that hold any tokenizer.json"
        )
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(texts)
    if len(kinds) != len(texts):
        raise CheckpointError(f"{path}: {len(kinds)} tokenizer.ggml.token_type for {len(texts)} tokens")
    shape = GEMMA if model == GEMMA_MODEL else _byte_level(PATTERNS[pre])
    begins = fields.get("tokenizer.ggml.add_bos_token", shape is GEMMA or PATTERNS[pre] is LLAMA3)
    first = roles["bos_token"] if begins else None
    whole = _pairs(texts, kinds, fields.get("tokenizer.ggml.merges") or [], shape, first)
    return {"tokenizer.json": whole, "tokenizer_config.json": named}


GEMMA_MODEL = "gemma4"  # `tokenizer.ggml.model`
MARK = "\u2581"  # for a blank
# Gemma's tokenizer.json: pairs of characters, bytes for those that are no token.
GEMMA = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
    "pre_tokenizer": {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
    "model": {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>", "ignore_merges": False},
}  # fmt: skip


def _byte_level(patterns: tuple[str, ...]) -> dict[str, Any]:
    """What a tokenizer.json of byte pairs has beside its tokens. `patterns`: where texts are cut."""
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if patterns is QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": byte_level,
        "model": {"ignore_merges": patterns is LLAMA3},
    }


def _pairs(
    texts: Sequence[str], kinds: Sequence[int], merges: Sequence[str], shape: Mapping[str, Any], first: int | None
) -> dict[str, Any]:
    """tokenizer.json of pairs. `shape`: what it has beside its tokens; `first`: the token that begins every text."""
    added = [
        {
            "id": token, "content": texts[token], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind == SPECIAL,
        }
        for token, kind in enumerate(kinds)
        if kind in (SPECIAL, PLAIN)
    ]  # fmt: skip
    vocab = {text: token for token, text in enumerate(texts)}
    begin = None
    if first is not None:
        text = texts[first]
        single = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        begin = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {text: {"id": text, "ids": [first], "tokens": [text]}},
        }
    return {
        "version": "1.0",
        "added_tokens": added,
        **shape,
        "post_processor": begin,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [pair for pair in merges if pair.replace(" ", "", 1) in vocab],  # llama.cpp skips others, too
            **shape["model"],
        },
    }


BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
TYPES = ("F32", "F16", "BF16", *BLOCKS)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the metadata of one `general.architecture` becomes a config.json."""

    keys: Mapping[str, str]  # fields of config.json, and the keys that hold them
    same: Mapping[str, Any]  # fields that all these models share
    kind: gguf.MODEL_ARCH  # names of tensors
    tied: str = "tie_word_embeddings"  # the field that says whether the head is the embedding
    permuted: bool = False  # rows of q and k are in interleaved pairs, as llama.cpp rotates them, not in halves
    shift: bool = False  # logits predict the next token
    absent: Mapping[str, Any] = field(default_factory=dict)  # values of optional keys
    expected: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)  # beside `EXPECTED`; None: any value
    more: Callable[[Metadata], Mapping[str, Any]] | None = None  # further fields. It may raise CheckpointError
    inside: str | None = None  # the object of config.json that has the fields; None: it has them itself
    outside: Mapping[str, Any] = field(default_factory=dict)  # fields beside that object
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors in a family, {i} a layer, by those in the file


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a GGUF file says of its model."""

    path: Path
    prefix: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str) -> Any:
        return self.fields.get(f"{self.prefix}.{key}")


HUB_KEYS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "head_dim": "attention.key_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}  # fmt: skip
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
}
LLADA = Architecture(
    keys={
        "d_model": "embedding_length", "n_layers": "block_count", "n_heads": "attention.head_count",
        "n_kv_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base", "max_sequence_length": "context_length",
        "mlp_hidden_size": "feed_forward_length",
    },
    same={
        "model_type": "llada", "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True,
    },
    tied="weight_tying",
    kind=gguf.MODEL_ARCH.LLADA,
    permuted=True,
)  # fmt: skip
DREAM = Architecture(
    keys=HUB_KEYS | {"intermediate_size": "feed_forward_length"},
    same={"model_type": "Dream", "hidden_act": "silu"},
    kind=gguf.MODEL_ARCH.DREAM,
    shift=True,
    absent={"attention.key_length": None},
)
LLADA_MOE = Architecture(
    keys=HUB_KEYS
    | EXPERT_KEYS
    | {"dense_intermediate_size": "feed_forward_length", "expert_intermediate_size": "expert_feed_forward_length"},
    same={"model_type": "llada_moe", "hidden_act": "silu", "qk_layernorm": True},
    kind=gguf.MODEL_ARCH.LLADA_MOE,
    absent={
        "attention.key_length": None, "feed_forward_length": None, "expert_weights_norm": False,
        "expert_weights_scale": 1.0,
    },
)  # fmt: skip
RND1 = Architecture(
    keys=HUB_KEYS
    | EXPERT_KEYS
    | {"intermediate_size": "feed_forward_length", "moe_intermediate_size": "expert_feed_forward_length"},
    same={"model_type": "rnd1", "hidden_act": "silu"},
    kind=gguf.MODEL_ARCH.RND1,
    shift=True,
    absent={"expert_weights_norm": True, "expert_weights_scale": None},
)  # fmt: skip


def _of_llada2(said: Metadata) -> dict[str, Any]:
    width, own = said.get("expert_shared_feed_forward_length"), said.get("expert_feed_forward_length")
    if width not in (None, (said.get("expert_shared_count") or 0) * own):
        raise CheckpointError(
            f"{said.path}: {said.prefix}.expert_shared_feed_forward_length={width} must be that of expert_shared_count "
            f"experts of {own}"
        )
    return {
        "partial_rotary_factor": said.get("rope.dimension_count") / said.get("attention.key_length"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in said.tensors,
        "moe_router_enable_expert_bias": any(".exp_probs_b." in name for name in said.tensors),
    }


LLADA2 = Architecture(
    keys=HUB_KEYS | EXPERT_KEYS | {
        "intermediate_size": "feed_forward_length", "moe_intermediate_size": "expert_feed_forward_length",
        "first_k_dense_replace": "leading_dense_block_count", "num_shared_experts": "expert_shared_count",
        "n_group": "expert_group_count", "topk_group": "expert_group_used_count", "rotary_dim": "rope.dimension_count",
    },
    same={"model_type": "llada2_moe", "hidden_act": "silu", "score_function": "sigmoid"},
    kind=gguf.MODEL_ARCH.BAILINGMOE2,
    absent={
        "expert_weights_norm": True, "expert_weights_scale": 1.0, "leading_dense_block_count": 0,
        "expert_shared_count": 0, "expert_group_count": 1, "expert_group_used_count": 1,
    },
    expected={
        "expert_gating_func": (2,), "leading_dense_block_count": None, "expert_shared_count": None,
        "expert_group_count": None, "rope.dimension_count": None,
    },
    more=_of_llada2,
)  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
STOPS = "<eos>", "<turn|>", "<|tool_response>"  # of Gemma, whose files name one of them


def _of_gemma(said: Metadata) -> dict[str, Any]:
    pattern, heads = said.get("attention.sliding_window_pattern"), said.get("attention.head_count_kv")
    layers = said.get("block_count")
    for key, found in (("attention.sliding_window_pattern", pattern), ("attention.head_count_kv", heads)):
        if not isinstance(found, list) or len(found) != layers:
            raise CheckpointError(f"{said.path}: {said.prefix}.{key}={found!r:.60} must have one value a layer")
    kinds = {kind: {h for h, own in zip(heads, pattern, strict=True) if bool(own) is kind} for kind in (True, False)}
    if any(len(found) != 1 for found in kinds.values()):
        raise CheckpointError(
            f"{said.path}: {said.prefix}.attention.head_count_kv={heads!r:.60} must be one number for all layers with "
            "a sliding window, and one for all others"
        )
    ropes = {LOCAL: {"rope_type": "default", "rope_theta": _plain(said.get("rope.freq_base_swa") or 10_000.0)},
             FULL: {"rope_type": "proportional", "rope_theta": _plain(said.get("rope.freq_base")),
                    "partial_rotary_factor": _turned(said)}}  # fmt: skip
    texts = said.fields.get(TEXTS) or []
    stops = [texts.index(text) for text in STOPS if text in texts]
    return {
        "layer_types": [LOCAL if own else FULL for own in pattern], "rope_parameters": ropes,
        "num_key_value_heads": kinds[True].pop(), "num_global_key_value_heads": kinds[False].pop(),
    } | ({"eos_token_id": stops} if stops else {})  # fmt: skip


def _turned(said: Metadata) -> float:
    """The share of pairs that layers without a window turn: the others' frequencies are divided by almost infinity."""
    if ROPE not in said.tensors:
        return 1.0
    factors = said.tensors[ROPE].values()
    turned = int((factors == 1).sum())
    if 2 * len(factors) != said.get("attention.key_length") or not (factors[turned:] > FROZEN).all():
        raise CheckpointError(f"{said.path}: {ROPE} must be 1 for the first pairs of a head, and huge for the others")
    return turned / len(factors)


ROPE, FROZEN = "rope_freqs.weight", 1e20
IN_DECODER = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "post_ffw_norm": "post_feedforward_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_gate_inp": "router.proj",
}  # fmt: skip
BARE = {
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj",
    "layer_output_scale.weight": "layer_scalar",
}  # fmt: skip
DIFFUSION_GEMMA = Architecture(
    keys={
        "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "head_dim": "attention.key_length_swa",
        "global_head_dim": "attention.key_length", "num_attention_heads": "attention.head_count",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon", "max_position_embeddings": "context_length",
        "sliding_window": "attention.sliding_window", "intermediate_size": "feed_forward_length",
        "num_experts": "expert_count", "top_k_experts": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length", "final_logit_softcapping": "final_logit_softcapping",
    },
    same={"hidden_activation": "gelu_pytorch_tanh"},
    kind=gguf.MODEL_ARCH.GEMMA4,
    expected={
        "attention.sliding_window": None, "final_logit_softcapping": None, "attention.key_length": None,
        "attention.value_length": None, "rope.dimension_count": None, "attention.scale": (1, None),
        "attention.shared_kv_layers": (0, None), "embedding_length_per_layer_input": (0, None),
    },
    more=_of_gemma,
    inside="text_config",
    outside={"model_type": "diffusion_gemma"},
    names={
        **{f"blk.{{i}}.{own}.weight": f"model.decoder.layers.{{i}}.{name}.weight" for own, name in IN_DECODER.items()},
        **{f"blk.{{i}}.{own}": f"model.decoder.layers.{{i}}.{name}" for own, name in BARE.items()},
        "blk.{i}.enc_layer_output_scale.weight": "model.encoder.language_model.layers.{i}.layer_scalar",
        "self_cond_pre_norm.weight": "model.decoder.self_conditioning.pre_norm.weight",
        **{f"self_cond_{part}.weight": f"model.decoder.self_conditioning.{part}_proj.weight"
           for part in ("gate", "up", "down")},
        "token_embd.weight": "model.decoder.embed_tokens.weight", "output_norm.weight": "model.decoder.norm.weight",
    },
)  # fmt: skip


def _parent(name: str, kind: gguf.MODEL_ARCH, *, permuted: bool = False) -> Architecture:
    """An autoregressive model, which an adapter makes a diffusion model (`dinfer.families.models.a2d`)."""
    return Architecture(
        keys=HUB_KEYS | {"intermediate_size": "feed_forward_length"},
        same={"model_type": name, "hidden_act": "silu"},
        kind=kind,
        permuted=permuted,
        absent={"attention.key_length": None},
    )


ARCHITECTURES = {
    "llada": LLADA, "llada-moe": LLADA_MOE, "dream": DREAM, "rnd1": RND1, "llada2": LLADA2, "llada2-moe": LLADA2,
    "diffusion-gemma": DIFFUSION_GEMMA,
    "llama": _parent("llama", gguf.MODEL_ARCH.LLAMA, permuted=True), "qwen2": _parent("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": _parent("qwen3", gguf.MODEL_ARCH.QWEN3),
}  # fmt: skip
OWN = "diffuse"  # the architecture of diffuse-cpp's files, which name the model's in another key and never permute
EXPECTED = {
    "attention.causal": (False, None), "rope.scaling.type": ("none", None), "rope.scaling.factor": (1, 0, None),
    "rope.scale_linear": (1, 0, None), "rope.dimension_sections": (None,), "attention.sliding_window": (0, None),
    "attention.scale": (None,), "attention.clamp_kqv": (0, None), "attention.max_alibi_bias": (0, None),
    "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "logit_scale": (1, None),
    "residual_scale": (1, None), "embedding_scale": (1, None), "use_parallel_residual": (False, None),
    "expert_gating_func": (1, None), "expert_shared_count": (0, None), "expert_group_count": (1, 0, None),
    "leading_dense_block_count": (0, None),
}  # fmt: skip
"""Keys that would change the network if they had other values. None: absent."""
FLAGS = ("expert_weights_norm",)
COUNTS = "leading_dense_block_count", "expert_shared_count"  # which may be 0
HEADS = ("head_count", "head_count_kv")
TOKENS = {
    "mask_token_id": ("tokenizer.ggml.mask_token_id",),
    "eos_token_id": ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"),
}


@dataclass(frozen=True)
class GgufTensor(Stored):
    """A tensor of a GGUF file. `dtype` is the GGUF type."""

    offset: int  # bytes from the beginning of the file
    nbytes: int
    heads: int = 0  # heads whose rows are permuted; 0: none are

    @property
    def floats(self) -> torch.dtype:
        return FLOATS.get(self.dtype, torch.bfloat16)

    def bytes_of(self, part: Slices | None) -> int:
        return self.nbytes

    def fill(self, format: Any, weight: tuple[Tensor, ...], source: Slices, target: Slices) -> None:
        format.place(weight, target[-2].start, self.blocks())

    def mapped(self) -> Tensor:
        return self.values() if self.dtype in FLOATS else self.blocks().flatten()

    def opened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def values(self, file: None = None, part: Slices | None = None) -> Tensor:
        """On the CPU: floats as they are, blocks in float32 as the gguf package dequantises them."""
        if self.dtype in FLOATS:
            whole = self._in_halves(self._bytes().view(FLOATS[self.dtype]).view(self.shape))
        else:
            whole = dequantised(self.dtype, self.blocks())
        return whole if part is None else whole[part]

    def blocks(self) -> Tensor:
        """The blocks, one row of them for each row of values. uint8"""
        return self._in_halves(self._bytes().view(gguf.quant_shape_to_byte_shape(self.shape, Kind[self.dtype])))

    def _bytes(self) -> Tensor:
        """A private mapping of the file: a page takes memory from its first use on."""
        return torch.from_numpy(np.memmap(self.path, np.uint8, "c", self.offset, (self.nbytes,)))

    def _in_halves(self, rows: Tensor) -> Tensor:
        """Rows of values, or of their blocks, in the network's order."""
        if not self.heads:
            return rows
        return rows.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file, or of all its shards."""

    path: Path
    name: str  # of the architecture
    known: Architecture
    files: dict[str, dict[str, Any]]  # what the small files of a checkpoint hold: config.json, and its tokenizer's
    tensors: dict[str, GgufTensor]  # by their names in the file
    layers: int

    def retold(self, message: str) -> str:
        """A message on fields of config.json, about the keys of the metadata that hold them."""
        keys = self.known.keys
        message = re.sub(rf"\b({'|'.join(keys)})\b", lambda field: f"{self.name}.{keys[field[1]]}", message)
        return message.replace("config.json", str(self.path))

    def stored(self, wanted: Iterable[str]) -> dict[str, Stored]:
        """The tensors by their names in the family's checkpoints. Unknown tensors keep their own names."""
        names = gguf.get_tensor_name_map(self.known.kind, self.layers)
        own_names = {
            name.format(i=layer): own.format(i=layer)
            for own, name in self.known.names.items()
            for layer in range(self.layers)
        }
        found: dict[str, Stored] = {}
        for name in wanted:
            own = own_names.get(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
            ends = ("", ".weight", ".bias") if own is not None else ()
            if there := [self.tensors[f"{own}{end}"] for end in ends if f"{own}{end}" in self.tensors]:
                found[name] = there[0]
        taken = {tensor.offset for tensor in found.values() if isinstance(tensor, GgufTensor)}
        return found | {own: tensor for own, tensor in self.tensors.items() if tensor.offset not in taken}


def dequantised(kind: str, blocks: Tensor) -> Tensor:
    """The values of rows of blocks, by the gguf package. uint8 [..., B] -> float32 [..., K]"""
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), Kind[kind]))


def gguf_file(path: Path) -> GgufFile:
    """Reads the header of a GGUF file and of its other shards. Raises CheckpointError."""
    fields, own_tensors = _header(path)
    tensors = dict(own_tensors)
    for shard in _other_shards(path, fields):
        tensors |= _header(shard)[1]
    if len(tensors) != (count := fields.get("split.tensors.count", len(tensors))):
        raise CheckpointError(f"{path}: split.tensors.count={count}, but the shards hold {len(tensors)} tensors")
    refuse(
        [f"{name}: {found.dtype}" for name, found in tensors.items() if found.dtype not in TYPES],
        f"{path} has tensors of types that are not supported; these are: {', '.join(TYPES)}",
    )
    if (kind := fields.get("general.type", "model")) != "model":
        raise CheckpointError(f"{path}: general.type={kind!r} is no model: give the file of the model")
    prefix = str(fields.get("general.architecture", "absent"))
    key, others = (f"{OWN}.model_type", "") if prefix == OWN else ("general.architecture", f" and {OWN}")
    name = str(fields.get(key, "absent"))
    if name not in ARCHITECTURES:
        raise CheckpointError(f"{path}: {key}={name!r} is not supported; {', '.join(ARCHITECTURES)}{others} are")
    known = ARCHITECTURES[name]
    config = _config(path, prefix, known, fields, tensors)
    tensors.pop(ROPE, None)  # which only says what `_turned` has read
    if known.permuted and prefix != OWN:
        n, kv = (config[next(own for own, key in known.keys.items() if key == f"attention.{name}")] for name in HEADS)
        heads = {"q": n, "k": kv or n}
        for own, found in tensors.items():
            if row := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", own):
                tensors[own] = replace(found, heads=heads[row[1]])
    files = {"config.json": config} | tokenizer_files(path, fields)
    return GgufFile(path, prefix, known, files, tensors, fields[f"{prefix}.block_count"])


def _header(path: Path) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
    """The metadata and tensors of one file."""
    stat = path.stat()
    return _read_header(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)  # config, tokenizer and weights read the same header
def _read_header(path: Path, _changed: int, size: int) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
    try:
        reader = GGUFReader(path)
        fields = {name: found.contents() for name, found in reader.fields.items()}
        tensors = {
            one.name: GgufTensor(
                path, one.name, tuple(int(size) for size in reversed(one.shape)), one.tensor_type.name,
                int(one.data_offset), int(one.n_bytes),
            )
            for one in reader.tensors
        }  # fmt: skip
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # of numpy and the package
        if kind := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            raise CheckpointError(
                f"{path} has tensors of type {kind[1]}, which the gguf package does not know; {', '.join(TYPES)} load"
            ) from error
        if version := re.search(r"version (\d+) which", str(error)):
            raise CheckpointError(
                f"{path} has version {version[1]} of GGUF; 2 and 3 load. Convert the model again"
            ) from error
        raise damaged(path, "GGUF", error) from error
    if reader.endianess is GGUFEndian.BIG:
        raise CheckpointError(f"{path} is big-endian, and only little-endian files load: use gguf-convert-endian")
    check_kinds(path, fields)
    refuse(
        [f"{name} ends at byte {end:,}" for name, one in tensors.items() if (end := one.offset + one.nbytes) > size],
        f"{path} is truncated: it has {size:,} bytes",
    )
    return fields, tensors


def _other_shards(path: Path, fields: Mapping[str, Any]) -> list[Path]:
    """The other files of a model that is split into shards. `path` is the first. Raises CheckpointError."""
    count = fields.get("split.count", 1)
    if count <= 1:
        return []
    first = f"-00001-of-{count:05}.gguf"
    if fields.get("split.no") != 0 or not path.name.endswith(first):
        raise CheckpointError(f"{path} is one of {count} shards: give the first, whose name must end in {first}")
    others = [path.with_name(f"{path.name.removesuffix(first)}-{n:05}-of-{count:05}.gguf") for n in range(2, count + 1)]
    absent = [other.name for other in others if not other.is_file()]
    refuse(absent, f"{path} has split.count={count}, and shards are not there")
    return others


def _config(
    path: Path, prefix: str, known: Architecture, fields: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """The fields of a config.json, from the metadata. Raises CheckpointError."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{path} has no token_embd.weight")
    config = {**known.same, known.tied: "output.weight" not in tensors, "vocab_size": table.shape[0]}
    for name, key in known.keys.items():
        if f"{prefix}.{key}" not in fields and key not in known.absent:
            raise CheckpointError(f"{path}: the metadata has no {prefix}.{key}")
        config[name] = _plain(found := fields.get(f"{prefix}.{key}", known.absent.get(key)))
        if found is not None and not (
            type(found) is bool if key in FLAGS else type(found) in (int, float) and (found > 0 or key in COUNTS)
        ):
            must = "true or false" if key in FLAGS else "one number above 0"
            raise CheckpointError(f"{path}: {prefix}.{key}={found!r:.80} must be {must}")
    sizes = {f"{prefix}.vocab_size": fields.get(f"{prefix}.vocab_size"), TEXTS: len(fields.get(TEXTS) or ()) or None}
    refuse(
        [f"{key}: {size}" for key, size in sizes.items() if size not in (None, table.shape[0])],
        f"{path}: token_embd.weight has {table.shape[0]} rows, and the vocabulary has another size",
    )
    said = Metadata(path, prefix, fields, tensors)
    expected = {f"{prefix}.{key}": allowed for key, allowed in EXPECTED.items()}
    if "num_experts" not in known.keys:
        expected[f"{prefix}.expert_count"] = (0, None)
    expected |= {"diffusion.shift_logits": (known.shift, None), "general.quantization_version": (2, None)}
    width, heads = (fields[f"{prefix}.{key}"] for key in ("embedding_length", "attention.head_count"))
    if width % heads == 0:  # otherwise the family raises an error
        head_dim = config.get("head_dim") or width // heads
        same = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        expected |= {f"{prefix}.{key}": (head_dim, None) for key in same}
    own = {f"{prefix}.{key}": allowed for key, allowed in known.expected.items()}
    expected = {key: allowed for key, allowed in (expected | own).items() if allowed is not None}
    refuse(
        [
            f"{key}={fields[key]!r}, must be {'absent' if allowed[0] is None else repr(allowed[0])}"
            for key, allowed in expected.items()
            if fields.get(key) not in allowed
        ],
        f"{path}: the metadata has values that are not supported for {prefix}",
    )
    for name, keys in TOKENS.items():
        found = [fields[key] for key in (f"{prefix}.{name}", *keys) if key in fields]
        if found:
            config[name] = found[0] if name == "mask_token_id" else [*dict.fromkeys(found)]
    config |= known.more(said) if known.more else {}
    return config if known.inside is None else {**known.outside, known.inside: config}


def _plain(value: Any) -> Any:
    """A float before it was rounded to 32 bits, if it had few digits: 9.99999974737875e-06 was 1e-5."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def blocks_of(
    tensors: Mapping[str, Stored], placements: Mapping[str, Placement], changed: Collection[str], mapped: str | None
) -> dict[str, Blocks]:
    """The parameters that can keep their blocks on a CPU, whose kernels multiply with them.

    These are matrices all of whose weights are blocks of some type. `changed`: weights that an adapter changes.
    `mapped`: the parameter that stays as the file has it.
    """
    from dinfer.core.kernels.dispatch import has_native, in_c  # only here: networks are heavy to import
    from dinfer.formats.rounding.blocks import Blocks, Section

    sections: dict[str, list[tuple[int, Section]]] = {}
    others = set() if has_native() else {place.parameter for place in placements.values()}
    tiles = (kernels := in_c()) is not None and kernels.reads_tiles()
    for name, place in placements.items():
        found = tensors[name]
        if found.dtype in BLOCKS and len(found.shape) > 1 and name not in changed and place.expert is None:
            size = found.bytes_of(None) // math.prod(found.shape[:-1])
            section = Section(found.dtype, found.shape[-2], size)
            sections.setdefault(place.parameter, []).append((place.row, section))
        else:
            others.add(place.parameter)
    return {
        parameter: Blocks([section for _, section in sorted(found)], dequantised, tiles and parameter != mapped)
        for parameter, found in sections.items()
        if parameter not in others
    }
