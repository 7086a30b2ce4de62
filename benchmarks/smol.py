"""What answers of a converted model are worth beside those of the model it came from, on a CPU.

    python -m benchmarks.smol BASE.gguf --held OUT/held.jsonl --out benchmarks/results/smol-cpu.json

For each recipe: the base's NLL of the answers in nats a token, the share of 4-grams that occurred before, and tokens a
forward. The base's greedy answers have been drawn by tools/convert_ar and are in OUT/held.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import dinfer
from tools.convert_ar.base import Base, causal_scores, load
from tools.convert_ar.draw import repeats


def judged(base: Base, rows: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """NLL by the base and repeats of (prompt, answer)."""
    nll, tokens = 0.0, 0
    layers = base.layers()
    with torch.no_grad():
        for prompt, answer in rows:
            (scores,) = causal_scores(base, layers, [prompt + answer], 0)
            nll -= float(scores[len(prompt) - 1 :].sum())
            tokens += len(answer)
    mean = sum(repeats(answer) for _, answer in rows) / len(rows)
    return {"nll": nll / tokens, "tokens": tokens, "repeats": mean}


def answered(base: Base, prompts: list[list[int]], recipe: dict[str, Any], new: int) -> dict[str, Any]:
    """Scores of one recipe. `recipe`: `adapter`, `block` and `threshold`; above 1, one token is filled a forward."""
    pipe = dinfer.load(
        {"name": "a2d", "checkpoint": recipe["base"], "adapter": recipe["adapter"], "block": recipe["block"]},
        iteration={"name": "block_diffusion", "block": recipe["block"]}, cache="block",
        decoder={"name": "threshold", "threshold": recipe["threshold"]},
    )  # fmt: skip
    found = pipe.generate_ids(prompts, max_new_tokens=new)
    rows = [(prompt, one.ids + [base.chat.stop] * one.stopped) for prompt, one in zip(prompts, found, strict=True)]
    forwards = sum(one.counts.forwards for one in found)
    scores = judged(base, rows)
    made = {"forwards": forwards, "tokens_per_forward": scores["tokens"] / forwards}
    return recipe | scores | made | {"samples": [one.text for one in found[:4]]}


def main() -> None:
    """Writes the table of all recipes asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smol")
    parser.add_argument("base", type=Path)
    parser.add_argument("--held", type=Path, required=True, help="held.jsonl of tools/convert_ar")
    parser.add_argument("--adapter", nargs="+", default=["smol"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.0, 0.9, 0.7, 0.5])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    base = load(args.base, torch.device("cpu"), torch.float32)
    with args.held.open() as file:
        held = [json.loads(line) for line in file][: args.rows]
    prompts = [one["tokens"][: one["answer"]] for one in held]
    given = [(prompt, one["tokens"][one["answer"] :][: args.new]) for prompt, one in zip(prompts, held, strict=True)]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    table: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.smol", *sys.argv[1:]]), "commit": commit, "torch": torch.__version__,
        "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "prompts": len(prompts), "new_tokens": args.new, "parent_greedy": judged(base, given), "recipes": [],
    }  # fmt: skip
    for adapter in args.adapter:
        for block in args.blocks:
            for threshold in args.thresholds:
                recipe = {"base": str(args.base), "adapter": adapter, "block": block, "threshold": threshold}
                row = answered(base, prompts, recipe, args.new)
                table["recipes"].append(row)
                print({name: value for name, value in row.items() if name not in ("samples", "base")}, flush=True)
                args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
