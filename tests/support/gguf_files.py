"""GGUF files for the tests: one that llama.cpp's converter wrote, and others made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import load_file

GOLDENS = Path(__file__).parents[1] / "goldens"
LLADA = GOLDENS / "gguf" / "llada.gguf"  # goldens/models/llada in 16 bits, by convert_hf_to_gguf.py
Blocks = tuple[np.ndarray, GGMLQuantizationType]


def rewritten(
    target: Path, fields: Mapping[str, Any] = {}, tensors: Mapping[str, Blocks | None] = {}, source: Path = LLADA
) -> Path:
    """The file with other fields and tensors; None leaves one out."""
    reader = GGUFReader(source)
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")} | fields
    writer = GGUFWriter(target, found.pop("general.architecture"))
    for name, value in found.items():
        if value is not None:
            kind = GGUFValueType.get_type(value)
            kind = GGUFValueType.UINT32 if kind is GGUFValueType.INT32 and value >= 0 else kind
            writer.add_key_value(
                name, value, kind, GGUFValueType.get_type(value[0]) if kind is GGUFValueType.ARRAY else None
            )
    held: dict[str, Blocks | None] = {one.name: (np.array(one.data), one.tensor_type) for one in reader.tensors}
    for name, blocks in (held | dict(tensors)).items():
        if blocks is not None:
            writer.add_tensor(name, blocks[0], raw_dtype=blocks[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


LLADA2_NAMES = {
    "model.word_embeddings.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "input_layernorm.weight": "attn_norm.weight",
    "attention.query_key_value.weight": "attn_qkv.weight", "attention.query_layernorm.weight": "attn_q_norm.weight",
    "attention.key_layernorm.weight": "attn_k_norm.weight", "attention.dense.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.expert_bias": "exp_probs_b.bias",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}  # fmt: skip
GEMMA_NAMES = {
    "model.decoder.embed_tokens.weight": "token_embd.weight", "model.decoder.norm.weight": "output_norm.weight",
    "model.decoder.self_conditioning.pre_norm.weight": "self_cond_pre_norm.weight",
    **{f"model.decoder.self_conditioning.{part}_proj.weight": f"self_cond_{part}.weight"
       for part in ("gate", "up", "down")},
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight", "layer_scalar": "layer_output_scale.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in ("q", "k", "v")},
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in ("q", "k")},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def written(
    target: Path, folder: Path, names: Mapping[str, str], fields: Mapping[str, Any], **more: np.ndarray
) -> Path:
    """A GGUF file of a folder's tensors under llama.cpp's names, experts stacked by layer. `more`: other tensors."""
    writer, experts = GGUFWriter(target, fields["general.architecture"]), dict[str, list[np.ndarray]]()
    for name, value in fields.items():
        if name != "general.architecture":
            kind = GGUFValueType.get_type(value)
            kind = GGUFValueType.UINT32 if kind is GGUFValueType.INT32 else kind
            writer.add_key_value(
                name, value, kind, GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            )
    held = dict(more)
    stored = load_file(folder / "model.safetensors")
    for name in sorted(stored, key=lambda name: [int(part) if part.isdecimal() else -1 for part in name.split(".")]):
        tensor = stored[name].float().numpy()
        if name in names:
            held[names[name]] = tensor
            continue
        layer = re.fullmatch(r"(.*)layers\.(\d+)\.(.*)", name)
        assert layer is not None, name
        if expert := re.fullmatch(r"mlp\.experts\.\d+\.(\w+)_proj\.weight", layer[3]):
            experts.setdefault(f"blk.{layer[2]}.ffn_{expert[1]}_exps.weight", []).append(tensor)
            continue
        own = f"enc_{names[layer[3]]}" if "encoder" in layer[1] else names[layer[3]]
        held[f"blk.{layer[2]}.{own}"] = tensor
    for name, tensor in (held | {name: np.stack(each) for name, each in experts.items()}).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
