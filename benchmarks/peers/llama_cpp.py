"""llama.cpp's diffusion program and ours on one CPU, reading the same GGUF file, one after the other in each round.

    python -m benchmarks.peers.llama_cpp --program BUILD/bin/llama-diffusion-cli --file Q8_0.gguf --quantize int8

The canvas has 384 positions: a prompt of 128, and 256 new tokens in 8 blocks of 32 and 64 steps. There every step is a
pass over the whole canvas. Here the cache `dual` takes one such pass a block, and steps of 32 positions. Ratios are of
the medians of all rounds; machines are noisy, so no figure is to be read without its ratio.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dinfer
from dinfer.analysis.provenance import provenance

PROMPT, NEW, BLOCK, STEPS = 128, 256, 32, 64
THEIR_STEPS = 12  # of a pass over the whole canvas each; one for each of its blocks
MEASURED = 2 * STEPS * BLOCK // NEW  # steps of ours that are timed: two blocks


def theirs(program: Path, file: Path, threads: int) -> tuple[float, int]:
    """Seconds of a step of llama.cpp, and its peak memory in KB."""
    canvas = str(PROMPT + NEW)
    command = [
        str(program), "-m", str(file), "-p", "a" * PROMPT, "-ub", canvas, "-b", canvas, "-c", canvas, "--temp", "0",
        "--diffusion-block-length", str(BLOCK), "--diffusion-steps", str(THEIR_STEPS), "-t", str(threads),
    ]  # fmt: skip
    peak = 0
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, peak_of(Path(f"/proc/{process.pid}/status")))
            time.sleep(0.2)
        said.seek(0)
        text = said.read()
    found = re.search(r"time per step: ([\d.]+)ms", text)
    if found is None:
        raise SystemExit(f"{program} says no time per step:\n{text[-2000:]}")
    return float(found[1]) / 1000, peak


def peak_of(status: Path) -> int:
    """Peak memory of a process in KB; 0 if it has just ended."""
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def ours(pipe: dinfer.Pipeline) -> tuple[float, float]:
    """Seconds of a pass over the whole canvas, and of a step of one block."""
    requests = pipe.requests([[65] * PROMPT], NEW, None)
    times, last = [], time.perf_counter()
    for _, update in zip(range(MEASURED), pipe.engine.run(requests, snapshots=True), strict=False):
        assert update is not None
        now = time.perf_counter()
        times.append(now - last)
        last = now
    every = STEPS * BLOCK // NEW
    whole = [seconds for step, seconds in enumerate(times) if step % every == 0]
    return min(whole), statistics.median(seconds for step, seconds in enumerate(times) if step % every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file, to which the run is added")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    pipe = dinfer.load(
        str(given.file), device="cpu", dtype=given.dtype, quantize=given.quantize, cache="dual",
        decoder={"name": "fixed", "steps": STEPS}, iteration={"name": "blockwise", "block": BLOCK, "stop": "off"},
        runtime=dinfer.Runtime(rows=1, graphs=False),
    )  # fmt: skip
    ours(pipe)
    rounds = [(*theirs(given.program, given.file, given.threads), *ours(pipe)) for _ in range(given.rounds)]
    step, peak, whole, window = (statistics.median(times) for times in zip(*rounds, strict=True))
    blocks = NEW // BLOCK
    mean = (blocks * whole + (STEPS - blocks) * window) / STEPS
    found: dict[str, Any] = {
        "file": given.file.name, "quantize": given.quantize, "dtype": given.dtype, "threads": given.threads,
        "seconds": {"llama.cpp step": step, "our whole pass": whole, "our step of a block": window},
        "whole pass / their step": whole / step,
        "tokens/s, ours / theirs": step / mean,
        "peak memory / theirs": peak_of(Path("/proc/self/status")) / peak,
        "rounds": rounds, "cpu": torch.backends.cpu.get_cpu_capability(), **provenance(torch.device("cpu")),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.out is not None:
        before = json.loads(given.out.read_text()) if given.out.is_file() else []
        given.out.write_text(json.dumps([*before, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
