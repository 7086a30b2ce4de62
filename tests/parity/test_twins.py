"""Networks that grew from a family that transformers has: the same weights, the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dinfer.core.loading.checkpoint import family_of, load_network
from dinfer.core.registry import MODELS

BODY: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 128, "rope_theta": 100.0, "rms_norm_eps": 1e-5,
    "bos_token_id": 45, "eos_token_id": 46, "pad_token_id": 46, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
QWEN3_MOE = BODY | {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}  # fmt: skip
GLM4_MOE = BODY | {
    "head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 0.5, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "attention_bias": False,
}  # fmt: skip


def as_sdar(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """The number of experts under the name that transformers 4 gave it, as in the published checkpoints."""
    config["num_experts"] = config.pop("num_local_experts")


def as_llada2(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """GLM-4-MoE's tensors and fields under LLaDA2's names."""
    renamed = {
        "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm", "embed_tokens": "word_embeddings",
        "e_score_correction_bias": "expert_bias",
    }  # fmt: skip
    for name in list(tensors):
        new = name
        for theirs, ours in renamed.items():
            new = new.replace(theirs, ours)
        tensors[new] = tensors.pop(name)
    for layer in range(config["num_hidden_layers"]):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{layer}.attention.query_key_value.weight"] = torch.cat(parts)
    config |= {"num_experts": config.pop("n_routed_experts"), "num_shared_experts": config.pop("n_shared_experts")}


@pytest.mark.parametrize(
    ("twin", "fields", "model_type", "change"),
    [
        ("Qwen2", BODY, "Dream", None),
        ("Qwen2", BODY | {"tie_word_embeddings": True, "num_key_value_heads": 4}, "Dream", None),
        ("Qwen3", BODY | {"head_dim": 16}, "sdar", None),
        ("Llama", BODY | {"rope_scaling": LLAMA3}, "a2d-llama", None),
        ("Qwen2", BODY, "a2d-qwen2", None),
        ("Qwen3", BODY | {"head_dim": 16}, "a2d-qwen3", None),
        ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}, "sdar_moe", as_sdar),
        ("Qwen3Moe", QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": []}, "sdar_moe", as_sdar),
        ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": []}, "rnd1", as_sdar),
        ("Glm4Moe", GLM4_MOE, "llada2_moe", as_llada2),
        ("Glm4Moe", GLM4_MOE | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}, "llada2_moe", as_llada2),
    ],
)
def test_the_logits_are_those_of_the_twin(
    twin: str, fields: dict[str, Any], model_type: str, change: Callable[..., None] | None, tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{twin}ForCausalLM")(getattr(transformers, f"{twin}Config")(**fields)).double()
        if "num_experts_per_tok" in fields:
            model.set_experts_implementation("eager")  # the others take no float64
        for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("bias"))):
            tensor.data.copy_(torch.randn_like(tensor) * 0.3 + (tensor.dim() == 1))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(file)
    config |= {"model_type": model_type, "mask_token_id": 47}
    if change is not None:
        change(tensors, config)
    save_file(tensors, file)
    (tmp_path / "config.json").write_text(json.dumps(config))

    family = MODELS.build(family_of(config))
    network = load_network(tmp_path, family, dtype=torch.float64, device=torch.device("cpu"))
    ids_BT = torch.randint(0, 45, (2, 17), generator=torch.Generator().manual_seed(1))
    all_see_all = torch.zeros(2, 1, 17, 17, dtype=torch.float64) if model_type == "rnd1" else None
    with torch.inference_mode():
        want_BTV = model(input_ids=ids_BT, attention_mask=all_see_all, use_cache=False).logits
        got_BTV = network.score(ids_BT, attention="causal" if all_see_all is None else "bidirectional")
        torch.testing.assert_close(got_BTV, want_BTV, rtol=1e-5, atol=1e-5)
