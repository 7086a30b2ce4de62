"""Checkpoints with rounded weights: which tensors are scales, and which weights the network can hold as they are.

It reads weights in 8 bits with a scale for each tensor, each output, or each block of a matrix: `quant_method` "fp8"
(transformers' FineGrainedFP8Config, vLLM) and "compressed-tensors" (llm-compressor). A weight is its values times its
scales. The scales are a tensor named NAME_scale_inv or NAME_scale.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dinfer.loading.files import CheckpointError
from dinfer.loading.packed import FIELD, expect, packing
from dinfer.loading.safetensors_io import FLOATS, NARROW, Stored, read
from dinfer.parallel.split import Placement

SCALES = ("_scale_inv", "_scale")
INPUT_SCALES = (".input_scale", ".activation_scale")  # unused, since we round each row at its own scale
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
Block = tuple[int, int]


def scale_block(config: Mapping[str, Any]) -> Block | None:
    """Outputs and inputs of the blocks that share a scale; None: there are no blocks.

    Raises CheckpointError for a `quantization_config` that is not supported.
    """
    if (found := config.get(FIELD)) is None:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {FIELD}={found!r:.80} must be an object")
    if packing(config) is not None:
        return None
    method = found.get("quant_method")
    if method == "fp8":
        expect(found, {"fmt": (None, "e4m3", "float8_e4m3fn")})
        return _block(found.get("weight_block_size"), "weight_block_size")
    if method != "compressed-tensors":
        raise CheckpointError(
            f"config.json: {FIELD} with quant_method={method!r} is not supported; 'fp8', 'gptq', 'awq' and "
            "'compressed-tensors' are. Load the original checkpoint with quantize=fp8, int8 or int4."
        )
    expect(found, {"format": FORMATS})
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"config.json: {FIELD}.config_groups={groups!r:.80} must be an object that is not empty")
    blocks = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"config.json: {FIELD}.config_groups.{name} has no weights")
        where = f"config_groups.{name}.weights."
        expect(weights, {"num_bits": (8,), "symmetric": (True,), "strategy": ("channel", "tensor", "block")}, where)
        structure = weights.get("block_structure")
        if isinstance(structure, str):
            structure = [int(part) if part.isdecimal() else part for part in structure.split("x")]
        blocks.add(_block(structure, f"{where}block_structure"))
    sizes = sorted(block for block in blocks if block is not None)
    if len(sizes) > 1:
        raise CheckpointError(f"config.json: {FIELD} has blocks of several sizes, {sizes}; one is supported")
    return sizes[0] if sizes else None


def _block(value: Any, field: str) -> Block | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise CheckpointError(f"config.json: {FIELD}.{field}={value!r} must be two sizes, such as [128, 128]")
    return value[0], value[1]


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a checkpoint's rounded weights, and the blocks that share one."""

    stored: Mapping[str, tuple[str, Stored]]  # names and tensors of the scales, by the weight's name
    block: Block | None

    def problems(self, weights: Mapping[str, Stored]) -> Iterator[str]:
        """The scales with a wrong shape or dtype."""
        blocks = "" if self.block is None else f", or one a block of {self.block[0]} x {self.block[1]}"
        for name, (own, scale) in self.stored.items():
            if scale.dtype not in FLOATS or not (self.per_output(name, weights) or self._per_block(name, weights)):
                shape = weights[name].shape
                yield f"{own}: {scale.dtype} {scale.shape}, must be floats: one for {shape}, one an output{blocks}"

    def per_output(self, name: str, weights: Mapping[str, Stored]) -> bool:
        """Whether all inputs of an output have the same scale."""
        shape, outputs = self.stored[name][1].shape, weights[name].shape[:-1]
        return math.prod(shape) == 1 or shape in (outputs, (*outputs, 1))

    def _per_block(self, name: str, weights: Mapping[str, Stored]) -> bool:
        *lead, rows, width = weights[name].shape
        blocks = None if self.block is None else (*lead, -(-rows // self.block[0]), -(-width // self.block[1]))
        return self.stored[name][1].shape == blocks

    def read(self) -> dict[str, Tensor]:
        """The scales in float32, by the weight's name."""
        owner = {own: name for name, (own, _) in self.stored.items()}
        return {owner[own]: scale.float().clone() for own, scale in read(dict(self.stored.values()))}

    def kept(
        self, weights: Mapping[str, Stored], placements: Mapping[str, Placement], only: Collection[str],
        changed: Collection[str],
    ) -> dict[str, str]:  # fmt: skip
        """The parameters that can hold the checkpoint's values bit for bit, and safetensors' name of the dtype.

        All weights of a parameter must be in the same dtype of `only`. `changed`: weights that an adapter changes.
        """
        found: dict[str, set[str]] = {}
        for name, place in placements.items():
            fits = name in self.stored and name not in changed and self.per_output(name, weights)
            found.setdefault(place.parameter, set()).add(weights[name].dtype if fits else "")
        dtypes = {parameter: min(kinds) for parameter, kinds in found.items() if len(kinds) == 1}
        return {parameter: dtype for parameter, dtype in dtypes.items() if dtype in only}


def scales_of(tensors: Mapping[str, Stored], block: Block | None) -> tuple[dict[str, Stored], Scales]:
    """The tensors without those of scales, and the scales of rounded weights."""
    stored: dict[str, tuple[str, Stored]] = {}
    unused: set[str] = set()
    for name in (name for name, tensor in tensors.items() if tensor.dtype in NARROW and len(tensor.shape) > 1):
        unused.update(name.removesuffix(".weight") + end for end in INPUT_SCALES)
        own = next((name + end for end in SCALES if name + end in tensors), None)
        if own is not None:
            stored[name] = own, tensors[own]
            unused.add(own)
    return {name: tensor for name, tensor in tensors.items() if name not in unused}, Scales(stored, block)


def scale_at(scale: Tensor, shape: tuple[int, ...], block: Block | None, part: tuple[slice, ...]) -> Tensor:
    """The factors of a part of a rounded weight; their last dimension is 1 if all inputs share a scale.

    `shape` is that of the whole weight, [..., O, K], and `scale` one of `Scales.read`.
    """
    *lead, rows, width = shape
    if scale.numel() == 1:
        return scale.reshape(1).expand(*lead, rows, 1)[part[:-1]]
    if scale.shape in ((*lead, rows), (*lead, rows, 1)):
        return scale.view(*lead, rows, 1)[part[:-1]]
    high, wide = block or (1, 1)
    by_row = scale.repeat_interleave(high, -2).narrow(-2, 0, rows)[part[:-1]]
    return by_row.repeat_interleave(wide, -1).narrow(-1, 0, width)[..., part[-1]]
