"""Mixtures of experts against their definition, one token and one expert at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.kernels import expert_mlps
from support.models import tiny_spec

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.linear import round_rows
from dinfer.core.kernels.moe import block_experts, route
from dinfer.core.kernels.types import Dealt
from dinfer.core.layers.transformer import Experts, blocks_of
from dinfer.core.terms.spec import ExpertSpec
from dinfer.formats.holding import quantize


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@examples(30)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 4), st.integers(0, 9))
def test_the_tiles_are_the_sum_over_each_tokens_experts(tokens: int, experts: int, chosen: int, seed: int) -> None:
    chosen, g = min(chosen, experts), rng(seed)
    x = torch.randn(tokens, 6, generator=g, dtype=torch.float64)
    gate_up = torch.randn(experts, 10, 6, generator=g, dtype=torch.float64)
    down = torch.randn(experts, 6, 5, generator=g, dtype=torch.float64)
    ids = torch.rand(tokens, experts, generator=g).topk(chosen, -1).indices
    weights = torch.rand(tokens, chosen, generator=g, dtype=torch.float64)
    want = torch.zeros_like(x)
    for t in range(tokens):
        for e, w in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).split(5)
            want[t] += w * (down[e] @ (gate / (1 + (-gate).exp()) * up))
    torch.testing.assert_close(expert_mlps(x, ids, weights, gate_up, down), want)


@examples(30)
@given(st.integers(1, 20), st.sampled_from([(6, 2), (6, 3), (4, 4)]), st.integers(1, 3), st.integers(0, 99))
def test_parts_of_the_experts_add_up_to_all(tokens: int, sizes: tuple[int, int], chosen: int, seed: int) -> None:
    """Some part may have no token at all."""
    (experts, ranks), g = sizes, rng(seed)
    x = torch.randn(tokens, 6, generator=g, dtype=torch.float64)
    gate_up = torch.randn(experts, 10, 6, generator=g, dtype=torch.float64)
    down = torch.randn(experts, 6, 5, generator=g, dtype=torch.float64)
    ids = torch.rand(tokens, experts, generator=g).topk(chosen, -1).indices
    weights = torch.rand(tokens, chosen, generator=g, dtype=torch.float64)
    want, each = expert_mlps(x, ids, weights, gate_up, down), experts // ranks
    parts = [
        expert_mlps(x, ids, weights, gate_up[i : i + each], down[i : i + each], dealt=Dealt(i, experts))
        for i in range(0, experts, each)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), want)


def test_rows_that_come_rounded_are_not_rounded_again_for_the_shared_expert() -> None:
    spec = tiny_spec(experts=ExpertSpec(experts=4, chosen=2, width=16, shared=16))
    mlp = Experts(spec).eval().requires_grad_(False)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=rng(1)) / 4)
    network = torch.nn.Sequential(mlp)
    network.device = torch.device("cpu")
    quantize(network, "fp8")
    x = torch.randn(1, 5, spec.hidden, generator=rng(2))
    made, pos = round_rows(x), torch.zeros(1, 5, dtype=torch.int64)
    want = close(mlp.deferred(x, pos))
    torch.testing.assert_close(close(mlp.deferred(made._replace(wide=x), pos)), want, rtol=0, atol=0)
    assert not torch.equal(close(mlp.deferred(made._replace(wide=x, values=torch.zeros_like(made.values)), pos)), want)


def test_every_token_may_go_to_one_expert() -> None:
    """The most tiles that one expert can need."""
    x, gate_up, down = (torch.randn(*s, generator=rng(1)) for s in ((100, 4), (3, 6, 4), (3, 4, 3)))
    ids = torch.full((100, 1), 2)
    got = expert_mlps(x, ids, torch.ones(100, 1), gate_up, down)
    gate, up = (x @ gate_up[2].T).chunk(2, -1)
    torch.testing.assert_close(got, (torch.nn.functional.silu(gate) * up) @ down[2].T)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    spec = ExpertSpec(experts=4, chosen=2, width=1, scores="sigmoid", normalize=True, scale=2.5)
    ids, weights = route(logits, spec, bias_X=torch.tensor([-9.0, 0.0, 0.0, 9.0]))
    assert sorted(ids[0].tolist()) == [1, 3]
    scores = logits.sigmoid()[0, ids[0]]
    torch.testing.assert_close(weights[0], scores / scores.sum() * 2.5)


def test_groups_are_ranked_by_their_two_best() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.6, 0.5, 0.7, 0.05, 0.0]])  # groups of three: 1.0, 1.2, 0.75
    spec = ExpertSpec(experts=9, chosen=2, width=1, scores="sigmoid", groups=3, groups_chosen=1)
    ids, _ = route(scores.logit(1e-6), spec)
    assert sorted(ids[0].tolist()) == [3, 4]


def test_softmax_weights_are_not_normalised_unless_asked() -> None:
    logits = torch.randn(3, 5, generator=rng(2))
    _, weights = route(logits, ExpertSpec(experts=5, chosen=2, width=1))
    assert (weights.sum(-1) < 1).all()
    _, weights = route(logits, ExpertSpec(experts=5, chosen=2, width=1, normalize=True))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def test_tokens_of_a_block_share_its_experts() -> None:
    pos = torch.tensor([[0, 1, 4, 5], [4, 5, -1, -1]])
    block = blocks_of(pos, 4)
    assert block.tolist() == [0, 0, 1, 1, 3, 3, 2, 2]  # rows apart, padding apart
    scores = torch.rand(8, 6, generator=rng(3))
    open_NX = block_experts(scores, block, 2)
    assert (open_NX.sum(-1) == 2).all()
    best = torch.maximum(scores[0], scores[1]).topk(2).indices
    assert open_NX[0, best].all() and open_NX[1, best].all()


@examples(20)
@given(st.integers(0, 99), st.integers(2, 8), st.booleans())
def test_block_routing_is_its_rule_one_block_at_a_time(seed: int, capacity: int, ties: bool) -> None:
    """By corrected scores, with the best of all tokens of a block; the mixing weights are those of the plain scores."""
    spec = replace(tiny_spec("block_causal"), experts=ExpertSpec(
        experts=8, chosen=2, width=4, scores="sigmoid", normalize=True, scale=2.5, bias=True, capacity=capacity,
    ))  # fmt: skip
    layer, g = Experts(spec), rng(seed)
    torch.nn.init.normal_(layer.choice_bias, generator=g)
    pos = torch.stack([torch.randperm(11, generator=g), torch.arange(3, 14)])
    logits = torch.randn(22, 8, generator=g)
    if ties:
        logits = logits.round()
        torch.nn.init.zeros_(layer.choice_bias)
    with torch.no_grad():
        chosen, weights = layer.route(logits, pos)
        scores = logits.sigmoid()
        corrected = scores + layer.choice_bias
    for row in (0, 1):
        for block in range(4):
            own = [11 * row + i for i in range(11) if pos[row, i] // 4 == block]
            if not own:
                continue
            best = corrected[own].amax(0).tolist()
            allowed = sorted(range(8), key=lambda x: (-best[x], x))[:capacity]
            for token in own:
                want = sorted((corrected[token, x].item() for x in allowed), reverse=True)[:2]
                assert set(chosen[token].tolist()) <= set(allowed)
                assert sorted(corrected[token, chosen[token]].tolist(), reverse=True) == want
                plain = scores[token, chosen[token]]
                torch.testing.assert_close(weights[token], plain / plain.sum() * 2.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 0}, "experts=0"),
        ({"groups": 3}, "must divide into groups=3"),
        ({"groups": 2, "groups_chosen": 3}, "groups_chosen=3"),
        ({"chosen": 5, "groups": 2}, "exceed the 4 there are"),
        ({"chosen": 3, "capacity": 2}, "exceed the 2 there are"),
    ],
)
def test_experts_that_make_no_sense(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertSpec(**({"experts": 8, "chosen": 2, "width": 4} | fields))
