"""A format of weights is one class: what it makes, holds and multiplies is all that a network needs of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import random_model
from support.models import tiny_model
from torch import Tensor

from dinfer.core.kernels.deferred import close
from dinfer.core.kernels.moe import ExpertWeight, PlainExperts
from dinfer.core.kernels.types import Matrices
from dinfer.core.layers.format import FORMATS, Format, Weight
from dinfer.core.layers.linear import formatted
from dinfer.formats.holding import format_of

IDS = torch.arange(12)[None]


class Codebook(Format):
    """Values of a table of 256, as another package might hold them: an index a weight, and the table."""

    beside = ("_table",)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        return torch.empty(shape, dtype=torch.uint8), torch.empty(256, dtype=dtype)

    def make(self, weight: Tensor) -> Weight:
        table = torch.linspace(weight.min().item(), weight.max().item(), 256, dtype=weight.dtype)
        return torch.bucketize(weight, table).clamp_max(255).to(torch.uint8), table

    def linear(self, x: Any, weight: Weight, bias_O: Tensor | None, *, parts: bool = False) -> Tensor:
        return torch.nn.functional.linear(close(x), self.meant(weight), bias_O)

    def experts(self, weight: Weight) -> ExpertWeight:
        return PlainExperts(Matrices(self.meant(weight)))

    def meant(self, weight: Weight) -> Tensor:
        return weight[1][weight[0].long()]


@pytest.mark.parametrize("name", ["dense", "llada2", "llada_moe"])
def test_a_format_of_ones_own(name: str) -> None:
    """Dense layers, experts and shared experts; a bias too."""
    made = [tiny_model(qkv_bias=True) if name == "dense" else random_model(name) for _ in range(2)]
    held, meant = made
    codebook = Codebook()
    for path, (module, own) in formatted(held).items():
        weight = codebook.make(module.get_parameter(own).detach())
        module.hold(own, weight, codebook)
        meant.get_parameter(path).data.copy_(codebook.meant(weight))
    torch.testing.assert_close(held.score(IDS), meant.score(IDS))
    assert all(module.get_parameter(own).dtype == torch.uint8 for module, own in formatted(held).values())


@pytest.mark.parametrize("name", FORMATS.names())
@pytest.mark.parametrize("shape", [(6, 64), (3, 6, 96)])
def test_what_a_format_makes_has_the_shapes_that_it_announces(name: str, shape: tuple[int, ...]) -> None:
    """Loading makes room by `empty`, and `nbytes` tells what that takes."""
    held = FORMATS.get(name)()
    made, room = held.make(torch.randn(shape)), held.empty(shape, torch.float32)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in room]
    assert held.nbytes(shape, torch.float32) == sum(t.nbytes for t in made) and len(made) == 1 + len(held.beside)


def test_8_and_4_bits_take_what_they_say() -> None:
    assert [format_of(name).nbytes((128, 256), torch.bfloat16) for name in ("fp8", "int8", "int4")] == [
        128 * 256 + 4 * 128, 128 * 256 + 4 * 128, 128 * 128 + 2 * 2 * 128,
    ]  # fmt: skip
