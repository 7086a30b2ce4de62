"""Ranks of tensor parallelism: their slices cover each tensor, and each reads its own bytes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.families import EXPERTS, family_for
from support.models import CONFIG
from support.ranks import CPU, MODELS

from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.safetensors_io import read_slices, stored
from dinfer.core.ranks.split import Rank
from dinfer.formats.saving import save_network
from dinfer.lab.random_network import random_network

RANKS = [(2, False), (3, False), (3, True)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("ranks", "expert_parallel"), RANKS)
def test_the_slices_of_all_ranks_cover_each_tensor(name: str, ranks: int, expert_parallel: bool) -> None:
    """Once what is divided, once a rank what is not, and key heads that are too few for all ranks repeatedly."""
    family, config = MODELS[name]
    spec = family.spec(config)
    divided = 0
    for tensor, place in family.weights(spec).items():
        times = torch.zeros(place.shape)
        for rank in range(ranks):
            own = torch.zeros(place.shape)
            for source, _ in place.pieces(Rank(rank, ranks, expert_parallel)):
                own[source] += 1
            assert own.max() <= 1, tensor
            times += own
        if place.division(Rank(0, ranks, expert_parallel)) is None:
            assert (times == ranks).all(), tensor
            continue
        divided += 1
        want = torch.ones(place.shape)
        if place.parameter.endswith(("qkv.weight", "qkv.bias")):
            (_, heads, size), (_, kv_heads, _), *_ = place.split.sections
            want[max(heads * size - place.row, 0) :] = max(ranks // kv_heads, 1)
        assert torch.equal(times, want), tensor
    assert divided


@pytest.mark.rest(but=9)
@pytest.mark.parametrize("name", [*EXPERTS, "dream", "fast_dllm_v2", "llada, 12 key heads", "diffusion_gemma"])
@pytest.mark.parametrize(("ranks", "expert_parallel"), RANKS)
def test_a_rank_reads_its_share_alone(tmp_path: Path, name: str, ranks: int, expert_parallel: bool) -> None:
    """The same numbers as the whole network has there, and no more bytes than its parameters hold."""
    family, config = MODELS[name]
    spec = family.spec(config)
    torch.manual_seed(0)
    whole = random_network(family, spec, dtype=torch.float32, device=CPU)
    save_network(whole, family, tmp_path, config)
    tensors, places = stored(tmp_path), family.weights(spec)
    for index in range(ranks):
        rank = Rank(index, ranks, expert_parallel)
        network = load_network(tmp_path, family, dtype=None, device=CPU, rank=rank)
        torch.manual_seed(0)
        made = random_network(family, spec, dtype=torch.float32, device=CPU, rank=rank)
        for (parameter, got), want in zip(network.named_parameters(), made.parameters(), strict=True):
            assert torch.equal(got, want), parameter
        parts = [(one, source) for name, one in tensors.items() for source, _ in places[name].pieces(rank)]
        read = sum(part.nbytes for part in read_slices(parts))
        held = sum(p.nbytes for p in network.parameters())
        assert read == held < sum(p.nbytes for p in whole.parameters())


def test_the_parts_of_qkv_gate_and_down(tmp_path: Path) -> None:
    """By hand, once: rank 1 of 2 with 4 query heads of 8 entries, 2 key heads, and an MLP of 48."""
    family = family_for(CONFIG)
    torch.manual_seed(0)
    save_network(random_network(family, family.spec(CONFIG), dtype=torch.float32, device=CPU), family, tmp_path, CONFIG)
    network = load_network(tmp_path, family, dtype=None, device=CPU, rank=Rank(1, 2))
    tensors, first = load_file(tmp_path / "model.safetensors"), "model.transformer.blocks.0."
    q, k, v = (tensors[f"{first}{part}_proj.weight"] for part in "qkv")
    block = network.blocks[0]
    assert torch.equal(block.qkv.weight, torch.cat((q[16:], k[8:], v[8:])))
    assert torch.equal(block.out.weight, tensors[f"{first}attn_out.weight"][:, 16:])
    gate, up = tensors[f"{first}ff_proj.weight"], tensors[f"{first}up_proj.weight"]
    assert torch.equal(block.mlp.gate_up.weight, torch.cat((gate[24:], up[24:])))
    assert torch.equal(block.mlp.down.weight, tensors[f"{first}ff_out.weight"][:, 24:])
    assert torch.equal(network.embedding.weight, tensors["model.transformer.wte.weight"][20:])


@pytest.mark.parametrize(("numbers", "ranks", "message"), [
    ({}, 3, r"heads=4 cannot be divided among ranks=3: it must be a multiple"),
    ({"d_model": 48, "n_heads": 6}, 3, r"kv_heads=2 cannot be divided among ranks=3"),
    ({"mlp_hidden_size": 50}, 4, r"width=50 cannot be divided among ranks=4"),
])  # fmt: skip
def test_what_does_not_divide_is_refused_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: dict[str, int], ranks: int, message: str
) -> None:
    config = CONFIG | numbers
    family = family_for(config)
    save_network(random_network(family, family.spec(config), dtype=torch.float32, device=CPU), family, tmp_path, config)
    monkeypatch.setattr("dinfer.core.loading.checkpoint.read_slices", None)
    with pytest.raises(ValueError, match=message):
        load_network(tmp_path, family, dtype=None, device=CPU, rank=Rank(1, ranks))


def test_a_rank_is_one_of_them() -> None:
    with pytest.raises(ValueError, match=r"rank=2 must be 0 to 1, as there are ranks=2"):
        Rank(2, 2)
