"""Autoregressive checkpoints that an adapter makes diffusion models."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dinfer
from dinfer.core.loading.checkpoint import load_network, read_config, read_spec
from dinfer.core.loading.files import CheckpointError
from dinfer.core.registry import MODELS
from dinfer.families.stretches import RopeStretch
from dinfer.lab.likelihood import family_blocks

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 48}
FIELDS = {
    "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "eos_token_id": 46,
    "tie_word_embeddings": True, "hidden_act": "silu", **SIZES,
}  # fmt: skip
MODULES = {"q_proj": (32, 32), "k_proj": (16, 32)}


def write_base(folder: Path) -> dict[str, torch.Tensor]:
    """A folder of random weights, whose tensors it returns."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FIELDS | {"model_type": "a2d-llama", "mask_token_id": 47}))
    family = MODELS.build({"name": "a2d", "checkpoint": str(folder), "block": 4})
    spec = read_spec(family, read_config(folder))
    draws = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(place.shape, generator=draws) * 0.2 for name, place in family.weights(spec).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIELDS))
    return tensors


def write_gguf(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The same weights as llama.cpp has them: rows of queries and keys in interleaved pairs."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100.0)
    writer.add_eos_token_id(46)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in tensors.items():
        heads = {"q": 4, "k": 2}.get(name.split("_proj")[0][-1])
        if "_proj" in name and heads:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        own = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(own, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter(folder: Path, said: dict[str, Any] | None, dtype: torch.dtype = torch.float32) -> None:
    """An adapter that changes nothing, and what it says of diffusion."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [*MODULES]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(2):
        for name, (rows, width) in MODULES.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            tensors[f"{prefix}_A.weight"] = torch.full((2, width), 0.5).to(dtype)
            tensors[f"{prefix}_B.weight"] = torch.full((rows, 2), 0.25).to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    if said is not None:
        (folder / "diffusion.json").write_text(json.dumps(said))


SAID = {"model_type": "a2d-llama", "mask_token_id": 47, "block_size": 4, "base": SIZES}


def test_a_folder_and_a_gguf_file_are_one_model_with_an_adapter_that_says_diffusion(tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf", write_base(tmp_path / "base"))
    write_adapter(tmp_path / "wide", SAID)
    write_adapter(tmp_path / "narrow", SAID, torch.float8_e4m3fn)  # which holds these values exactly
    ids = torch.arange(12)[None]
    logits = []
    for checkpoint, adapter in (("base", "wide"), ("base.gguf", "wide"), ("base", "narrow")):
        given = {"name": "a2d", "checkpoint": str(tmp_path / checkpoint), "adapter": str(tmp_path / adapter)}
        family = MODELS.build(given)
        network = load_network(tmp_path / checkpoint, family, dtype=torch.float32, device=torch.device("cpu"))
        assert (network.spec.causal_block, network.spec.mask_id, network.spec.eos_id) == (4, 47, 46)
        logits.append(network.score(ids, "block_causal", 4))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(logits[2], logits[0])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("no adapter", "model_type='llama' is an autoregressive model, which fills no masks: give model.adapter"),
        (None, "has no diffusion.json"),
        (SAID | {"model_type": "a2d-qwen3"}, "model_type='llama' is not the base of the adapter"),
        (SAID | {"base": SIZES | {"hidden_size": 64}}, "hidden_size=32 does not fit the adapter"),
    ],
)
def test_an_autoregressive_checkpoint_alone_is_refused_with_the_remedy(said: Any, message: str, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    model = {"name": "a2d", "checkpoint": str(tmp_path / "base")}
    if said != "no adapter":
        write_adapter(tmp_path / "adapter", said)
        model["adapter"] = str(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=message):
        dinfer.load(model)


def test_a_plain_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf", write_base(tmp_path / "base"))
    with pytest.raises(CheckpointError, match="model_type='llama' is an autoregressive model"):
        dinfer.load(str(tmp_path / "base.gguf"))


@pytest.mark.parametrize(("name", "block"), [("x-mdlm-v0.1", None), ("x-bd3lm-v0.1", 32)])
def test_the_name_says_whether_all_positions_see_each_other(name: str, block: int | None) -> None:
    config = FIELDS | {"model_type": "a2d-llama", "mask_token_id": 47, "rope_scaling": None}
    assert MODELS.build({"name": "a2d", "checkpoint": name}).spec(config).causal_block == block


def test_attention_blocks_are_counted_from_the_prompts_end_where_the_model_says_so() -> None:
    config = FIELDS | {"model_type": "a2d-llama", "mask_token_id": 47}
    spec = MODELS.build({"name": "a2d", "block": 4, "origin": "prompt"}).spec(config)
    assert family_blocks(spec, torch.arange(14), 10).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert family_blocks(spec, torch.arange(6), 4).tolist() == [1, 1, 1, 1, 2, 2]  # only the order counts
    with pytest.raises(ValueError, match=r"model\.origin=prompt counts attention blocks, and this model has none"):
        MODELS.build({"name": "a2d", "bidirectional": True, "origin": "prompt"}).spec(config)


def test_llama3_scaling_is_data_and_its_fields_are_checked() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = FIELDS | {"model_type": "a2d-llama", "mask_token_id": 47}
    family = MODELS.build({"name": "a2d", "checkpoint": "x"})
    spec = family.spec(config | {"rope_scaling": scaling | {"original_max_position_embeddings": 32}})
    assert spec.rope_stretch == RopeStretch(factor=8.0, low=1.0, high=4.0, length=32)
    with pytest.raises(ValueError, match="original_max_position_embeddings=None must be a number above 0"):
        family.spec(config | {"rope_scaling": scaling})
    with pytest.raises(ValueError, match=r"low_freq_factor=1\.0 must be below high_freq_factor=0\.5"):
        family.spec(
            config | {"rope_scaling": scaling | {"high_freq_factor": 0.5, "original_max_position_embeddings": 32}}
        )


DRAFTS = {"model_type": "a2d-llama", "mask_token_id": 47, "shift": 1, "drafts": 3, "base": SIZES}


@pytest.mark.parametrize("changes", [{}, {"quantize": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_masks_that_draft_change_no_token_of_their_base(changes: dict[str, Any], tmp_path: Path) -> None:
    """A plain Llama with an adapter for masks alone, folder and GGUF file, beside the same base token by token."""
    write_gguf(tmp_path / "base.gguf", write_base(tmp_path / "base"))
    write_adapter(tmp_path / "drafts", DRAFTS)
    prompts = [[1, 2, 3, 4, 5], [7] * 9, [30]]
    asked = {"max_new_tokens": 14, "options": [{}, {"temperature": 1.0, "seed": 3}, {}]}
    for checkpoint in ("base", "base.gguf"):
        base = {"name": "a2d", "checkpoint": str(tmp_path / checkpoint)}
        parts: dict[str, Any] = {"iteration": "block_diffusion", "decoder": "threshold", "cache": "block"}
        one_by_one = dinfer.load(
            base | {"block": 1, "mask_id": 47}, **parts | {"iteration": "token_by_token"} | changes
        )
        wanted = [answer.ids for answer in one_by_one.generate_ids(prompts, **asked)]
        for rejected in ("cold", "branches"):
            own = {"iteration": "sliding_7", "decoder": {"name": "isd", "rejected": rejected}}
            drafting = dinfer.load(base | {"draft_adapter": str(tmp_path / "drafts")}, **parts | own | changes)
            found = drafting.generate_ids(prompts, **asked)
            assert [answer.ids for answer in found][::2] == wanted[::2]


@pytest.mark.parametrize(
    ("options", "said", "message"),
    [
        ({"adapter": "drafts"}, DRAFTS, "is for masks that draft: give model.draft_adapter="),
        ({"draft_adapter": "drafts"}, SAID, "is for blocks: give model.adapter="),
        ({"draft_adapter": "drafts", "block": 4}, DRAFTS, "stays causal: leave out model.block"),
        ({"draft_adapter": "drafts", "adapter": "drafts"}, DRAFTS, "give one of them"),
    ],
)
def test_an_adapter_of_the_other_kind_is_refused(options: Any, said: Any, message: str, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "drafts", said)
    given = {name: str(tmp_path / value) if value == "drafts" else value for name, value in options.items()}
    with pytest.raises(CheckpointError, match=message):
        dinfer.load({"name": "a2d", "checkpoint": str(tmp_path / "base"), **given})
