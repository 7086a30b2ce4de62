"""First differences, in the words of the goldens: where, what the reference has, what dinfer has."""

from typing import Any

import torch
from torch import Tensor


class Mismatch(Exception):
    """dinfer's result differs from the reference's; the message is the first difference."""


def same(where: str, want: Any, got: Any) -> None:
    """Values, or nested lists of them, must be equal."""
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        if len(want) != len(got):
            raise Mismatch(f"length of {where}: want {len(want)}, got {len(got)}")
        for i, pair in enumerate(zip(want, got, strict=True)):
            same(f"{where}[{i}]", *pair)
    elif want != got:
        raise Mismatch(f"{where}: want {want}, got {got}")


def at_most(where: str, limit: int, got: int) -> None:
    if got > limit:
        raise Mismatch(f"{where}: want at most {limit}, got {got}")


def close(where: str, want: Tensor, got: Tensor, *, atol: float, rtol: float) -> float:
    """Every element within atol + rtol * |want|; returns the largest difference. A NaN is never close."""
    if want.shape != got.shape:
        raise Mismatch(f"shape of {where}: want {tuple(want.shape)}, got {tuple(got.shape)}")
    if want.numel() == 0:
        return 0.0
    want = want.to(got.device)
    off = (got.double() - want.double()).abs()
    far = ~(off <= atol + rtol * want.double().abs())
    if far.any():
        index = tuple(int(i) for i in far.nonzero()[0])
        raise Mismatch(
            f"{where}{list(index)}: want {want[index].item():.7g}, got {got[index].item():.7g} "
            f"(atol {atol:g}, rtol {rtol:g}); {int(far.sum())} of {far.numel()} elements differ"
        )
    return float(torch.max(off))
