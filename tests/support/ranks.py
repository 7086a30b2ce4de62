"""Models that 2, 3 and 4 ranks can divide, and recipes on them, run by processes that speak to each other over gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.families import CONFIGS, family_for
from support.models import CONFIG, GEMMA

from dinfer import Pipeline, Runtime, compose
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.models.family import ModelFamily
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.families.models.diffusion_gemma import DiffusionGemma
from dinfer.formats.saving import save_network
from dinfer.lab.random_network import random_network

os.environ["DINFER_CHECK_RANKS"] = "1"  # a rank that strays is found in the round in which it does


CPU = torch.device("cpu")
HEADS = {"num_attention_heads": 12, "d_model": 72, "n_heads": 12}  # as each family spells it
SIZES = {"head_dim": 8, "rotary_dim": 4, "hidden_size": 48, "moe_intermediate_size": 12, "expert_intermediate_size": 12}


VOCAB = 200
SIZE_OF_VOCABULARY = ("vocab_size", "embedding_size")
WIDE = ("llada", "llada2")
ROUNDED = ("fp8", "int8", "int4")


def divisible(config: dict[str, Any], kv_heads: int, experts: int) -> dict[str, Any]:
    """The config with numbers that 2, 3 and 4 ranks can divide."""
    more = HEADS | SIZES | {"num_key_value_heads": kv_heads, "n_kv_heads": kv_heads}
    more |= {"num_experts": experts, "n_group": 3, "expert_capacity": config.get("expert_capacity")}
    return config | {name: value for name, value in more.items() if name in config}


def models() -> dict[str, tuple[ModelFamily, dict[str, Any]]]:
    found = {name: (family_for(config), divisible(config, 1, 12)) for name, config in CONFIGS.items()}
    found["llada, 12 key heads"] = family_for(CONFIG), divisible(CONFIG, 12, 0)
    found["llada, many tokens"] = family_for(CONFIG), divisible(CONFIG, 1, 0) | dict.fromkeys(SIZE_OF_VOCABULARY, VOCAB)
    for name in WIDE:  # a rank's share of every width holds whole groups of 32 inputs
        config, wide = found[name][1], {"n_kv_heads": 12, "num_key_value_heads": 12, "head_dim": 32}
        wide |= dict.fromkeys(("d_model", "hidden_size", "mlp_hidden_size", "moe_intermediate_size"), 384)
        wide |= {"intermediate_size": 384, "rotary_dim": 16}
        found[f"{name}, wide"] = found[name][0], config | {key: wide[key] for key in wide.keys() & config.keys()}
    text = GEMMA["text_config"] | {
        "num_attention_heads": 12, "num_key_value_heads": 12, "num_experts": 12, "intermediate_size": 36,
    }  # fmt: skip
    return found | {"diffusion_gemma": (DiffusionGemma(), GEMMA | {"text_config": text})}


MODELS = models()


def save(name: str, folder: Path) -> None:
    """A checkpoint with random weights that differ from each other, and logits that are far from equal."""
    family, config = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = random_network(family, family.spec(config), dtype=torch.float64, device=CPU)
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        network.norm.weight.mul_(4)
    save_network(network, family, folder / name, config)


@dataclass(frozen=True)
class Case:
    """A recipe, and two requests."""

    name: str
    model: str
    decoder: Any = "threshold"
    cache: Any = "dual"
    iteration: Any = field(default_factory=lambda: {"name": "blockwise", "block": 8})
    sampling: Any = "standard"
    options: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    expert_parallel: bool = False


CAUSAL = {"cache": "block", "iteration": {"name": "block_diffusion", "block": 8}}
DRAWN = {"name": "standard", "temperature": 0.8, "seed": 5}
PENALTIES = {"name": "standard", "repetition_penalty": 1.3, "ban_eos": 1, "eos_last": 1, "suppress": [3, 70, 150]}
MANY_TOKENS = [
    Case(f"llada, {name}", "llada, many tokens", **given)
    for name, given in {
        "draws": {"sampling": DRAWN},
        "top-k": {"sampling": DRAWN | {"top_k": 9, "top_p": 0.9}},
        "penalties": {"sampling": PENALTIES},
        "last stop tokens": {"sampling": DRAWN | {"eos_last": 1}, "decoder": "fixed"},
        "tempered draws": {"sampling": DRAWN | {"name": "tempered", "top_k": 9}},
        "guidance": {"sampling": {"name": "standard", "guidance": 1.0}, "decoder": "entropy_bound"},
        "guided draws": {"sampling": DRAWN | {"guidance": 0.5}, "cache": "prefix"},
        "draws of candidates": {"sampling": DRAWN | {"top_k": 12}, "runtime": {"speculate": 3}},
        "a nucleus of many": {"sampling": DRAWN | {"top_p": 0.8}},
    }.items()
]
CASES = [
    Case("llada, no cache", "llada", cache="none"),
    Case("llada, prefix", "llada", cache="prefix", decoder={"name": "entropy_bound"}),
    Case("llada, dual", "llada, 12 key heads", decoder="factor"),
    Case("llada, nucleus and penalty", "llada", sampling=DRAWN | {"top_p": 0.8, "repetition_penalty": 1.3}),
    *MANY_TOKENS,
    Case("llada, whole logits", "llada", decoder="klass"),
    Case("llada, expectations", "llada", iteration={"name": "smooth", "block": 8}),
    Case("llada, values of all heads", "llada, 12 key heads", cache="adaptive"),
    Case("llada, attention of all heads", "llada", cache="d2cache", iteration="full"),
    Case("llada, candidates", "llada", runtime={"speculate": 3}),
    Case("llada, multi-block", "llada", iteration={"name": "multi_block", "block": 8, "blocks": 2}),
    Case("dream", "dream", decoder={"name": "dream", "alg": "topk_margin"}),
    Case("llada_moe", "llada_moe"),
    Case("llada2", "llada2", **CAUSAL),
    Case("llada2, drafts", "llada2", decoder="joint_threshold", **CAUSAL),
    Case("llada2, drawn drafts", "llada2", decoder="joint_threshold", sampling=DRAWN, **CAUSAL),
    Case("llada2, a second pass", "llada2", decoder="s2d2", **CAUSAL),
    Case("llada2.2", "llada2.2", **CAUSAL),
    Case("sdar", "sdar", **CAUSAL),
    Case("sdar_moe", "sdar_moe", **CAUSAL),
    Case("fast_dllm_v2", "fast_dllm_v2", **CAUSAL),
    Case("stable_diffcoder", "stable_diffcoder", **CAUSAL),
    Case(
        "diffusion_gemma", "diffusion_gemma", decoder={"name": "renoise", "steps": 4}, cache="none",
        iteration={"name": "self_conditioned", "block": 8},
    ),
]  # fmt: skip
CASES += [
    replace(case, name=f"{case.name}, experts dealt out", expert_parallel=True)
    for case in CASES if case.name in ("llada2", "sdar_moe", "diffusion_gemma")
]  # fmt: skip
PROMPTS = [[1, 5, 9, 2, 7], [4, 4, 8]]


def decode(case: Case, folder: Path, ranks: Ranks = ALONE) -> list[Any]:
    """The canvas of each request, its forwards and the steps without one, as one rank of these has them."""
    if case.expert_parallel and ranks.size > 1:
        ranks = replace(ranks, rank=replace(ranks.rank, expert_parallel=True))
    network = load_network(folder / case.model, MODELS[case.model][0], dtype=torch.float64, device=CPU, rank=ranks.rank)
    network.join(ranks)
    parts = {"iteration": case.iteration, "decoder": case.decoder, "cache": case.cache, "sampling": case.sampling}
    divided: dict[str, Any] = {"tensor_parallel": ranks.size, "expert_parallel": ranks.rank.expert_parallel}
    runtime = Runtime(page=4, **divided, **case.runtime)
    pipe = Pipeline(compose(network, **parts), None, runtime)
    done = pipe.generate_ids(PROMPTS, max_new_tokens=[16, 12], options=case.options)
    return [(result.canvas, result.counts.forwards, result.counts.hits) for result in done]


def scores(name: str, folder: Path, quantize: str | None, ranks: Ranks = ALONE) -> torch.Tensor:
    """Logits of a sequence, with weights in a format. [B, T, V]"""
    network = load_network(
        folder / name, MODELS[name][0], dtype=torch.float32, device=CPU, quantize=quantize, rank=ranks.rank
    )
    network.join(ranks)
    with torch.inference_mode():
        return network.score(torch.tensor([[1, 5, 9, 2, 7, 3, 8, 4]]))


def run_rank(index: int, size: int, folder: str, names: Sequence[str]) -> None:
    """Decodes each case with two ranks, three and four, and writes what came out, or why not, to a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=index, world_size=size)
    groups = {count: dist.new_group([*range(count)]) for count in (2, 3, 4)}
    found = {}
    for case in (case for case in CASES if case.name in names):
        for count, group in groups.items():
            if index < count:
                try:
                    found[case.name, count] = decode(case, Path(folder), Ranks.of(group))
                except Exception as error:
                    found[case.name, count] = repr(error)
    for count, group in groups.items():
        if index < count:
            for model, kind in product(WIDE, ROUNDED):
                found[model, kind, count] = scores(f"{model}, wide", Path(folder), kind, Ranks.of(group))
    if index < 2:  # they draw by other seeds
        parted = replace(CASES[0], name="parted", sampling=DRAWN | {"seed": index})
        with pytest.raises(RuntimeError, match="rank 1 has other cursors in slot 0 than rank 0"):
            decode(parted, Path(folder), Ranks.of(groups[2]))
    torch.save(found, f"{folder}/rank{index}.pt")
    dist.destroy_process_group()
