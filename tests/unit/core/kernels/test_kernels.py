"""Kernels against their definitions, written out in loops and in float64."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import tiny_spec

from dinfer.core.kernels import dispatch
from dinfer.core.kernels.attention import attention_interval, interval_attention, interval_mask
from dinfer.core.kernels.norm import add_rms_norm, swiglu
from dinfer.core.kernels.rotary import rotary_table, rotate
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.kernels.token_stats import token_stats
from dinfer.core.kernels.types import Projections
from dinfer.core.memory import NULL, RESERVED, SCRATCH, KVPool, PoolSize, Seen


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_attention(q_HE: torch.Tensor, k_SGE: torch.Tensor, v_SGE: torch.Tensor, seen: range) -> torch.Tensor:
    """One query."""
    heads, size = q_HE.shape
    out = torch.zeros_like(q_HE)
    for h in range(heads):
        g = h * k_SGE.shape[1] // heads
        weights = [math.exp(float(q_HE[h] @ k_SGE[s, g]) / math.sqrt(size)) for s in seen]
        for weight, s in zip(weights, seen, strict=True):
            out[h] += weight / sum(weights) * v_SGE[s, g]
    return out


@examples(40)
@given(
    seed=st.integers(0, 9999), rows=st.integers(1, 3), queries=st.integers(1, 5), keys=st.integers(1, 9),
    groups=st.integers(1, 3), per_group=st.integers(1, 3),
)  # fmt: skip
def test_interval_attention_is_its_definition(
    seed: int, rows: int, queries: int, keys: int, groups: int, per_group: int
) -> None:
    generator = rng(seed)
    q, k, v = (
        torch.randn(rows, n, h, 4, generator=generator, dtype=torch.float64)
        for n, h in ((queries, groups * per_group), (keys, groups), (keys, groups))
    )
    start = torch.randint(keys, (rows, queries), generator=generator)
    end = start + 1 + (torch.rand(rows, queries, generator=generator) * (keys - start)).long()
    got = interval_attention(q, k, v, interval_mask(start, end, keys))
    for b in range(rows):
        for w in range(queries):
            want = naive_attention(q[b, w], k[b], v[b], range(int(start[b, w]), int(end[b, w])))
            torch.testing.assert_close(got[b, w], want, rtol=1e-10, atol=1e-12)


def test_no_mask_sees_every_key() -> None:
    q, k = torch.randn(2, 3, 4, 8, generator=rng(0)), torch.randn(2, 5, 2, 8, generator=rng(1))
    torch.testing.assert_close(
        interval_attention(q, k, k, None), interval_attention(q, k, k, torch.ones(2, 3, 5, dtype=torch.bool))
    )


@given(
    length=st.integers(1, 20), start=st.integers(0, 6), block=st.sampled_from([None, 1, 2, 4, 7]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_interval_fills_in_two_integers(length: int, start: int, block: int | None, seed: int) -> None:
    start = min(start, length - 1)
    pos_BW = torch.randint(-1, length, (1, 8), generator=rng(seed))
    first_BW, end_BW = attention_interval(pos_BW, torch.tensor([start]), torch.tensor([length]), block)
    for pos, first, end in zip(pos_BW[0].tolist(), first_BW[0].tolist(), end_BW[0].tolist(), strict=True):
        assert first == start and end > first
        if block is None:
            assert end == length
        elif pos >= start:  # its own block whole, no more; causal is the block of one
            visible = [p for p in range(start, length) if p // block <= pos // block]
            assert list(range(first, end)) == visible


@examples(60)
@given(
    seed=st.integers(0, 9999), vocab=st.integers(2, 12), mask=st.integers(0, 11), digits=st.sampled_from([0, 1, 9]),
    wide=st.booleans(),
)  # fmt: skip
def test_token_stats_are_their_definition(seed: int, vocab: int, mask: int, digits: int, wide: bool) -> None:
    """Few digits make ties, which go to the lowest id; the mask token is part of the softmax and never the token."""
    mask %= vocab
    logits = torch.randn(3, 4, vocab, generator=rng(seed), dtype=torch.float64).mul(3).round(decimals=digits)
    logits = logits if wide else logits.float()
    before = logits.clone()
    stats = token_stats(logits, mask, torch.float32)
    assert torch.equal(logits, before)
    assert stats.confidence_RL.dtype == logits.dtype
    for r in range(3):
        for i in range(4):
            row = logits[r, i].tolist()
            total = sum(math.exp(x) for x in row)
            best = max((x, -v) for v, x in enumerate(row) if v != mask)
            token = -best[1]
            assert stats.token_RL[r, i] == token
            assert stats.confidence_RL[r, i].item() == pytest.approx(math.exp(row[token]) / total, rel=1e-5)
            assert stats.mask_confidence_RL[r, i].item() == pytest.approx(math.exp(row[mask]) / total, rel=1e-5)
            assert bool(stats.declined_RL[r, i]) == (row[mask] > row[token])
    assert stats.finite_RL.all()


@pytest.mark.parametrize(
    ("given_dtype", "asked", "found"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_token_stats_take_the_wider_dtype(given_dtype: torch.dtype, asked: torch.dtype, found: torch.dtype) -> None:
    assert token_stats(torch.zeros(1, 1, 4, dtype=given_dtype), 3, asked).confidence_RL.dtype == found


@pytest.mark.parametrize(
    ("row", "finite"),
    [
        ([0.0, 1.0, 2.0, 3.0], True),
        ([-math.inf, 1.0, -math.inf, 3.0], True),
        ([-math.inf, 1.0, -math.inf, -math.inf], True),
        ([-1e38, -1e38, -1e38, 1e38], True),  # underflow is not a fault
        ([math.nan, 1.0, 2.0, 3.0], False),
        ([0.0, math.inf, 2.0, 3.0], False),
        ([0.0, 1.0, 2.0, math.nan], False),
        ([0.0, 1.0, 2.0, math.inf], False),
        ([-math.inf] * 4, False),
        ([-math.inf, -math.inf, -math.inf, 3.0], False),  # the mask alone: there is no token to commit
    ],
)
def test_finite_means_that_a_token_can_be_chosen(row: list[float], finite: bool) -> None:
    assert token_stats(torch.tensor([[row]]), 3, torch.float32).finite_RL.item() is finite


@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4))
def test_descending_rank_is_the_place_in_a_stable_sort(rows: list[list[int]]) -> None:
    score_RL = torch.tensor(rows, dtype=torch.float32)
    order_RL = score_RL.sort(stable=True, dim=-1, descending=True).indices
    assert torch.equal(descending_rank(score_RL), order_RL.argsort(-1))


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("size", [2, 8, 32])
def test_rotary_is_multiplication_by_a_complex_number(size: int, theta: float) -> None:
    pos_BW = torch.tensor([[0, 1, 7, 4000]])
    x = torch.randn(1, 4, 3, size, generator=rng(2), dtype=torch.float64)
    got = rotate(x, rotary_table(pos_BW, size, theta, x.dtype))
    for w, pos in enumerate(pos_BW[0].tolist()):
        for h in range(3):
            for i in range(size // 2):
                pair = complex(x[0, w, h, i], x[0, w, h, i + size // 2])
                turned = pair * cmath.exp(1j * pos * theta ** (-2 * i / size))
                assert got[0, w, h, i].item() == pytest.approx(turned.real, abs=1e-9)
                assert got[0, w, h, i + size // 2].item() == pytest.approx(turned.imag, abs=1e-9)


def test_rotary_keeps_the_dtype_and_turns_in_float32() -> None:
    x = torch.randn(1, 2, 1, 8, generator=rng(3)).bfloat16()
    pos_BW = torch.tensor([[5, 300]])
    got = rotate(x, rotary_table(pos_BW, 8, 1e4, x.dtype))
    want = rotate(x.double(), rotary_table(pos_BW, 8, 1e4, torch.float64))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-12)  # one rounding, at the end


@pytest.mark.parametrize("page", [1, 2, 5, 16])
def test_paged_attention_is_attention_over_what_was_written(page: int) -> None:
    """Pages in any order, two rows of different lengths, keys written in two parts, padding in between."""
    spec, generator = tiny_spec(), rng(page)
    lengths, capacity, heads, groups = [11, 6], 16, spec.heads, spec.kv_heads
    need = [-(-n // page) for n in lengths]
    kv = KVPool.alloc(spec, PoolSize(2, capacity, sum(need), page), dtype=torch.float64, device="cpu")
    order = (torch.randperm(sum(need), generator=generator) + RESERVED).tolist()
    kv.assign({0: order[: need[0]]})
    kv.assign({1: order[need[0] :]})
    k, v = (torch.randn(2, 12, groups, spec.head_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    q = torch.randn(2, 12, heads, spec.head_dim, generator=generator, dtype=torch.float64)
    slot_B, pages = torch.tensor([0, 1]), -(-max(lengths) // page)
    end_B, zero_B = torch.tensor(lengths), torch.tensor([0, 0])
    for part in ([8, 9, 10, 3, -1, 5], [0, -1, 1, 2, 4, 6, 7]):
        rows = [[p if p < n else -1 for p in part] for n in lengths]
        pos_BW = torch.tensor(rows)
        at_BWXE = pos_BW.clamp_min(0)[..., None, None].expand(-1, -1, heads + 2 * groups, spec.head_dim)
        attend = kv.attend(slot_B, pos_BW, Seen(attention_interval(pos_BW, zero_B, end_B, None)), pages)
        still = rotary_table(torch.zeros_like(pos_BW), spec.head_dim, 1e4, torch.float64)
        out = attend(1, Projections(torch.cat((q, k, v), 2).gather(1, at_BWXE), heads, still))
    for b, n in enumerate(lengths):
        for w, pos in enumerate(rows[b]):
            if pos >= 0:
                want = naive_attention(q[b, pos], k[b], v[b], range(n))
                torch.testing.assert_close(out[b, w], want, rtol=1e-10, atol=1e-12)
    assert not kv.k_JPTGE[:, NULL].any() and not kv.v_JPTGE[:, NULL].any()
    assert not kv.k_JPTGE[0].any()  # another layer


def test_padding_and_scratch_lanes_write_to_the_scratch_page_alone() -> None:
    spec = tiny_spec()
    kv = KVPool.alloc(spec, PoolSize(1, 8, 2, 4), dtype=torch.float64, device="cpu")
    kv.assign({0: [RESERVED]})  # four of eight positions have a page
    pos_BW = torch.tensor([[-1, 6], [0, 1]])
    interval = attention_interval(pos_BW, torch.tensor([0, 0]), torch.tensor([4, 0]), None)
    qkv = torch.full((2, 2, spec.heads + 2 * spec.kv_heads, spec.head_dim), math.nan, dtype=torch.float64)
    qkv[:, :, : spec.heads] = 1.0
    attend = kv.attend(torch.tensor([0, 1]), pos_BW, Seen(interval), 2)
    table = rotary_table(pos_BW, spec.head_dim, 1e4, torch.float64)
    out = attend(0, Projections(qkv, spec.heads, table))
    assert kv.k_JPTGE[0, SCRATCH].isnan().any()
    assert kv.k_JPTGE[0, [NULL, RESERVED, RESERVED + 1]].count_nonzero() == 0
    assert out.isfinite().all()


def test_wiped_pages_are_zero() -> None:
    kv = KVPool.alloc(tiny_spec(), PoolSize(1, 8, 3, 4), dtype=torch.float32, device="cpu")
    kv.k_JPTGE.fill_(math.nan)
    kv.v_JPTGE.fill_(math.nan)
    kv.wipe([RESERVED + 1])
    for pool in (kv.k_JPTGE, kv.v_JPTGE):
        assert not pool[:, [SCRATCH, RESERVED + 1]].any()
        assert pool[:, [RESERVED, RESERVED + 2]].isnan().all()


def test_the_norm_of_a_sum_is_its_definition() -> None:
    x, delta = (torch.randn(2, 3, 8, generator=rng(i), dtype=torch.float64) for i in (4, 5))
    weight = torch.randn(8, generator=rng(6), dtype=torch.float64)
    for other in (delta, None):
        total, normed = add_rms_norm(x, other, weight, 1e-3)
        want = x if other is None else x + other
        torch.testing.assert_close(total, want)
        torch.testing.assert_close(normed, want / (want.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight)


def test_swiglu_gates_with_its_first_half() -> None:
    x = torch.randn(2, 3, 10, generator=rng(7), dtype=torch.float64)
    gate, up = x[..., :5], x[..., 5:]
    torch.testing.assert_close(swiglu(x), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize(("choice", "off"), [
    ("triton", set()), ("torch", set(dispatch.GROUPS)), ("triton,-canvas,-commit", {"canvas", "commit"}),
])  # fmt: skip
def test_groups_of_kernels_are_turned_off(choice: str, off: set[str]) -> None:
    assert dispatch.groups_off(choice) == off


@pytest.mark.parametrize(
    "choice", ["", "cuda", "torch,-canvas", "triton,canvas", "triton,-canvsa", "-canvas", "triton,"]
)
def test_a_group_that_is_not_known_is_named(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DINFER_KERNELS", choice)
    with pytest.raises(ValueError, match=rf"DINFER_KERNELS='{choice}' must be .* Groups: linear, .*, languages\."):
        add_rms_norm(torch.zeros(1, 2, 4), None, torch.ones(4), 1e-5)
