"""Steps on the meta device launch the same kernels with our shapes as with torch's, and operators return the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.capture import meta_steps
from support.launches import recorded_launches
from support.matrix import SAMPLE, Combination
from support.models import UNIFORM, tiny_model
from torch.nn import functional

from dinfer.speed.startup.kernel_compiler import META, Shapes


@pytest.mark.rest(but=3)
@pytest.mark.parametrize("combination", sorted(SAMPLE, key=str)[::16], ids=str)
@torch.inference_mode()
def test_steps_launch_the_same_kernels(combination: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {} if combination.variant == UNIFORM else {"head_dim": 16}
    recipe = combination.recipe(tiny_model(combination.variant, dtype=torch.bfloat16, **sizes).to(META))
    with recorded_launches(monkeypatch) as want:
        meta_steps(recipe)
    with recorded_launches(monkeypatch) as found, Shapes():
        meta_steps(recipe)
    assert found == want != set()


X, Y, W = (torch.empty(shape, device=META) for shape in ((4, 6), (4, 1), (5, 6)))
N = torch.empty(4, 6, dtype=torch.int32, device=META)
CASES = {
    "types are promoted": lambda: X + N,
    "a number does not widen": lambda: N * 2,
    "true division": lambda: N / N,
    "comparison": lambda: (N > Y) & (X < 1),
    "broadcast": lambda: torch.where(Y > 0, X, 0.0),
    "power of a number": lambda: torch.pow(2.0, N),
    "in place": lambda: X.clone().mul_(2).masked_fill_(N > 0, 1.0),
    "transposed": lambda: torch.empty_like(X.mT),
    "made contiguous": lambda: X.mT.contiguous(),
    "other type": lambda: X.mT.to(torch.bfloat16),
    "sum of a mask": lambda: (N > 0).cumsum(-1),
    "range": lambda: torch.arange(1, 9, 3, device=META),
    "range of floats": lambda: torch.arange(4.0, device=META, dtype=torch.float64),
    "stacked": lambda: torch.stack([X, N], 1),
    "joined": lambda: torch.cat([X, N, Y], 1),
    "repeated": lambda: X.repeat(2, 1, 3),
    "product": lambda: X @ W.mT,
    "product of a batch": lambda: X.expand(3, 4, 6) @ W.expand(3, 5, 6).mT,
    "linear": lambda: functional.linear(X.expand(3, 4, 6), W),
    "embedding": lambda: functional.embedding(N, W),
    "gathered": lambda: X.gather(1, N.long()[:, :2]),
    "normaliser": lambda: X.logsumexp(-1, keepdim=True) + X.logsumexp((0, 1)),
    "sum": lambda: (N > 0).sum(-1) + X.sum((0, 1), dtype=torch.float64),
    "largest": lambda: X.topk(3, 0),
    "sorted": lambda: X.sort(-1, descending=True),
    "not known": lambda: X.std(-1),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_return_what_torch_returns(case: str) -> None:
    with torch.inference_mode():
        want = told(CASES[case]())
        with Shapes():
            found = told(CASES[case]())
    assert found == want


def told(made: Any) -> list[tuple[Any, ...]]:
    results = [made] if isinstance(made, torch.Tensor) else [*made]
    return [(one.shape, one.dtype, one.stride(), one.device) for one in results]


def test_tensors_elsewhere_are_computed() -> None:
    with Shapes():
        assert torch.equal(torch.arange(3) + 1, torch.tensor([1, 2, 3]))
