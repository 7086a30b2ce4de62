"""Kernels of weights in 4 bits against their references: in Triton's interpreter, or on the GPU if there is one."""

from __future__ import annotations

import pytest
import torch
from support.kernels import CLOSE, CUDA, draw, expert_mlps, in_8_bits

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

from dinfer.core.kernels import norm  # noqa: E402
from dinfer.core.kernels.deferred import close  # noqa: E402
from dinfer.core.kernels.types import GROUPED_ROWS, Grouped, InGroups, PartialSums  # noqa: E402
from dinfer.formats.kernels import packed  # noqa: E402
from dinfer.kernels.triton import attention as triton_attention  # noqa: E402
from dinfer.kernels.triton import moe as triton_moe  # noqa: E402
from dinfer.kernels.triton import norm as triton_norm  # noqa: E402
from dinfer.kernels.triton import packed as triton_packed  # noqa: E402
from dinfer.kernels.triton.linear import round_groups  # noqa: E402
from dinfer.kernels.triton.packed import Config  # noqa: E402


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of dinfer.kernels run torch, so that the kernels have something to be compared with."""
    monkeypatch.setenv("DINFER_KERNELS", "torch")


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("config", "rows", "outputs", "width"), [
    *((config, *sizes) for config in (None, Config(16, 64, 2, 4, 2), Config(32, 32, 1, 4, 2, parts=4))
      for sizes in ((5, 40, 512), (70, 192, 192), (33, 64, 96))),
    (None, 129, 128, 128),
], ids=str)  # fmt: skip
def test_linear_in_4_bits(
    reference: None, dtype: torch.dtype, config: Config | None, rows: int, outputs: int, width: int
) -> None:
    """Tiles that do not fit, groups of every size, and sums of several parts, which come out the same each time.

    Weights are as `pack` makes them and, where 64 divides the outputs, as a GPU holds them. A card divides less
    exactly, so an input halfway between two integers may go to either.
    """
    near = {"atol": 0.02, "rtol": 0.02} if CUDA else CLOSE[dtype]
    x, bias_O = draw(1, rows, width, dtype=dtype), draw(outputs, dtype=dtype)
    weight_OH, scale_OG = packed.pack(draw(outputs, width) / width**0.5)
    got = triton_packed.linear(x, weight_OH, scale_OG, bias_O, config=config)
    want = packed.packed_linear(in_8_bits(x, packed.group_of(width)), weight_OH, scale_OG, bias_O)
    torch.testing.assert_close(got, want, **near)
    tiled = packed.tiled(weight_OH, scale_OG)
    assert (tiled is weight_OH) == (outputs == 40)
    assert torch.equal(packed.flat(tiled, scale_OG), weight_OH)
    assert torch.equal(got, triton_packed.linear(x, tiled, scale_OG, bias_O, config=config))
    parts = triton_packed.linear(x, tiled, scale_OG, bias_O, config=config, split=True)
    torch.testing.assert_close(close(parts), want, **near)
    for values in (weight_OH, tiled):
        assert torch.equal(triton_packed.unpack(values, scale_OG, dtype), packed.unpack(weight_OH, scale_OG, dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_rounding_the_inputs_keeps_nan() -> None:
    """A row with NaN comes out as NaN, so that its request ends, alone."""
    x, weight = draw(3, 64), packed.pack(draw(40, 64))
    whole = triton_packed.linear(x, *weight, None)
    x[1, 5] = float("nan")
    broken = triton_packed.linear(x, *weight, None)
    assert broken[1].isnan().all() and torch.equal(broken[::2], whole[::2])


def assert_rounded(grouped: Grouped, plain: torch.Tensor, group: int, *, exact: bool = not CUDA) -> None:
    """`grouped` holds the rows of `plain`, each value at most half a step away, and NaN where a group has one.

    `exact`: it holds what `round_groups` makes of them. A card divides less exactly, and a kernel that rounds may add
    up in another order or skip roundings to bfloat16, so that a value halfway between two steps may go to either.
    """
    exact = exact and grouped.squares is None
    assert grouped.shape == plain.shape
    wide = plain.float().unflatten(-1, (-1, group))
    step = wide.abs().amax(-1, keepdim=True) / 127
    got = close(grouped._replace(wide=None)).float().unflatten(-1, (-1, group))
    assert ((got - wide).abs() <= 0.51 * step + 2 ** (-7 if exact else -5) * wide.abs())[
        ~step.isnan().squeeze(-1)
    ].all()
    broken = step.isnan().squeeze(-1) if grouped.squares is None else step.isnan().any(-2).expand(step.shape[:-1])
    assert torch.equal(got.isnan().all(-1), broken) and torch.equal(got.isnan().any(-1), broken)
    if exact:
        rows, want = plain.shape[:-1].numel(), round_groups(plain, group)
        there = ~want.scale_GR[:, :rows].mT.isnan().repeat_interleave(group, -1)  # NaN has no integer
        assert torch.equal(grouped.values_RK[:rows] * there, want.values_RK[:rows] * there)
        assert torch.equal(grouped.scale_GR[:, :rows].nan_to_num(), want.scale_GR[:, :rows].nan_to_num())


@pytest.mark.rest(but=1)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("rows", "width", "both"), [(3, 96, True), (3, 1184, False), (70, 1280, True), (60, 1280, False)]
)
def test_norm_and_gate_leave_rounded_rows(reference: None, rows: int, width: int, both: bool) -> None:
    """With NaN where a row has one; more rows stay as they are. Without `both` the product divides by the norm."""
    x, gate_up = draw(1, rows, width, dtype=torch.bfloat16), draw(1, rows, 2 * width, dtype=torch.bfloat16)
    weight, inputs = packed.pack(draw(64, width) / width**0.5), InGroups(packed.group_of(width), both)
    x[0, 1, 5] = gate_up[0, 2, 7] = float("nan")
    norms = [triton_norm.add_rms_norm(x, x, x[0, 0], 1e-5, kind)[1] for kind in ("plain", inputs)]
    assert (norms[1].squares is None) == both
    in_two = PartialSums(torch.stack((gate_up, torch.zeros_like(gate_up))).float(), gate_up.dtype)
    assert_rounded(triton_norm.swiglu(in_two, inputs), triton_norm.swiglu(gate_up), inputs.group, exact=False)
    torch.testing.assert_close(triton_norm.swiglu(in_two), triton_norm.swiglu(gate_up), equal_nan=True)
    for plain, grouped in (norms, (triton_norm.swiglu(gate_up), triton_norm.swiglu(gate_up, inputs))):
        assert_rounded(grouped, plain, inputs.group)
        got, want = (triton_packed.linear(given, *weight, None) for given in (grouped, plain))
        torch.testing.assert_close(got, want, atol=0.1, rtol=0.02, equal_nan=True)  # a few inputs are rounded apart
        assert (got - want).nan_to_num().float().norm() < 0.02 * want.nan_to_num().float().norm()
        assert want.isnan().any()
        if grouped.wide is not None:
            torch.testing.assert_close(grouped.wide, plain, equal_nan=True)
    assert isinstance(triton_norm.swiglu(gate_up.expand(1 + GROUPED_ROWS // rows, -1, -1), inputs), torch.Tensor)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("group", [512, 1024])
def test_a_scale_for_many_inputs(reference: None, group: int) -> None:
    """Checkpoints have such groups, too, which are larger than the pieces that programs share a row in."""
    x, gate_up = draw(1, 3, 2 * group, dtype=torch.bfloat16), draw(1, 3, 4 * group, dtype=torch.bfloat16)
    normed, shared = (triton_norm.add_rms_norm(x, x, x[0, 0], 1e-5, kind)[1] for kind in ("plain", InGroups(group)))
    assert shared.squares is not None
    assert_rounded(shared, normed, group)
    assert_rounded(triton_norm.swiglu(gate_up, InGroups(group)), triton_norm.swiglu(gate_up), group)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_leaves_rounded_rows(splits: int) -> None:
    lanes, width, heads, size, page = 2, 5, 4, 32, 16
    q_BWHE = draw(lanes, width, heads, size, dtype=torch.bfloat16)
    k_PTGE, v_PTGE = draw(12, page, 2, size, dtype=torch.bfloat16), draw(12, page, 2, size, dtype=torch.bfloat16)
    pages_BP = torch.arange(12, device=q_BWHE.device).view(lanes, 6)
    start_BW = pages_BP.new_zeros(lanes, width)
    read = q_BWHE, k_PTGE, v_PTGE, pages_BP, start_BW, start_BW + 90
    tiles = triton_attention.Tiles(16, 32, splits, 4, 1)
    plain = triton_attention.paged_attention(*read, tiles=tiles).flatten(2)
    grouped = triton_attention.paged_attention(*read, tiles=tiles, input_format=InGroups(size))
    assert_rounded(grouped, plain, size)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("tiles", [False, True])
def test_a_shared_expert_in_4_bits_is_one_more_of_the_experts(
    reference: None, monkeypatch: pytest.MonkeyPatch, tiles: bool
) -> None:
    tokens, experts, hidden, width = 5, 4, 64, 64
    x_ND, (weights_NC, experts_NC) = draw(tokens, hidden), draw(tokens, experts).softmax(-1).topk(2)
    gate_up, down = (
        packed.pack(draw(experts + 1, 2 * width, hidden) / 8),
        packed.pack(draw(experts + 1, hidden, width) / 8),
    )
    if tiles:
        gate_up, down = ((packed.tiled(*weight), weight[1]) for weight in (gate_up, down))
    each = [packed.PackedExperts(*(part[:experts] for part in weight)) for weight in (gate_up, down)]
    shared = [packed.PackedExperts(*(part[experts] for part in weight)) for weight in (gate_up, down)]
    plan = triton_moe.plan(experts_NC, experts, 16, shared=True)
    both = [one.joined(more) for one, more in zip(each, shared, strict=True)]
    got = triton_moe.combine(
        both[1].mixed_rows(both[0].gated_rows(x_ND, plan, triton_norm.swiglu, both[1]), plan), weights_NC
    )
    plan = triton_moe.plan(experts_NC, experts, 16)
    hidden_NM = triton_norm.swiglu(triton_packed.linear(x_ND, *(part[experts] for part in gate_up), None))
    alone_ND = triton_packed.linear(hidden_NM, *(part[experts] for part in down), None)
    mixed_PD = each[1].mixed_rows(each[0].gated_rows(x_ND, plan, triton_norm.swiglu, each[1]), plan)
    # Sums in another order differ by little, and may round a value between the maps to its other neighbour.
    torch.testing.assert_close(got, triton_moe.combine(mixed_PD, weights_NC, alone_ND), atol=0.02, rtol=0.02)


@pytest.mark.rest(but=1)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "chosen", "hidden", "width"), [
    (1, 8, 2, 64, 32), (33, 8, 2, 128, 96), (48, 4, 3, 64, 64),
])  # fmt: skip
def test_expert_mlps_in_4_bits(
    reference: None, dtype: torch.dtype, tokens: int, experts: int, chosen: int, hidden: int, width: int
) -> None:
    x_ND = draw(tokens, hidden, dtype=dtype)
    gate_up, gate_up_scale = packed.pack(draw(experts, 2 * width, hidden) / hidden**0.5)
    down, down_scale = packed.pack(draw(experts, hidden, width) / width**0.5)
    weights_NC, experts_NC = draw(tokens, experts).softmax(-1).topk(chosen)
    scales = gate_up_scale, down_scale
    rows = packed.PackedExperts(down, down_scale).rows_of_tile(tokens * chosen / experts)
    plan = triton_moe.plan(experts_NC, experts, rows)

    def gated(both: torch.Tensor, inputs: str) -> torch.Tensor:
        return in_8_bits(norm.swiglu(both), packed.group_of(width))

    rounded_ND = in_8_bits(x_ND, packed.group_of(hidden))
    want = expert_mlps(rounded_ND, experts_NC, weights_NC, gate_up, down, gated, scales)
    for first, second in ((gate_up, down), (packed.tiled(gate_up, scales[0]), packed.tiled(down, scales[1]))):
        up_PM = triton_moe.packed_expert_linear(x_ND, first, scales[0], plan, by_token=True)
        out_PD = triton_moe.packed_expert_linear(norm.swiglu(up_PM), second, scales[1], plan, by_token=False)
        got = triton_moe.combine(out_PD, weights_NC)
        # A sum in another order may round one value between the maps to its other neighbour, which one row then shows.
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
        assert torch.isclose(got, want, **CLOSE[dtype]).all(-1).sum() >= tokens - CUDA
