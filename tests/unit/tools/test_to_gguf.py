"""tools/convert to GGUF: the same network, the same ids, and values as the gguf package rounds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.families import CONFIGS, family_for, random_model

import dinfer
from dinfer.core.loading.checkpoint import family_of, load_network, read_config
from dinfer.core.loading.files import CheckpointError, locate
from dinfer.core.registry import MODELS
from dinfer.formats.saving import save_network
from tools.convert import convert
from tools.to_gguf import write_gguf

CPU = torch.device("cpu")


def network(path: Path) -> Any:
    config = read_config(path)
    family = MODELS.build({"name": family_of(config), "stop_ids": config["eos_token_id"]})
    return load_network(path, family, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["llada", "dream", "llada_moe", "rnd1"])
def test_a_round_trip_changes_nothing(name: str, tmp_path: Path) -> None:
    """Heads are grouped, so that q and k have other numbers of rows; experts become one tensor a layer."""
    config = CONFIGS[name] | ({"moe_layer_freq": [1, 1, 1], "mask_token_id": 39} if name == "llada_moe" else {})
    model = random_model(name, torch.float32, **config)
    save_network(model, family_for(config), tmp_path / "folder", config)
    write_gguf(tmp_path / "folder", tmp_path / "a.gguf", "F32")
    found = network(tmp_path / "a.gguf")
    for (own, want), got in zip(model.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(want, got), own
    assert found.spec == model.spec
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.gguf"]
    with pytest.raises(CheckpointError, match="exists: name a new file"):
        write_gguf(tmp_path / "folder", tmp_path / "a.gguf", "F32")


def test_weights_with_scales_are_refused(tmp_path: Path) -> None:
    convert(locate("tiny"), tmp_path / "int8", quantize="int8")
    with pytest.raises(CheckpointError, match="has weights in 8 bits with scales"):
        write_gguf(tmp_path / "int8", tmp_path / "a.gguf", "F16")


def test_the_model_in_the_box_keeps_its_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.gguf"
    write_gguf(locate("tiny"), path, "Q8_0")
    want, got = dinfer.load("tiny"), dinfer.load(str(path))
    chat = [{"role": "user", "content": "What is 12 + 345?"}]
    assert got.encode(chat) == want.encode(chat) and got.encode("a b", chat=False) == want.encode("a b", chat=False)
    assert got.model.spec == want.model.spec
    down = want.model.get_parameter("blocks.0.mlp.down.weight").numpy()
    rounded = gguf.dequantize(gguf.quantize(down, Kind.Q8_0), Kind.Q8_0)
    held = got.model.blocks[0].mlp.down
    assert torch.equal(held.formats["weight"].widened(held.weight_of("weight")), torch.from_numpy(rounded))


def test_what_llama_cpp_has_no_architecture_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"family llada2; llama\.cpp has"):
        write_gguf(locate("tiny-llada2"), tmp_path / "a.gguf", "F16")
