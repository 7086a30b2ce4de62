"""The tensors of a checkpoint in another layout of its experts."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dinfer.core.loading.checkpoint import place_of
from dinfer.core.loading.files import CheckpointError
from dinfer.core.loading.safetensors_io import FLOATS, Stored, read
from dinfer.core.models.family import Placement


def regrouped(
    tensors: Mapping[str, Stored], have: Mapping[str, Placement], want: Mapping[str, Placement]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the wanted layout, in the order of `order`. Raises CheckpointError for experts of mixed dtypes."""
    yield from read(tensors, [name for name in tensors if name in want])
    for parameter in remade(have, want):
        own = [name for name in sorted(have) if have[name].parameter == parameter]
        if len(dtypes := {tensors[name].dtype for name in own}) > 1:
            raise CheckpointError(f"the experts for {parameter} are of different dtypes, {', '.join(sorted(dtypes))}")
        size = sum(torch.Size(tensors[name].shape).numel() for name in own)
        flat, first = torch.empty(size, dtype=FLOATS[tensors[own[0]].dtype]), have[own[0]]
        whole = {parameter: flat.view(first.experts, -1, first.shape[-1])}
        for name, tensor in read(tensors, own):
            place_of(whole, have[name]).copy_(tensor)
        yield from (
            (name, place_of(whole, place).clone()) for name, place in want.items() if place.parameter == parameter
        )


def remade(have: Mapping[str, Placement], want: Mapping[str, Placement]) -> list[str]:
    """The parameters that the two layouts divide differently."""
    return [*dict.fromkeys(place.parameter for name, place in have.items() if name not in want)]


def order(tensors: Mapping[str, Stored], have: Mapping[str, Placement], want: Mapping[str, Placement]) -> list[str]:
    """The names of the tensors of `regrouped`; those that both layouts have come first."""
    new = (name for one in remade(have, want) for name, place in want.items() if place.parameter == one)
    return [*(name for name in tensors if name in want), *new]
