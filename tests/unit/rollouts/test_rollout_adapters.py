"""LoRA adapters that are merged into the weights of a running engine."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from unit.rollouts.test_weights import answers, folders, new_weights, pipeline, same_as_loaded  # noqa: F401, a fixture

from dinfer import Pipeline, Runtime, compose
from dinfer.core.loading.checkpoint import load_network


def adapter_for(new: dict[str, torch.Tensor], endings: tuple[str, ...], seed: int) -> Any:
    """PEFT's tensors and config for the matrices with these endings."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in [name for name in new if name.removesuffix(".weight").endswith(endings)]:
        out, width = new[name].shape
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, width, generator=drawn)
        tensors[f"{module}.lora_B.weight"] = torch.randn(out, 4, generator=drawn)
    return tensors, {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [*endings]}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_an_adapter_alone(quantize: str | None, folders: Any, tmp_path: Path) -> None:  # noqa: F811
    """The next one takes the place of the last, also where that changed other matrices."""
    pipe = pipeline(folders("wide", "A"), "wide", quantize)
    old = new_weights(folders, "wide", "A")
    for number, endings in enumerate((("q_proj", "ff_out"), ("q_proj", "v_proj"))):
        tensors, config = adapter_for(old, endings, number)
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with pipe.updating() as into:
            into.lora(*((folder,) if number else (tensors, config)))
        family = replace(pipe.origin[0], adapter=str(folder))
        network = load_network(
            folders("wide", "A"), family, dtype=torch.float32, device=torch.device("cpu"), quantize=quantize
        )
        recipe = compose(network, **{kind: vars(pipe.recipe)[kind] for kind in ("iteration", "decoder", "cache")})
        fresh = Pipeline(recipe, None, Runtime(page=4), (family, folders("wide", "A")))
        same_as_loaded(pipe, fresh)
        with fresh.updating() as into:  # the adapter is merged into what comes, too
            into.load_all(old)
        same_as_loaded(pipe, fresh)
        with pytest.raises(ValueError, match="is merged into this model: load it without"), fresh.updating() as into:
            into.lora(folder)
    with pipe.updating() as into:
        into.load_all({name: tensor for name, tensor in old.items() if "q_proj" in name})
    with pytest.raises(ValueError, match="was replaced by an update"), pipe.updating() as into:
        into.lora(folder)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("model", ["wide", "wide experts"])
def test_an_adapter_that_peft_trained_on_the_network(model: str, saved: bool, folders: Any, tmp_path: Path) -> None:  # noqa: F811
    """It names the network's modules, which hold several matrices of a checkpoint. The engine takes it as it is."""
    peft = pytest.importorskip("peft")
    pipe = pipeline(folders(model, "A"), model)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["qkv", "out"], init_lora_weights=False)
    trainer = peft.get_peft_model(deepcopy(pipe.model), config)
    if saved:
        trainer.save_pretrained(str(tmp_path))
    with pipe.updating() as into:
        into.lora(*((tmp_path,) if saved else (peft.get_peft_model_state_dict(trainer), config.to_dict())))
    merged, held = dict(trainer.merge_and_unload().named_parameters()), dict(pipe.model.named_parameters())
    assert all(torch.allclose(tensor, merged[name], atol=1e-6) for name, tensor in held.items())
    first = load_network(folders(model, "A"), pipe.origin[0], dtype=torch.float32, device=torch.device("cpu"))
    changed = [name for name, tensor in first.named_parameters() if not torch.equal(tensor, held[name])]
    assert {name.split(".")[-2] for name in changed} == {"qkv", "out"}


def test_what_peft_wraps_itself_samples_and_takes_no_update(folders: Any) -> None:  # noqa: F811
    """An adapter around the engine's own network is part of it. Updates are refused before they begin to write."""
    peft = pytest.importorskip("peft")
    pipe = pipeline(folders("wide", "A"), "wide")
    before, new = answers(pipe), new_weights(folders, "wide", "A")
    config = peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False, lora_alpha=40)
    wrapped = peft.get_peft_model(pipe.model, config)
    changed = answers(pipe)
    assert changed != before
    for work in (
        lambda into: into.load_all(new), lambda into: into.from_folder(folders("wide", "A")),
        lambda into: into.lora(peft.get_peft_model_state_dict(wrapped), config.to_dict()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="train an adapter on a copy"), pipe.updating() as into:
            work(into)
    for asked in (pipe.weights.tensors, pipe.weights.checksums):
        with pytest.raises(ValueError, match="which something is around"):
            asked()
    with pipe.updating() as into:
        into.changed()
    assert answers(pipe) == changed
