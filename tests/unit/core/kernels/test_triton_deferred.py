"""Partial sums whose reduction is fused into the consumer: what makes them, and every kernel that reads them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import CLOSE, CUDA, DEVICE, SHORT, draw

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.kernels import linear, norm, rotary  # noqa: E402
from dinfer.core.kernels.deferred import close  # noqa: E402
from dinfer.core.kernels.types import HeadNorm, InputFormat, PartialSums, Projections  # noqa: E402
from dinfer.core.terms.spec import ExpertSpec  # noqa: E402
from dinfer.formats.kernels.scaled import scaled_linear  # noqa: E402
from dinfer.kernels.symmetric import EMPTY, GROUP, Exchange, ManyRows  # noqa: E402
from dinfer.kernels.triton import linear as triton_linear  # noqa: E402
from dinfer.kernels.triton import moe as triton_moe  # noqa: E402
from dinfer.kernels.triton import moe as triton_route  # noqa: E402
from dinfer.kernels.triton import norm as triton_norm  # noqa: E402
from dinfer.kernels.triton import rotary as triton_rotary  # noqa: E402


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the kernels runs in torch."""
    torch.manual_seed(0)
    monkeypatch.setenv("DINFER_KERNELS", "torch")


@pytest.mark.rest(but=7)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 40), (20, 128)])
def test_a_linear_map_in_parts(
    dtype: torch.dtype, quantized: bool, parts: int, copied: bool, rows: int, outputs: int
) -> None:
    x, weight_OK = draw(2, rows, 128, dtype=dtype), draw(outputs, 128, dtype=dtype) / 11
    bias_O, scale_O = draw(outputs).to(dtype), None
    if quantized:
        weight_OK, scale_O = linear.round_rows(weight_OK, torch.int8)[:2]
    config = triton_linear.Config(16, 64, 32, 4, 2, parts=parts, copied=copied)
    got = triton_linear.linear(x, weight_OK, bias_O, scale_O, config)
    assert isinstance(got, PartialSums) and got.shape == (2, rows, outputs)
    assert got.values.shape[0] == parts and got.values.dtype == torch.float32
    want = linear.linear(x, weight_OK, bias_O) if scale_O is None else scaled_linear(x, weight_OK, scale_O, bias_O)
    torch.testing.assert_close(close(got), want, **CLOSE[dtype])


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("outputs", "parts"), [(256, 4), (2048, 2), (3072, 2), (12288, 1)])
def test_small_maps_come_in_parts_where_asked(outputs: int, parts: int) -> None:
    x, weight_OK = draw(3, 2048, dtype=SHORT), draw(outputs, 2048, dtype=SHORT) / 45
    whole = triton_linear.linear(x, weight_OK, None, None)
    got = triton_linear.linear(x, weight_OK, None, None, split=True)
    assert isinstance(whole, torch.Tensor)
    assert (got.values.shape[0] if isinstance(got, PartialSums) else 1) == parts
    torch.testing.assert_close(close(got), whole, **CLOSE[SHORT])


@given(
    st.integers(1, 300), st.integers(1, 200_000), st.integers(1, 20_000), st.sampled_from([(1, 1), (1, 2), (2, 2)]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_parts_are_whole_numbers_of_depths(
    rows: int, outputs: int, width: int, sizes: tuple[int, int], split: bool, copied: bool
) -> None:
    config = triton_linear.config_for(rows, outputs, width, *sizes, split, copied)
    assert config.parts == 1 or (split and width % (config.parts * config.depth) == 0)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize(
    ("rows", "outputs", "parts", "kernel_on"),
    [
        (32, 40, False, "any"), (33, 40, False, "hopper"), (64, 5000, True, "hopper"), (65, 40, False, "none"),
        (128, 4096, True, "hopper"), (128, 5000, True, "none"), (129, 40, True, "none"),
    ],
)  # fmt: skip
def test_which_maps_take_the_kernel(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, parts: bool, kernel_on: str
) -> None:
    x, weight_OK = torch.zeros(rows, 16, dtype=torch.float16), torch.zeros(outputs, 16, dtype=torch.float16)
    taken: list[bool] = []
    monkeypatch.setattr(linear, "use_triton", lambda *_: True)
    monkeypatch.setattr(triton_linear, "linear", lambda *_, split: taken.append(split))
    for hopper in (False, True):
        monkeypatch.setattr(triton_linear, "on_hopper", lambda _, hopper=hopper: hopper)
        linear.linear(x, weight_OK, parts=parts)
    assert taken == [parts] * {"any": 2, "hopper": 1, "none": 0}[kernel_on]


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("outputs", "dtype", "torchs"),
    [(48, torch.float16, False), (40, torch.bfloat16, False), (48, torch.bfloat16, True)],
)
def test_large_products_of_float8_are_torchs(
    monkeypatch: pytest.MonkeyPatch, outputs: int, dtype: torch.dtype, torchs: bool
) -> None:
    """Only in bfloat16, and of whole pieces of 16."""
    x, weight_OK, bias_O = draw(2, 5, 64, dtype=dtype), draw(outputs, 64, dtype=dtype), draw(outputs, dtype=dtype)
    rows, (weight_OK, scale_O, *_) = linear.round_rows(x), linear.round_rows(weight_OK)
    want = scaled_linear(rows, weight_OK, scale_O, bias_O)
    for name, value in (("LARGE", 10 * outputs), ("on_hopper", lambda _: True), ("use_triton", lambda *_: True)):
        monkeypatch.setattr(f"dinfer.formats.kernels.scaled.{name}", value)
    monkeypatch.setattr(triton_linear, "linear", lambda *_: want)
    got = scaled_linear(rows, weight_OK, scale_O, bias_O)
    assert (got is not want) == torchs
    torch.testing.assert_close(got, want, atol=0.1, rtol=2e-2)


def test_the_copy_engine_takes_whole_pieces_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_linear, "on_hopper", lambda _: True)
    x_RK, flat = torch.zeros(4, 16, dtype=SHORT), torch.zeros(4 * 16 + 1, dtype=SHORT)
    assert triton_linear.copyable(x_RK, flat[:-1].view(4, 16))
    assert not triton_linear.copyable(x_RK, flat[1:].view(4, 16))
    assert not triton_linear.copyable(x_RK[:, :12].contiguous(), x_RK[:, :12].contiguous())


def sum_of(kind: str, lanes: int, rows: int, width: int, dtype: torch.dtype) -> PartialSums:
    tokens = lanes * rows
    if kind == "parts":
        return PartialSums(draw(3, lanes, rows, width), dtype)
    if kind in ("mixture", "beside"):
        plus_ND = draw(tokens, width, dtype=dtype) if kind == "beside" else None
        return PartialSums(draw(tokens * 4, width, dtype=dtype), dtype, draw(tokens, 4), plus_ND)
    return PartialSums(draw(tokens * 4, width, dtype=dtype), dtype, draw(tokens, 3))  # and a shared expert


@pytest.mark.rest(but=4)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("width", [64, 1000])
@pytest.mark.parametrize("kind", ["parts", "mixture", "shared", "beside"])
def test_a_norm_adds_up(dtype: torch.dtype, width: int, kind: str) -> None:
    x_BWD, weight_D = draw(2, 3, width, dtype=dtype), draw(width, dtype=dtype)
    delta = sum_of(kind, 2, 3, width, dtype)
    got = triton_norm.add_rms_norm(x_BWD, delta, weight_D, 1e-5)
    want = norm.add_rms_norm(x_BWD, delta, weight_D, 1e-5)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE[dtype])
    assert torch.equal(triton_norm.add(x_BWD, delta), got[0])
    if delta.weights_NC is not None:  # the same bits as where a kernel of its own adds up
        whole = triton_moe.combine(delta.values, delta.weights_NC, delta.plus_ND).view(2, 3, width)
        assert torch.equal(got[0], triton_norm.add_rms_norm(x_BWD, whole, weight_D, 1e-5)[0])


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_added_up(dtype: torch.dtype, normed: bool) -> None:
    lanes, width, heads, kv_heads, size = 2, 5, 6, 2, 32
    qkv = PartialSums(draw(2, lanes, width, (heads + 2 * kv_heads) * size), dtype).unflatten(-1, (-1, size))
    table = rotary.rotary_table(torch.randint(0, 99, (lanes, width), device=DEVICE), 16, 1e4, dtype)
    head_norm = HeadNorm(draw(2 * size, dtype=dtype), 1e-5) if normed else None
    write_X = torch.randperm(40, device=DEVICE)[: lanes * width]
    mine, theirs = ([torch.zeros(40, kv_heads, size, device=DEVICE, dtype=dtype) for _ in range(2)] for _ in range(2))
    given = Projections(qkv, heads, table, head_norm)
    got = triton_rotary.rotate_and_store(given, *mine, write_X)
    want = rotary.rotate_and_store(given, *theirs, write_X)
    for a, b in zip((got, *mine), (want, *theirs), strict=True):
        torch.testing.assert_close(a, b, **CLOSE[dtype])


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_router_adds_up_and_takes_the_first_of_equals(sigmoid: bool, groups: int) -> None:
    logits = PartialSums(torch.randint(-2, 3, (3, 17, 24), device=DEVICE).float(), torch.float32)
    groups_given = {"groups": groups, "groups_chosen": min(groups, 2)}
    scores = "sigmoid" if sigmoid else "softmax"
    spec = ExpertSpec(experts=24, chosen=4, width=1, scores=scores, normalize=True, **groups_given)
    experts_NC, weights_NC = triton_route.route(logits, spec, bias_X=None)
    score_NX = close(logits).sigmoid() if sigmoid else close(logits).softmax(-1)
    for score_X, experts_C, weights_C in zip(score_NX, experts_NC, weights_NC, strict=True):
        kept = range(24)
        if groups > 1:
            best = [sum(sorted(part, reverse=True)[:2]) for part in score_X.unflatten(0, (groups, -1)).tolist()]
            kept = [x for x in kept if x // 6 in sorted(range(groups), key=lambda g: -best[g])[:2]]
        want = sorted(kept, key=lambda x: -score_X[x].item())[:4]
        assert experts_C.tolist() == want
        torch.testing.assert_close(weights_C, score_X[want] / score_X[want].sum())


@pytest.mark.rest(but=2)
@pytest.mark.parametrize(("ranks", "own"), [(4, 2), (2, 0), (2, 1), (4, 0), (3, 1)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("inputs", ["plain", "both"])
def test_a_norm_adds_up_the_rows_of_all_cards(ranks: int, own: int, parts: int, inputs: InputFormat) -> None:
    """The other cards' rows have arrived, three times: a row has two places, and they are empty again afterwards."""
    x, weight_D = draw(1, 5, 64, dtype=SHORT), draw(64).to(SHORT)
    inboxes = [torch.zeros(2, ranks, 8, 96, dtype=torch.int16, device=DEVICE) for _ in range(ranks)]
    exchange = Exchange.over(inboxes, own)
    assert exchange.takes(x) and not exchange.takes(x.double()) and not exchange.takes(draw(9, 64, dtype=SHORT))
    for count in range(3):
        values, rows_N5D = draw(parts, 1, 5, 64), draw(ranks, 5, 64, dtype=SHORT)
        rows_N5D[:, :, 0] = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=SHORT)[:ranks, None]  # the order shows here
        values[..., :2] = -0.0  # what an empty place holds
        rows_N5D[:, :, 1] = 0
        rows_N5D[own] = values.sum(0)[0].to(SHORT)
        total = torch.zeros(5, 64, device=DEVICE)
        for addend in rows_N5D:
            total += addend.float()
        want = triton_norm.add_rms_norm(x, total.to(SHORT)[None], weight_D, 1e-5, inputs)
        others = [rank for rank in range(ranks) if rank != own]
        inboxes[own][count % 2, others, :5, :64] = rows_N5D[others].view(torch.int16)
        if count == 1:
            got = triton_norm.add(x, PartialSums(values, SHORT), exchange), want[1]
        else:
            got = triton_norm.add_rms_norm(x, PartialSums(values, SHORT), weight_D, 1e-5, inputs, exchange)
        for rank in others:
            sent = inboxes[rank][count % 2, own, :5, :64]
            assert torch.equal(sent.view(SHORT), rows_N5D[own]) and not (sent == EMPTY).any()
        assert (inboxes[own] == EMPTY).all()
        assert torch.equal(got[0], want[0]) and torch.equal(close(got[1]), close(want[1]))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(("ranks", "own"), [(4, 2), (2, 0), (4, 0), (3, 1)])
@pytest.mark.parametrize("rows", [19, 30])
def test_ranks_share_the_sums_of_many_rows(ranks: int, own: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other cards' addends and totals have arrived, three times, and this one's are sent to who needs them."""
    programs, slots = 4, -(-2 // ranks) * GROUP * 4
    monkeypatch.setattr(triton_norm, "ROWS", programs)
    x, weight_D = draw(1, rows, 64, dtype=SHORT), draw(64).to(SHORT)
    inboxes = [torch.zeros(2, ranks, 4, 96, dtype=torch.int16, device=DEVICE) for _ in range(ranks)]
    addends = [torch.zeros(2, ranks, slots, 96, dtype=torch.int16, device=DEVICE) for _ in range(ranks)]
    totals = [torch.zeros(2, 32, 96, dtype=torch.int16, device=DEVICE) for _ in range(ranks)]
    exchange = Exchange.over(inboxes, own)._replace(many=ManyRows.over(addends, totals, own))
    assert exchange.takes(x) and exchange.in_two(x) and not exchange.takes(draw(33, 64, dtype=SHORT))
    row_R, line_R = torch.arange(rows), torch.arange(rows) // programs
    owner_R = (row_R % programs + line_R // GROUP) % ranks
    slot_R = row_R % programs + programs * (line_R // (GROUP * ranks) * GROUP + line_R % GROUP)
    for count in range(3):
        values, rows_NRD = draw(2, 1, rows, 64), draw(ranks, rows, 64, dtype=SHORT)
        values[..., :2] = -0.0  # what an empty place holds
        rows_NRD[:, :, 1] = 0
        rows_NRD[own] = values.sum(0)[0].to(SHORT)
        total = torch.zeros(rows, 64, device=DEVICE)
        for addend in rows_NRD:
            total += addend.float()
        mine_R, turn = owner_R == own, count % 2
        for rank in range(ranks):
            if rank != own:
                addends[own][turn, rank, slot_R[mine_R], :64] = rows_NRD[rank, mine_R].view(torch.int16)
        totals[own][turn, row_R[~mine_R], :64] = total.to(SHORT)[~mine_R].view(torch.int16)
        want = triton_norm.add_rms_norm(x, total.to(SHORT)[None], weight_D, 1e-5)
        got = triton_norm.add_rms_norm(x, PartialSums(values, SHORT), weight_D, 1e-5, exchange=exchange)
        assert torch.equal(got[0], want[0]) and torch.equal(close(got[1]), close(want[1]))
        for rank in range(ranks):
            theirs_R = owner_R == rank
            if rank != own:
                sent = addends[rank][turn, own, slot_R[theirs_R], :64]
                assert torch.equal(sent.view(SHORT), rows_NRD[own, theirs_R]) and not (sent == EMPTY).any()
                told = totals[rank][turn, row_R[mine_R], :64]
                assert torch.equal(told.view(SHORT), total.to(SHORT)[mine_R]) and not (told == EMPTY).any()
        assert (addends[own] == EMPTY).all() and (totals[own] == EMPTY).all()
