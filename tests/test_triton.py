"""Triton kernels against their torch references: in Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

CUDA = torch.cuda.is_available()
triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.kernels import attention, moe, norm, rotary  # noqa: E402
from dinfer.kernels.triton import attention as triton_attention  # noqa: E402
from dinfer.kernels.triton import moe as triton_moe  # noqa: E402
from dinfer.kernels.triton import norm as triton_norm  # noqa: E402
from dinfer.kernels.triton import rotary as triton_rotary  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
# The interpreter computes in numpy, which has no bfloat16.
CLOSE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16 if CUDA else torch.float16: {"atol": 2e-2, "rtol": 2e-2},
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of dinfer.kernels run torch, so that the kernels have something to be compared with."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


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


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("width", [16, 1500])
def test_swiglu(reference: None, dtype: torch.dtype, width: int) -> None:
    x_BWX = draw(2, 3, 2 * width, dtype=dtype)
    torch.testing.assert_close(triton_norm.swiglu(x_BWX), norm.swiglu(x_BWX), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "dim"), [(4, 4, 16, 16), (6, 2, 32, 16), (5, 1, 64, 24)])
def test_rotate_and_store(
    reference: None, dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, size: int, dim: int
) -> None:
    lanes, width, places = 2, 5, 40
    qkv_BWXE = draw(lanes, width, heads + 2 * kv_heads, size, dtype=dtype)
    table = rotary.rotary_table(torch.randint(0, 99, (lanes, width), device=DEVICE), dim, 1e4, dtype)
    norm = rotary.HeadNorm(draw(2 * size, dtype=dtype), 1e-5) if normed else None
    write_X = torch.randperm(places, device=DEVICE)[: lanes * width]
    pools = [draw(places, kv_heads, size, dtype=dtype) for _ in range(2)]
    mine, theirs = [p.clone() for p in pools], [p.clone() for p in pools]
    got = triton_rotary.rotate_and_store(qkv_BWXE, table, norm, heads, *mine, write_X)
    want = rotary.rotate_and_store(qkv_BWXE, table, norm, heads, *theirs, write_X)
    for a, b in zip([got, *mine], [want, *theirs], strict=True):
        torch.testing.assert_close(a, b, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("splits", [0, 1, 4])
@pytest.mark.parametrize(
    ("lanes", "width", "heads", "kv_heads", "size", "page", "pages"),
    [(1, 1, 2, 2, 16, 16, 2), (3, 7, 4, 2, 32, 16, 9), (2, 33, 6, 1, 16, 8, 20), (1, 64, 2, 2, 64, 4, 33)],
)
def test_paged_attention(
    reference: None, dtype: torch.dtype, splits: int, lanes: int, width: int, heads: int, kv_heads: int, size: int,
    page: int, pages: int,
) -> None:  # fmt: skip
    pool = lanes * pages + 3
    k_PTGE, v_PTGE = (draw(pool, page, kv_heads, size, dtype=dtype) for _ in range(2))
    q_BWHE = draw(lanes, width, heads, size, dtype=dtype)
    pages_BP = torch.randperm(pool, device=DEVICE)[: lanes * pages].view(lanes, pages)
    start_BW = torch.randint(0, page * pages, (lanes, width), device=DEVICE)
    end_BW = start_BW + 1 + (torch.rand(lanes, width, device=DEVICE) * (page * pages - start_BW)).long()
    end_BW = end_BW.clamp_max(page * pages)
    got = triton_attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, start_BW, end_BW, splits)
    want = attention.paged_attention(q_BWHE, k_PTGE, v_PTGE, pages_BP, (start_BW, end_BW))
    torch.testing.assert_close(got, want, **CLOSE[dtype])


ROUTERS = {
    "softmax": {"sigmoid": False, "normalize": False, "scale": 1.0},
    "normalized": {"sigmoid": False, "normalize": True, "scale": 1.0},
    "grouped": {"sigmoid": True, "normalize": True, "scale": 2.5, "groups": 4, "groups_chosen": 2, "biased": True},
    "groups of one": {"sigmoid": True, "normalize": False, "scale": 1.0, "groups": 24, "groups_chosen": 5},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_route(reference: None, name: str) -> None:
    router = {"groups": 1, "groups_chosen": 1} | ROUTERS[name]
    bias_X = draw(24) if router.pop("biased", False) else None
    logits_NX = draw(33, 24)
    got = triton_moe.route(logits_NX, 5, bias_X=bias_X, **router)
    want = moe.route(logits_NX, 5, bias_X=bias_X, **router)
    for experts, weights, (theirs, their_weights) in zip(*got, zip(*want, strict=True), strict=True):
        order, their_order = experts.argsort(), theirs.argsort()
        assert experts[order].tolist() == theirs[their_order].tolist()
        torch.testing.assert_close(weights[order], their_weights[their_order])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "chosen", "hidden", "width"), [
    (1, 8, 2, 64, 32), (33, 8, 2, 40, 24), (20, 64, 6, 130, 48), (300, 4, 3, 64, 64),
])  # fmt: skip
def test_expert_mlps(
    reference: None, dtype: torch.dtype, tokens: int, experts: int, chosen: int, hidden: int, width: int
) -> None:
    x_ND = draw(tokens, hidden, dtype=dtype)
    gate_up_XMD = draw(experts, 2 * width, hidden, dtype=dtype) / hidden**0.5
    down_XDM = draw(experts, hidden, width, dtype=dtype) / width**0.5
    weights_NX = draw(tokens, experts).softmax(-1)
    weights_NX[:, 0] = 0  # nobody's expert
    weights_NC, experts_NC = weights_NX.topk(chosen)
    plan = triton_moe.plan(experts_NC, experts)
    assert plan.count_X[0] == 0 and plan.count_X.sum() == tokens * chosen
    hidden_PM = norm.swiglu(triton_moe.expert_linear(x_ND, gate_up_XMD, plan, tokens * chosen))
    got = triton_moe.combine(triton_moe.expert_linear(hidden_PM, down_XDM, plan, tokens * chosen), weights_NC)
    torch.testing.assert_close(
        got, moe.expert_mlps(x_ND, experts_NC, weights_NC, gate_up_XMD, down_XDM), **CLOSE[dtype]
    )


@pytest.mark.parametrize("neighbours", [1, 40])
def test_a_token_and_its_experts_do_not_notice_the_others(neighbours: int) -> None:
    """Bit for bit, as long as tiles have the same shape."""
    x_ND, gate_up_XMD, down_XDM = draw(41, 64), draw(64, 32, 64), draw(64, 64, 16)
    experts_NC = torch.rand(41, 64, device=DEVICE).topk(3).indices
    weights_NC = torch.rand(41, 3, device=DEVICE)

    def run(count: int) -> torch.Tensor:
        plan = triton_moe.plan(experts_NC[:count], 64)
        hidden_PM = norm.swiglu(triton_moe.expert_linear(x_ND[:count], gate_up_XMD, plan, 3 * count))
        out_PD = triton_moe.expert_linear(hidden_PM, down_XDM, plan, 3 * count)
        return triton_moe.combine(out_PD, weights_NC[:count])

    assert torch.equal(run(neighbours + 1)[0], run(1)[0])
