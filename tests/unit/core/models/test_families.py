"""Every family: its config is read, its cache is exact, its experts load in either layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import CONFIGS, EXPERTS, LLADA2, family_for, random_model
from support.matrix import completions, engine_for

from dinfer.core.engine.request import Request
from dinfer.core.kernels.attention import attention_interval
from dinfer.core.loading.checkpoint import family_of, load_network, read_spec
from dinfer.core.loading.files import CheckpointError
from dinfer.core.memory import RESERVED, KVPool, PoolSize, Seen
from dinfer.core.models.llada2 import Llada2
from dinfer.core.recipe.recipe import compose
from dinfer.families.models.a2d import A2d
from dinfer.families.models.fast_dllm_v2 import FastDllmV2
from dinfer.families.models.sdar import Sdar
from dinfer.families.models.stable_diffcoder import StableDiffcoder
from dinfer.formats.saving import save_network

IDS = (torch.arange(26).view(2, 13) * 7) % 36


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_of_one_family(name: str) -> None:
    spec = family_for(CONFIGS[name]).spec(CONFIGS[name])
    assert spec.family == family_of(CONFIGS[name]) == name.removesuffix(".2").replace("sdar_moe", "sdar")


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_a_window_over_kept_keys_equals_the_full_forward(name: str) -> None:
    """In float64, at the same positions. Where tokens of a block share experts, the window has all of the block."""
    model = random_model(name)
    spec, (rows, length), page = model.spec, IDS.shape, 4
    pages = -(-length // page)
    kv = KVPool.alloc(spec, PoolSize(rows, length, rows * pages, page), dtype=model.dtype, device="cpu")
    for row in range(rows):
        kv.assign({row: [RESERVED + row + rows * i for i in range(pages)]})
    end_B = torch.tensor([length, 9])

    def hidden(pos_BW: torch.Tensor) -> torch.Tensor:
        interval = attention_interval(pos_BW, torch.zeros_like(end_B), end_B, spec.causal_block)
        tokens_BW = IDS.gather(1, pos_BW.clamp_min(0))
        return model(model.embed(tokens_BW), kv.attend(torch.arange(rows), pos_BW, Seen(interval), pages))

    every_BW = torch.arange(length).expand(rows, -1)
    full = hidden(torch.where(every_BW < end_B[:, None], every_BW, -1))
    whole_blocks = torch.tensor([[11, 8, 10, 9, -1], [-1, 5, 7, 4, 6]])
    scattered = torch.tensor([[7, 2, 3, 12, -1], [5, -1, 8, 0, 1]])
    for window_BW in (whole_blocks,) if spec.experts and spec.experts.capacity else (whole_blocks, scattered):
        part = hidden(window_BW)
        for row, w in (window_BW >= 0).nonzero().tolist():
            torch.testing.assert_close(part[row, w], full[row, window_BW[row, w]], rtol=1e-10, atol=1e-10)
    attention = "bidirectional" if spec.causal_block is None else "block_causal"
    score = model.score(IDS[:1], attention, spec.causal_block)[0]
    torch.testing.assert_close(model.logits(full)[0], score, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_generates(name: str) -> None:
    """With exact keys where there are any: the tokens are those without a cache."""
    model = random_model(name)
    blocks = model.spec.causal_block
    iteration = "seeded" if name == "nemotron" else "block_diffusion" if blocks else "blockwise"
    found = []
    for cache in ("none", "block" if blocks else "dual"):
        recipe = compose(model, iteration={"name": iteration, "block": 8}, decoder="threshold", cache=cache)
        requests = [
            Request.behind([1, 2, 3, 4, 5], 14, recipe.resolve({})),
            Request.behind([7] * 9, 9, recipe.resolve({})),
        ]
        found.append([c.canvas for c in completions(engine_for(recipe), requests)])
    assert not blocks or found[0] == found[1]
    assert all(model.spec.mask_id not in canvas for canvases in found for canvas in canvases)


@pytest.mark.parametrize("name", EXPERTS)
def test_both_layouts_of_experts_load(name: str, tmp_path: Path) -> None:
    """Fused as dInfer's converter writes them: [X, 2M, D], gate rows first, and [X, D, M]."""
    model, family = random_model(name, torch.float32), family_for(CONFIGS[name])
    save_network(model, family, tmp_path, CONFIGS[name])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    experts = CONFIGS[name]["num_experts"]
    for layer in range(3):
        root = f"model.layers.{layer}.mlp"
        if f"{root}.experts.0.up_proj.weight" not in tensors:
            continue
        own = [[tensors.pop(f"{root}.experts.{x}.{part}_proj.weight") for part in ("gate", "up", "down")]
               for x in range(experts)]  # fmt: skip
        tensors[f"{root}.w1"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in own])
        tensors[f"{root}.w2"] = torch.stack([down for _, _, down in own])
    separate = load_network(tmp_path, family, dtype=None, device=torch.device("cpu"))
    save_file(tensors, file)
    fused = load_network(tmp_path, family, dtype=None, device=torch.device("cpu"))
    want = dict(model.named_parameters())
    for network in (separate, fused):
        assert all(torch.equal(p, want[key]) for key, p in network.named_parameters())
    del tensors[f"{root}.w2"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"missing: {root}.w2$"):
        load_network(tmp_path, family, dtype=None, device=torch.device("cpu"))


def test_attention_blocks_are_read_from_the_config_unless_given() -> None:
    given = {"mask_id": 39, "stop_ids": [38]}
    for family, config, field, silent in (
        (Llada2, LLADA2, "block_size", 32),
        (Sdar, CONFIGS["sdar"], "block_size", 4),
        (StableDiffcoder, CONFIGS["stable_diffcoder"], "block_size", 4),
        (FastDllmV2, CONFIGS["fast_dllm_v2"], "bd_size", 32),
    ):
        assert family(**given).spec(config | {field: 16}).causal_block == 16
        assert family(**given).spec(config | {field: None}).causal_block == silent
        assert family(block=2, **given).spec(config | {field: 16}).causal_block == 2
        with pytest.raises(ValueError, match=r"model\.block=0 must be at least 1"):
            family(block=0)


def test_block_routing_is_read_from_the_config() -> None:
    experts = family_for(LLADA2).spec(CONFIGS["llada2.2"]).experts
    assert experts and (experts.capacity, experts.groups) == (3, 1)


def test_the_mask_of_fast_dllm_v2_is_the_published_constant_unless_named() -> None:
    config = CONFIGS["fast_dllm_v2"] | {"vocab_size": 151936}
    assert FastDllmV2().spec(config).mask_id == 151665
    assert FastDllmV2().spec(config | {"mask_token_id": 7}).mask_id == 7
    assert FastDllmV2(mask_id=9).spec(config).mask_id == 9


def test_a_llama_is_not_a_diffusion_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIGS["stable_diffcoder"] | {"architectures": ["LlamaForCausalLM"]})
    )
    with pytest.raises(ValueError, match="is an autoregressive model, which fills no masks"):
        A2d(checkpoint=str(tmp_path)).spec(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("name", ["dream", "sdar", "llada2"])
def test_positions_that_would_be_stretched_are_refused(name: str) -> None:
    rope = {"rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0}
    family = family_for(CONFIGS[name])
    with pytest.raises(ValueError, match="rope_type='yarn' is not supported"):
        family.spec(CONFIGS[name] | {"rope_parameters": rope})
    plain = CONFIGS[name] | {"rope_theta": None, "rope_parameters": rope | {"rope_type": "default"}}
    assert family.spec(plain).rope_theta == 100.0


CHECKED = {
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "eos_token_id",
    "mask_token_id",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "num_shared_experts",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "partial_rotary_factor",
    "expert_capacity",
    "block_size",
    "bd_size",
    "dense_intermediate_size",
    "expert_intermediate_size",
    "moe_layer_freq",
    "mlp_only_layers",
    "decoder_sparse_step",
    "qk_layernorm",
    "tie_word_embeddings",
    "use_qk_norm",
    "layer_types",
}
WRONG = ("x", -1, 0, 1.5, True, None, [], ["x"], {"x": 1})
FLAGS = ("tie_word_embeddings", "qk_layernorm", "use_qk_norm", "norm_topk_prob")
NULL = (
    "num_key_value_heads", "head_dim", "dense_intermediate_size", "moe_layer_freq", "mlp_only_layers", "block_size",
    "bd_size", "expert_capacity", "num_shared_experts", "first_k_dense_replace", "partial_rotary_factor",
    "routed_scaling_factor", "eos_token_id", "mask_token_id", "layer_types", *FLAGS,
)  # fmt: skip
RIGHT = [
    (1.5, ("rms_norm_eps", "rope_theta", "routed_scaling_factor")), (True, FLAGS), (None, NULL),
    ([], ("mlp_only_layers",)),
    (0, ("eos_token_id", "mask_token_id", "first_k_dense_replace", "num_shared_experts")),
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llada"])
def test_a_field_of_the_wrong_kind_is_refused_by_name(name: str) -> None:
    family, config = family_for(CONFIGS[name]), CONFIGS[name]
    for field in config.keys() & CHECKED:
        for wrong in WRONG:
            if any(type(wrong) is type(value) and field in fields for value, fields in RIGHT if wrong == value):
                continue
            with pytest.raises(ValueError, match=field.replace("mask_token_id", "mask_(token_)?id")):
                read_spec(family, config | {field: wrong})


@pytest.mark.parametrize("name", ["dream", "sdar", "sdar_moe", "llada2"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"), ("rope_scaling", {"type": "yarn", "factor": 4.0}), ("use_sliding_window", True),
        ("layer_types", ["full_attention"] * 2 + ["sliding_attention"]), ("quantization_config", {"bits": 4}),
    ],
)  # fmt: skip
def test_another_network_is_refused_by_name(name: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field}=.* is not supported"):
        read_spec(family_for(CONFIGS[name]), CONFIGS[name] | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_causal", True), ("mlp_only_layers", [1]), ("decoder_sparse_step", 2), ("attention_bias", True),
        ("rope_scaling", True),
    ],
)  # fmt: skip
def test_another_rnd1_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field}=.* is not supported"):
        read_spec(family_for(CONFIGS["rnd1"]), CONFIGS["rnd1"] | {field: value})


def test_rnd1_is_known_by_its_class_too() -> None:
    for name in ("RND1", "RND1LM"):
        assert family_of({"architectures": [name]}) == "rnd1"


def test_a_mixture_without_its_size_is_refused() -> None:
    config = {name: value for name, value in CONFIGS["sdar_moe"].items() if name != "num_experts"}
    with pytest.raises(CheckpointError, match=r"config\.json lacks the field 'num_experts'"):
        read_spec(Sdar(), config)


def test_a_fraction_of_rotated_entries_is_read_where_transformers_5_keeps_it() -> None:
    config = {name: value for name, value in LLADA2.items() if name not in ("partial_rotary_factor", "rope_theta")}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    assert family_for(LLADA2).spec(config) == family_for(LLADA2).spec(LLADA2)
    with pytest.raises(ValueError, match=r"rotary_dim=8 and .* contradict"):
        family_for(LLADA2).spec(config | {"rotary_dim": 8})
    with pytest.raises(ValueError, match=r"rope_theta=10.0 contradicts rope_parameters\.rope_theta=100\.0"):
        family_for(LLADA2).spec(config | {"rope_theta": 10.0})
    with pytest.raises(ValueError, match="partial_rotary_factor=None"):
        family_for(LLADA2).spec(LLADA2 | {"partial_rotary_factor": None})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_field_that_the_family_does_not_read_is_refused_by_name(name: str) -> None:
    family, config = family_for(CONFIGS[name]), CONFIGS[name]
    read_spec(family, config | {"use_thing": False, "thing_dropout": 0.1, "transformers_version": "5.0"})
    for field, value in (("use_other_causal", True), ("residual_multiplier", 0.5)):
        with pytest.raises(ValueError, match=f"{field}={value}: the family .* does not know this"):
            read_spec(family, config | {field: value})
    if "text_config" in config:
        with pytest.raises(ValueError, match=r"text_config\.residual_multiplier=0.5"):
            read_spec(family, config | {"text_config": config["text_config"] | {"residual_multiplier": 0.5}})
