"""The number of denoise steps of a block: at a fixed rate, or measured.

    python -m benchmarks.capacity.denoising --model tiny-llada2 --threshold 0.9 --out FILE.json

answers held-out problems, or `--prompts FILE` with a text a line, and counts the steps of every block.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import dinfer
from benchmarks.provenance import begun, command_line, show
from dinfer.core.engine.request import Update
from dinfer.core.step.cursors import Phase
from dinfer.demo.problems import generate
from dinfer.lab.outputs import check_file


class Denoising:
    """Draws the steps of blocks."""

    def __init__(self, counts: dict[int, int], block: int) -> None:
        """`counts`: how many blocks of `block` positions took how many steps."""
        self.block, self.counts = block, counts
        self._steps, self._weights = [*counts], [*counts.values()]

    @classmethod
    def at_rate(cls, rate: float, block: int) -> Denoising:
        """All blocks take `rate` tokens a step."""
        if not 0 < rate <= block:
            raise ValueError(f"--tokens-per-step {rate} must be above 0 and at most the block, {block}")
        return cls({math.ceil(block / rate): 1}, block)

    @classmethod
    def read(cls, path: Path, block: int) -> Denoising:
        try:
            report = json.loads(path.read_text())
            counts = {int(steps): int(count) for steps, count in report["steps_per_block"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--denoising {path} is not a file of benchmarks.capacity.denoising: {type(error).__name__}: {error}"
            ) from error
        if report.get("block") != block:
            raise ValueError(f"--denoising {path} has blocks of {report.get('block')}, and the steps are of {block}")
        if not counts or min(counts) < 1 or min(counts.values()) < 1:
            raise ValueError(f"--denoising {path}: steps_per_block must have steps and counts of at least 1")
        return cls(counts, block)

    @property
    def tokens_per_step(self) -> float:
        blocks = sum(self.counts.values())
        return self.block * blocks / sum(steps * count for steps, count in self.counts.items())

    def steps(self, opens: int, draw: Random) -> int:
        """Draws the steps of a block with so many open positions. A short block takes its share of a whole one."""
        whole = self._steps[0] if len(self._steps) == 1 else draw.choices(self._steps, self._weights)[0]
        return max(math.ceil(whole * opens / self.block), 1)


def counted(updates: Iterable[Update], prompts: Sequence[Sequence[int]], block: int) -> Counter[int]:
    """Counts the denoise steps of blocks with `block` open positions, from the updates of an engine."""
    steps: dict[tuple[int, int], int] = defaultdict(int)
    for update in updates:
        start, end = update.region
        if update.phase != Phase.PREFILL and end - start == block and start >= len(prompts[update.index]):
            steps[update.index, start] += 1
    return Counter(steps.values())


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """A report of the steps of a model's blocks. Raises ValueError, OSError."""
    if given.out is not None:
        check_file(given.out)
    texts = [problem.question for problem in generate("heldout", given.problems, 0)]
    if given.prompts is not None:
        texts = [line for line in given.prompts.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    decoder = {"name": given.decoder, "threshold": given.threshold}
    pipe = dinfer.load(given.model, device=given.device, decoder=decoder)
    prompts, block = [pipe.encode(text) for text in texts], pipe.recipe.iteration.block
    counts = counted(pipe.engine.run(pipe.requests(prompts, given.new, None)), prompts, block)
    if not counts:
        raise ValueError(
            f"--new {given.new}: no answer to {len(texts)} prompts has a whole block of {block} positions. Raise it, "
            "or give more prompts"
        )
    return begun(given, pipe.model.device) | {"block": block, "steps_per_block": dict(sorted(counts.items()))}


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="tiny-llada2")
    parser.add_argument("--device", help="default: CUDA if there is any")
    parser.add_argument("--prompts", type=Path, help="a file with a text a line; default: problems of the box")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--decoder", default="threshold")
    parser.add_argument("--threshold", type=float, default=0.9)
    given = parser.parse_args(args)
    try:
        show(measured(given), given.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"benchmarks.capacity.denoising: {error}") from error


if __name__ == "__main__":
    main()
