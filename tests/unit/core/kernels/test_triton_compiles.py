"""The kernels of a step compile for a Hopper card, with no card: the interpreter takes more than the compiler does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.capture import meta_steps
from support.launches import failures, recorded_launches
from support.matrix import LEGAL, SAMPLE, Combination
from support.models import UNIFORM, tiny_model

from dinfer.core.kernels.types import FLOAT8, InGroups, Matrices, Plan, Rounded
from dinfer.structure.kernels.lines import LaneLanguages, Languages, Line

triton_linear = pytest.importorskip("dinfer.kernels.triton.linear")
triton_languages = pytest.importorskip("dinfer.kernels.triton.languages")
triton_moe = pytest.importorskip("dinfer.kernels.triton.moe")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels there")


@cache
def on_meta(variant: str) -> Any:
    sizes = {} if variant == UNIFORM else {"head_dim": 16}
    return tiny_model(variant, dtype=torch.bfloat16, **sizes).to("meta")


def maps_of_more_rows() -> None:
    """Linear maps whose tiles the copy engine of a Hopper card fetches, in bfloat16 and in float8."""
    for rows, outputs in ((64, 4096), (64, 12288), (64, 24576), (96, 4096), (128, 4096)):
        x, weight_OK = (torch.empty(many, 4096, dtype=torch.bfloat16, device="meta") for many in (rows, outputs))
        triton_linear.linear(x, weight_OK, None, None, split=True)
    x, weight_OK = x.to(FLOAT8), weight_OK.to(FLOAT8)
    x_scale_R, scale_O = (torch.empty(len(many), device="meta") for many in (x, weight_OK))
    triton_linear.linear(Rounded(x, x_scale_R, torch.bfloat16), weight_OK, None, scale_O)


def experts_of_more_tokens() -> None:
    """Products with experts whose tiles the copy engine fetches, in bfloat16 and in float8."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    plan = Plan(empty(4, 512, dtype=torch.int32), empty(12, 4, dtype=torch.int32), rows=128, pairs=1024)
    x_PM, weight_XOM = empty(1024, 256, dtype=torch.bfloat16), empty(4, 256, 256, dtype=torch.bfloat16)
    triton_moe.expert_linear(x_PM[:512], Matrices(weight_XOM), plan, "silu")
    triton_moe.expert_linear(x_PM, Matrices(weight_XOM), plan)
    weight = Matrices(weight_XOM.to(FLOAT8), empty(4, 256, dtype=torch.float32))
    x = Rounded(x_PM[:512].to(FLOAT8), empty(512, dtype=torch.float32), torch.bfloat16)
    triton_moe.expert_linear(x, weight, plan, "silu", piece=128)
    rounded = Rounded(x_PM.to(FLOAT8), empty(2, 1024, dtype=torch.float32).mT, torch.bfloat16)
    triton_moe.expert_linear(rounded, weight, plan)


@torch.inference_mode()
def failed(combinations: list[Combination], monkeypatch: pytest.MonkeyPatch, *kernels: str) -> list[str]:
    with recorded_launches(monkeypatch) as launches:
        maps_of_more_rows()
        experts_of_more_tokens()
        for combination in combinations:
            meta_steps(combination.recipe(on_meta(combination.variant)))
    wanted = {launch for launch in launches if not kernels or any(kernel in launch for kernel in kernels)}
    assert wanted
    return failures(wanted)


@pytest.mark.rest
def test_a_recipe_with_two_passes_and_the_rules_of_decoders_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that gave a name of the kernel of attention another shape passed the interpreter, not the compiler."""
    names = [f"block_causal-block_diffusion-{decoder}-block" for decoder in ("s2d2", "fixed", "joint_threshold")]
    combinations = [c for c in LEGAL if str(c) in names]
    assert failed(combinations, monkeypatch, "_attend", "_confident", '"_linear"', "weight_tiles") == []


@pytest.mark.rest
def test_the_kernels_of_every_recipe_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(SAMPLE[::2], monkeypatch) == []


@pytest.mark.rest
@torch.inference_mode()
def test_products_with_weights_in_4_bits_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not run their PTX. Groups of 128 and 32, dense and of experts."""
    from dinfer.core.kernels import norm
    from dinfer.formats.kernels import packed
    from dinfer.kernels.triton import moe

    with recorded_launches(monkeypatch) as launches, torch.device("meta"):
        x = torch.empty(32, 1024, dtype=torch.bfloat16)
        for group in (128, 32):
            values, scale = torch.empty(2, 192, 512, dtype=torch.uint8), torch.empty(2, 192, 1024 // group)
            values = packed.tiled(values, scale)
            packed.packed_linear(x, values[0], scale[0])
            plan = moe.plan(torch.zeros(32, 1, dtype=torch.int32), 2, 16)
            experts = packed.PackedExperts(values, scale)
            experts.gated_rows(x, plan, norm.swiglu, experts)
            shared = experts.joined(packed.PackedExperts(values[0], scale[0]))
            inputs = norm.add_rms_norm(x, x, x[0], 1e-5, InGroups(group, both=True))[1]
            shared.gated_rows(inputs, plan, norm.swiglu, experts)
            packed.packed_linear(inputs, values[0], scale[0], parts=True)
            packed.packed_linear(x.repeat(5, 1), values[0], scale[0])
    wanted = {launch for launch in launches if "packed" in launch or '"GROUP"' in launch}
    assert sum('"ASM": true' in launch for launch in wanted) == 10
    assert failures(wanted) == []


@pytest.mark.rest
@torch.inference_mode()
def test_attention_of_many_queries_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not run Gluon. Grouped heads of 128; and heads of 64, of few rows whose keys are split."""
    from dinfer.kernels.triton import hopper_attention

    with recorded_launches(monkeypatch) as launches, torch.device("meta"):
        cases = (torch.bfloat16, 32, 16, 4, 128, 16, 256), (torch.float16, 1, 8, 8, 64, 64, 64)
        for dtype, lanes, heads, groups, size, page, pages in cases:
            q_BWHE, pool_PTGE = (
                torch.empty(shape, dtype=dtype) for shape in ((lanes, 256, heads, size), (9, page, groups, size))
            )
            pages_BP, end_BW = (torch.empty(lanes, many, dtype=torch.int64) for many in (pages, 256))
            hopper_attention.paged_attention(q_BWHE, pool_PTGE, pool_PTGE, pages_BP, end_BW, end_BW)
    wide = sorted(launch for launch in launches if "_attend_wide" in launch)
    assert ['"SPLITS": 1,' in launch for launch in wide] == [True, False]
    assert failures(launches) == []


@pytest.mark.rest
@torch.inference_mode()
def test_weights_in_4_bits_are_multiplied_before_ampere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles no products of integers there, so weights are unpacked."""
    from dinfer.core.kernels.moe import expert_mixture
    from dinfer.formats.kernels import packed

    with recorded_launches(monkeypatch) as launches, torch.device("meta"):
        monkeypatch.setattr(packed, "multiplies_integers", lambda tensor: False)
        x, weight = torch.empty(32, 128, dtype=torch.float16), packed.pack(torch.empty(2, 128, 128))
        packed.packed_linear(x, weight[0][0], weight[1][0])
        chosen, experts = torch.zeros(32, 1, dtype=torch.int64), packed.PackedExperts(*weight)
        assert (
            expert_mixture(
                x, chosen, chosen.float(), experts, packed.PackedExperts(weight[0][..., :32], weight[1][..., :1])
            ).shape
            == x.shape
        )
    assert ["_unpack" in launch for launch in launches if "packed" in launch] == [True]
    assert failures(launches, 75) == []


@pytest.mark.rest
@torch.inference_mode()
def test_sets_of_states_compile(monkeypatch: pytest.MonkeyPatch) -> None:

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    held = Languages(
        class_GV=empty(4, 99, dtype=torch.int16), size_GC=empty(4, 9, dtype=torch.int32),
        token_GC=empty(4, 9, dtype=torch.int32), distance_GQ=empty(4, 64, dtype=torch.int32),
        next_Y=empty(999, dtype=torch.int16), pair_Y2=empty(99, 2, dtype=torch.int16),
        edge_Y3=empty(99, 3, dtype=torch.int16), meta_G8=empty(4, 8),
    )  # fmt: skip
    flags_BX = empty(2, 7, dtype=torch.bool)
    line = Line(empty(2, 7), flags_BX, flags_BX, empty(2), empty(2))
    lanes = LaneLanguages(held, empty(2), 64, 99, 99)
    with recorded_launches(monkeypatch) as launches:
        triton_languages.allowed(lanes, line)
        triton_languages.settled(lanes, line, flags_BX, empty(2, 7), empty(2, 7, dtype=torch.float32))
        triton_languages.placed(empty(5, 6), empty(2), empty(2, 7))
        regions = empty(2), empty(2), flags_BX[:, 0], flags_BX[:, 0]
        triton_languages.leave(lanes, empty(5, 6), empty(2), line, empty(2, 7), empty(2, 7), flags_BX, *regions)
        logits_RLV, allowed_RLC = empty(2, 7, 99, dtype=torch.float32), empty(2, 7, 9, dtype=torch.bool)
        triton_languages.masked(lanes, logits_RLV, allowed_RLC, flags_BX, 5, True)
    assert len(launches) == 8 and failures(launches) == []
