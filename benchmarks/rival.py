"""An autoregressive model of the same shape on the same card: where diffusion wins, and where it loses.

    python -m benchmarks.rival --out benchmarks/results/rival-sdar-8b-h200.json
    python -m benchmarks.rival --shape small-sdar --device cpu --in-flight 1,2 --prompt 32 --steps 4     # dry run

The rival is a loop of one CUDA graph over the same layers: a token of each request, causal attention over its keys, the
LM head, the most likely token. It has no scheduler, no sampling and no host, so no server of such a model is faster on
these layers. Ours are the engine's own steps of block diffusion with attention blocks of 8, 16 and 32: a block of L
positions that commits n of them a step takes L / n steps, of which the first computes the block before, too, and makes
its keys final. Tokens a second follow from these times. Each figure is the median of three runs,
printed with their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

from benchmarks.clock import Clock, milliseconds, moment
from benchmarks.feeds import random_prompts
from benchmarks.limits import limits, rates
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import SHAPES, random_weights
from dinfer import Pipeline, Runtime, compose
from dinfer.core.loading.checkpoint import family_of
from dinfer.core.memory import RESERVED, KVPool, PoolSize, Seen
from dinfer.core.registry import MODELS

PAGE, RUNS = 16, 3
COMMITS = (1, 2, 4, 8)  # tokens a step commits
BLOCKS = (8, 16, 32)


def network(name: str, block: int, device: torch.device) -> Any:
    """The shape with random weights and attention blocks of this length, or causal if it is 1."""
    family = MODELS.build({"name": family_of(SHAPES[name]), "block": block})
    return random_weights(family, family.spec(SHAPES[name]), device)


def step_ms(work: Any, device: torch.device, steps: int) -> float:
    """The mean time of a step of so many."""
    cuda = device.type == "cuda"
    begin = moment(cuda)
    for _ in range(steps):
        work()
    end = moment(cuda)
    if cuda:
        end.synchronize()
    return milliseconds(begin, end) / steps


def left_to_right(model: Any, rows: int, given: argparse.Namespace, card: dict[str, float] | None) -> dict[str, Any]:
    """The time of a step in which each of `rows` requests gets one token."""
    device, spec = torch.device(given.device), model.spec
    length = given.prompt + given.steps * (RUNS + 1)
    pages = -(-length // PAGE)
    kv = KVPool.alloc(spec, PoolSize(rows, length, rows * pages, PAGE), dtype=model.dtype, device=device)
    kv.assign({row: [*range(RESERVED + row * pages, RESERVED + (row + 1) * pages)] for row in range(rows)})
    for pool in (kv.k_JPTGE, kv.v_JPTGE):
        pool.normal_()
    slot_B = torch.arange(rows, device=device)
    token_B1 = torch.arange(1, rows + 1, device=device)[:, None]
    pos_B1 = torch.full((rows, 1), given.prompt, device=device)

    @torch.no_grad()
    def step() -> None:
        attend = kv.attend(slot_B, pos_B1, Seen((torch.zeros_like(pos_B1), pos_B1 + 1)), pages)
        logits_B1V = model.logits(model.forward(model.embed(token_B1), attend))
        token_B1.copy_(logits_B1V.argmax(-1))
        pos_B1.add_(1)

    work = step
    if device.type == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        work = graph.replay
    else:
        step()
    pos_B1.fill_(given.prompt)
    runs = [step_ms(work, device, given.steps) for _ in range(RUNS)]
    least = limits(
        model, kv, rows=rows, width=1, block=1, keys=given.prompt + given.steps * RUNS / 2, experts=None, rates=card
    )
    ms = statistics.median(runs)
    return {"ms": ms, "all_ms": runs, "tokens_per_s": 1e3 * rows / ms, "positions_per_token": 1, "limit": least}


def in_blocks(model: Any, rows: int, block: int, given: argparse.Namespace) -> dict[str, Any]:
    """The time of our steps in the middle of a block and at its beginning, and what follows for tokens a second."""
    cuda = given.device != "cpu"
    iteration = {"name": "block_diffusion", "block": block, "stop": "off"}
    recipe = compose(model, iteration=iteration, decoder={"name": "fixed", "steps": max(block // 2, 1)}, cache="block")
    # All prompts enter in one pass, so that all rows are at the same place of a block.
    pipe = Pipeline(recipe, None, Runtime(rows=rows, positions=rows * given.prompt, graphs=cuda))
    prompts, new = random_prompts(model.spec, rows, given.prompt), 3 * block
    tables = []
    for run in range(RUNS + 2):  # the first two compile and capture
        with Clock(pipe.engine) as clock:
            pipe.generate_ids(prompts, max_new_tokens=new)
        tables += [clock.table()] if run > 1 else []

    def medians(width: int) -> list[float]:
        """Of the steps of this width in which all rows took part."""
        full = [[s for s in t if s["phase"] == "WINDOW" and s["width"] == width and s["rows"] == rows] for t in tables]
        return [max(steps, key=lambda s: s["launches"])["median_ms"] for steps in full if steps]

    middle, first = medians(block), medians(2 * block)
    found: dict[str, Any] = {"ms": statistics.median(middle), "all_ms": middle, "all_first_ms": first}
    found["first_ms"] = statistics.median(first)
    for commits in (n for n in COMMITS if n <= block):
        steps = block // commits
        whole = found["first_ms"] + (steps - 1) * found["ms"]
        found[f"commits_{commits}"] = {"tokens_per_s": 1e3 * rows * block / whole, "positions_per_token": steps + 1}
    return found


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__, device="cuda")
    parser.add_argument("--shape", choices=[name for name in SHAPES if "sdar" in name], default="sdar-8b")
    parser.add_argument("--in-flight", default="1,8,64,256")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64, help="tokens of each timed run of the rival")
    given = parser.parse_args(args)
    device = torch.device(given.device)
    card = rates(device, None) if device.type == "cuda" else None
    report = begun(given, device) | {"causal": {}, "blocks": {}}
    flights = [int(rows) for rows in given.in_flight.split(",")]
    for block in (1, *BLOCKS):
        model = network(given.shape, block, device)
        for rows in flights:
            if block == 1:
                found = report["causal"][rows] = left_to_right(model, rows, given, card)
            elif rows * block > 4096:  # these steps take as long as their multiply-adds, and lose by far
                continue
            else:
                found = report["blocks"].setdefault(block, {})[rows] = in_blocks(model, rows, block, given)
            save(report, given.out)
            print(f"block {block}, {rows} in flight: {found['ms']:.2f} ms a step", flush=True)
        del model
    print(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
