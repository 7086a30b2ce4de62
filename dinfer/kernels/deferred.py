"""Sums that are left to whoever reads them, so that no kernel runs only to add up.

Shape suffixes: S parts, N tokens, C chosen experts of a token, P pairs of token and expert, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dinfer.kernels.dispatch import use_triton


class Parts(NamedTuple):
    """Added up in order, the sum rounded to `dtype`."""

    values: Tensor  # float32 [S, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Parts:
        """Of a dimension counted from the last one."""
        return self._replace(values=self.values.unflatten(dim, sizes))


class Mixture(NamedTuple):
    """What each token's experts make of it, those with a weight first: weighted and added up in order, in float32."""

    rows_PD: Tensor  # token by token
    weights_NC: Tensor  # float32; rows behind these count once


Sum = Tensor | Parts


def held(x: Sum) -> Tensor:
    """What holds it, added up or not."""
    return x if isinstance(x, Tensor) else x.values


def addends(x: Sum) -> tuple[Tensor, int]:
    """The parts, one behind the other, and how many they are."""
    return (x.contiguous(), 1) if isinstance(x, Tensor) else (x.values, x.values.shape[0])


def summed(x: Sum | Mixture) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Parts):
        return x.values.sum(0).to(x.dtype)
    if use_triton(x.rows_PD):
        from dinfer.kernels.triton.moe import combine

        return combine(x.rows_PD, x.weights_NC)
    rows_NCD = x.rows_PD.unflatten(0, (len(x.weights_NC), -1)).float()
    many = x.weights_NC.shape[1]
    mixed_ND = (rows_NCD[:, :many] * x.weights_NC[..., None]).sum(1) + rows_NCD[:, many:].sum(1)
    return mixed_ND.to(x.rows_PD.dtype)
