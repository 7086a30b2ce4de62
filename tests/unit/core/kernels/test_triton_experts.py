"""Kernels of experts that ranks deal out, against the torch reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.kernels import CLOSE, CUDA, DEVICE, SHORT, draw, expert_mlps, in_8_bits, shared_of

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.kernels import linear, moe, norm  # noqa: E402
from dinfer.core.kernels.types import FLOAT8, Dealt, Matrices, Rounded  # noqa: E402
from dinfer.core.terms.spec import ExpertSpec  # noqa: E402
from dinfer.formats.kernels import packed  # noqa: E402
from dinfer.kernels.triton import moe as triton_moe  # noqa: E402


@pytest.fixture
def nothing_uninitialised() -> Iterator[None]:
    """Memory that nobody has written holds NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS may not be
    yield
    torch.use_deterministic_algorithms(False)


def test_experts_that_are_elsewhere_take_no_tile_and_add_nothing(
    nothing_uninitialised: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights as they are, and in 4 bits; with a shared expert beside, and for ranks that no token goes to."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")  # what the kernels are compared with
    torch.manual_seed(0)
    tokens, experts, chosen = 20, 6, 2
    x_ND = draw(tokens, 64)
    gate_up_XMD, down_XDM = draw(experts, 64, 64) / 8, draw(experts, 64, 32) / 6
    experts_NC = 2 + torch.rand(tokens, 4, device=DEVICE).topk(chosen).indices  # no token goes to the first two
    weights_NC = torch.rand(tokens, chosen, device=DEVICE)
    for first in (0, 2, 4):
        own_NC, own_weights_NC = moe.own_pairs(experts_NC, weights_NC, Dealt(first, experts), 2)
        here = slice(first, first + 2)
        want_ND = expert_mlps(
            x_ND, experts_NC, weights_NC, gate_up_XMD[here], down_XDM[here], dealt=Dealt(first, experts)
        )
        assert (want_ND.abs().sum() > 0) == (first > 0)
        for one in (None, (gate_up_XMD[0], down_XDM[0])):
            gate_up, down = Matrices(gate_up_XMD[here]), Matrices(down_XDM[here])
            plus_ND = torch.zeros_like(x_ND)
            if one is not None:
                gate_up, down = gate_up._replace(shared=one[0]), down._replace(shared=one[1])
                plus_ND = shared_of(*one).mlp(x_ND)
            plan = triton_moe.plan(own_NC, 2, 16, one is not None)
            hidden_PM = triton_moe.expert_linear(x_ND, gate_up, plan, "silu")
            got_ND = triton_moe.combine(triton_moe.expert_linear(hidden_PM, down, plan), own_weights_NC)
            torch.testing.assert_close(got_ND, want_ND + plus_ND, **CLOSE[torch.float32])
        packs = packed.pack(gate_up_XMD[here]), packed.pack(down_XDM[here])
        plan = triton_moe.plan(own_NC, 2, 16)
        up_PM = triton_moe.packed_expert_linear(x_ND, *packs[0], plan, by_token=True)
        out_PD = triton_moe.packed_expert_linear(norm.swiglu(up_PM), *packs[1], plan, by_token=False)
        scales = packs[0][1], packs[1][1]
        want_ND = expert_mlps(
            in_8_bits(x_ND, 64), experts_NC, weights_NC, packs[0][0], packs[1][0],
            lambda both, _: in_8_bits(norm.swiglu(both), 32), scales, dealt=Dealt(first, experts),
        )  # fmt: skip
        torch.testing.assert_close(triton_moe.combine(out_PD, own_weights_NC), want_ND, **CLOSE[torch.float32])


def test_padding_goes_to_no_expert(nothing_uninitialised: None) -> None:
    """Its outputs are 0, whatever memory held before, and those of other tokens are what they would be without it."""
    spec = ExpertSpec(experts=6, chosen=2, width=16, scores="sigmoid", normalize=True, scale=2.5)
    logits_NX, x_ND = draw(12, 6), draw(12, 32)
    pos_BW = torch.tensor([[3, 4, 5, -1], [-1, -1, -1, -1], [0, 1, -1, -1]], device=DEVICE)
    there_N = pos_BW.flatten() >= 0
    alone = triton_moe.route(logits_NX, spec, bias_X=None)
    experts_NC, weights_NC = triton_moe.route(logits_NX, spec, bias_X=None, pos_BW=pos_BW)
    assert (experts_NC[~there_N] > 6).all() and (weights_NC[~there_N] == 0).all()
    assert torch.equal(experts_NC[there_N], alone[0][there_N]) and torch.equal(weights_NC[there_N], alone[1][there_N])
    weights = draw(6, 32, 32) / 8, draw(6, 32, 16) / 6
    plan = triton_moe.plan(experts_NC, 6, 16)
    assert plan.tile_I4[:, 3].clamp_min(0).sum() == 2 * there_N.sum()
    want_ND = expert_mlps(x_ND, *alone, *weights)
    got_ND = expert_mlps(x_ND, experts_NC, weights_NC, *weights)
    torch.testing.assert_close(got_ND, want_ND.masked_fill(~there_N[:, None], 0), **CLOSE[torch.float32])


@pytest.fixture
def uneven_NC() -> torch.Tensor:
    """All of 150 tokens choose expert 1, 40 choose expert 2 and the others 3: whole tiles of 128 rows and parts."""
    token = torch.arange(150, device=DEVICE)
    return torch.stack((torch.ones_like(token), torch.where(token < 40, 2, 3)), 1)


def test_tiles_that_the_copy_engine_fetches(
    nothing_uninitialised: None, uneven_NC: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the rows nor the widths fill the last tile, and the rows behind a tile's are those of another expert."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")  # what the kernels are compared with
    monkeypatch.setattr(triton_moe, "copyable", lambda *matrices: True)
    torch.manual_seed(0)
    hidden, width = 72, 40
    x_ND, weights_NC = draw(150, hidden, dtype=SHORT), torch.rand(150, 2, device=DEVICE)
    gate_up_XMD, down_XDM = (draw(4, 2 * width, hidden) / 8).to(SHORT), (draw(4, hidden, width) / 6).to(SHORT)
    plan = triton_moe.plan(uneven_NC, 4, 128)
    hidden_PM = triton_moe.expert_linear(x_ND, Matrices(gate_up_XMD), plan, "silu")
    got_ND = triton_moe.combine(triton_moe.expert_linear(hidden_PM, Matrices(down_XDM), plan), weights_NC)
    want_ND = expert_mlps(x_ND.float(), uneven_NC, weights_NC, gate_up_XMD.float(), down_XDM.float())
    torch.testing.assert_close(got_ND.float(), want_ND, **CLOSE[SHORT])


def test_rows_in_8_bits_take_half_a_tile_each(
    nothing_uninitialised: None, uneven_NC: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers up to 8 are exact in float8, and in int8, which the interpreter multiplies with instead."""
    monkeypatch.setattr(triton_moe, "copyable", lambda *matrices: True)
    torch.manual_seed(0)
    eight = FLOAT8 if CUDA else torch.int8
    x_PM, weight_XDM = (torch.randint(-8, 9, shape, device=DEVICE) for shape in ((300, 64), (4, 24, 64)))
    scale_PG, scale_XD = (torch.rand(shape, device=DEVICE) + 0.5 for shape in ((2, 300), (4, 24)))
    plan = triton_moe.plan(uneven_NC, 4, 128)
    down = Matrices(weight_XDM.float().to(eight), scale_XD)
    got_PD = triton_moe.expert_linear(Rounded(x_PM.float().to(eight), scale_PG.mT, torch.float32), down, plan)
    pair_P = uneven_NC.flatten().argsort(stable=True)
    wide_PM = (x_PM.float().unflatten(1, (2, -1)) * scale_PG.mT[..., None]).flatten(1)
    wide_PDM = (weight_XDM * scale_XD[..., None])[uneven_NC.flatten()[pair_P]]
    want_PD = torch.empty_like(got_PD).index_copy(0, pair_P, (wide_PDM @ wide_PM[..., None])[..., 0])
    torch.testing.assert_close(got_PD, want_PD, atol=1e-3, rtol=1e-5)


def test_gates_that_the_copy_engine_feeds_are_rounded_piece_by_piece(
    nothing_uninitialised: None, uneven_NC: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers up to 8 are exact in float8, and in 16 bits, which the interpreter multiplies instead."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")  # what the kernels are compared with
    monkeypatch.setattr(triton_moe, "copyable", lambda *matrices: True)
    torch.manual_seed(0)
    dtype = FLOAT8 if CUDA else SHORT
    x_ND, weight_XMD = (torch.randint(-8, 9, shape, device=DEVICE).float() for shape in ((150, 80), (4, 2 * 96, 80)))
    scale_N, scale_XM = ((torch.rand(shape, device=DEVICE) + 0.5) / 40 for shape in ((150,), (4, 2 * 96)))
    plan = triton_moe.plan(uneven_NC, 4, 128)
    x = Rounded(x_ND.to(dtype), scale_N, torch.float32)
    got = triton_moe.expert_linear(x, Matrices(weight_XMD.to(dtype), scale_XM), plan, "silu", piece=32)
    pair_P = uneven_NC.flatten().argsort(stable=True)
    wide_PD, expert_P = (x_ND * scale_N[:, None])[pair_P // 2], uneven_NC.flatten()[pair_P]
    up_PM = ((weight_XMD * scale_XM[..., None])[expert_P] @ wide_PD[..., None])[..., 0]
    want_PGM = norm.swiglu(up_PM).unflatten(-1, (3, -1))
    torch.testing.assert_close(got.scale, linear.round_rows(want_PGM).scale, atol=1e-6, rtol=1e-4)
    got_PGM = got.values.float().unflatten(-1, (3, -1)) * got.scale[..., None]
    # The interpreter halves some values just below a power of two.
    assert (got_PGM - want_PGM).abs().mean() < 0.05 * want_PGM.abs().mean()
