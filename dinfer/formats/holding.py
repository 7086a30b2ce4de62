"""How a network holds its weights in few bits: formats by name, what holds a checkpoint's values, rounding.

Norms, routers, embeddings and a head that is the embedding are never rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dinfer.core.kernels.dispatch import on_own_device
from dinfer.core.layers.format import FORMATS, PLAIN, Format, Plain
from dinfer.core.layers.linear import formatted
from dinfer.core.loading.checkpoint import LoadPlan
from dinfer.core.loading.safetensors_io import FLOATS
from dinfer.core.ranks.split import Rank
from dinfer.formats.gguf_file import blocks_of

TABLE = "embedding.weight"  # the embedding of every network


def table_of(plan: LoadPlan) -> str | None:
    """The name of the tensor that is the embedding."""
    return next((name for name, place in plan.placements.items() if place.parameter == TABLE), None)


def kept_formats(
    plan: LoadPlan, dtype: torch.dtype, quantize: str | None, rank: Rank, blocks: bool
) -> dict[str, Format]:
    """The formats of parameters that keep the checkpoint's values bit for bit, on a rank of a network in `dtype`.

    `blocks`: a GGUF file's blocks stay, as on a CPU. The embedding stays in floats that are narrower than `dtype`,
    and its rows are widened when they are looked up: beside weights in few bits a wide table would be a large part
    of the model. A table that is also the head is widened, for speed.
    """
    takes, changed = taken(quantize), () if plan.adapter is None else plan.adapter.pairs
    kinds: dict[str, set[tuple[Any, ...] | None]] = {}
    for name, place in plan.placements.items():
        kinds.setdefault(place.parameter, set()).add(None if name in changed else _kind(plan, name, rank))
    found: dict[str, Format] = {}
    for parameter, (kind, *others) in kinds.items():  # all weights of a parameter must be alike
        if kind is not None and not others and kind[0] in takes:
            found[parameter] = takes[kind[0]].like(*kind[1:])
    found.pop(TABLE, None)  # none of these formats looks up rows
    if blocks:
        found |= blocks_of(plan.tensors, plan.placements, changed, None if plan.spec.tied_head else TABLE)
    table = table_of(plan)
    narrow = None if table is None or plan.spec.tied_head or table in changed else FLOATS.get(plan.tensors[table].dtype)
    if narrow is not None and narrow.itemsize < dtype.itemsize and (found or quantize):
        found.setdefault(TABLE, Plain(narrow))
    return found


def _kind(plan: LoadPlan, name: str, rank: Rank) -> tuple[Any, ...] | None:
    """The dtype of rounded values that a format may hold bit for bit, and of integers their group and scales."""
    one: Any = plan.tensors[name]
    if one.packed:
        return one.kept(plan.placements[name], rank)
    scales: Any = plan.scales
    return (one.dtype,) if name in scales.stored and scales.per_output(name, plan.tensors) else None


def roundings() -> list[str]:
    """The names of the formats that `quantize=` rounds to."""
    return [name for name in FORMATS.names() if name != "plain"]


def format_of(name: str, device: torch.device | None = None) -> Format:
    """The format that `quantize=name` rounds to.

    Raises ValueError for a name that is not one, and for a device, if it is given, that cannot compute with it.
    """
    if name not in roundings():
        raise ValueError(f"quantize={name!r} is not known; use one of {', '.join(roundings())}, or null for none")
    found: Format = FORMATS.get(name)()
    if device is not None:
        found.check(device, f"quantize={name}")
    return found


def taken(quantize: str | None) -> Mapping[str, Format]:
    """The formats in which weights may stay as a checkpoint has them, by the name of what it has them in.

    With `quantize`, only what is in that format already stays.
    """
    formats = [format_of(name) for name in (roundings() if quantize is None else [quantize])]
    return {known.stored: known for known in formats if known.stored is not None}


@on_own_device
def quantize(network: nn.Module, name: str) -> None:
    """Rounds the weights of every linear layer and of all experts to a format, in place, layer by layer.

    Weights that a checkpoint holds in 8 bits stay as they are. Raises ValueError for a layer that cannot be rounded so;
    the network is of no use then.
    """
    wanted = format_of(name, next(network.parameters()).device)
    for path, (module, own) in formatted(network).items():
        if module.formats[own] is PLAIN:
            try:
                made = wanted.make(module.get_parameter(own).detach())
            except ValueError as error:
                raise ValueError(f"{path.removesuffix(f'.{own}')}: {error}") from error
            module.hold(own, wanted.settled(made), wanted)


def settle(network: nn.Module) -> None:
    """Lays out the weights as their device reads them fastest, one after the other. For a network that has them all."""
    for module, own in formatted(network, embeddings=True).values():
        held, weight = module.formats[own], module.weight_of(own)
        if (settled := held.settled(weight)) is not weight:
            module.hold(own, settled, held)
