"""Triton kernels against their torch references: in Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import CLOSE, CUDA, DEVICE, draw, expert_mlps, shared_of

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.kernels import attention, linear, moe, norm, rotary  # noqa: E402
from dinfer.core.kernels.deferred import close, widened  # noqa: E402
from dinfer.core.kernels.types import FLOAT8, HeadNorm, Matrices, Projections, Rounded  # noqa: E402
from dinfer.core.terms.spec import ExpertSpec  # noqa: E402
from dinfer.formats.kernels.scaled import scaled_linear  # noqa: E402
from dinfer.kernels.triton import attention as triton_attention  # noqa: E402
from dinfer.kernels.triton import linear as triton_linear  # noqa: E402
from dinfer.kernels.triton import moe as triton_moe  # noqa: E402
from dinfer.kernels.triton import moe as triton_route  # noqa: E402
from dinfer.kernels.triton import norm as triton_norm  # noqa: E402
from dinfer.kernels.triton import rotary as triton_rotary  # noqa: E402


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of dinfer.kernels run torch, so that the kernels have something to be compared with."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("width", [64, 96, 1000])
@pytest.mark.parametrize("add", [True, False])
def test_add_rms_norm(reference: None, dtype: torch.dtype, width: int, add: bool) -> None:
    x_BWD, weight_D = draw(2, 3, width, dtype=dtype), draw(width, dtype=dtype)
    delta_BWD = draw(2, 3, width, dtype=dtype) if add else None
    for got, want in zip(
        triton_norm.add_rms_norm(x_BWD, delta_BWD, weight_D, 1e-5),
        norm.add_rms_norm(x_BWD, delta_BWD, weight_D, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(got, want, **CLOSE[dtype])


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("width", [16, 1500])
def test_swiglu(reference: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int) -> None:
    x_BWX = draw(2, 3, 2 * width, dtype=dtype)
    torch.testing.assert_close(triton_norm.swiglu(x_BWX), norm.swiglu(x_BWX), **CLOSE[dtype])
    want = triton_linear.round_rows(triton_norm.swiglu(x_BWX))
    for many in (1, 512):  # in one kernel or two, the same bits
        monkeypatch.setattr(triton_norm, "MANY", many)
        got = triton_norm.swiglu(x_BWX, "rounded")
        assert torch.equal(got.values.float(), want.values.float()) and torch.equal(got.scale, want.scale)


@pytest.mark.rest(but=5)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "dim"), [(4, 4, 16, 16), (6, 2, 32, 16), (5, 1, 64, 24)])
def test_rotate_and_store(
    reference: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
    normed: bool, narrow: bool, heads: int, kv_heads: int, size: int, dim: int,
) -> None:  # fmt: skip
    if normed:  # also as many rows are taken
        monkeypatch.setattr(triton_rotary, "MANY", 1)
    lanes, width, places = 2, 5, 40
    qkv_BWXE = draw(lanes, width, heads + 2 * kv_heads, size, dtype=dtype)
    table = rotary.rotary_table(torch.randint(0, 99, (lanes, width), device=DEVICE), dim, 1e4, dtype)
    norm = HeadNorm(draw(2 * size, dtype=dtype), 1e-5) if normed else None
    write_X = torch.randperm(places, device=DEVICE)[: lanes * width]
    pools = [draw(places, kv_heads, size, dtype=dtype) for _ in range(2)]
    if narrow:
        pools = [pool.to(FLOAT8) for pool in pools]
        qkv_BWXE[0, 0] *= 1e4  # out of its range
        if CUDA:  # the interpreter makes a number of NaN
            qkv_BWXE[1, 1, -1, 3] = float("nan")
    mine, theirs = [p.clone() for p in pools], [p.clone() for p in pools]
    qkv = Projections(qkv_BWXE, heads, table, norm)
    got = triton_rotary.rotate_and_store(qkv, *mine, write_X)
    want = rotary.rotate_and_store(qkv, *theirs, write_X)
    near = {"atol": 2e-2, "rtol": 0.13} if narrow else CLOSE[dtype]  # a neighbour in float8, where roundings differ
    torch.testing.assert_close(got, want, **CLOSE[dtype])
    for a, b in zip(mine, theirs, strict=True):
        if narrow and not CUDA:  # the interpreter does not carry when a mantissa is rounded up to a power of two
            a = torch.where(b.view(torch.uint8) & 7 == 0, b.float(), a.float())
        torch.testing.assert_close(a.float(), b.float(), equal_nan=True, **near)
    assert not narrow or mine[1].float()[write_X[0]].abs().max() == 448
    assert mine[1].float().isnan().sum() == (narrow and CUDA)


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("tiles", [None, (16, 32, 1, 4, 2), (32, 16, 4, 4, 2)])
@pytest.mark.parametrize(
    ("lanes", "width", "heads", "kv_heads", "size", "page", "pages"),
    [(1, 1, 2, 2, 16, 16, 2), (3, 7, 4, 2, 32, 16, 9), (2, 33, 6, 1, 16, 8, 20), (1, 64, 2, 2, 64, 4, 33)],
)
def test_paged_attention(
    reference: None, dtype: torch.dtype, narrow: bool, tiles: tuple[int, ...] | None, lanes: int, width: int,
    heads: int, kv_heads: int, size: int, page: int, pages: int,
) -> None:  # fmt: skip
    pool = lanes * pages + 3
    stored = FLOAT8 if narrow else dtype
    k_PTGE, v_PTGE = (draw(pool, page, kv_heads, size, dtype=dtype).to(stored) for _ in range(2))
    q_BWHE = draw(lanes, width, heads, size, dtype=dtype)
    pages_BP = torch.randperm(pool, device=DEVICE)[: lanes * pages].view(lanes, pages)
    start_BW = torch.randint(0, page * pages, (lanes, width), device=DEVICE)
    end_BW = start_BW + 1 + (torch.rand(lanes, width, device=DEVICE) * (page * pages - start_BW)).long()
    end_BW = end_BW.clamp_max(page * pages)
    got = triton_attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, start_BW, end_BW, tiles=tiles)
    want = attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, (start_BW, end_BW))
    torch.testing.assert_close(got, want, **CLOSE[dtype])


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("first", "fewest"), [(0, 40), (0, 3), (5, 60)])
def test_keys_that_all_queries_see_need_no_mask(reference: None, splits: int, first: int, fewest: int) -> None:
    """Tiles of 64 queries, of which the last is not full, over 16 keys at a time."""
    lanes, width, heads, kv_heads, size, page, pages = 2, 21, 4, 1, 16, 8, 9
    k_PTGE, v_PTGE = (draw(lanes * pages, page, kv_heads, size, dtype=torch.float32) for _ in range(2))
    q_BWHE = draw(lanes, width, heads, size, dtype=torch.float32)
    pages_BP = torch.randperm(lanes * pages, device=DEVICE).view(lanes, pages)
    start_BW = torch.full((lanes, width), first, device=DEVICE)
    end_BW = torch.randint(fewest, page * pages + 1, (lanes, width), device=DEVICE).clamp_min(first + 1)
    tiles = (64, 16, splits, 4, 2)
    got = triton_attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, start_BW, end_BW, tiles=tiles)
    want = attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, (start_BW, end_BW))
    torch.testing.assert_close(got, want, **CLOSE[torch.float32])


@pytest.mark.parametrize("heads", [6, 24])
def test_splits_are_joined_and_rounded_in_one_kernel(heads: int) -> None:
    """The same bits as in two; of many heads two are faster."""
    size, page, pages, splits = 128, 8, 9, 4
    k_PTGE, v_PTGE = (draw(pages, page, 2, size, dtype=torch.bfloat16) for _ in range(2))
    q_BWHE = draw(1, 5, heads, size, dtype=torch.bfloat16)
    start_BW, end_BW = (torch.full((1, 5), at, device=DEVICE) for at in (3, 70))
    read = q_BWHE, k_PTGE, v_PTGE, torch.arange(pages, device=DEVICE)[None], start_BW, end_BW
    tiles = triton_attention.Tiles(16, 16, splits, 4, 1)
    want = triton_attention.paged_attention(*read, tiles=tiles).flatten(2)
    got = triton_attention.paged_attention(*read, tiles=tiles, input_format="rounded")
    assert isinstance(got, Rounded if heads == 6 else torch.Tensor)
    if isinstance(got, Rounded):
        rounded = triton_linear.round_rows(want)
        assert torch.equal(got.values.float(), rounded.values.float()) and torch.equal(got.scale, rounded.scale)


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalized": {"normalize": True},
    "grouped": {"scores": "sigmoid", "normalize": True, "scale": 2.5, "groups": 4, "groups_chosen": 2, "bias": True},
    "groups of one": {"scores": "sigmoid", "groups": 24, "groups_chosen": 5},
}


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("name", ROUTERS)
def test_route(reference: None, name: str) -> None:
    spec = ExpertSpec(experts=24, chosen=5, width=1, **ROUTERS[name])
    bias_X = draw(24) if spec.bias else None
    logits_NX = draw(33, 24)
    got = triton_route.route(logits_NX, spec, bias_X=bias_X)
    want = moe.route(logits_NX, spec, bias_X=bias_X)
    for experts, weights, (theirs, their_weights) in zip(*got, zip(*want, strict=True), strict=True):
        order, their_order = experts.argsort(), theirs.argsort()
        assert experts[order].tolist() == theirs[their_order].tolist()
        torch.testing.assert_close(weights[order], their_weights[their_order])


def chosen_by(tokens: int, experts: int, chosen: int, routing: str) -> torch.Tensor:
    """Any experts but the first; or the last ones, by all or by every second token. [N, C]"""
    score_NX = torch.rand(tokens, experts, device=DEVICE)
    score_NX[:, 0] = -1
    if routing != "spread":
        score_NX[:: 2 if routing == "half alike" else 1, -chosen:] += 1
    return score_NX.topk(chosen).indices


ROUTINGS = ("spread", "half alike", "alike")


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("rows", "shared"), [(16, False), (16, True), (128, True)])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 8, 2), (33, 8, 1), (20, 64, 6), (300, 5, 3)])
def test_every_pair_is_in_one_tile_of_its_expert(
    tokens: int, experts: int, chosen: int, rows: int, shared: bool, routing: str
) -> None:
    experts_NC = chosen_by(tokens, experts, chosen, routing)
    plan = triton_moe.plan(experts_NC, experts, rows, shared)
    seen, places = [], []
    for expert, first, place, count in plan.tile_I4.tolist():
        if expert >= 0:
            assert 0 < count <= rows
            seen += [(expert, pair) for pair in plan.pairs_XN[expert, first : first + count].tolist()]
            places += range(place, place + count)
    want_NC = torch.cat((experts_NC, experts_NC.new_full((tokens, shared), experts)), 1)
    want = sorted((expert, pair) for pair, expert in enumerate(want_NC.flatten().tolist()))
    assert seen == want[tokens * chosen :] + want[: tokens * chosen]  # a shared expert is the last and comes first
    assert places == list(range(len(want)))


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "chosen", "hidden", "width", "rows", "routing"), [
    (1, 8, 2, 64, 32, 16, "spread"), (33, 8, 2, 40, 24, 32, "spread"), (20, 64, 6, 130, 48, 16, "half alike"),
    (300, 4, 3, 64, 64, 128, "alike"), (150, 8, 1, 64, 64, 128, "half alike"), (9, 8, 2, 40, 136, 16, "spread"),
])  # fmt: skip
def test_expert_mlps(
    reference: None, dtype: torch.dtype, tokens: int, experts: int, chosen: int, hidden: int, width: int, rows: int,
    routing: str,
) -> None:  # fmt: skip
    x_ND = draw(tokens, hidden, dtype=dtype)
    gate_up_XMD = draw(experts, 2 * width, hidden, dtype=dtype) / hidden**0.5
    down_XDM = draw(experts, hidden, width, dtype=dtype) / width**0.5
    experts_NC = chosen_by(tokens, experts, chosen, routing)
    weights_NC = torch.rand(tokens, chosen, device=DEVICE) / chosen
    shared = gate_up_XMD[1].flip(0), down_XDM[1].flip(0)
    for gated, one in ((norm.swiglu, shared), (norm.geglu, None)):
        gate_up, down = Matrices(gate_up_XMD), Matrices(down_XDM)
        if one is not None:
            gate_up, down = gate_up._replace(shared=one[0]), down._replace(shared=one[1])
        plan = triton_moe.plan(experts_NC, experts, rows, one is not None)
        out_PD = triton_moe.expert_linear(triton_moe.expert_linear(x_ND, gate_up, plan, moe.GATES[gated]), down, plan)
        wide_x, wide_up, wide_down = (t.float() for t in (x_ND, gate_up_XMD, down_XDM))
        wide = None if one is None else shared_of(*(part.float() for part in one))
        want_ND = expert_mlps(wide_x, experts_NC, weights_NC, wide_up, wide_down, gated, shared=wide)
        got_ND = triton_moe.combine(out_PD, weights_NC)
        torch.testing.assert_close(got_ND.float(), want_ND, **CLOSE[dtype])
        got_ND = triton_moe.combine(out_PD, weights_NC, x_ND)
        torch.testing.assert_close(got_ND.float(), want_ND + wide_x, **CLOSE[dtype])


def test_pieces_of_a_row_at_a_scale_of_their_own() -> None:
    """Values in float8 would be the same, but the interpreter does not multiply them."""
    tokens, experts, width = 40, 4, 96
    plan = triton_moe.plan(chosen_by(tokens, experts, 2, "spread"), experts, 16)
    x_PM, down = draw(2 * tokens, width), Matrices(draw(experts, 48, width))
    scale_PG = (torch.rand(3, 2 * tokens, device=DEVICE) + 0.5).mT
    scaled_PM = (x_PM.unflatten(-1, (3, -1)) * scale_PG[..., None]).flatten(1)
    got = triton_moe.expert_linear(Rounded(x_PM, scale_PG, torch.float32), down, plan)
    torch.testing.assert_close(got, triton_moe.expert_linear(scaled_PM, down, plan), **CLOSE[torch.float32])


def test_rounding_keeps_nan() -> None:
    """As the scale, so that the row's logits are NaN and its request ends, alone."""
    x_BWD = draw(1, 3, 64)
    x_BWD[0, 1, 5] = float("nan")
    normed = triton_norm.add_rms_norm(x_BWD, None, draw(64), 1e-5, "rounded")[1]
    for rounded in (normed, triton_linear.round_rows(x_BWD)):
        assert rounded.scale.isnan().tolist() == [[False, True, False]]


def test_gates_are_rounded_piece_by_piece() -> None:
    x_ND, gate_up = draw(7, 64), Matrices(draw(4, 2 * 64, 64) / 8)
    plan = triton_moe.plan(chosen_by(7, 4, 2, "spread"), 4, 16)
    want_PM = triton_moe.expert_linear(x_ND, gate_up, plan, "silu")
    got = triton_moe.expert_linear(x_ND, gate_up, plan, "silu", piece=32)
    want = linear.round_rows(want_PM.unflatten(-1, (2, -1)))
    torch.testing.assert_close(got.scale, want.scale)
    pieces = got.values.float().unflatten(-1, (2, -1)) * got.scale[..., None]
    assert (pieces - widened(want)).abs().max() < 0.07 * want_PM.abs().max()


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("neighbours", [1, 40])
def test_a_token_and_its_experts_do_not_notice_the_others(neighbours: int) -> None:
    """Bit for bit, as long as tiles have the same shape."""
    x_ND, gate_up_XMD, down_XDM = draw(41, 64), draw(64, 32, 64), draw(64, 64, 16)
    experts_NC = torch.rand(41, 64, device=DEVICE).topk(3).indices
    weights_NC = torch.rand(41, 3, device=DEVICE)

    def run(count: int) -> torch.Tensor:
        plan = triton_moe.plan(experts_NC[:count], 64, 16)
        hidden_PM = triton_moe.expert_linear(x_ND[:count], Matrices(gate_up_XMD), plan, "silu")
        out_PD = triton_moe.expert_linear(hidden_PM, Matrices(down_XDM), plan)
        return triton_moe.combine(out_PD, weights_NC[:count])

    assert torch.equal(run(neighbours + 1)[0], run(1)[0])


@pytest.mark.rest(but=10)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        None, triton_linear.Config(16, 64, 32, 4, 2), triton_linear.Config(32, 32, 32, 2, 2, late=True),
        triton_linear.Config(32, 64, 64, 4, 2, copied=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rows", "outputs", "width"), [(5, 40, 128), (70, 200, 96), (33, 64, 256)])
def test_linear(
    reference: None, dtype: torch.dtype, quantized: bool, config: triton_linear.Config | None,
    rows: int, outputs: int, width: int,
) -> None:  # fmt: skip
    """Tiles that fit and tiles that do not; the same each time."""
    x, weight_OK = draw(1, rows, width, dtype=dtype), draw(outputs, width, dtype=dtype) / width**0.5
    bias_O, scale_O = draw(outputs).to(dtype), None
    if quantized:
        weight_OK, scale_O = linear.round_rows(weight_OK, torch.int8)[:2]
    got = triton_linear.linear(x, weight_OK, bias_O, scale_O, config=config)
    want = linear.linear(x, weight_OK, bias_O) if scale_O is None else scaled_linear(x, weight_OK, scale_O, bias_O)
    torch.testing.assert_close(got, want, **CLOSE[dtype])
    assert torch.equal(got, triton_linear.linear(x, weight_OK, bias_O, scale_O, config=config))


@pytest.mark.rest(but=1)
@pytest.mark.skipif(not CUDA, reason="Triton's interpreter does not multiply float8")
@pytest.mark.parametrize("rows", [7, 50, 300])
def test_float8(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Rounding by itself and as part of norm and gate; linear maps and experts with weights in float8."""
    x, delta, weight_D = (draw(*shape, dtype=torch.bfloat16) for shape in ((1, rows, 512), (1, rows, 512), (512,)))
    weight = linear.round_rows(draw(320, 512))
    gate_up, down = linear.round_rows(draw(8, 512, 512) / 20), linear.round_rows(draw(8, 512, 256) / 20)
    experts_NC = torch.rand(rows, 8, device=DEVICE).topk(3).indices
    weights_NC = torch.rand(rows, 3, device=DEVICE)

    alike = shared_of(gate_up.values[0], down.values[0], (gate_up.scale[0], down.scale[0]))
    other = shared_of(draw(80, 512, dtype=torch.bfloat16), draw(512, 40, dtype=torch.bfloat16) / 20)

    def outcomes() -> list[torch.Tensor]:
        normed = norm.add_rms_norm(x, delta, weight_D, 1e-5, "both")[1]
        rounded = [normed, norm.swiglu(x, "rounded"), linear.round_rows(x)]
        experts = experts_NC, weights_NC, gate_up.values, down.values
        scales = gate_up.scale, down.scale
        return [
            *(widened(some) for some in rounded),
            scaled_linear(rounded[2], weight.values, weight.scale),
            close(normed),
            *(expert_mlps(x[0], *experts, scales=scales, shared=one) for one in (None, alike, other)),
            expert_mlps(normed, *experts, scales=scales, shared=other),
        ]

    with torch.no_grad():
        got = outcomes()
        monkeypatch.setenv("DINFER_KERNELS", "torch")
        want = outcomes()
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.float() - theirs.float()).norm() < 0.03 * theirs.float().norm()
