"""Multiply-adds and bytes of a round of steps, whole blocks beside narrow windows. It counts, and measures nothing.

    python -m benchmarks.capacity.rounds --in-flight 64 128 256 512 --out benchmarks/results/rounds-llada2-mini.json

A block's first step computes the block, and once more the block before it. The steps behind it compute the window.
Rows that enter a block share a launch with the others (`dinfer.abilities.slices`). Beside it stand their share of the
positions, how many rows enter in a round, and the bytes of weights that a launch of their own would read once more.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.limits import experts_chosen, operations, weight_bytes
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import SHAPES, shape
from dinfer.loading.checkpoint import random_network


def positions(block: int, rate: float, ahead: int, back: int) -> tuple[float, float]:
    """Mean computed and open positions of a row in a round: blocks of `rate` tokens a step. ahead=0: whole blocks."""
    steps = math.ceil(block / rate)
    left = [block - math.floor(step * rate) for step in range(1, steps)]
    narrow = min(ahead + back, block) if ahead else block
    opens = sum(min(one, ahead or one) for one in left)
    return (2 * block + narrow * len(left)) / steps, (block + opens) / steps


def counted(
    model: Any, rows: int, keys: int, computed: float, opens: float, block: int, steps: int
) -> dict[str, float]:
    """A round of so many rows, each with so many keys, whose blocks take so many steps."""
    spec, work = model.spec, operations(model, rows * computed, rows * opens, keys)
    cached = rows * keys * 2 * spec.layers * spec.kv_heads * spec.head_dim * model.dtype.itemsize
    weights = weight_bytes(model, experts_chosen(spec, rows * computed))
    entering = rows / steps
    apart = weight_bytes(model, experts_chosen(spec, entering * 2 * block)) * -math.expm1(-entering)  # if any enters
    return {
        "in_flight": rows, "positions": round(computed, 2), "open": round(opens, 2),
        "multiply_adds_e12": round(sum(work.values()) / 2e12, 3),
        "weights_gb": round(weights / 1e9, 2), "keys_gb": round(cached / 1e9, 2),
        "entering": round(entering, 1), "entering_share": round(2 * block / steps / computed, 3),
        "weights_apart_gb": round(apart / 1e9, 2),
    }  # fmt: skip


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada2-mini")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--windows", nargs="+", default=["0,0", "8,4", "8,2", "6,4"], metavar="AHEAD,BACK")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2.6, help="tokens a step")
    parser.add_argument("--keys", type=int, default=768, help="of a row, on average")
    given = parser.parse_args(args)
    family, spec = shape(given.shape)
    model = random_network(family, spec, dtype=torch.bfloat16, device=torch.device("meta"))
    report = begun(given, torch.device("cpu")) | {"runs": []}
    steps = math.ceil(given.block / given.rate)
    for window in given.windows:
        ahead, back = map(int, window.split(","))
        each = positions(given.block, given.rate, ahead, back)
        for rows in given.in_flight:
            report["runs"].append(
                {"window": window, **counted(model, rows, given.keys, *each, block=given.block, steps=steps)}
            )
            print(report["runs"][-1], flush=True)
    save(report, given.out)


if __name__ == "__main__":
    main()
