"""Checkpoints with rounded weights: how they are packed, which tensors are scales, which weights stay as they are.

Integers of 4 or 8 bits, several in each int32, with a scale for a group of inputs: GPTQ (AutoGPTQ, GPTQModel; formats
"gptq" and "gptq_v2"), AWQ (AutoAWQ, version "gemm") and compressed-tensors "pack-quantized" (llm-compressor; W4A16 and
W8A16). A weight is (value - zero) * scale. A float32 holds the product exactly, so weights are rounded once, to the
network's dtype, as in the packers' own code.

Weights in 8 bits with a scale for each tensor, each output, or each block of a matrix: `quant_method` "fp8"
(transformers' FineGrainedFP8Config, vLLM) and "compressed-tensors". The scales are a tensor named NAME_scale_inv or
NAME_scale.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dinfer.core.loading.files import QUANTIZATION as FIELD
from dinfer.core.loading.files import CheckpointError, refuse
from dinfer.core.loading.safetensors_io import FLOATS, INTEGERS, NARROW, Scales, Slices, Stored, read
from dinfer.core.models.family import Placement
from dinfer.core.ranks.split import Rank
from dinfer.formats.small_floats import InParts, gathered, joined, scheme_of

Method = Literal["gptq", "awq", "compressed-tensors"]
VALUES = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
PACKED = tuple(f".{end}" for end in sorted({*VALUES.values()}))
BESIDE = {
    "gptq": {"scale": "scales", "zero": "qzeros", "index": "g_idx"},
    "awq": {"scale": "scales", "zero": "qzeros"},
    "compressed-tensors": {
        "scale": "weight_scale", "zero": "weight_zero_point", "index": "weight_g_idx", "shape": "weight_shape",
    },
}  # fmt: skip
"""The endings of the names of a weight's other tensors, by role."""
WORD = 32  # bits
FLAG = (True, False, None)
ORDERED, IN_ORDER = (True, "group", "dynamic"), (None, False, "weight", "static")  # compressed-tensors' `actorder`
PIECE = 1 << 18  # values to unpack at a time, so that they stay in the cache
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight neighbours, in each 4 bits of an int32


class Packing(NamedTuple):
    """How a `quantization_config` says that weights are packed."""

    method: Method
    bits: int
    group: int  # inputs that share a scale; -1: all
    symmetric: bool  # zero is the middle of the range
    ordered: bool  # groups need not hold neighbouring inputs (act-order)
    lag: int = 0  # added to the stored zeros

    def __str__(self) -> str:
        group = "a scale an output" if self.group < 0 else f"groups of {self.group}"
        rest = f"{'' if self.symmetric else 'a'}symmetric{', act-order' if self.ordered else ''}"
        return f"{self.method} in {self.bits} bits, {group}, {rest}"


class Integers(NamedTuple):
    """Some outputs of a packed weight: (values - zero) * scale, by group."""

    values: Tensor  # int16 [O, K]
    scale: Tensor  # float [O, G]
    zero: Tensor  # int16 [O, G]
    group_K: Tensor  # int64: the group of each input

    def inputs(self, at: slice) -> tuple[Tensor, Tensor]:
        """Values around 0, and scales, of inputs that form whole groups or are part of the only group."""
        group = self.values.shape[1] // self.scale.shape[1]
        zero = self.zero.index_select(1, self.group_K[at])
        return (self.values[:, at] - zero).to(torch.int8), self.scale[:, at.start // group : -(-at.stop // group)]

    def widened(self) -> Tensor:
        """The values in float32. [O, K]"""
        zero, scale = (part.index_select(1, self.group_K) for part in (self.zero, self.scale.float()))
        return (self.values - zero).float() * scale


@dataclass(frozen=True)
class PackedWeight(InParts):
    """A weight in integers, with scales and zeros."""

    packing: Packing

    @property
    def floats(self) -> torch.dtype | None:
        return self.parts["scale"].floats

    @property
    def scales(self) -> torch.dtype:
        """The dtype of its scales."""
        return FLOATS[self.parts["scale"].dtype]

    def kept(self, place: Placement, rank: Rank) -> tuple[Any, ...] | None:
        return (self.dtype, self.group, self.scales) if self.symmetric_groups(place, rank) else None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] if self.packing.group < 0 else self.packing.group

    def symmetric_groups(self, place: Placement, rank: Rank) -> bool:
        """Whether one of our formats can hold a rank's part of it.

        These are symmetric values in 4 bits with groups of neighbouring inputs, or in 8 bits with a scale for each
        output.
        """
        if not self.packing.symmetric or self.packing.ordered:
            return False
        if self.packing.bits == 8:
            return self.group == self.shape[1]
        inputs = [piece[0][-1] for piece in place.pieces(rank)]
        whole = all(part.start % self.group == 0 and part.stop % self.group == 0 for part in inputs)
        return whole and self.group % 32 == 0 and self.group.bit_count() == 1

    def fill(self, format: Any, weight: tuple[Tensor, ...], source: Slices, target: Slices) -> None:
        *lead, rows, inputs = target
        for first, some in self.pieces(source[0]):
            place = slice(rows.start + first, rows.start + first + len(some.values))
            format.take(weight, (*lead, place, inputs), *some.inputs(source[1]))

    def values(self, file: Any, part: Slices | None) -> Tensor:
        """The weight, or a part of it, in float32."""
        rows, inputs = part or (slice(0, self.shape[0]), slice(0, self.shape[1]))
        whole = torch.empty(rows.stop - rows.start, inputs.stop - inputs.start)
        for first, some in self.pieces(rows):
            whole[first : first + len(some.values)] = some.widened()[:, inputs]
        return whole

    def pieces(self, rows: slice) -> Iterator[tuple[int, Integers]]:
        """Unpacks these outputs in pieces, since unpacked values take many times their bytes.

        Yields the first output of each piece, counted from `rows.start`, and the piece. Raises CheckpointError for
        values that contradict config.json.
        """
        width, bits, method = self.shape[1], self.packing.bits, self.packing.method
        found = dict(read(self.parts))
        words, scale, zero = found["values"], found["scale"], found.get("zero")
        middle = 1 << (bits - 1)
        if method == "compressed-tensors":
            zero = None if zero is None else unpacked(zero.T, bits).T
        else:
            unpack = _awq if method == "awq" else partial(unpacked, bits=bits)
            scale, zero = scale.T, None if zero is None else unpack(zero).T + self.packing.lag
        zero = torch.full(scale.shape, middle, dtype=torch.int16) if zero is None else zero[: self.shape[0]]
        in_order = torch.arange(width) // self.group
        group_K = found.get("index", in_order)
        if not 0 <= int(group_K.min()) <= int(group_K.max()) < scale.shape[1]:
            found_groups = f"{int(group_K.min())} to {int(group_K.max())}"
            raise CheckpointError(f"{self.parts['index'].name}: {found_groups} of {scale.shape[1]} groups")
        if not self.packing.ordered and not torch.equal(group_K, in_order.to(group_K.dtype)):
            raise CheckpointError(
                f"{self.parts['index'].name}: its groups are not of neighbouring inputs, as config.json says they are; "
                f"give desc_act=true (gptq) or actorder='group' (compressed-tensors) in its {FIELD}"
            )
        if "shape" in found and tuple(found["shape"].tolist()) != self.shape:
            own, said = self.parts["shape"].name, found["shape"].tolist()
            raise CheckpointError(f"{own}={said}, but the values beside it are {self.shape}")
        if self.packing.symmetric and not bool((zero == middle).all()):
            raise CheckpointError(f"{self.name}: config.json calls it symmetric, but its zeros are not all {middle}")
        many = max(PIECE // width, 1)
        for first in range(rows.start, rows.stop, many):
            at = slice(first, min(first + many, rows.stop))
            yield first - rows.start, Integers(self._values(words, at), scale[at], zero[at], group_K.long())

    def _values(self, words: Tensor, rows: slice) -> Tensor:
        """The values of some outputs. int16 [O, K]"""
        if self.packing.method == "compressed-tensors":
            return unpacked(words[rows], self.packing.bits)
        if self.packing.method == "gptq":
            return unpacked(words[:, rows].T, self.packing.bits)
        many = WORD // self.packing.bits  # outputs in an int32
        first = rows.start // many
        values = _awq(words[:, first : -(-rows.stop // many)]).T
        return values[rows.start - first * many : rows.stop - first * many]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The values in each int32 of the last dimension, lowest bits first. [..., W] -> int16 [..., N]"""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2).to(torch.int16)


def _awq(words: Tensor) -> Tensor:
    """Unpacks values along the last dimension, which AWQ stores in its own order."""
    order = torch.tensor(AWQ_ORDER).argsort()
    return unpacked(words, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2)


def packing(config: Mapping[str, Any]) -> Packing | None:
    """How the weights of a checkpoint are packed; None: they are not. Raises CheckpointError if not supported."""
    found = config.get(FIELD)
    if not isinstance(found, Mapping):
        return None
    method = found.get("quant_method")
    if method == "gptq":
        expect(found, {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2", None)})
        dynamic = found.get("dynamic") or {}  # of GPTQModel: "-:" says which weights are packed, as their tensors do
        if not isinstance(dynamic, Mapping) or not all(pattern.startswith("-:") for pattern in dynamic):
            raise CheckpointError(
                f"config.json: {FIELD}.dynamic={found['dynamic']!r:.80} is not supported: it may only leave weights as "
                "they are, by patterns that begin with '-:'"
            )
        expect(found, {"is_marlin_format": (False, None), "sym": FLAG, "desc_act": FLAG})
        lag = 0 if found.get("checkpoint_format") == "gptq_v2" else 1
        return Packing("gptq", found["bits"], _group(found), bool(found.get("sym")), bool(found.get("desc_act")), lag)
    if method == "awq":
        expect(found, {"bits": (4,), "version": ("gemm", "GEMM", None), "zero_point": (True, None)})
        return Packing("awq", 4, _group(found), False, False)
    if method != "compressed-tensors":
        return None
    expect(found, {"kv_cache_scheme": (None,), "transform_config": ({}, None)})
    if isinstance(sparsity := found.get("sparsity_config"), Mapping):
        expect(sparsity, {"format": ("dense", None)}, "sparsity_config.")
    if found.get("format") == "pack-quantized":
        made = {_scheme(where, weights) for where, weights in _groups(found)}
        if len(made) != 1:
            raise CheckpointError(
                f"config.json: {FIELD}.config_groups must pack all weights in one way, not in {len(made)}"
            )
        return made.pop()
    return None


def _groups(found: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The weights of each of the `config_groups`, behind their place in `FIELD`."""
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"config.json: {FIELD}.config_groups={groups!r:.80} must be an object that is not empty")
    for name, group in groups.items():
        weights, where = group.get("weights") if isinstance(group, Mapping) else None, f"config_groups.{name}.weights"
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"config.json: {FIELD}.{where}={weights!r:.80} must be an object")
        yield f"{where}.", weights


def _scheme(where: str, weights: Mapping[str, Any]) -> Packing:
    """The packing of one of the `config_groups`."""
    expect(weights, {"num_bits": (4, 8), "type": ("int", None), "strategy": ("group", "channel")}, where)
    expect(weights, {"symmetric": FLAG, "actorder": (*IN_ORDER, *ORDERED)}, where)
    size = _group(weights) if weights["strategy"] == "group" else -1
    ordered, symmetric = weights.get("actorder") in ORDERED, weights.get("symmetric") is not False
    return Packing("compressed-tensors", weights["num_bits"], size, symmetric, ordered)


def expect(found: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raises CheckpointError for a field with another value than those allowed. `where`: its place in `FIELD`."""
    for field, allowed in fields.items():
        value = found.get(field)
        if not any(type(value) is type(one) and value == one for one in allowed):
            known = ", ".join(repr(one) for one in allowed)
            raise CheckpointError(f"config.json: {FIELD}.{where}{field}={value!r} is not supported; use {known}")


def _group(found: Mapping[str, Any]) -> int:
    size = found.get("group_size")
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(f"config.json: {FIELD}: group_size={size!r} must be a number of inputs, or -1 for all")
    return size


def packed(tensors: Mapping[str, Stored], how: Packing | None) -> dict[str, Stored]:
    """The tensors, with those of a packed weight joined. Raises CheckpointError for a missing or wrong part."""
    if how is None:
        return dict(tensors)
    found, ending = dict(tensors), f".{VALUES[how.method]}"
    needed = ["scale", *["zero"] * (how.method != "compressed-tensors" or not how.symmetric), *["index"] * how.ordered]
    bases = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    ends = {"values": ending, **{role: f".{end}" for role, end in BESIDE[how.method].items()}}
    wrong = list[str]()
    for name, parts in gathered(found, {base: f"{base}.weight" for base in bases}, ends, needed, str(how)).items():
        values = parts["values"]
        if len(values.shape) != 2 or values.dtype != "I32":
            raise CheckpointError(f"{values.name}: {values.dtype} {values.shape} must be an I32 of two dimensions")
        (first, second), many = values.shape, WORD // how.bits
        shape = {"gptq": (second, first * many), "awq": (second * many, first)}.get(how.method, (first, second * many))
        weight = found[name] = PackedWeight(values.path, name, shape, f"I{how.bits}", parts, how)
        wrong += _differences(weight)
    refuse(wrong, f"config.json: {FIELD} says {how}, but the tensors do not fit that: correct it")
    return found


def _differences(weight: PackedWeight) -> Iterator[str]:
    """The tensors whose headers do not fit the packing."""
    (outputs, width), many = weight.shape, WORD // weight.packing.bits
    if width % weight.group:
        yield f"{weight.name}: group_size={weight.group} does not divide {width} inputs"
        return
    groups, words = width // weight.group, -(-outputs // many)
    wanted = {"scale": (groups, outputs), "zero": (groups, words), "index": (width,), "shape": (2,)}
    if weight.packing.method == "compressed-tensors":
        wanted |= {"scale": (outputs, groups), "zero": (words, groups)}
    for role in wanted.keys() & weight.parts.keys():
        part = weight.parts[role]
        if part.shape != wanted[role]:
            yield f"{part.name}: {part.shape}, must be {wanted[role]}"
        kinds = {"scale": FLOATS, "zero": ("I32",)}.get(role, INTEGERS)
        if part.dtype not in kinds:
            yield f"{part.name}: {part.dtype}, must be {' or '.join(kinds)}"


def spare_biases(names: Collection[str], how: Packing | None, expected: Collection[str]) -> list[str]:
    """Biases of packed weights that the network does not have. AutoGPTQ writes one, of zeros, beside every weight.

    `names`: those in the files. `expected`: those of the network.
    """
    ending = None if how is None else f".{VALUES[how.method]}"
    biases = (f"{name.removesuffix(ending)}.bias" for name in names if ending and name.endswith(ending))
    return [bias for bias in biases if bias in names and bias not in expected]


def packed_names(names: Collection[str], how: Packing | None) -> Collection[str]:
    """The names of tensors, with those of a packed weight replaced by the weight's."""
    if how is None:
        return names
    endings = {f".{end}" for end in BESIDE[how.method].values()}
    weight = f".{VALUES[how.method]}"
    rest = (name for name in names if not any(name.endswith(end) for end in endings))
    return [f"{name.removesuffix(weight)}.weight" if name.endswith(weight) else name for name in rest]


SCALES = ("_scale_inv", "_scale")
INPUT_SCALES = (".input_scale", ".activation_scale")  # unused, since we round each row at its own scale
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
BlockShape = tuple[int, int]


def scale_block(config: Mapping[str, Any]) -> BlockShape | None:
    """Outputs and inputs of the blocks that share a scale; None: there are no blocks.

    Raises CheckpointError for a `quantization_config` that is not supported.
    """
    if (found := config.get(FIELD)) is None:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {FIELD}={found!r:.80} must be an object")
    if packing(config) is not None or scheme_of(config) is not None:
        return None
    method = found.get("quant_method")
    if method == "fp8":
        expect(found, {"fmt": (None, "e4m3", "float8_e4m3fn")})
        return _block(found.get("weight_block_size"), "weight_block_size")
    if method != "compressed-tensors":
        raise CheckpointError(
            f"config.json: {FIELD} with quant_method={method!r} is not supported; 'fp8', 'gptq', 'awq', "
            "'compressed-tensors', 'modelopt' and 'mxfp4' are. Load the original checkpoint with quantize=fp8, int8 or "
            "int4."
        )
    expect(found, {"format": FORMATS})
    blocks = set()
    for where, weights in _groups(found):
        expect(weights, {"num_bits": (8,), "symmetric": (True,), "strategy": ("channel", "tensor", "block")}, where)
        structure = weights.get("block_structure")
        if isinstance(structure, str):
            structure = [int(part) if part.isdecimal() else part for part in structure.split("x")]
        blocks.add(_block(structure, f"{where}block_structure"))
    sizes = sorted(block for block in blocks if block is not None)
    if len(sizes) > 1:
        raise CheckpointError(f"config.json: {FIELD} has blocks of several sizes, {sizes}; one is supported")
    return sizes[0] if sizes else None


def _block(value: Any, field: str) -> BlockShape | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise CheckpointError(f"config.json: {FIELD}.{field}={value!r} must be two sizes, such as [128, 128]")
    return value[0], value[1]


@dataclass(frozen=True, slots=True)
class ScalesOfBlocks(Scales):
    """The scales of a checkpoint's rounded weights, and the blocks that share one."""

    block: BlockShape | None

    def problems(self, weights: Mapping[str, Stored], placements: Collection[str]) -> Iterator[str]:
        words = next((name for name in weights if name.endswith(PACKED) and name not in placements), None)
        if words is not None:
            yield f"config.json does not say in {FIELD} how {words} is packed: add quant_method, bits and group_size"
        blocks = "" if self.block is None else f", or one a block of {self.block[0]} x {self.block[1]}"
        for name, scale in self.stored.items():
            if scale.dtype not in FLOATS or not (self.per_output(name, weights) or self._per_block(name, weights)):
                shape = weights[name].shape
                must = f"must be floats: one for {shape}, one an output{blocks}"
                yield f"{scale.name}: {scale.dtype} {scale.shape}, {must}"

    def per_output(self, name: str, weights: Mapping[str, Stored]) -> bool:
        """Whether all inputs of an output have the same scale."""
        shape, outputs = self.stored[name].shape, weights[name].shape[:-1]
        return math.prod(shape) == 1 or shape in (outputs, (*outputs, 1))

    def _per_block(self, name: str, weights: Mapping[str, Stored]) -> bool:
        *lead, rows, width = weights[name].shape
        blocks = None if self.block is None else (*lead, -(-rows // self.block[0]), -(-width // self.block[1]))
        return self.stored[name].shape == blocks

    def read(self) -> dict[str, Tensor]:
        """The scales in float32, by the weight's name."""
        return {name: scale.float().clone() for name, scale in read(self.stored)}

    def at(self, scale: Tensor, shape: tuple[int, ...], part: Slices) -> Tensor:
        """The factors of a part of a weight of this shape. `scale`: one of `read`."""
        return scale_at(scale, shape, self.block, part)


def rounded_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Stored], expected: Collection[str]
) -> tuple[dict[str, Stored], list[str], Scales]:
    """As `safetensors_io.plain`, for checkpoints that may be rounded. Raises CheckpointError."""
    how = packing(config)
    spare, tensors = spare_biases(tensors, how, expected), joined(packed(tensors, how), scheme_of(config))
    whole = {name: one for name, one in tensors.items() if not name.startswith(tuple(spare))}
    found, scales = scales_of(whole, scale_block(config))
    return found, spare, scales


def scales_of(tensors: Mapping[str, Stored], block: BlockShape | None) -> tuple[dict[str, Stored], Scales]:
    """The tensors without those of scales, and the scales of rounded weights."""
    stored: dict[str, Stored] = {}
    unused: set[str] = set()
    for name in (name for name, tensor in tensors.items() if tensor.dtype in NARROW and len(tensor.shape) > 1):
        unused.update(name.removesuffix(".weight") + end for end in INPUT_SCALES)
        own = next((name + end for end in SCALES if name + end in tensors), None)
        if own is not None:
            stored[name] = tensors[own]
            unused.add(own)
    return {name: tensor for name, tensor in tensors.items() if name not in unused}, ScalesOfBlocks(stored, block)


def scale_at(scale: Tensor, shape: tuple[int, ...], block: BlockShape | None, part: tuple[slice, ...]) -> Tensor:
    """The factors of a part of a rounded weight; their last dimension is 1 if all inputs share a scale.

    `shape` is that of the whole weight, [..., O, K], and `scale` one of `ScalesOfBlocks.read`.
    """
    *lead, rows, width = shape
    if scale.numel() == 1:
        return scale.reshape(1).expand(*lead, rows, 1)[part[:-1]]
    if scale.shape in ((*lead, rows), (*lead, rows, 1)):
        return scale.view(*lead, rows, 1)[part[:-1]]
    high, wide = block or (1, 1)
    by_row = scale.repeat_interleave(high, -2).narrow(-2, 0, rows)[part[:-1]]
    return by_row.repeat_interleave(wide, -1).narrow(-1, 0, width)[..., part[-1]]
