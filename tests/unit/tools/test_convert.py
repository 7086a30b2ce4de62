"""tools/convert: experts fused and apart again, every tensor as it was, bit for bit."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.families import CONFIGS, EXPERTS, family_for, random_model
from support.gguf_files import LLADA

from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import CheckpointError, locate
from dinfer.core.loading.safetensors_io import read, stored
from dinfer.core.models.llada import Llada
from dinfer.formats.holding import quantize as quantize_network
from dinfer.formats.saving import save_network
from tools import convert as tool


def checkpoint(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    save_network(random_model(name, dtype), family_for(CONFIGS[name]), folder, CONFIGS[name])
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    (folder / "modeling_x.py").write_text("never copied")
    return folder


def contents(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (t.dtype, t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, t in read(stored(folder))
    }


@pytest.mark.parametrize("name", EXPERTS)
def test_a_round_trip_changes_nothing(name: str, tmp_path: Path) -> None:
    """Through shards of any size; the fused checkpoint is the same model."""
    source = checkpoint(tmp_path / "source", name)
    tool.convert(source, tmp_path / "fused", experts="fused", shard=9000)
    tool.convert(tmp_path / "fused", tmp_path / "merged", experts="merged", shard=8000)
    tool.convert(tmp_path / "merged", tmp_path / "back", experts="separate", shard=7000)
    assert contents(tmp_path / "back") == contents(source)
    fused = stored(tmp_path / "fused")
    assert "model.layers.2.mlp.w1" in fused and not any(".experts." in key for key in fused)
    assert len(list((tmp_path / "fused").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.bytes_of(None) for tensor in fused.values())
    assert "model.layers.2.mlp.experts.gate_proj" in stored(tmp_path / "merged")
    for folder in ("fused", "back"):
        assert (tmp_path / folder / "chat_template.jinja").read_text() == "x"
        assert not (tmp_path / folder / "modeling_x.py").exists()
    family, cpu = family_for(CONFIGS[name]), torch.device("cpu")
    networks = [
        load_network(tmp_path / f, family, dtype=None, device=cpu) for f in ("source", "fused", "merged", "back")
    ]
    for other in networks[1:]:
        assert all(map(torch.equal, networks[0].parameters(), other.parameters()))


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("quantize", ["fp8", "int8"])
@pytest.mark.parametrize("name", EXPERTS)
def test_weights_in_8_bits_are_those_that_loading_rounds(name: str, quantize: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", name)
    tool.convert(source, tmp_path / "apart", quantize=quantize, shard=9000)
    tool.convert(source, tmp_path / "fused", quantize=quantize, experts="fused")
    tool.convert(source, tmp_path / "merged", quantize=quantize, experts="merged")
    family, cpu = family_for(CONFIGS[name]), torch.device("cpu")
    want = load_network(source, family, dtype=None, device=cpu)
    quantize_network(want, quantize)
    for folder in ("apart", "fused", "merged"):
        got = load_network(tmp_path / folder, family, dtype=None, device=cpu)
        for mine, theirs in ((got.named_parameters(), want.parameters()), (got.named_buffers(), want.buffers())):
            for (what, tensor), other in zip(mine, theirs, strict=True):
                assert tensor.dtype == other.dtype and torch.equal(tensor.float(), other.float()), what
        with pytest.raises(CheckpointError, match="has weights in few bits already"):
            tool.convert(tmp_path / folder, tmp_path / "again", quantize=quantize)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = checkpoint(tmp_path / "source", "llada_moe"), tmp_path / "fused"
    monkeypatch.setattr(sys, "argv", ["convert", str(source), str(target), "--experts", "fused"])
    tool.main()
    with safe_open(target / "model-00001-of-00001.safetensors", framework="pt") as file:
        assert file.get_slice("model.layers.1.mlp.w1").get_shape() == [4, 32, 32]
    with pytest.raises(SystemExit):
        tool.main()
    assert "is not empty: name a new folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["convert", str(source), str(tmp_path / "file" / "out"), "--experts", "fused"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_a_full_disk_leaves_nothing(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = ["--quantize", "int8"] if out == "out" else ["--type", "Q4_0"]
    monkeypatch.setattr(sys, "argv", ["convert", "tiny", str(tmp_path / out), *kind])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # bytes that a file may have
    try:
        with pytest.raises(SystemExit, match="2"):
            tool.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"error: {tmp_path / out} cannot be written: " in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_a_stop_token_of_id_0(tmp_path: Path) -> None:
    """The ids of the model in the box once collided with those that stand for ids no tensor depends on."""
    tool.convert(locate("tiny"), tmp_path / "out", quantize="int8")
    assert load_network(tmp_path / "out", Llada(), dtype=None, device=torch.device("cpu")).spec.stop_ids == (0,)


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "moe", "llada2")
    with pytest.raises(CheckpointError, match="they are separate already"):
        tool.convert(source, tmp_path / "out", experts="separate")
    with pytest.raises(CheckpointError, match="has no experts"):
        tool.convert(checkpoint(tmp_path / "dense", "dream"), tmp_path / "out", experts="fused")
    with pytest.raises(CheckpointError, match="is a GGUF file, which converts to another"):
        tool.convert(LLADA, tmp_path / "out", quantize="int8")
    assert not (tmp_path / "out").exists()
