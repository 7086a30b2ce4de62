"""Answers one prompt repeatedly: NFE, tokens, forwards and tokens a second, tokens per forward.

    python -m benchmarks.single --warmup 2 --repeats 5 model=llada_8b_instruct device=cuda decoder.threshold=0.9

The prompt is a fixed word problem unless --prompt gives one. It prints a line for each repeat, and their median by
tokens a second. --out writes all as JSON, with settings, commit and hardware. Warm-up runs do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.configured import check_least, configured
from benchmarks.provenance import provenance, save
from dinfer.cli.recipe import pipeline
from dinfer.pipeline import Pipeline

PROMPT = (
    "Eva wants 32 books and 37 cups. One of the books costs 7 coins, one of the cups 9 coins. "
    "How many coins does Eva pay?"
)


def timed(pipe: Pipeline, prompt: str, new_tokens: int) -> dict[str, Any]:
    """One answer and its figures. Wall time includes tokenising."""
    cuda = pipe.recipe.model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = pipe.generate(prompt, max_new_tokens=new_tokens)
    if cuda:
        torch.cuda.synchronize()
    seconds, counts = time.perf_counter() - began, result.counts
    return {
        "forwards": counts.forwards, "tokens": counts.tokens, "seconds": seconds, "tpf": counts.tpf,
        "tps": counts.tokens / seconds, "fps": counts.forwards / seconds, "text": result.text,
    }  # fmt: skip


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a .json file")
    given = parser.parse_intermixed_args(args)
    try:
        run(given)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.single: {error}")


def run(given: argparse.Namespace) -> None:
    """Raises ValueError or OSError for what cannot be run."""
    check_least(given, warmup=0, repeats=1)
    config = configured(given.overrides)
    pipe, new_tokens = pipeline(config), config["max_new_tokens"]
    for _ in range(given.warmup):
        timed(pipe, given.prompt, new_tokens)
    runs = [timed(pipe, given.prompt, new_tokens) for _ in range(given.repeats)]
    print(runs[0]["text"])
    for run in runs:
        print(told(run))
    middle = sorted(runs, key=lambda run: run["tps"])[(len(runs) - 1) // 2]
    print(f"median: {told(middle)}")
    if given.out is not None:
        about = provenance(pipe.recipe.model.device)
        spread = statistics.pstdev([run["tps"] for run in runs])
        found = {"settings": config, "warmup": given.warmup, "median": middle, "tps_deviation": spread, "runs": runs}
        save(about | found, given.out)


def told(run: dict[str, Any]) -> str:
    """One run in words."""
    return (
        f"{run['forwards']} forwards (NFE), {run['tokens']} tokens, {run['tpf']:.2f} TPF, {run['tps']:.1f} tokens/s, "
        f"{run['fps']:.1f} forwards/s"
    )


if __name__ == "__main__":
    main()
