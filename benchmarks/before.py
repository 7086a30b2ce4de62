"""Runs `benchmarks.throughput` of this commit over the `dinfer` of commit 5453251, for a before beside an after.

    git archive --prefix=5453251/ 5453251 dinfer | tar x -C /tmp
    python -m benchmarks.before /tmp/5453251 --shape small-llada2 --device cpu --in-flight 4 --prompt 32 --new 32
    python -m benchmarks.goals --before /tmp/5453251 --out benchmarks/results     # the work of the goals' table

The folder's name is the commit that the report names. Prompts, scripted decoder, load, counting and limits are those of
this commit: what has another name now is given that name. What the older engine lacks, such as `--tensor-parallel`, is
an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

MOVED = {  # modules that have other names now, of those that `benchmarks.throughput` needs
    "dinfer.analysis.provenance": "dinfer.surroundings",
    "dinfer.step.canvas": "dinfer.canvas",
    "dinfer.memory.kv": "dinfer.kv",
    "dinfer.step.contracts": "dinfer.protocols",
    "dinfer.recipe.recipe": "dinfer.compose",
    "dinfer.recipe.registry": "dinfer.registry",
    "dinfer.demo.problems": "dinfer.problems",
    "dinfer.kernels.types": "dinfer.kernels.linear",
    "dinfer.loading.checkpoint": "dinfer.checkpoint",
}

IDS = {  # that families know by now, where a config.json does not
    "llada2_moe": {"use_qk_norm": True, "mask_token_id": 156895, "eos_token_id": 156892},
    "sdar": {"mask_token_id": 151669, "eos_token_id": [151643, 151645]},
}


def folder_of(text: str) -> Path:
    """The folder of an older `dinfer`, for argparse."""
    folder = Path(text).resolve()
    if not (folder / "dinfer" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no dinfer: `git archive --prefix=COMMIT/ COMMIT dinfer` gives it")
    return folder


def renamed() -> None:
    """Gives modules, classes and functions of the older package the names that they have now."""
    for now, then in MOVED.items():
        sys.modules[now] = import_module(then)
    ranks: Any = ModuleType("dinfer.pipeline.ranks")
    ranks.Source = ranks.divided = None
    ranks.everywhere = lambda recipe, change: change(recipe.model)
    modules: dict[str, Any] = sys.modules
    modules[ranks.__name__] = ranks
    modules["dinfer.surroundings"].provenance = modules["dinfer.surroundings"].surroundings
    modules["dinfer.protocols"].RowCursors = modules["dinfer.protocols"].Lanes
    modules["dinfer.registry"].values_of = lambda part: {one.name: getattr(part, one.name) for one in fields(part)}
    plain = modules["dinfer"].Runtime
    known = {one.name for one in fields(plain)}  # others are left out where they are at their defaults
    modules["dinfer"].Runtime = lambda **given: plain(
        **{name: value for name, value in given.items() if name in known or value not in (1, False)}
    )


def observed() -> None:
    """Lets a `benchmarks.clock.Clock` see the launches of the older engine."""
    engine, launcher = import_module("dinfer.engine.engine").Engine, import_module("dinfer.engine.launcher").Launcher
    engine.runner = property(lambda self: self.launcher)
    launcher.observer, plain = None, launcher.launch

    def launch(self: Any, shape: Any, slots: Sequence[int]) -> None:
        with nullcontext() if self.observer is None else self.observer(self.bucket(shape), slots):
            plain(self, shape, slots)

    launcher.launch = launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=folder_of, help="an older dinfer's, named after its commit")
    given, args = parser.parse_known_args()
    sys.path.insert(0, str(given.folder))  # `benchmarks` is imported already, from here
    os.environ["DINFER_COMMIT"] = given.folder.name
    renamed()
    observed()
    shapes: Any = import_module("benchmarks.shapes")
    throughput: Any = import_module("benchmarks.throughput")
    for name, shape in shapes.SHAPES.items():
        own = shapes.OPTIONS.get(name, {})
        stops = {"eos_token_id": own["stop_ids"]} if "stop_ids" in own else {}
        shape |= IDS.get(shape["model_type"], {}) | shape | stops
    plain, linear = throughput.quantize, import_module("dinfer.layers.linear")
    throughput.quantize = lambda network, name: plain(network, linear.quantized_dtype(name))
    throughput.main(args)


if __name__ == "__main__":
    main()
