"""The published checkpoints under tests/configs/real: their small files, and an index as the hub has it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

REAL = Path(__file__).parents[1] / "configs" / "real"
FOLDERS = sorted(path.name for path in REAL.iterdir() if path.is_dir())


def copied(name: str, target: Path) -> Path:
    """A copy of one folder, named as there, with a config.json and with the index that its tensors.txt stands for."""
    folder = target / name
    shutil.copytree(REAL / name, folder)
    if not (folder / "config.json").is_file():
        next(folder.glob("config.*.json")).rename(folder / "config.json")
    if (folder / "tensors.txt").is_file():
        lines = (folder / "tensors.txt").read_text().splitlines()
        head = " ".join(line for line in lines if line.startswith("#"))
        total, shards = re.search(r'"total_size": (\d+)', head), re.search(r"(\d+) shards", head)
        names = [name for line in lines if not line.startswith("#") for name in expanded(line)]
        files = (
            [f"model-{i + 1:05}-of-{int(shards[1]):05}.safetensors" for i in range(int(shards[1]))] if shards else []
        )
        where = dict(zip(names, itertools.cycle(files or ["model.safetensors"]), strict=False))
        index = {"metadata": {"total_size": int(total[1])} if total else {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def expanded(line: str) -> Iterator[str]:
    """The names of a pattern such as `layers.{i}.{q,k}_proj.weight  i=0-4,6`."""
    pattern, *ranges = line.split()
    for text in ranges:
        letter, _, numbers = text.partition("=")
        ends = [part.partition("-") for part in numbers.split(",")]
        all_of_them = [str(n) for low, _, high in ends for n in range(int(low), int(high or low) + 1)]
        pattern = pattern.replace(f"{{{letter}}}", f"{{{','.join(all_of_them)},}}")
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [[part] if i % 2 == 0 else [one for one in part.split(",") if one] for i, part in enumerate(parts)]
    yield from map("".join, itertools.product(*choices))
