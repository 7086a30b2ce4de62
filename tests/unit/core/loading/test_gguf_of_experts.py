"""GGUF files of LLaDA2 and DiffusionGemma, under the names that llama.cpp's converters give: the same network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from support.families import CONFIGS, family_for, random_model
from support.gguf_files import GEMMA_NAMES, LLADA2_NAMES, rewritten, written
from support.models import EOS, GEMMA, MASK, tiny_gemma
from transformers import GemmaTokenizer

import dinfer
from dinfer.core.loading.files import CheckpointError
from dinfer.formats.saving import save_network

PROMPT = [[*range(1, 11)], [5, 3, 9, 1]]


def llada2(folder: Path) -> Path:
    config, name = CONFIGS["llada2"], "llada2"
    save_network(random_model("llada2", torch.float32), family_for(config), folder / "saved", config)
    fields = {
        "block_count": config["num_hidden_layers"], "context_length": 256, "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"], "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_theta"]), "rope.dimension_count": config["rotary_dim"],
        "vocab_size": config["vocab_size"], "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_shared_feed_forward_length": config["num_shared_experts"] * config["moe_intermediate_size"],
        "expert_feed_forward_length": config["moe_intermediate_size"], "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"], "expert_gating_func": 2,
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
    }  # fmt: skip
    others = {"general.architecture": name, "diffusion.shift_logits": False, "tokenizer.ggml.mask_token_id": MASK,
              "tokenizer.ggml.eos_token_id": EOS}  # fmt: skip
    own = {f"{name}.{key}": value for key, value in fields.items()}
    return written(folder / "model-b4.gguf", folder / "saved", LLADA2_NAMES, others | own)


def gemma(folder: Path) -> Path:
    text = GEMMA["text_config"]
    save_network(tiny_gemma(dtype=torch.float32), family_for(GEMMA), folder / "saved", GEMMA)
    fields = {
        "block_count": 2, "context_length": 256, "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"], "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": [2, 1], "attention.key_length": 16, "attention.value_length": 16,
        "attention.key_length_swa": 8, "attention.value_length_swa": 8, "attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, False], "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "attention.causal": False, "rope.freq_base": 80.0, "rope.freq_base_swa": 50.0, "rope.dimension_count": 16,
        "rope.dimension_count_swa": 8, "final_logit_softcapping": 30.0, "expert_count": text["num_experts"],
        "expert_used_count": text["top_k_experts"], "expert_feed_forward_length": text["moe_intermediate_size"],
        "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0,
    }  # fmt: skip
    others = {"general.architecture": "diffusion-gemma", "diffusion.canvas_length": 16,
              "tokenizer.ggml.eos_token_id": 38, "tokenizer.ggml.eot_token_id": 28}  # fmt: skip
    own = {f"diffusion-gemma.{key}": value for key, value in fields.items()}
    rope = np.array([1.0] * 4 + [1e30] * 4, np.float32)
    return written(folder / "model.gguf", folder / "saved", GEMMA_NAMES, others | own, **{"rope_freqs.weight": rope})


MADE = {"llada2": llada2, "diffusion_gemma": gemma}


@pytest.mark.parametrize("name", MADE)
def test_the_network_and_its_tokens_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    file = MADE[name](tmp_path)
    options = {"name": name} | ({"block": 4, "mask_id": MASK, "stop_ids": [EOS]} if name == "llada2" else {})
    of_file, of_folder = (
        dinfer.load(options | {"checkpoint": str(path)}, device="cpu", dtype="float32")
        for path in (file, tmp_path / "saved")
    )
    assert of_file.model.spec == of_folder.model.spec
    for (parameter, want), got in zip(of_folder.model.named_parameters(), of_file.model.parameters(), strict=True):
        assert torch.equal(got, want), parameter
    told = [[one.ids for one in pipe.generate_ids(PROMPT, max_new_tokens=12, seed=3)] for pipe in (of_file, of_folder)]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llada2", {"llada2.expert_gating_func": 1}, r"llada2\.expert_gating_func=1, must be 2"),
        ("llada2", {"llada2.expert_shared_feed_forward_length": 5}, "expert_shared_feed_forward_length=5 must be that"),
        ("llada2", {"llada2.rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn', must be 'none'"),
        ("diffusion_gemma", {"diffusion-gemma.attention.causal": True}, r"attention\.causal=True, must be False"),
        ("diffusion_gemma", {"diffusion-gemma.attention.head_count_kv": 2}, "head_count_kv=2 must have one value"),
        ("diffusion_gemma", {"diffusion-gemma.attention.shared_kv_layers": 1}, r"shared_kv_layers=1, must be 0"),
    ],
)  # fmt: skip
def test_metadata_of_another_network_is_refused(name: str, fields: Any, message: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "other.gguf", fields, source=MADE[name](tmp_path))
    with pytest.raises(CheckpointError, match=message):
        dinfer.load({"name": name, "checkpoint": str(path)}, device="cpu")


@pytest.mark.parametrize("lost", ["blk.1.exp_probs_b.bias", "blk.1.ffn_up_exps.weight", "blk.0.attn_qkv.weight"])
def test_every_tensor_must_be_there(lost: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "other.gguf", {}, {lost: None}, source=llada2(tmp_path))
    with pytest.raises(CheckpointError, match="missing"):
        dinfer.load({"name": "llada2", "checkpoint": str(path), "block": 4}, device="cpu")


def test_gemma_s_tokenizer_is_that_of_the_hub(tmp_path: Path) -> None:
    letters = ["a", "b", "c", "\u2581", "ab", "\u2581ab", "\u2581c"]
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("a", "b"), ("\u2581", "ab"), ("\u2581", "c")]
    kinds = [3, 3, 3, 2, 3, *[6] * 256, *[1] * len(letters)]
    fields = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges], "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": None, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    source = gemma(tmp_path)
    wide = np.zeros((len(texts), 24), np.float32)
    path = rewritten(tmp_path / "words.gguf", fields, {"token_embd.weight": (wide, GGMLQuantizationType.F32)}, source)
    pipe = dinfer.load({"name": "diffusion_gemma", "checkpoint": str(path)}, device="cpu")
    hub = GemmaTokenizer(vocab={text: token for token, text in enumerate(texts)}, merges=merges)
    for text in ("ab c", "  abab\n", "\u00e9 a<eos>b", "cab \u4e2d"):
        want = hub(text, add_special_tokens=False)["input_ids"]
        assert pipe.encode(text, chat=False) == [2, *want]
        assert pipe.decode(want) == hub.decode(want, skip_special_tokens=True)
