"""`dinfer inspect` in one process: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.command_line import write_checkpoint
from support.real_configs import copied

from dinfer.__main__ import main
from dinfer.core.loading.files import CheckpointError


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Status, stdout and stderr of a command line."""
    for name, value in {"COLUMNS": "80", "TTY_COMPATIBLE": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)

    def one(*args: str) -> tuple[int, str, str]:
        status = 0
        try:
            main(["inspect", *args])
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return one


def found(said: tuple[int, str, str]) -> dict[str, Any]:
    return json.loads(said[1])


def test_a_page_of_eighty_columns(run: Any) -> None:
    status, out, err = run("tiny")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out and "5,524,736" in out and "model=tiny" in out and "1 <|mdm_mask|> (config.json)" in out


def test_json_has_what_a_program_wants(run: Any, tmp_path: Path) -> None:
    folder = copied("JetLM__SDAR-4B-Chat", tmp_path)
    status, out, _ = run(str(folder), "--json")
    said = json.loads(out)
    assert status == 3 and said["problems"] == [] and said["loads"] is None  # no weights are here
    assert (said["family"], said["parameters"], said["mask_id"]) == ("sdar", 4411424256, 151669)
    assert (said["stop_ids"], said["block"], said["attention"]) == ([151643, 151645], 4, "block-causal, 4")
    assert said["memory"]["none"] == 2 * 4411424256
    assert said["recipe"]["use"] == f"model={folder}"
    assert said["recipe"]["decoder"] == "threshold"
    assert said["chat"].startswith("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4.")


def test_an_option_of_the_family_counts(run: Any, tmp_path: Path) -> None:
    folder = copied("JetLM__SDAR-4B-Chat", tmp_path).rename(tmp_path / "mine")
    status, out, _ = run(str(folder), "--json")
    assert status == 1 and "Give model.block" in json.loads(out)["problems"][0]
    said = found(run(str(folder), "--json", "model.block=16", "model.stop_ids=[7]"))
    assert said["block"] == 16 and said["stop_ids"] == [151643, 151645, 7]
    assert "model.block=16" in said["recipe"]["use"] and said["recipe"]["iteration"] == "block_diffusion"
    assert {"role": "stop", "id": 7, "text": None, "source": "model.stop_ids"} in said["tokens"]


def test_problems_are_listed_and_end_with_one(run: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    (folder / "model.safetensors").write_bytes(b"broken")
    status, out, _ = run(str(folder))
    assert (
        status == 1
        and out.endswith("would not load or answer\n")
        and "damaged or no safetensors file" in " ".join(out.split())
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "unknown checkpoint 'nothing'"),
        (["~nobody-of-this-name/model"], "unknown checkpoint '~nobody-of-this-name/model'"),
        (["llada2_mni"], "Did you mean 'llada2_mini'?"),
        (["./nothing"], "nothing"),
        ([], "give one folder or name"),
        (["tiny", "tiny"], "not 2"),
        (["tiny", "--jsn"], "--json"),
        (["tiny", "model.blok=3"], "unknown option of model 'llada': 'blok'"),
        (["tiny-llada2", "model.block=x"], "model.block='x' must be an integer"),
    ],
)
def test_slips_end_with_two_and_one_line(args: list[str], message: str, run: Any) -> None:
    status, out, err = run(*args)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_file_and_an_empty_folder(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, _, err = run(str(tmp_path / "config.json"))
    assert status == 2 and "is a file: give the folder" in err
    (tmp_path / "empty").mkdir()
    status, _, err = run(str(tmp_path / "empty"))
    assert status == 2 and "has no config.json" in err


def test_names_of_the_hub_need_the_small_files_alone(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A preset, a checkpoint of the catalogue and an adapter; none of their weights is downloaded."""
    asked = []

    def download(name: str, revision: str | None, patterns: Any) -> Path:
        asked.append((name, revision, tuple(patterns)))
        if name == "no/network":
            raise CheckpointError("no/network is not in the cache")
        return folder

    monkeypatch.setattr("dinfer.core.loading.files.from_layer", lambda name, *_: download)
    folder = copied("inclusionAI__LLaDA2.0-mini", tmp_path)
    assert found(run("llada2_mini", "--json"))["recipe"]["use"] == "model=llada2_mini"
    said = found(run("inclusionAI/LLaDA2.1-mini", "--json", "model.revision=v1"))
    assert said["recipe"]["use"] == "model=inclusionAI/LLaDA2.1-mini model.revision=v1"
    folder = copied("GSAI-ML__LLaDA-8B-Instruct", tmp_path)
    said = found(run("SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora", "--json"))
    assert (
        said["stop_ids"] == [126081, 126348]
        and said["recipe"]["use"] == "model=SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora"
    )
    assert "adapter SJTU-Deng-Lab" in said["unknown"][-1]
    assert [(name, revision) for name, revision, _ in asked] == [
        ("inclusionAI/LLaDA2.0-mini", None), ("inclusionAI/LLaDA2.1-mini", "v1"), ("GSAI-ML/LLaDA-8B-Instruct", None),
    ]  # fmt: skip
    assert all("*.safetensors" not in patterns for _, _, patterns in asked)
    status, _, err = run("no/network")
    assert status == 2 and "no/network is not in the cache" in err


def test_control_characters_of_a_template_reach_no_terminal(run: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    (folder / "chat_template.jinja").write_text("a\x1b[2Jb")
    status, out, _ = run(str(folder))
    assert status == 0 and "\x1b" not in out and "a\\x1b[2Jb" in out


def test_a_tied_head_that_differs_does_not_load(run: Any, tmp_path: Path) -> None:
    """And the answer is another one where the weights are not here."""
    folder = write_checkpoint(tmp_path / "one")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"weight_tying": True}))
    tensors = load_file(folder / "model.safetensors")
    head, embedding = "model.transformer.ff_out.weight", "model.transformer.wte.weight"
    for change, status, verdict in ((0, 0, "it loads"), (1, 1, "would not load or answer")):
        save_file(tensors | {head: tensors[embedding] + change}, folder / "model.safetensors")
        said = run(str(folder))
        assert (said[0], said[1].splitlines()[-1]) == (status, verdict)
    (folder / "model.safetensors").unlink()
    status, out, _ = run(str(folder))
    assert (status, out.splitlines()[-1]) == (3, "whether it loads cannot be said without the weights")
