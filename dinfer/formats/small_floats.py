"""Checkpoints in floats of four bits, widened while they are read: NVFP4 and MXFP4.

Two values (e2m1) stand in each byte, the first in its low half. NVFP4 has a scale (e4m3) for 16 neighbours, and one for
the whole weight: llm-compressor's is divided by, and modelopt's is multiplied with. MXFP4 has a power of two for 32
neighbours. The product is taken in float32, and rounded once, to the network's dtype.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dinfer.core.loading.files import QUANTIZATION, CheckpointError, refuse
from dinfer.core.loading.safetensors_io import Slices, Stored, read
from dinfer.core.models.family import Placement
from dinfer.core.ranks.split import Rank

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits; the fourth is the sign
BIAS = 127  # of the exponent of MXFP4's scales


class Scheme(NamedTuple):
    """How a `quantization_config` says that weights are stored."""

    method: str
    group: int  # inputs that share a scale
    values: str  # the ending of the names of values
    beside: Mapping[str, str]  # the endings of the names of the other tensors, by role
    spare: tuple[str, ...] = ()  # endings of tensors that are not used: scales of inputs
    bare: bool = False  # weights are called as their values without the ending, not "weight"

    def named(self, values: str) -> str:
        """The name of a weight, by that of its values."""
        base = values.removesuffix(self.values)
        return base if self.bare else f"{base}.weight"


OWN = ".weight_packed"
SCHEMES = {
    "nvfp4-pack-quantized": Scheme(
        "nvfp4-pack-quantized", 16, OWN, {"scale": ".weight_scale", "divisor": ".weight_global_scale"},
        (".input_global_scale",),
    ),
    "mxfp4-pack-quantized": Scheme("mxfp4-pack-quantized", 32, OWN, {"scale": ".weight_scale"}),
    "NVFP4": Scheme(
        "modelopt's NVFP4", 16, ".weight", {"scale": ".weight_scale", "factor": ".weight_scale_2"}, (".input_scale",)
    ),
    "mxfp4": Scheme("mxfp4", 32, "_blocks", {"scale": "_scales"}, bare=True),
}  # fmt: skip
KINDS = {16: "F8_E4M3", 32: "U8"}  # the dtype of scales, by group


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """How the weights of a checkpoint are stored; None: not in floats of four bits. Raises CheckpointError."""
    if not isinstance(found := config.get(QUANTIZATION), Mapping):
        return None
    method, name = found.get("quant_method"), found.get("format")
    if method == "modelopt":
        own = found.get("quantization") if isinstance(found.get("quantization"), Mapping) else found
        assert isinstance(own, Mapping)
        if (name := own.get("quant_algo")) != "NVFP4":
            raise CheckpointError(f"config.json: {QUANTIZATION}.quant_algo={name!r} is not supported; use 'NVFP4'")
        if (keys := own.get("kv_cache_quant_algo")) is not None:
            raise CheckpointError(
                f"config.json: {QUANTIZATION}.kv_cache_quant_algo={keys!r} is not supported: export without it, and "
                "use runtime.kv=fp8"
            )
    elif method == "mxfp4":
        name = "mxfp4"
    elif method != "compressed-tensors":
        return None
    return SCHEMES.get(str(name))


@dataclass(frozen=True)
class InParts(Stored):
    """A weight that is stored as separate tensors, such as values and scales."""

    packed: ClassVar[bool] = True
    parts: Mapping[str, Stored]  # by role; the values have the role "values"

    def bytes_of(self, part: Slices | None) -> int:
        return sum(one.bytes_of(None) for one in self.parts.values())  # any part needs all of it


@dataclass(frozen=True)
class SmallFloats(InParts):
    """A weight in floats of four bits."""

    scheme: Scheme

    @property
    def floats(self) -> torch.dtype:
        return torch.bfloat16

    def kept(self, place: Placement, rank: Rank) -> tuple[Any, ...] | None:
        """No format of ours holds them."""
        return None

    def values(self, file: Any, part: Slices | None) -> Tensor:
        """The weight, or a part of it, in float32."""
        *lead, inputs = part or tuple(slice(0, size) for size in self.shape)
        found = dict(read(self.parts))
        scale = found["scale"][*lead]
        factor = scale.float() if self.scheme.group == 16 else torch.exp2(scale.to(torch.int32).float() - BIAS)
        if "divisor" in found:
            factor = factor / found["divisor"].float().reshape(())
        if "factor" in found:
            factor = factor * found["factor"].float().reshape(())
        values = unpacked(found["values"][*lead].flatten(len(self.shape) - 1))
        return (values.unflatten(-1, (-1, self.scheme.group)) * factor[..., None]).flatten(-2)[..., inputs]


def unpacked(packed: Tensor) -> Tensor:
    """The values of bytes, in float32. uint8 [..., K / 2] -> [..., K]"""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[halves.long()]


def gathered(
    tensors: dict[str, Stored], weights: Mapping[str, str], ends: Mapping[str, str], needed: Collection[str], says: str
) -> dict[str, dict[str, Stored]]:
    """Takes weights in parts out of the tensors: by weight, the parts by role.

    `weights`: the name of each weight by that of its values, without the ending `ends["values"]`. `ends`: the endings
    by role. `says`: how config.json says that weights are stored. Raises CheckpointError for a missing part that is
    needed, and for a weight that is there as it is, too.
    """
    own = {base: {role: f"{base}{end}" for role, end in ends.items()} for base in weights}
    absent = [f"missing: {one[role]}" for one in own.values() for role in needed if one[role] not in tensors]
    refuse(absent, f"config.json says {says}, but tensors are missing")
    taken = {
        weight: {role: tensors.pop(name) for role, name in own[base].items() if name in tensors}
        for base, weight in weights.items()
    }
    twice = [f"{one}: it is there twice, as it is and as {parts['values'].name}"
             for one, parts in taken.items() if one in tensors]  # fmt: skip
    refuse(twice, f"config.json: {QUANTIZATION} says {says}: leave one of the two out")
    return taken


def joined(tensors: Mapping[str, Stored], scheme: Scheme | None) -> dict[str, Stored]:
    """The tensors, with those of a weight in four bits joined. Raises CheckpointError for a missing or wrong part."""
    found = dict(tensors)
    if scheme is None:
        return found
    values = [name for name, one in tensors.items() if name.endswith(scheme.values) and one.dtype == "U8"]
    weights = {name.removesuffix(scheme.values): scheme.named(name) for name in values}
    taken = gathered(found, weights, {"values": scheme.values, **scheme.beside}, scheme.beside, scheme.method)
    made = [SmallFloats(parts["values"].path, name, _shape(parts["values"], scheme), "F4", parts, scheme)
            for name, parts in taken.items()]  # fmt: skip
    wrong = [one for weight in made for one in _differences(weight)]
    refuse(wrong, f"config.json: {QUANTIZATION} says {scheme.method}, but the tensors do not fit that: correct it")
    spare = {f"{base}{end}" for base in weights for end in scheme.spare}
    return {name: one for name, one in found.items() if name not in spare} | {one.name: one for one in made}


def _shape(values: Stored, scheme: Scheme) -> tuple[int, ...]:
    *lead, width = values.shape
    if scheme.bare:  # [..., O, groups, bytes of a group]
        *lead, groups = lead
        return (*lead, groups * width * 2)
    return (*lead, 2 * width)


def _differences(weight: SmallFloats) -> Iterator[str]:
    """The tensors whose headers do not fit the scheme."""
    scale, group = weight.parts["scale"], weight.scheme.group
    *lead, width = weight.shape
    if width % group:
        yield f"{weight.name}: groups of {group} do not divide {width} inputs"
    elif scale.shape != (*lead, width // group) or scale.dtype != KINDS[group]:
        yield f"{scale.name}: {scale.dtype} {scale.shape}, must be {KINDS[group]} {(*lead, width // group)}"
    for role in weight.parts.keys() & {"divisor", "factor"}:
        one = weight.parts[role]
        if one.dtype != "F32" or any(size != 1 for size in one.shape):
            yield f"{one.name}: {one.dtype} {one.shape}, must be one F32"


def small_names(names: Collection[str], scheme: Scheme | None) -> Collection[str]:
    """The names of tensors, with those of a weight in four bits replaced by the weight's."""
    if scheme is None:
        return names
    endings = (*scheme.beside.values(), *scheme.spare)
    return [
        scheme.named(name) if name.endswith(scheme.values) and scheme.values != ".weight" else name
        for name in names
        if not name.endswith(endings)
    ]
