"""Closes deferred values: the only place where one becomes a tensor, and so the only place where ranks add up."""

import torch
from torch import Tensor

from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.kernels.types import Deferred, Grouped, PartialSums, Rounded, Share
from dinfer.core.ranks.ranks import Ranks


def close(x: Deferred) -> Tensor:
    """The tensor: parts added up, rounded rows widened unless the original is kept."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Share):
        return x.ranks.all_reduce(close(x.value))
    if isinstance(x, Rounded):
        return widened(x).to(x.dtype) if x.wide is None else x.wide
    if isinstance(x, Grouped):
        return ungrouped(x) if x.wide is None else x.wide
    if x.weights_NC is None:
        return x.values.sum(0).to(x.dtype)
    if use_triton(x.values, "experts"):
        combine = triton("moe").combine

        return combine(x.values, x.weights_NC, x.plus_ND)
    parts_NCD = x.values.unflatten(0, (len(x.weights_NC), -1)).float()
    chosen = x.weights_NC.shape[1]
    mixed_NCD = parts_NCD[:, :chosen] * x.weights_NC[..., None]
    mixed_NCD = mixed_NCD.masked_fill(x.weights_NC[..., None] == 0, 0)  # nobody may have written such a part
    mixed_ND = mixed_NCD.sum(1) + parts_NCD[:, chosen:].sum(1)
    return (mixed_ND if x.plus_ND is None else mixed_ND + x.plus_ND).to(x.dtype)


def share(x: Deferred, ranks: Ranks | None) -> Deferred:
    """A layer's output. If `ranks` divide the layer's inputs, it is this rank's addend."""
    return x if ranks is None else Share(to_add(x), ranks)


def to_add(x: Deferred) -> Tensor | PartialSums:
    """`x` for a consumer that adds up parts."""
    return x if isinstance(x, PartialSums) else close(x)


def rows(x: Deferred) -> Tensor | Rounded:
    """`x` for a consumer that takes rounded rows."""
    return x if isinstance(x, Rounded) else close(x)


def held(x: Deferred) -> Tensor:
    """A tensor on the device of `x`, in the dtype that kernels read it in."""
    if isinstance(x, Share):
        return held(x.value)
    if isinstance(x, Grouped):
        return x.values_RK
    return x if isinstance(x, Tensor) else x.values


def ungrouped(x: Grouped) -> Tensor:
    """The rows, in the dtype that they had."""
    rows, groups = x.shape[:-1].numel(), len(x.scale_GR)
    values = x.values_RK[:rows].float().unflatten(-1, (groups, -1)) * (16 * x.scale_GR[:, :rows].mT[..., None])
    if x.squares is not None:
        mean_R = x.squares.sums_SR[:, :rows].sum(0) / x.shape[-1]
        values = values * torch.rsqrt(mean_R + x.squares.eps)[:, None, None]
    return values.view(x.shape).to(x.dtype)


def widened(x: Tensor | Rounded) -> Tensor:
    """Rows in float32."""
    return x.float() if isinstance(x, Tensor) else x.values.float() * x.scale[..., None]


def rows_of(x: Deferred) -> Deferred:
    """All rows in one dimension. [..., K] -> [R, K]"""
    if not isinstance(x, Grouped | Rounded):
        return close(x).flatten(0, -2)
    wide = None if x.wide is None else x.wide.flatten(0, -2)
    if isinstance(x, Grouped):
        return x._replace(shape=torch.Size((x.shape[:-1].numel(), x.shape[-1])), wide=wide)
    return Rounded(x.values.flatten(0, -2), x.scale.flatten(), x.dtype, wide)
