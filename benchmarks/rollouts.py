"""What recording costs, and what a replay of a block-causal model computes.

    python -m benchmarks.rollouts --out benchmarks/results/rollouts-cpu.json
    python -m benchmarks.rollouts --device cuda --out FILE    # with CUDA graphs

Rounds with each level of the record go by turns; figures are CPU seconds, on a card those that pass. The other part
counts the positions that `trajectory` feeds to the model in the box with attention blocks, beside those of clean and
masked texts side by side in every forward, as trainers feed them.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch

import dinfer
from benchmarks.clock import Lap, lap
from benchmarks.provenance import begun, command_line, save
from dinfer.demo.problems import generate
from dinfer.lab.likelihood import combine, logps, passes

LEVELS = ("none", "steps", "logps", "events")


def cost(device: str, prompts: int, group: int, repeats: int, new_tokens: int) -> dict[str, Any]:
    """Throughput of each level, as shares of that without a record."""
    pipe = dinfer.load("tiny", device=device, runtime=dinfer.Runtime(rows=64, graphs=device != "cpu"))
    questions = [problem.question for problem in generate("heldout", count=prompts, seed=1)]
    laps: dict[str, list[Lap]] = {level: [] for level in LEVELS}
    tokens: dict[int, torch.Tensor] = {}
    for repeat in range(repeats + 1):
        for level in LEVELS[repeat % 4 :] + LEVELS[: repeat % 4]:
            how: Any = {"max_new_tokens": new_tokens, "seed": repeat, "temperature": 1.0, "threshold": 0.7}
            work = partial(pipe.rollout, questions, n=group, record=level, **how)
            laps[level].append(lap(work, pipe.engine, cpu=device == "cpu"))
            made = laps[level][-1].result.answer_ids
            assert tokens.setdefault(repeat, made).equal(made), "a record changed tokens"
    # The first round makes what later ones share, such as graphs.
    seconds = {level: [one.seconds for one in own[1:]] for level, own in laps.items()}
    none, captured = seconds["none"], {level: sum(one.captured for one in own[1:]) for level, own in laps.items()}
    return {
        "in_flight": 64, "samples": prompts * group, "seconds": seconds, "captured_while_timed": captured,
        "tokens_equal": True,
        "throughput": {
            level: median(a / b for a, b in zip(none, own, strict=True)) for level, own in seconds.items()
        },
    }  # fmt: skip


def positions(device: str, prompts: int, group: int) -> dict[str, Any]:
    """Positions fed for the replay of block-causal rollouts, and how far it is from the record."""
    pipe = dinfer.load(
        "tiny-llada2", device=device, iteration={"name": "block_diffusion"}, cache="block",
        decoder={"name": "threshold", "threshold": 0.7},
    )  # fmt: skip
    questions = [problem.question for problem in generate("heldout", count=prompts, seed=1)]
    made = pipe.rollout(questions, n=group, max_new_tokens=64, temperature=1.0)
    drawn, fed = passes("trajectory", pipe.model.spec, made.samples()), list[int]()
    hook = pipe.model.register_forward_pre_hook(lambda model, given: fed.append(given[0].shape[:2].numel()))
    scored = combine(drawn, logps(pipe.model, drawn, grad=False))
    hook.remove()
    assert made.logps is not None
    width = min(scored.per_token.shape[2], made.logps.shape[1])
    apart = (scored.per_token[0, :, :width].cpu() - made.logps[:, :width]).abs().max()
    doubled = int(2 * drawn.length_N[drawn.sequence_M].sum())
    return {
        "samples": len(made), "passes": len(drawn.sequence_M), "positions": sum(fed), "positions_doubled": doubled,
        "share": sum(fed) / doubled, "exact": made.exact, "largest_difference_from_record": float(apart),
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, "cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = begun(given, torch.device(given.device))
    report["replay"] = positions(given.device, 4, 4)
    report["record"] = cost(given.device, given.prompts, given.group, given.repeats, given.new)
    print({name: report["record"]["throughput"][name] for name in LEVELS}, report["replay"])
    save(report, given.out)


if __name__ == "__main__":
    main()
