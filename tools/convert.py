"""Writes a checkpoint with its experts in another layout, in 8 bits, or as a GGUF file.

    python -m tools.convert IN OUT [--experts fused|merged|separate] [--quantize fp8|int8]
    python -m tools.convert IN OUT.gguf [--type F16]

Loading needs neither: it reads all layouts, and `quantize=` rounds while loading. "fused" is the layout of dInfer's
converter (`mlp.w1` [X, 2M, D], gate rows first, and `mlp.w2` [X, D, M]), "merged" that of dFactory. Values are copied
bit for bit. --quantize writes the weights that `quantize=` would round, each output at its own scale, as
"compressed-tensors": the file has half the size, and loading rounds nothing. IN is a folder or hub name. llama.cpp runs
the GGUF file if it has an architecture for the model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dinfer.core.layers.format import Format
from dinfer.core.layers.linear import formatted
from dinfer.core.loading.checkpoint import family_of, layout, read_config, read_spec
from dinfer.core.loading.files import GGUF, CheckpointError, locate, read_object, refuse
from dinfer.core.loading.safetensors_io import mismatches, stored
from dinfer.core.registry import MODELS, options_of
from dinfer.core.terms.spec import ExpertLayout
from dinfer.formats.holding import format_of
from dinfer.formats.quantized import FIELD
from dinfer.formats.saving import INDEX, SMALL, whole
from tools import to_gguf
from tools.layouts import regrouped

SHARD = 5 * 10**9  # bytes


def convert(
    source: Path, target: Path, *, experts: ExpertLayout | None = None, quantize: str | None = None, shard: int = SHARD
) -> None:
    """Reads the checkpoint in one folder and writes it to a new one. Raises CheckpointError.

    `experts`: None keeps the layout of experts. `quantize`: "fp8" or "int8". `shard`: the most bytes of a file.
    """
    if source.suffix == GGUF:
        raise CheckpointError(f"{source} is a GGUF file, which converts to another OUT.gguf only")
    config = read_config(source)
    if config.get(FIELD) is not None:
        raise CheckpointError(
            f"{source} has weights in few bits already ({FIELD} in config.json): convert what they were made of"
        )
    name = family_of(config)
    unneeded = {"block": 1, "mask_id": 0, "stop_ids": [1]}  # no tensor depends on these
    options = {info.name: unneeded[info.name] for info in options_of(MODELS.get(name)) if info.name in unneeded}
    family = MODELS.build({"name": name, "checkpoint": str(source)} | options)
    spec = read_spec(family, config | {"eos_token_id": unneeded["stop_ids"]})
    tensors = stored(source)
    have = layout(family, spec, tensors)
    want = have if experts is None else family.weights(spec, experts)
    shapes = {name: place.shape for name, place in have.items()}
    refuse([*mismatches(tensors, shapes)], f"the tensors in {source} do not fit its config.json")
    if have == want and experts is not None:
        raise CheckpointError(f"{source} has no experts, or they are {experts} already")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: name a new folder")
    with whole(target):
        for path in {path for pattern in SMALL for path in source.glob(pattern)}:
            if path.name != INDEX:
                shutil.copy2(path, target / path.name)
        made = regrouped(tensors, have, want)
        if quantize is not None:
            with torch.device("meta"):
                weights = formatted(family.network(spec)).keys()
            names = {name for name, place in want.items() if place.parameter in weights}
            made = rounded(made, names, format_of(quantize))
            config = read_object(source / "config.json") | {FIELD: described(quantize)}
            (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write(target, made, shard)


def rounded(
    tensors: Iterator[tuple[str, Tensor]], names: Collection[str], format: Format
) -> Iterator[tuple[str, Tensor]]:
    """The tensors. Those in `names` are rounded to 8 bits and followed by the scales of their outputs."""
    for name, tensor in tensors:
        if name in names:
            values, scale = format.make(tensor)
            yield name, values
            yield f"{name}_scale", scale[..., None]
        else:
            yield name, tensor


def described(quantize: str) -> dict[str, Any]:
    """The `quantization_config` of these rounded weights."""
    kind = "float" if quantize == "fp8" else "int"
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": groups}


def write(target: Path, tensors: Iterator[tuple[str, Tensor]], shard: int) -> None:
    """Writes files of at most `shard` bytes, unless one tensor has more, and their index."""
    files: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, target / f"{len(files)}.part", metadata={"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard:
            flush()
        held[name] = tensor.clone()  # its file is closed before this one is written
    flush()
    weight_map = {}
    for number, sizes in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (target / f"{number}.part").rename(target / file)
        weight_map |= dict.fromkeys(sizes, file)
    total = sum(size for sizes in files for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def main() -> None:

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN")
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument("--experts", choices=get_args(ExpertLayout))
    parser.add_argument("--quantize", choices=("fp8", "int8"))
    parser.add_argument("--type", choices=to_gguf.KINDS, help="of the matrices in a GGUF file; F16 by default")
    given = parser.parse_args()
    gguf, other = given.target.suffix == GGUF, given.experts is not None or given.quantize is not None
    if (gguf and other) or (given.type is not None and not gguf):
        parser.error("--type is for OUT.gguf, --experts and --quantize are for a folder")
    if not gguf and not other:
        parser.error("nothing to do: give --experts, --quantize or both, or OUT.gguf")
    try:
        if gguf:
            return to_gguf.write_gguf(locate(given.source), given.target, given.type or "F16")
        convert(locate(given.source), given.target, experts=given.experts, quantize=given.quantize)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    except (OSError, SafetensorError) as error:
        named = isinstance(error, OSError) and error.filename  # numpy and safetensors name no file on a full disk
        parser.exit(2, f"error: {error}\n" if named else f"error: {given.target} cannot be written: {error}\n")


if __name__ == "__main__":
    main()
