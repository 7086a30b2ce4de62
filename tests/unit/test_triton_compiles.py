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

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels there")


@cache
def on_meta(variant: str) -> Any:
    sizes = {} if variant == UNIFORM else {"head_dim": 16}
    return tiny_model(variant, dtype=torch.bfloat16, **sizes).to("meta")


@torch.inference_mode()
def failed(combinations: list[Combination], monkeypatch: pytest.MonkeyPatch, *kernels: str) -> list[str]:
    with recorded_launches(monkeypatch) as launches:
        for combination in combinations:
            meta_steps(combination.recipe(on_meta(combination.variant)))
    wanted = {launch for launch in launches if not kernels or any(kernel in launch for kernel in kernels)}
    assert wanted
    return failures(wanted)


def test_a_recipe_with_two_passes_and_the_rules_of_decoders_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that gave a name of the kernel of attention another shape passed the interpreter, not the compiler."""
    names = [f"block_causal-block_diffusion-{decoder}-block" for decoder in ("s2d2", "fixed", "joint_threshold")]
    combinations = [c for c in LEGAL if str(c) in names]
    assert failed(combinations, monkeypatch, "_attend", "_confident") == []


@pytest.mark.matrix
def test_the_kernels_of_every_recipe_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(SAMPLE[::2], monkeypatch) == []


@torch.inference_mode()
def test_products_with_weights_in_4_bits_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not run their PTX. Groups of 128 and 32, dense and of experts."""
    from dinfer.kernels import packed
    from dinfer.kernels.triton import moe, packed_moe  # noqa: F401 (their launches are recorded)

    with recorded_launches(monkeypatch) as launches, torch.device("meta"):
        x = torch.empty(32, 1024, dtype=torch.bfloat16)
        for group in (128, 32):
            values, scale = torch.empty(2, 192, 512, dtype=torch.uint8), torch.empty(2, 192, 1024 // group)
            values = packed.tiled(values, scale)
            packed.packed_linear(x, values[0], scale[0])
            plan = moe.plan(torch.zeros(32, 1, dtype=torch.int32), 2, 16)
            packed.PackedExperts(values, scale).gated_rows(x, plan, lambda both, inputs: both, None)
    wanted = {launch for launch in launches if "packed" in launch}
    assert sum('"ASM": true' in launch for launch in wanted) == 4
    assert failures(wanted) == []
