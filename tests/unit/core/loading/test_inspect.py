"""What the small files of a checkpoint say; held against the files of published checkpoints and against loading."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import write_checkpoint
from support.families import CONFIGS, family_for
from support.models import GEMMA
from support.real_configs import FOLDERS, REAL, copied

from dinfer.core.loading.checkpoint import load_network, read_spec
from dinfer.core.loading.files import PUBLISHED as DEFAULT
from dinfer.core.loading.files import locate
from dinfer.core.registry import MODELS
from dinfer.formats.holding import roundings
from dinfer.lab.inspect import Inspection, inspect

INDEX = "model.safetensors.index.json"
# parameters, mask, stops, block, and the file that names the mask
PUBLISHED: dict[str, tuple[int, int | None, tuple[int, ...], int | None, str | None]] = {
    "Dream-org__Dream-v0-Instruct-7B": (7615616512, 151666, (151643,), None, "config.json"),
    "Efficient-Large-Model__Fast_dLLM_v2_1.5B": (1543714304, 151665, (151645,), 32, DEFAULT),
    "GSAI-ML__LLaDA-8B-Instruct": (8015581184, 126336, (126081,), None, "config.json"),
    "JetLM__SDAR-4B-Chat": (4411424256, 151669, (151643, 151645), 4, "tokenizer_config.json"),
    "JetLM__SDAR-8B-Chat": (8190735360, 151669, (151643, 151645), 4, "tokenizer_config.json"),
    "google__diffusiongemma-26B-A4B-it": (25250986812, None, (1, 106, 50), None, None),
    "inclusionAI__LLaDA2.0-flash": (102889705216, 156895, (156892,), 32, DEFAULT),
    "inclusionAI__LLaDA2.0-mini": (16255643392, 156895, (156892,), 32, DEFAULT),
}
BIASES = {"inclusionAI__LLaDA2.0-flash": 31 * 256, "inclusionAI__LLaDA2.0-mini": 19 * 256}


def inspected(folder: Path, **given: Any) -> Inspection:
    return inspect(folder, {"checkpoint": str(folder), **given})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_what_its_index_says(name: str, tmp_path: Path) -> None:
    parameters, mask, stops, block, source = PUBLISHED[name]
    found = inspected(copied(name, tmp_path))
    assert found.problems == []
    assert found.parameters == parameters
    assert found.stored in (found.expected, None)
    assert found.total_size in (2 * parameters, None)
    assert found.spec is not None
    assert (found.spec.mask_id, found.spec.stop_ids, found.spec.causal_block) == (mask, stops, block)
    assert next((token.source for token in found.tokens if token.role == "mask"), None) == source
    assert found.memory["none"] == 2 * (parameters + BIASES.get(name, 0))
    sizes = [found.memory[kind] for kind in ("none", "fp8", "int8", "int4")]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]


def test_every_real_folder_is_tested() -> None:
    assert {*PUBLISHED} == {*FOLDERS}


@pytest.mark.parametrize("name", ["tiny", "tiny-llada2"])
def test_memory_is_that_of_the_loaded_network(name: str) -> None:
    folder = locate(name)
    found = inspected(folder)
    for kind in ("none", *roundings()):
        family, quantize = MODELS.build({"name": found.family}), None if kind == "none" else kind
        network = load_network(folder, family, dtype=None, device=torch.device("cpu"), quantize=quantize)
        assert found.memory[kind] == sum(one.nbytes for one in (*network.parameters(), *network.buffers()))
    assert found.problems == [] and found.dtype == torch.float16


def test_a_checkpoint_with_weights_and_tokenizer_is_known_completely(tmp_path: Path) -> None:
    found = inspected(write_checkpoint(tmp_path / "one"))
    assert (found.problems, found.unknown) == ([], [])
    assert [(token.role, token.id, token.text, token.source) for token in found.tokens] == [
        ("mask", 1, "<mask>", "config.json"),
        ("stop", 0, "<eos>", "config.json"),
        ("eos_token", 0, "<eos>", "tokenizer.json"),
    ]
    assert found.chat == "<user>What is 2 + 2?<assistant>4.<user>And times 3?<assistant>"
    assert found.template == "tokenizer_config.json"


def test_what_is_not_at_hand_is_said_to_be_unknown(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    found = inspected(folder)
    assert found.problems == [] and found.stored is None and found.chat is None
    assert [text.split(":")[0] for text in found.unknown] == [
        "names and shapes of the tensors", "dtype of the weights", "texts of the tokens", "chat template",
    ]  # fmt: skip


def test_experts_that_a_token_does_not_meet_are_not_active(tmp_path: Path) -> None:
    found = inspected(locate("tiny-llada2"))
    assert found.parameters is not None and found.active is not None
    assert found.parameters - found.active == 5 * (16 - 4) * 3 * 64 * 256


def test_names_that_do_not_fit_are_gathered_by_layer(tmp_path: Path) -> None:
    folder = copied("JetLM__SDAR-4B-Chat", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    for layer in range(36):
        index["weight_map"][f"model.layers.{layer}.extra"] = index["weight_map"].pop(
            f"model.layers.{layer}.self_attn.q_proj.weight"
        )
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert inspected(folder).problems == [
        "missing: model.norm.weight",
        "missing: model.layers.*.self_attn.q_proj.weight (36 tensors)",
        "unexpected: model.layers.*.extra (36 tensors)",
    ]


def test_the_index_of_another_size_contradicts_config_json(tmp_path: Path) -> None:
    """SDAR-4B and SDAR-8B have the same names."""
    folder, other = copied("JetLM__SDAR-4B-Chat", tmp_path), copied("JetLM__SDAR-8B-Chat", tmp_path)
    (other / INDEX).rename(folder / INDEX)
    (problem,) = inspected(folder).problems
    assert "total_size=16381470720 is not that of 4411424256 parameters" in problem


def test_vectors_in_float32_do_not_contradict_config_json(tmp_path: Path) -> None:
    folder = copied("JetLM__SDAR-4B-Chat", tmp_path)
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 2 * 36 * 2 * 2560  # the norms
    (folder / INDEX).write_text(json.dumps(index))
    assert inspected(folder).problems == []


def test_shapes_are_those_of_the_headers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_hidden_size": 32}))
    problems = inspected(folder).problems
    assert len(problems) == 3
    assert "shape of model.transformer.blocks.*.ff_out.weight: (32, 64), must be (32, 32) (2 tensors)" in problems


def test_a_rounded_checkpoint_of_which_only_names_are_known(tmp_path: Path) -> None:
    folder = copied("JetLM__SDAR-4B-Chat", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    scales = [f"{name}_scale_inv" for name in index["weight_map"] if name.endswith("_proj.weight")]
    index["weight_map"] |= dict.fromkeys(scales, file)
    index["metadata"]["total_size"] //= 2
    (folder / INDEX).write_text(json.dumps(index))
    found = inspected(folder)
    assert found.problems == [] and found.memory["none"] == 2 * 4411424256  # blocks are widened
    index["weight_map"]["model.norm.weight_scale_inv"] = file
    (folder / INDEX).write_text(json.dumps(index))
    assert inspected(folder).problems == ["unexpected: model.norm.weight_scale_inv"]


def broken(folder: Path, how: str) -> None:
    """Breaks a checkpoint that is in order."""
    config = json.loads((folder / "config.json").read_text())

    def change(**fields: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | fields))

    if how in ("config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json", INDEX):
        (folder / how).write_bytes(b"\xff\x00{")
    elif how == "list":
        (folder / "config.json").write_text("[]")
    elif how == "directory":
        (folder / "config.json").unlink()
        (folder / "config.json").mkdir()
    elif how == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif how == "shards alone":
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    elif how == "lost shard":
        where = {
            "model.transformer.wte.weight": "model.safetensors",
            "model.transformer.ln_f.weight": "lost.safetensors",
        }
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    elif how.startswith("map of "):
        where = {"a": 1 if how == "map of numbers" else "../one/model.safetensors"}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    elif how == "no tokenizer":
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    elif how == "template":
        (folder / "chat_template.jinja").write_text("{% for")
    elif how == "template that fails":
        (folder / "chat_template.jinja").write_text("{{ messages[7].content.nothing.at_all }}")
    else:
        change(**json.loads(how))


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("config.json", "config.json is not JSON"),
        ("list", "config.json must hold a JSON object"),
        ("directory", "Is a directory"),
        ("model.safetensors", "is truncated, damaged or no safetensors file"),
        ("tokenizer_config.json", "tokenizer_config.json is not JSON"),
        (INDEX, f"{INDEX} is not JSON"),
        ("pickle", "Weights in pickles (pytorch_model.bin) are not read"),
        ("shards alone", "put the index beside model-00001-of-00001.safetensors"),
        ("lost shard", f"{INDEX} names files that are not there: lost.safetensors"),
        ("map of numbers", "weight_map={'a': 1} must name a file beside it for each tensor"),
        ("map of another folder", "weight_map={'a': '../one/model.safetensors'} must name a file beside it"),
        ("no tokenizer", "tokenizer.json cannot be read"),
        ("template", "chat_template.jinja: the chat template fails"),
        ("template that fails", "chat_template.jinja: the chat template fails"),
        ('{"model_type": "gpt2"}', "belong to no family that dinfer knows"),
        ('{"d_model": NaN}', "d_model"),
        ('{"d_model": "abc"}', "d_model"),
        ('{"n_layers": 1000000000}', "n_layers=1000000000"),
        ('{"d_model": 1000000000000000000, "n_heads": 1, "n_kv_heads": 1}', "d_model"),
        ('{"rope": "yes"}', "rope='yes' is not supported"),
        ('{"mask_token_id": -1}', "mask_token_id=-1"),
        ('{"eos_token_id": {}}', "eos_token_id={}"),
        ('{"quantization_config": {"quant_method": "hqq"}}', "quant_method='hqq' is not supported"),
    ],
)
def test_what_is_broken_is_a_problem(how: str, problem: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    broken(folder, how)
    problems = inspected(folder).problems
    assert any(problem in text for text in problems) and len({*problems}) == len(problems), problems


WRONG: tuple[Any, ...] = (
    None, "abc", -1, 0, 1, 3, 1.5, math.nan, math.inf, [], [None], ["a"], [[]], {}, {"a": 1}, True, 10**30, 2**31 - 1,
)  # fmt: skip


def changes(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The object with each of its fields, and of those of objects in it, left out or of a wrong value."""
    for name, value in config.items():
        yield {other: config[other] for other in config if other != name}
        yield from ({**config, name: wrong} for wrong in WRONG)
        if isinstance(value, dict):
            yield from ({**config, name: inner} for inner in changes(value))


@pytest.mark.parametrize("name", [*CONFIGS, "diffusion_gemma"])
def test_no_value_in_config_json_ends_in_another_error(name: str) -> None:
    whole = (CONFIGS | {"diffusion_gemma": GEMMA})[name]
    family, refused = family_for(whole), 0
    for config in changes(whole):
        if family.matches(config):
            try:
                dict(family.weights(read_spec(family, config)))
            except ValueError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_no_value_in_the_other_files_ends_in_another_error(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    shutil.copytree(REAL / "JetLM__SDAR-4B-Chat", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "unknown", "eos_token_id": 1, "mask_token_id": 2}))
    whole = json.loads((folder / file).read_text())
    decoder = whole.get("added_tokens_decoder", {})
    short = whole | ({"added_tokens_decoder": dict([*decoder.items()][-2:])} if decoder else {})
    for found in changes(short):
        (folder / file).write_text(json.dumps(found))
        assert isinstance(inspected(folder).problems, list)
