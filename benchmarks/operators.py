"""The operators that steps dispatch on the CPU: how many, in which order, and which tokens they decode.

    python -m benchmarks.operators --out benchmarks/results/operators-1da347a2.json
    python -m benchmarks.operators --compare benchmarks/results/operators-1da347a2.json

A graph holds what a step dispatches. So where these lists are the same before and after a change, the change costs no
time on a device, and no card is needed to say so. The recipes are ten settings of `benchmarks.step` in small, 40 that
have every pair of a model, an iteration, a decoder and a cache as far as 40 can, and some optional features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dinfer.core.engine.runner as launching
from benchmarks.feeds import random_prompts
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import random_weights, shape
from dinfer import CACHES, DECODERS, ITERATIONS, Runtime, compose
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request, Wants

STEP, PAIRWISE = 10, 40
PARTS = ("model", "iteration", "decoder", "cache")
SMALL: dict[str, Any] = {"block": 8, "threshold": 0.5, "steps": 3, "low_threshold": 0.4, "initial": 4, "horizon": 2}
Setting = dict[str, Any]


def step_settings() -> list[Setting]:
    """The settings of `benchmarks.step` whose figures are published, with small networks."""

    def one(model: str, rows: int, iteration: str, cache: str, block: int) -> Setting:
        sweep = {"name": iteration, "block": block, "stop": "off"}
        parts = {"model": model, "iteration": sweep, "decoder": "threshold", "cache": cache}
        return parts | {"rows": rows, "new": 48}

    return [
        one("small", 1, "blockwise", "dual", 32), one("small", 8, "blockwise", "dual", 32),
        one("small", 1, "blockwise", "prefix", 32), one("small", 1, "blockwise", "none", 32),
        one("small", 8, "multi_block", "dual", 32), one("small-llada2", 1, "block_diffusion", "block", 32),
        one("small-llada2", 8, "block_diffusion", "block", 32), one("small-llada2", 40, "block_diffusion", "block", 32),
        one("small-sdar", 1, "block_diffusion", "block", 4), one("small-sdar", 40, "block_diffusion", "block", 4),
    ]  # fmt: skip


def feature_settings() -> list[Setting]:
    """Optional features of the runtime and of requests."""
    dual: Setting = {"iteration": {"name": "blockwise", "block": 8}, "decoder": "threshold", "cache": "dual"}
    block: Setting = dual | {"iteration": {"name": "block_diffusion", "block": 8}, "cache": "block"}
    s2d2: Setting = {"decoder": "s2d2", "model": "small-sdar"}
    gemma: Setting = {"decoder": "renoise", "model": "small-gemma"}
    lopa: Setting = {"iteration": {"name": "lopa", "block": 8}}
    return [
        dual | {"runtime": {"speculate": 3}}, dual | {"options": {"guidance": 1.5}},
        dual | {"options": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}},
        block | {"model": "small-llada2", "runtime": {"favour": "throughput"}, "rows": 40, "new": 40},
        block | {"model": "small-sdar", "runtime": {"speculate": 2, "share": True}},
        dual | {"reports": {"drafts": True}},
        dual | {"reports": {"drafts": True, "logprobs": True, "deltas": "commit"}},
        dual | {"cache": {"name": "prefix", "suffix": 3}}, dual | {"cache": "d2cache"}, block | s2d2,
        dual | lopa, dual | lopa | {"reports": {"drafts": True}},
        block | {"model": "small-llada2", "decoder": "insert_delete"}, dual | {"model": "small-gemma", "cache": "none"},
        block | gemma | {"iteration": {"name": "self_conditioned", "block": 8}, "options": {"temperature": 1.0}},
        block | gemma | {"iteration": {"name": "self_conditioned", "block": 8}, "reports": {"drafts": True}},
        dual | {"iteration": {"name": "multi_block", "block": 8}, "rows": 8, "runtime": {"kv": "fp8"}},
    ]  # fmt: skip


@cache
def network(name: str) -> Any:
    """Random weights, sharp enough that confidences spread over (0, 1)."""
    given = {"shift": 1} if name == "small-shifted" else {}
    given |= {"delete_id": 500, "split_id": 501} if name == "small-llada2" else {}
    family, spec = shape("small" if given.get("shift") else name)
    model = random_weights(family, replace(spec, **given), torch.device("cpu"))
    model.norm.weight.data.mul_(2.5)
    return model


def recipe_of(setting: Setting) -> Any:
    """Raises ValueError for parts that do not fit."""
    parts = {part: setting[part] for part in PARTS[1:]}
    return compose(network(setting.get("model", "small")), **parts)


def pairwise() -> list[Setting]:
    """`PAIRWISE` recipes, each the one with most new pairs."""
    axes: list[list[Any]] = [["small", "small-shifted", "small-llada2", "small-sdar", "small-gemma"]]
    for registry in (ITERATIONS, DECODERS, CACHES):
        axes.append([])
        for name in registry.names():
            known = {info.name for info in registry.describe(name).options}
            axes[-1].append({"name": name} | {key: value for key, value in SMALL.items() if key in known})
    points: list[tuple[Setting, set[str]]] = []
    for values in product(*axes):
        setting = dict(zip(PARTS, values, strict=True))
        try:
            recipe_of(setting)
        except ValueError:
            continue
        points.append((setting, {json.dumps(pair) for pair in combinations(setting.items(), 2)}))
    chosen: list[Setting] = []
    for _ in range(PAIRWISE):
        best, pairs = max(points, key=lambda point: len(point[1]))
        points = [(setting, own - pairs) for setting, own in points]
        chosen.append(best)
    return chosen


class Listed(TorchDispatchMode):
    """Notes the name of every operator but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.order = 0, hashlib.blake2b(digest_size=8)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns):
            self.count += 1  # views launch nothing
            self.order.update(func.name().encode())
        return func(*args, **(kwargs or {}))


def measured(setting: Setting) -> dict[str, Any]:
    """Runs a recipe. The number of operators of its steps, and digests of their order and of the tokens."""
    recipe, rows = recipe_of(setting), setting.get("rows", 3)
    engine = Engine(recipe, Runtime(rows=rows, **setting.get("runtime", {})))
    prompts, new = random_prompts(recipe.model.spec, rows, 21), setting.get("new", 19)
    given = [setting.get("options", {}) if i % 2 == 0 else {} for i in range(rows)]
    requests = [
        Request.behind(p[: len(p) - i % 5], new, recipe.resolve(o))
        for i, (p, o) in enumerate(zip(prompts, given, strict=True))
    ]
    listed, step = Listed(), launching.denoise_step

    def noted(*args: Any) -> None:
        with listed:
            step(*args)

    launching.denoise_step = noted
    try:
        updates = engine.run(requests, Wants(**setting.get("reports", {})))
        canvas = sorted((u.index, u.completion.canvas) for u in updates if u.completion is not None)
    finally:
        launching.denoise_step = step
    tokens = hashlib.blake2b(json.dumps(canvas).encode(), digest_size=8).hexdigest()
    return {"operators": listed.count, "order": listed.order.hexdigest(), "tokens": tokens}


def differences(record: list[dict[str, Any]]) -> Iterator[str]:
    """What runs otherwise than in a record, or not any more: a line for each recipe."""
    for entry in record:
        try:
            now = measured(entry["setting"])
        except (TypeError, ValueError) as error:  # an option that is gone, or a pair that is refused now
            yield f"{json.dumps(entry['setting'])}: operators none any more: {error}"
            continue
        if changed := [f"{key} {entry[key]} -> {value}" for key, value in now.items() if entry[key] != value]:
            yield f"{json.dumps(entry['setting'])}: {', '.join(changed)}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--compare", type=Path, help="a record; prints what differs from it, and fails for a number")
    given = parser.parse_args()
    if given.compare:
        found = []
        for line in differences(json.loads(given.compare.read_text())["recipes"]):
            print(line, flush=True)
            found.append(line)
        print(f"{len(found)} of the recipes differ")
        raise SystemExit(any("operators " in line or "tokens " in line for line in found))
    settings = [*step_settings(), *feature_settings(), *pairwise()]
    recipes = [{"setting": setting} | measured(setting) for setting in settings]
    save(begun(given, torch.device("cpu")) | {"recipes": recipes}, given.out)


if __name__ == "__main__":
    main()
