"""A study: does a block that slides (DSB), or a refresh after an unsure commit (EntropyCache's idea), beat the window?

    python -m benchmarks.sliding --out benchmarks/results/sliding-cpu.json

DSB (arXiv:2602.05992) decodes between the first mask and a bound that moves on with the commits. It recomputes these
positions and some before them, and everything after as many commits as a block has positions. Its block is an
iteration of this file, its cache is `vicinity`. EntropyCache (arXiv:2603.18489) refreshes all keys after a commit of
high entropy; here after one of low confidence. Neither is in the package: docs/results.md says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import dinfer
from benchmarks.narrow import DECODER, figures
from benchmarks.provenance import begun, command_line, save
from dinfer.step.contracts import BlockAfter, Iteration, ModelSpec, Moved, RowCursors, State

NEW = 96  # max_new_tokens
WINDOWS = ((8, 4), (8, 8), (12, 4))  # ahead, back


@dataclass(frozen=True, kw_only=True)
class Sliding(Iteration):
    """The active region begins at the first mask. A row ends once all before its first stop token is decoded."""

    block: int = 32  # the most positions of the region
    first: int = 32  # those that it begins with; it ends so many positions behind the prompt, and one more a commit
    refresh: int = 32  # commits after which all keys are computed; 0: any number
    sure: float = 0.0  # after a commit of less confidence, too

    def fresh_state(self, spec: ModelSpec, length: int) -> State:
        return {"since": torch.zeros((), dtype=torch.int64)}

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        return prompt, min(prompt + self.first, length)

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        open_BL, pos_BL, view = after.open_BKL.flatten(1), after.view.pos_RL, after.view
        new_BL = view.masked_RL & ~open_BL
        first_B = pos_BL.gather(1, open_BL.long().argmax(1, keepdim=True))[:, 0]
        start_B = torch.where(open_BL.any(1), first_B, after.next_B)
        end_B = lanes.prompt_B + self.first + lanes.committed_B + new_BL.sum(1)
        end_B = torch.minimum(torch.minimum(end_B, start_B + self.block), lanes.length_B)
        stopped_B = (after.stop_BKL.flatten(1) & (pos_BL < start_B[:, None])).any(1)
        done_B = stopped_B | (start_B >= lanes.length_B)
        since_B = state["since"] + new_BL.sum(1)
        due_B = (since_B >= self.refresh) & (self.refresh > 0)
        due_B = (due_B | (new_BL & (after.stats.confidence_RL < self.sure)).any(1)) & ~done_B
        state["since"] = since_B.masked_fill(due_B, 0)
        return Moved(start_B, end_B, lanes.block_B + due_B, due_B[:, None], done_B)


def recipes(plain: str, iteration: str) -> Iterator[tuple[str, Any, Any]]:
    """A name, an iteration and a cache: whole blocks, narrow windows, DSB as published and narrower, refreshes."""
    blocks = {"name": iteration, "block": 32, "stop": "cut"}
    yield "blocks", blocks, plain
    for ahead, back in WINDOWS:
        yield f"window {ahead},{back}", blocks, {"name": f"narrow_{plain}", "ahead": ahead, "back": back}
    settings = [
        ("DSB const.", {}, 24), ("DSB greedy", {"block": NEW}, 24),
        *((f"slides {n}, back {b}, refresh {r}", {"block": n, "first": n, "refresh": r}, b)
          for n, b, r in ((16, 4, 32), (8, 4, 32), (8, 8, 32), (8, 4, 16))),
        *((f"slides {n}, back 4, refresh below {s}", {"block": n, "first": n, "refresh": 0, "sure": s}, 4)
          for n, s in ((8, 0.5), (8, 0.7), (16, 0.7))),
    ]  # fmt: skip
    for name, options, back in settings:
        yield name, Sliding(**options), {"name": "vicinity", "back": back, "ahead": 0, "warmup": 0}


def main() -> None:
    parser = command_line(__doc__, device="cpu")
    parser.add_argument("--models", nargs="+", default=("tiny-llada2", "tiny"))
    parser.add_argument("--count", type=int, default=200, help="held-out problems")
    parser.add_argument("--rows", type=int, default=64, help="requests in flight")
    given = parser.parse_args()
    report = begun(given, torch.device(given.device)) | {"runs": []}
    for model in given.models:
        base = dinfer.load(model, device=given.device, dtype="float32", runtime=dinfer.Runtime(rows=given.rows))
        causal = base.model.spec.causal_block is not None
        usual = ("block", "block_diffusion") if causal else ("dual", "blockwise")
        for name, iteration, cache in recipes(*usual):
            recipe = dinfer.compose(base.model, iteration=iteration, decoder=DECODER, cache=cache)
            pipe = dinfer.Pipeline(recipe, base.tokenizer, base.engine.runtime)
            print(run := {"model": model, "recipe": name, **figures(pipe, given.count)}, flush=True)
            report["runs"].append(run)
            save(report, given.out)


if __name__ == "__main__":
    main()
