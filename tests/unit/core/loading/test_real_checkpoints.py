"""Configs of published checkpoints load with the fields that they have, and no others.

The folders under tests/configs/real are copies. To make weights for them, numbers of their sizes get smaller.
"""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import REAL
from support.models import GEMMA, tiny_gemma
from support.tokenizer import published_tokenizer

from dinfer.core.loading.checkpoint import family_of, load_network, read_config, read_spec
from dinfer.core.loading.files import CheckpointError
from dinfer.core.pipeline import load
from dinfer.core.registry import MODELS
from dinfer.families.models.diffusion_gemma import DiffusionGemma
from dinfer.formats.saving import save_network
from dinfer.lab.random_network import random_network

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "rotary_dim": 4, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 24, "global_head_dim": 8,
    "num_global_key_value_heads": 1, "top_k_experts": 2,
}  # fmt: skip
# Mask, stop tokens (those of the preset too) and attention block of each config, by its file.
FACTS: dict[str, tuple[int | None, tuple[int, ...], int | None]] = {
    "Dream-org__Dream-v0-Instruct-7B/config.json": (151666, (151643, 151645), None),
    "Efficient-Large-Model__Fast_dLLM_v2_1.5B/config.json": (151665, (151645,), 32),
    "GSAI-ML__LLaDA-8B-Instruct/config.json": (126336, (126081, 126348), None),
    "GSAI-ML__LLaDA-8B-Instruct/config.resaved.json": (126336, (126081, 126348), None),
    "JetLM__SDAR-4B-Chat/config.json": (151669, (151643, 151645), 4),
    "JetLM__SDAR-8B-Chat/config.json": (151669, (151643, 151645), 4),
    "google__diffusiongemma-26B-A4B-it/config.json": (None, (1, 106, 50), None),
    "inclusionAI__LLaDA2.0-flash/config.dfactory.json": (156895, (156892,), 32),
    "inclusionAI__LLaDA2.0-mini/config.json": (156895, (156892,), 32),
}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same fields with smaller sizes; a vocabulary stays as large as the ids of its special tokens are."""
    small = {name: SIZES.get(name, value) for name, value in config.items()}
    if isinstance(config.get("layer_types"), list):
        small["layer_types"] = config["layer_types"][: SIZES["num_hidden_layers"]]
    return {name: shrunk(value) if name == "text_config" else value for name, value in small.items()}


def checkpoint(file: str, target: Path) -> Path:
    """A folder called as the published one, with its small files and random weights."""
    source = REAL / file
    folder = target / source.parent.name
    config = shrunk(json.loads(source.read_text()))
    family = MODELS.build({"name": family_of(config), "checkpoint": str(folder)})
    network = random_network(family, family.spec(config), dtype=torch.float32, device=CPU)
    save_network(network, family, folder, config, "merged" if "dfactory" in file else "separate")
    for other in source.parent.glob("*.json"):
        if not other.name.startswith("config"):
            (folder / other.name).write_bytes(other.read_bytes())
    if (folder / "tokenizer_config.json").is_file():
        published_tokenizer(folder)
    return folder


def test_every_config_is_tried() -> None:
    assert {str(path.relative_to(REAL)) for path in REAL.glob("*/config*.json")} == set(FACTS)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("file", FACTS)
def test_a_published_checkpoint_loads_and_generates(file: str, tmp_path: Path) -> None:
    folder = checkpoint(file, tmp_path)
    pipe = load(str(folder), device="cpu", iteration={"name": "blockwise", "block": 4}, cache="none")
    spec = pipe.model.spec
    assert (spec.mask_id, spec.stop_ids, spec.causal_block) == FACTS[file]
    prompt = pipe.encode("hi") if pipe.tokenizer else [5, 6]
    result = pipe.generate_ids([prompt], max_new_tokens=4)[0]
    assert len(result.canvas) == len(prompt) + 4 and spec.mask_id not in result.canvas


@pytest.mark.parametrize("file", FACTS)
def test_the_config_as_it_is_makes_a_network(file: str) -> None:
    """On torch's `meta` device; the family's options all at their defaults."""
    family = MODELS.build({"name": family_of(json.loads((REAL / file).read_text())), "checkpoint": file.split("/")[0]})
    config = json.loads((REAL / file).read_text())
    with torch.device("meta"):
        network = family.network(read_spec(family, config))
    held = {place.parameter for place in family.weights(network.spec).values()}
    assert held == {name for name, _ in network.named_parameters()}


@pytest.mark.parametrize("file", FACTS)
def test_a_value_of_the_wrong_kind_is_an_error_of_one_line(file: str) -> None:
    """Whatever the field: it is refused by name, or it is one that changes nothing."""
    config = json.loads((REAL / file).read_text())
    parts = [({}, config), *[({"text_config": config[part]}, config[part]) for part in config if part == "text_config"]]
    family = MODELS.build({"name": family_of(config), "checkpoint": file.split("/")[0]})
    for whole, part in parts:
        for field, wrong in itertools.product(
            part.keys() - {"model_type", "num_experts"}, ("abc", -1, None, [], {"x": 1})
        ):
            changed = {"text_config": part | {field: wrong}} if whole else {field: wrong}
            try:
                read_spec(family, config | changed)
            except ValueError as error:
                assert field in str(error) or field == "text_config"


def test_what_no_file_says_is_published_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint("inclusionAI__LLaDA2.0-mini/config.json", tmp_path)
    caplog.clear()
    assert read_config(folder)["mask_token_id"] == 156895  # the tokenizer's files say it
    load_network(folder, MODELS.build("llada2"), dtype=None, device=CPU)
    assert not caplog.records
    (folder / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        spec = load_network(folder, MODELS.build("llada2"), dtype=None, device=CPU).spec
    assert (spec.mask_id, spec.stop_ids) == (156895, (156892,)) and spec.qk_norm
    assert "mask_token_id: published default of the family [156895]" in caplog.text
    assert "eos_token_id: published default of the family [156892]" in caplog.text


@pytest.mark.parametrize(
    ("name", "block"),
    [("SDAR-1.7B-Chat-b8", 8), ("JetLM/SDAR-8B-Chat-b64", 64), ("/x/models--JetLM--SDAR-4B-Chat-b16/snapshots/0f", 16),
     ("JetLM/SDAR-30B-A3B-Chat", 4), ("/x/Gen-Verse__TraDo-8B-Thinking/", 4), ("my-sdar-b32", 32),
     ("~nobody-of-this-name/SDAR-4B-Chat-b16", 16), ("x/SeqD-SDAR-1.7B-b64-Thinking", 64)],
)  # fmt: skip
def test_the_name_of_an_sdar_says_how_long_its_attention_blocks_are(name: str, block: int) -> None:
    config = json.loads((REAL / "JetLM__SDAR-8B-Chat/config.json").read_text())
    family = MODELS.build({"name": "sdar", "checkpoint": name})
    assert family.spec(config).causal_block == block
    assert family.spec(config | {"block_size": 2}).causal_block == 2
    assert MODELS.build({"name": "sdar", "checkpoint": name, "block": 1}).spec(config).causal_block == 1


@pytest.mark.parametrize("name", ["/x/my-sdar", "SDAR-4B-Chat-tuned", "/x/SDAR-4B-Chat/tuned", "SDAR-4B-Chat-b0"])
def test_another_name_needs_the_length(name: str) -> None:
    config = json.loads((REAL / "JetLM__SDAR-8B-Chat/config.json").read_text())
    with pytest.raises(ValueError, match=r"config\.json has no block_size, .* Give model\.block"):
        MODELS.build({"name": "sdar", "checkpoint": name}).spec(config)


@pytest.mark.parametrize(
    ("name", "card", "field", "what"),
    [
        ("yifanyu/I-DLM-8B", "", None, "I-DLM: its attention is strictly causal"),
        ("/x/models--yifanyu--I-DLM-32B/snapshots/0f", "", None, "I-DLM"),
        ("x/RCD-SDAR-8B-b64", "", None, "RCD: it is fed what earlier steps expected"),
        ("mine", "", "yifanyu/I-DLM-8B", "I-DLM"),
        ("mine", "---\nlicense: mit\n---\n# Introspective Diffusion 8B\n", None, "I-DLM"),
        ("mine", "# Mine\nnot as good as I-DLM-8B\n", None, None),
    ],
)
def test_what_only_shares_the_config_of_sdar_is_refused(
    name: str, card: str, field: str | None, what: str | None, tmp_path: Path
) -> None:
    """Also where model.block says what config.json does not."""
    config = json.loads((REAL / "JetLM__SDAR-8B-Chat/config.json").read_text()) | {"_name_or_path": field}
    if card:
        (folder := tmp_path / name).mkdir()
        (folder / "README.md").write_text(card)
        name = str(folder)
    family = MODELS.build({"name": "sdar", "checkpoint": name, "block": 4})
    if what is None:
        assert family.spec(config).causal_block == 4
        return
    with pytest.raises(ValueError, match=rf"model_type='sdar' says SDAR, but this checkpoint is {what}"):
        family.spec(config)


def test_a_causal_model_made_a_diffusion_one_is_taken_for_no_other_family() -> None:
    """A2D's checkpoints name the network that they were made of."""
    for kind in ("qwen2", "qwen3", "llama"):
        config = {"model_type": f"a2d-{kind}", "architectures": [f"A2D{kind.title()}LMHeadModel"]}
        assert family_of(config) == "a2d"
    with pytest.raises(ValueError, match="no family that dinfer knows"):
        family_of({"model_type": "a2d-gpt2"})


def test_copies_of_tied_weights_load_if_they_are_equal(tmp_path: Path) -> None:
    """As programs write them that know nothing of ties: the LM head, and the encoder beside the decoder."""
    model, family = tiny_gemma(dtype=torch.float32), DiffusionGemma()
    save_network(model, family, tmp_path, GEMMA)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    copies = {
        name.replace("model.decoder.", "model.encoder.language_model."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.decoder.") and not name.endswith("layer_scalar") and "self_cond" not in name
    }
    copies["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
    assert copies.keys() == family.copies(model.spec).keys()
    save_file(tensors | copies, file)
    found = load_network(tmp_path, family, dtype=None, device=CPU)
    assert all(map(torch.equal, found.parameters(), model.parameters()))
    for name in ("lm_head.weight", "model.encoder.language_model.layers.1.self_attn.q_proj.weight"):
        save_file(tensors | copies | {name: copies[name] + 1}, file)
        with pytest.raises(CheckpointError, match=rf"must be equal:\n  {name} differs from model\.decoder\.[^ ]*$"):
            load_network(tmp_path, family, dtype=None, device=CPU)


def test_a_tied_head_may_be_there_all_the_same(tmp_path: Path) -> None:
    folder = checkpoint("Efficient-Large-Model__Fast_dLLM_v2_1.5B/config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    load_network(folder, MODELS.build("fast_dllm_v2"), dtype=None, device=CPU)


def test_early_revisions_of_stable_diffcoder_are_known() -> None:
    for name in ("SeedDiffcoderForCausalLM", "StableDiffcoderForCausalLM"):
        assert family_of({"model_type": "llama", "architectures": [name]}) == "stable_diffcoder"
        code = {"AutoModelForCausalLM": f"modeling_seed_diffcoder.{name}"}
        assert family_of({"model_type": "llama", "architectures": None, "auto_map": code}) == "stable_diffcoder"
    assert family_of({"model_type": "llama", "architectures": 5}) == "a2d"  # which wants an adapter


def test_a_shared_expert_of_llada_moe_stands_beside_the_mlp() -> None:
    config = json.loads((REAL.parent / "llada_moe_7b_a1b.json").read_text())
    config |= {"shared_expert_intermediate_size": 1024, "moe_layer_freq": [0] + [1] * 15}
    family = MODELS.build("llada_moe")
    names = [name for name in family.weights(family.spec(config)) if "shared_expert" in name]
    assert names[0] == "model.layers.1.shared_expert.gate_proj.weight" and len(names) == 3 * 15
    assert not any(".mlp." in name for name in names)
