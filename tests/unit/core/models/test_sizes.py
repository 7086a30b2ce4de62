"""Specs of published checkpoints, built without memory, have as many parameters as was published.

Where the published figure is rounded, so is ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from benchmarks.shapes import LLADA2_MINI, LLADA_8B
from dinfer.core.layers.transformer import Transformer
from dinfer.core.loading.checkpoint import family_of
from dinfer.core.registry import MODELS
from dinfer.core.terms.spec import ExpertLayout

CONFIGS = Path(__file__).parents[3] / "configs"
DREAM = "real/Dream-org__Dream-v0-Instruct-7B/config"
SDAR = "real/JetLM__SDAR-8B-Chat/config"


def network(config: dict[str, Any]) -> Transformer:
    family = MODELS.build(family_of(config))
    with torch.device("meta"):
        return family.network(family.spec(config))


def read(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


RND1 = {
    "model_type": "rnd1", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu", "mask_token_id": 151669,
    "eos_token_id": 151645,
}  # fmt: skip


def test_llada_8b() -> None:
    """8.02B, without the embedding and the head 6.98B: table of the card of GSAI-ML/iLLaDA-8B-Base."""
    model = network(LLADA_8B)
    assert round(count(model) / 1e9, 2) == 8.02
    assert round((count(model) - 2 * model.embedding.weight.numel()) / 1e9, 2) == 6.98


def test_llada_moe_7b_a1b() -> None:
    """14032 MiB in bfloat16, of which 12288 MiB are experts: measured on the checkpoint by a quantisation project
    (found with the search tool, file 62469430891), and 1.4B of parameters active: the paper, arXiv:2509.24389."""
    model = network(read("llada_moe_7b_a1b"))
    experts = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("mlp.gate_up", "mlp.down")))
    assert (round(2 * count(model) / 2**20), 2 * experts / 2**20) == (14032, 12288)
    assert round((count(model) - experts * 56 / 64) / 1e9, 1) == 1.7  # with the embedding, which is a table
    assert round((count(model) - experts * 56 / 64 - model.embedding.weight.numel()) / 1e9, 1) == 1.4


def test_llada2_mini() -> None:
    """16255643392, the safetensors total of inclusionAI/Ling-mini-2.0, which has the same config (file 70949800607)."""
    assert count(network(LLADA2_MINI)) == 16_255_643_392


def test_dream_7b() -> None:
    """7615616512, as of Qwen2.5-7B-Instruct, from which it grew with the vocabulary unchanged (file 12439498600)."""
    assert count(network(read(DREAM))) == 7_615_616_512


def test_sdar_8b() -> None:
    """8190735360, as of Qwen3-8B, from which it grew: safetensors total in the hub's answer (file 62108703711)."""
    assert count(network(read(SDAR))) == 8_190_735_360


def test_rnd1() -> None:
    """30532122624, as of Qwen3-30B-A3B, from which it grew: the sizes are the defaults of the authors' config class."""
    assert count(network(RND1)) == 30_532_122_624


@pytest.mark.parametrize("config", [RND1, LLADA_8B, LLADA2_MINI, read("llada_moe_7b_a1b"), read(DREAM), read(SDAR)])
def test_a_checkpoint_fills_every_parameter(config: dict[str, Any]) -> None:
    """In every layout: every row is somebody's, and nobody's twice."""
    family = MODELS.build(family_of(config))
    spec, parameters = family.spec(config), dict(network(config).named_parameters())
    for experts in get_args(ExpertLayout):
        filled = dict.fromkeys(parameters, 0)
        for place in family.weights(spec, experts).values():
            filled[place.parameter] += torch.Size(place.shape).numel()
        assert filled == {name: p.numel() for name, p in parameters.items()}
