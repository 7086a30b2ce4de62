"""Presets in Python: what a model is decoded with unless the caller says otherwise."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.families import CONFIGS, family_for
from support.models import EOS, MASK, tiny_model

import dinfer
from dinfer.core.step.window import exact
from dinfer.formats.saving import save_network
from dinfer.lab.random_network import random_network

CPU = torch.device("cpu")


def test_a_name_brings_its_own_recipe() -> None:
    """It took blocks of 32, a threshold and a cache that is not exact for this model, and had no tiny-d2f."""
    pipe = dinfer.load("tiny-llada2", device="cpu")
    names = [type(part).__name__ for part in (pipe.recipe.iteration, pipe.recipe.decoder, pipe.recipe.cache)]
    assert names == ["BlockDiffusion", "JointThreshold", "BlockCache"]
    folder = Path(dinfer.__file__).parent / "demo" / "checkpoints" / "tiny-llada2"
    assert dinfer.load(folder, device="cpu").recipe.parts == pipe.recipe.parts
    several = dinfer.load("tiny-d2f", device="cpu")
    assert several.recipe.iteration.blocks == 4 and several.model.spec.prompt_block
    assert dinfer.load(preset="tiny-d2f", device="cpu").recipe.parts == several.recipe.parts
    mine = dinfer.load("tiny", preset="tiny-d2f", decoder="threshold_95", device="cpu").recipe
    assert mine.decoder.threshold == 0.95 and mine.iteration == several.recipe.iteration
    assert {"tiny", "tiny-d2f", "llada2_mini", "sdar_8b_chat"} <= dinfer.presets().keys()


def test_a_folder_has_its_own_blocks_and_the_exact_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for block in (4, 8):
        config = CONFIGS["sdar"] | {"block_size": block, "mask_token_id": MASK, "eos_token_id": EOS}
        family = family_for(config)
        network = random_network(family, family.spec(config), dtype=torch.float32, device=CPU)
        save_network(network, family, tmp_path / str(block), config)
        recipe = dinfer.load(tmp_path / str(block), device="cpu").recipe
        assert recipe.iteration.block == block
        assert exact(recipe.cache, recipe.model.spec.attention_layout, recipe.alignment)
    assert "anew" not in caplog.text


def test_a_cache_that_is_not_exact_for_the_model_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = tiny_model("block_causal")
    for cache in ({"name": "dual", "interval": 77}, {"name": "dual", "interval": 77}, "block"):
        recipe = dinfer.compose(model, iteration="blockwise", decoder="threshold", cache=cache)
        dinfer.Pipeline(recipe, None, dinfer.Runtime())
    told = [message for message in caplog.messages if "anew" in message]
    assert len(told) == 1 and "cache=dual" in told[0] and "cache=block" in told[0]


def test_a_hint_names_an_iteration_that_the_model_takes(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of D2F are counted from the prompt's end, and block_diffusion counts them from position 0."""
    blocks = {"name": "blockwise", "block": 16}
    dinfer.load("tiny-d2f", iteration=blocks, cache={"name": "dual", "interval": 78}, device="cpu")
    assert "cache=block with iteration=multi_block" in caplog.text


def test_slips_name_the_presets() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'tiny-d2'\. Did you mean 'tiny-d2f'"):
        dinfer.load(preset="tiny-d2")
