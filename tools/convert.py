"""Writes a checkpoint with the experts of each layer in two tensors, or each in three of its own again.

    python -m tools.convert IN OUT --experts fused|separate

Loading needs neither: both are read as they are. Fused is the layout of dInfer's converter (`mlp.w1` [X, 2M, D], gate
rows first, and `mlp.w2` [X, D, M]), with far fewer tensors. Values are copied bit for bit. IN is a folder or hub name.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dinfer.checkpoint import check, family_of, layout, locate, read_config, read_spec
from dinfer.registry import MODELS
from dinfer.shards import CheckpointError, Stored, read, stored
from dinfer.spec import Placement

SHARD = 5 * 10**9  # bytes
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
INDEX = "model.safetensors.index.json"


def convert(source: Path, target: Path, *, fused: bool, shard: int = SHARD) -> None:
    """Reads the checkpoint in one folder and writes it to another, new one. Raises CheckpointError."""
    config = read_config(source)
    family = MODELS.build({"name": family_of(config), "checkpoint": str(source)})
    spec = read_spec(family, config)
    tensors = stored(source)
    have, want = layout(family, spec, tensors), family.weights(spec, fused=fused)
    check(source, tensors, have)
    if have == want:
        raise CheckpointError(f"{source} has no experts, or they are {'fused' if fused else 'separate'} already")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: name a new folder")
    target.mkdir(parents=True, exist_ok=True)
    for path in {path for pattern in COPIED for path in source.glob(pattern)}:
        if path.name != INDEX:
            shutil.copy2(path, target / path.name)
    write(target, regrouped(tensors, have, want, fused), shard)


def regrouped(
    tensors: Mapping[str, Stored], have: Mapping[str, Placement], want: Mapping[str, Placement], fused: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the layout that is wanted; what the two have in common first."""
    yield from read(tensors, [name for name in tensors if name in want])
    whole, parts = (want, have) if fused else (have, want)
    pieces: dict[str, list[str]] = {}
    for name in sorted(parts.keys() - whole.keys(), key=lambda name: parts[name].row):
        pieces.setdefault(parts[name].parameter, []).append(name)
    for name in sorted(whole.keys() - parts.keys()):
        own = pieces[whole[name].parameter]
        if not fused:
            rows = next(read(tensors, [name]))[1].flatten(0, 1)
            yield from ((piece, rows.narrow(0, parts[piece].row, parts[piece].shape[0]).clone()) for piece in own)
        elif len(dtypes := {tensors[piece].dtype for piece in own}) > 1:
            raise CheckpointError(f"the experts for {name} are of different dtypes, {', '.join(sorted(dtypes))}")
        else:
            yield name, torch.cat([tensor.clone() for _, tensor in read(tensors, own)]).view(whole[name].shape)


def write(target: Path, tensors: Iterator[tuple[str, Tensor]], shard: int) -> None:
    """Files of at most `shard` bytes, unless one tensor has more, and their index."""
    files: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(held, target / f"{len(files)}.part", metadata={"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard:
            flush()
        held[name] = tensor.clone()  # the file that it is read from is closed before this one is written
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
    parser.add_argument("--experts", choices=("fused", "separate"), required=True)
    given = parser.parse_args()
    try:
        convert(locate(given.source), given.target, fused=given.experts == "fused")
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
