"""All layers of a network in one call of C, against the layers called one by one."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import tiny_spec
from torch import Tensor, nn

from dinfer.core.kernels.attention import attention_interval
from dinfer.core.kernels.rotary import rotary_table
from dinfer.core.memory import RESERVED, KVPool, PoolSize, Seen
from dinfer.families.gated import Gate, GatedLinear, GatedTransformer, LowRank
from dinfer.formats.holding import quantize
from dinfer.kernels.cpu.layers import LayersPlan, layers
from dinfer.kernels.cpu.linear import library

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, or no CPU with AVX2")


def network_of(normed: bool) -> Any:
    """Weights in 4 bits; every other linear layer has a low-rank part."""
    torch.manual_seed(0)
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 96, "layers": 3}
    spec = replace(tiny_spec("drafts"), **sizes, qk_norm=normed, qkv_bias=normed)
    network, gate = GatedTransformer(spec).float(), Gate()
    for tensor in network.parameters():
        tensor.data.normal_(0, 0.2)
    quantize(network, "int4")
    for block in network.blocks if not normed else ():
        for owner, name in ((block, "qkv"), (block.mlp, "down")):
            base = getattr(owner, name)
            pair = torch.randn(8, base.in_features).bfloat16().float(), torch.randn(32, 8).bfloat16().float()
            setattr(owner, name, GatedLinear(base, gate, LowRank.of(base.out_features, [(32, *pair)])))
        network.gate = gate
    return network


def forward(network: Any, way: Callable[..., Any], needed: Tensor | None = None, padded: int = 0) -> Any:
    """What a way to call the layers returns, and the keys that it leaves."""
    kv = KVPool.alloc(network.spec, PoolSize(2, 16, 4, 8), dtype=torch.float32, device="cpu")
    for row in range(2):
        kv.assign({row: [RESERVED + row, RESERVED + row + 2]})
    pos_BW = torch.tensor([[0, 1, 2, 3, 4, 9, -1], [3, 2, 7, 1, 0, 12, 6]])
    pos_BW[:, 7 - padded :] = -1
    end_B, x_BWD = torch.tensor([10, 13]), torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(1))
    seen = Seen(attention_interval(pos_BW, torch.zeros_like(end_B), end_B, 1))
    attend = replace(kv.attend(torch.arange(2), pos_BW, seen, 2), needed_BX=needed)
    table = rotary_table(pos_BW, 32, network.spec.rope_theta, torch.float32)
    return way(network, x_BWD, table, attend), kv.k_JPTGE, kv.v_JPTGE


def one_by_one(network: Any, x_BWD: Tensor, table: Any, attend: Any) -> Tensor:
    hook = network.blocks[1].register_forward_hook(lambda *_: None)
    assert layers(network, x_BWD, table, attend) is None
    found = network(x_BWD, attend)
    hook.remove()
    return found


def same(network: Any, needed: Tensor | None = None) -> bool:
    (found, *keys), (wanted, *own) = forward(network, layers, needed), forward(network, one_by_one, needed)
    pages = slice(RESERVED, None)  # what padding writes goes to a page that nobody reads
    alike = [torch.equal(a[:, pages], b[:, pages]) for a, b in zip(keys, own, strict=True)]
    return torch.equal(found, wanted) and all(alike)


@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_results_are_those_of_the_layers_one_by_one(normed: bool) -> None:
    network = network_of(normed)
    assert same(network) and same(network, torch.tensor([[4, 1], [0, 6]])) and same(network, torch.zeros(2, 0).long())
    if network.gate is not None:
        closed = forward(network, layers)[0]
        with network.gate.on(torch.arange(14).view(2, 7) % 3 > 0):
            assert same(network) and not torch.equal(closed, forward(network, layers)[0])


@torch.no_grad()
def test_a_network_may_change_between_forwards() -> None:
    network = network_of(False)
    before, block = forward(network, layers)[0], network.blocks[2]

    def changed() -> bool:
        nonlocal before
        last, before = before, forward(network, layers)[0]
        return same(network) and not torch.equal(last, before)

    with network.gate.on(torch.ones(2, 7, dtype=torch.bool)):
        assert changed()
        block.qkv.part.b_OS.mul_(2)
        assert changed()
        block.out.weight.fill_(17)
        assert changed()
        block.mlp.gate_up.weight = nn.Parameter(block.mlp.gate_up.weight.flip(0), requires_grad=False)
        assert changed()
        block.mlp_norm.weight.data = block.mlp_norm.weight * 3
        assert changed()
        block.out = nn.Sequential(block.out)
        assert forward(network, layers)[0] is None


def test_whether_a_network_has_changed_costs_no_loop_of_python() -> None:
    """Each forward asks it of each module and tensor."""
    plan, events = LayersPlan.of(network_of(False)), list[str]()
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        assert plan.holds()
    finally:
        sys.setprofile(None)
    assert events.count("call") == 1


@torch.no_grad()
def test_padding_behind_all_lanes_is_not_computed() -> None:
    """Others get what they get beside it."""
    network = network_of(False)
    with network.gate.on(torch.arange(14).view(2, 7) % 3 > 0):
        (found, *keys), (wanted, *own) = forward(network, layers, padded=3), forward(network, one_by_one, padded=3)
        assert torch.equal(found[:, :4], wanted[:, :4]) and found.isfinite().all()
        assert all(torch.equal(a[:, RESERVED:], b[:, RESERVED:]) for a, b in zip(keys, own, strict=True))
        assert not torch.equal(found[:, 4:], wanted[:, 4:])
        assert forward(network, layers, padded=7)[0].isfinite().all()
