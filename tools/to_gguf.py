"""Writes a checkpoint as a GGUF file that llama.cpp loads. `tools.convert` is the command."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from torch import Tensor

from dinfer.core.loading.checkpoint import LoadPlan, family_of, read_config, read_spec
from dinfer.core.loading.files import CheckpointError
from dinfer.core.models.family import Placement
from dinfer.core.pipeline.tokenizer import read_tokenizer
from dinfer.core.registry import MODELS
from dinfer.core.terms.spec import ModelSpec
from dinfer.formats.gguf_file import ARCHITECTURES, PATTERNS, WHOLE
from dinfer.formats.quantized import FIELD, packing
from tools.layouts import order, regrouped

NAMES = {"llada": "llada", "llada_moe": "llada-moe", "dream": "dream", "rnd1": "rnd1"}
"""llama.cpp's architectures, by family."""
KINDS = {
    "F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16, "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1, "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
}  # fmt: skip
"""The types that the gguf package can write. llama-quantize makes others from a file in F16."""
log = logging.getLogger(__name__)


def write_gguf(source: Path, target: Path, made: str) -> None:
    """Reads a checkpoint and writes a new file, with vectors and routers in F32 and matrices in the type `made`.

    Raises CheckpointError for a model without an architecture in llama.cpp.
    """
    config = read_config(source)
    family = MODELS.build({"name": family_of(config), "checkpoint": str(source)})
    spec = read_spec(family, config | {FIELD: None})
    experts = spec.experts
    if spec.family not in NAMES or (experts is not None and (experts.dense or experts.shared)):
        raise CheckpointError(
            f"{source} is of the family {spec.family}; llama.cpp has architectures for {', '.join(NAMES)}, without "
            "dense layers and shared experts"
        )
    if config.get(FIELD) is not None and packing(config) is None:
        raise CheckpointError(
            f"{source} has weights in 8 bits with scales ({FIELD} in config.json): convert what they were made of"
        )
    if target.exists():
        raise CheckpointError(f"{target} exists: name a new file")
    plan = LoadPlan.read(source, family).verified()
    tensors, have, want = plan.tensors, plan.placements, family.weights(spec, "merged")
    known = ARCHITECTURES[NAMES[spec.family]]
    names = gguf.get_tensor_name_map(known.kind, spec.layers)
    part = target.with_name(f"{target.name}.part")
    writer = GGUFWriter(part, NAMES[spec.family])
    _describe(writer, spec, made)
    tokenizer = read_tokenizer(source, family.tokenizer, family.adapter)
    if tokenizer is None:
        log.warning("%s has no tokenizer, so the file has none, and llama.cpp cannot read text with it", source)
        writer.add_tokenizer_model("none")
    else:
        _add_tokenizer(writer, tokenizer, spec)
    kinds = {own: _kind(own, place, made) for own, place in want.items()}
    for own in order(tensors, have, want):
        shape, (block, size) = want[own].shape, gguf.GGML_QUANT_SIZES[kinds[own]]
        nbytes = math.prod(shape) // block * size
        writer.add_tensor_info(_name(names, own), shape, np.dtype(np.float32), nbytes, kinds[own])
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for own, tensor in regrouped(tensors, have, want):
            if known.permuted and (heads := _heads(_name(names, own), spec)):
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
            writer.write_tensor_data(_made(tensor, kinds[own]))
        writer.close()
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)


def _name(names: gguf.TensorNameMap, own: str) -> str:
    found = names.get_name(own, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def _heads(name: str, spec: ModelSpec) -> int:
    """The number of heads whose rows are permuted; 0: none are."""
    return {"attn_q": spec.heads, "attn_k": spec.kv_heads}.get(name.split(".")[-2], 0)


def _kind(own: str, place: Placement, made: str) -> Kind:
    """The type of a tensor. A matrix is in F16 if its width is no multiple of the block."""
    if len(place.shape) == 1 or place.parameter.endswith("router.weight"):
        return Kind.F32
    if place.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[made]][0]:
        log.warning("%s is in F16: its width %d is no multiple of a block of %s", own, place.shape[-1], made)
        return Kind.F16
    return Kind[made]


def _made(tensor: Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    if kind is Kind.BF16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return gguf.quantize(tensor.float().contiguous().numpy(), kind)


def _describe(writer: GGUFWriter, spec: ModelSpec, made: str) -> None:
    """Writes the fields of `ModelSpec` under llama.cpp's keys."""
    writer.add_file_type(KINDS[made])
    writer.add_context_length(spec.max_length)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.mlp)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.rope_dim or spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab)
    writer.add_causal_attention(False)
    writer.add_diffusion_shift_logits(bool(spec.shift))
    writer.add_mask_token_id(spec.mask)
    writer.add_eos_token_id(spec.eos_id)
    others = [stop for stop in spec.stop_ids if stop != spec.eos_id]
    if others:
        writer.add_eot_token_id(others[0])
    if len(others) > 1:
        log.warning("GGUF has a place for two stop tokens: give model.stop_ids=%s", others[1:])
    if experts := spec.experts:
        writer.add_expert_count(experts.experts)
        writer.add_expert_used_count(experts.chosen)
        writer.add_expert_feed_forward_length(experts.width)
        writer.add_expert_weights_norm(experts.normalize)
        writer.add_expert_weights_scale(experts.scale)


def _add_tokenizer(writer: GGUFWriter, tokenizer: Any, spec: ModelSpec) -> None:
    """Writes the vocabulary and merges for llama.cpp, and the whole tokenizer.json for dinfer."""
    text = tokenizer.backend_tokenizer.to_str()
    whole = json.loads(text)
    model = whole["model"]
    if model["type"] != "BPE" or len(tokenizer) > spec.vocab:
        raise CheckpointError(
            f"a tokenizer of {len(tokenizer)} tokens in {model['type']} fits no GGUF file of {spec.vocab}"
        )
    known = {token: text for text, token in tokenizer.get_vocab().items()}
    special = {token["id"]: token["special"] for token in whole["added_tokens"]}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    texts = [known.get(token, f"[PAD{token}]") for token in range(spec.vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pattern(whole["pre_tokenizer"]))
    writer.add_token_list(texts)
    writer.add_token_types([kinds[special.get(i)] if i in known else TokenType.UNUSED for i in range(spec.vocab)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_add_bos_token(
        tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    )
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    writer.add_string(WHOLE, text)


def _pattern(pre_tokenizer: Any) -> str:
    """llama.cpp's name of the pattern that cuts text into words."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    found = tuple(step["pattern"].get("Regex") for step in steps if step and step["type"] == "Split")
    if (name := next((name for name, patterns in PATTERNS.items() if patterns == found), None)) is None:
        log.warning("llama.cpp does not know how this tokenizer cuts text into words, and may cut it differently")
    return name or "default"
