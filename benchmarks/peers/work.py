"""The work that both sides do, and how it is timed. Imports neither side: both packages have the same name."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import lap

RATE = 4  # masks that every step commits, the leftmost ones: each side computes its threshold rule, and does not use it


def arguments(about: str | None, args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the shape")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cache", choices=("dual", "vicinity", "none", "block"), default="dual")
    parser.add_argument("--quantize", help="ours alone")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rate", type=int, default=RATE, help="masks that every step commits")
    parser.add_argument("--attention-block", type=int, help="ours alone: of models whose config.json does not say it")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(args)


def fill(model: Any, head: torch.Tensor, first: int) -> Any:
    """Gives a peer's network random weights; no token from `first` on is ever the most likely."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        head[first:] = 0
    return model


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Waits for the runs that warm up beside this one (`--together`), then for its turn on the card."""
    together = os.environ.get("PEERS_TOGETHER", "").split()
    out.with_suffix(".warm").touch()
    while not all(out.with_name(f"{name}.warm").exists() for name in together):
        time.sleep(0.2)
    with open(out.with_name("turn"), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def report(
    given: argparse.Namespace,
    generate: Callable[[], tuple[int, Any]],
    widths: Callable[[], dict[int, list[float]]],
    engine: Any = None,
) -> dict[str, Any]:
    """Times whole generations, the first ones apart; writes and returns what was found.

    `generate` returns its forwards and its tokens. `widths` returns the milliseconds of each forward by the positions
    that it computed, of the last generation or of one more. `engine`: ours, whose graphs are counted. Raises
    RuntimeError.
    """
    cuda = given.device != "cpu"
    first, second = lap(generate), lap(generate)
    with alone(given.out):
        runs, by_width = [lap(generate, engine) for _ in range(given.repeats)], widths()
    seconds, forwards = statistics.median(run.seconds for run in runs), first.result[0]
    if any(run.result[0] != forwards for run in runs):
        raise RuntimeError(f"forwards differ between runs: {[run.result[0] for run in runs]}")
    found = {
        "batch": given.batch, "cache": given.cache, "quantize": given.quantize, "eager": given.eager,
        "prompt": given.prompt, "new": given.new, "block": given.block, "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "warm_up_s": first.seconds, "second_s": second.seconds,
        "all_s": [run.seconds for run in runs], "seconds": seconds,
        "captured_while_timed": sum(run.captured for run in runs) if engine else None, "forwards": forwards,
        "ms_per_forward": 1e3 * seconds / forwards, "tokens_per_s": given.batch * given.new / seconds,
        "same_tokens": all(run.result[1] == runs[0].result[1] for run in runs),
        "by_width": {
            str(width): {"forwards": len(ms), "median_ms": round(statistics.median(ms), 4)}
            for width, ms in by_width.items()
        },
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
    }  # fmt: skip
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    return found
