"""What answers of a converted model are worth beside those of the model it came from, on a CPU.

    python -m benchmarks.smol BASE.gguf --held OUT/held.jsonl --out benchmarks/results/smol-cpu.json

For each recipe: the base's NLL of the answers in nats a token, the share of 4-grams that occurred before, and tokens a
forward. The base's greedy answers have been drawn by tools/convert_ar and are in OUT/held.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import command_line, provenance, save
from tools.convert_ar.base import Base, load
from tools.convert_ar.measure import judged


def answered(base: Base, prompts: list[list[int]], recipe: dict[str, Any], new: int) -> dict[str, Any]:
    """Scores of one recipe. `recipe`: `adapter`, `block` and `threshold`; above 1, one token is filled a forward."""
    pipe = dinfer.load(
        {"name": "a2d", "checkpoint": recipe["base"], "adapter": recipe["adapter"], "block": recipe["block"]},
        iteration={"name": "block_diffusion", "block": recipe["block"]}, cache="block",
        decoder={"name": "threshold", "threshold": recipe["threshold"]},
    )  # fmt: skip
    found = pipe.generate_ids(prompts, max_new_tokens=new)
    answers = [one.ids + [base.chat.stop] * one.stopped for one in found]
    scores = judged(base, prompts, answers, [one.counts.forwards for one in found])
    return recipe | scores | {"samples": [one.text for one in found[:4]]}


def main() -> None:
    """Writes the table of all recipes asked for."""
    parser = command_line(__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("--held", type=Path, required=True, help="held.jsonl of tools/convert_ar")
    parser.add_argument("--adapter", nargs="+", default=["smol"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.0, 0.9, 0.7, 0.5])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    device = torch.device("cpu")
    base = load(args.base, device, torch.float32)
    with args.held.open() as file:
        held = [json.loads(line) for line in file][: args.rows]
    prompts = [one["tokens"][: one["answer"]] for one in held]
    given = [one["tokens"][one["answer"] :][: args.new] for one in held]
    table: dict[str, Any] = {
        **provenance(device), "prompts": len(prompts), "new_tokens": args.new,
        "parent_greedy": judged(base, prompts, given, [len(one) for one in given]), "recipes": [],
    }  # fmt: skip
    for adapter in args.adapter:
        for block in args.blocks:
            for threshold in args.thresholds:
                recipe = {"base": str(args.base), "adapter": adapter, "block": block, "threshold": threshold}
                row = answered(base, prompts, recipe, args.new)
                table["recipes"].append(row)
                print({name: value for name, value in row.items() if name not in ("samples", "base")}, flush=True)
                save(table, args.out)


if __name__ == "__main__":
    main()
