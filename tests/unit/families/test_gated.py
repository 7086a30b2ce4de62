"""Low-rank parts that single rows of a forward take."""

import math

import torch
from torch import nn

from dinfer.families.gated import Gate, GatedLinear


def test_a_part_that_overflows_leaves_the_rows_without_it_alone() -> None:
    base, gate = nn.Linear(4, 4, bias=False, dtype=torch.float64), Gate()
    layer = GatedLinear(base, gate, torch.full((1, 4), 1e308, dtype=torch.float64), torch.ones(4, 1).double())
    x_BWK = torch.full((2, 3, 4), 10.0, dtype=torch.float64)
    with gate.on(torch.tensor([[True] * 3, [False] * 3])), torch.no_grad():
        y_BWO = layer(x_BWK)
        assert torch.equal(y_BWO[1], base(x_BWK)[1]) and y_BWO[0].eq(math.inf).all()
