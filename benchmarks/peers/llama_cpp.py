"""llama.cpp's diffusion program and ours on one CPU, reading the same GGUF files, in turns.

    python -m benchmarks.peers.llama_cpp --program BUILD/bin/llama-diffusion-cli --float f16.gguf --out OUT.json \\
        Q8_0.gguf Q4_K_M.gguf

The canvas has 384 positions: a prompt of 128, and 256 new tokens in 8 blocks of 32 and 64 steps. There every step is a
pass over the whole canvas. Here the cache `dual` takes one such pass a block, and steps of 32 positions. Each side runs
in a process of its own. Times are CPU time, so that others on the machine disturb little; with one thread, as threads
that wait for each other count too. `--float` is timed once, as our float32. Ratios are of the medians of all rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks.provenance import command_line, provenance, save
from dinfer.core.engine.request import Wants

PROMPT, NEW, BLOCK, STEPS = 128, 256, 32, 64
THEIR_STEPS, THEIR_BLOCK = 3, 128  # one step for each of their blocks; what a step takes does not depend on them
OURS = 2 * STEPS * BLOCK // NEW  # steps of ours that are timed: two blocks


def ended(command: list[str], output: Any) -> tuple[float, float, list[tuple[float, str]]]:
    """CPU seconds and peak memory in MB of a command, and the CPU seconds at which its output grew."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    tick, seen, size = os.sysconf("SC_CLK_TCK"), list[tuple[float, str]](), 0
    while (waited := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        text = Path(output.name).read_text(errors="replace")
        if len(text) > size:
            seen.append((sum(map(int, fields[11:13])) / tick, text[size:]))
            size = len(text)
        time.sleep(0.05)
    _, status, used = waited
    text = Path(output.name).read_text(errors="replace")
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{text[-2000:]}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, [*seen, (0, text[size:])]


def theirs(program: Path, file: Path, threads: int) -> dict[str, float]:
    """CPU seconds of a step of llama.cpp, and its peak memory."""
    canvas = str(PROMPT + NEW)
    command = [
        str(program), "-m", str(file), "-p", "a" * PROMPT, "-ub", canvas, "-b", canvas, "-c", canvas, "--temp", "0",
        "--diffusion-block-length", str(THEIR_BLOCK), "--diffusion-steps", str(THEIR_STEPS), "-t", str(threads),
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile("w") as output:
        total, peak, seen = ended(command, output)
    begin = next(cpu for cpu, text in seen if "diffusion step: 0/" in text)
    return {"whole pass": (total - begin) / THEIR_STEPS, "peak MB": peak}


def ours(file: Path, threads: int, dtype: str) -> dict[str, float]:
    """CPU seconds of a pass over the whole canvas, and of a step of one block, and the peak memory."""
    command = [sys.executable, "-m", "benchmarks.peers.llama_cpp", "--program", "-", "--ours"]
    command += ["--threads", str(threads)]
    with tempfile.NamedTemporaryFile("w") as output:
        _, peak, seen = ended([*command, "--dtype", dtype, str(file)], output)
    found: dict[str, float] = json.loads("".join(text for _, text in seen).strip().splitlines()[-1])
    return found | {"peak MB": peak}


def timed(file: Path, dtype: str) -> dict[str, float]:
    """What `ours` reads: of this process."""
    pipe = dinfer.load(
        str(file), device="cpu", dtype=dtype, cache="dual", decoder={"name": "fixed", "steps": STEPS * BLOCK // NEW},
        iteration={"name": "blockwise", "block": BLOCK, "stop": "off"}, runtime=dinfer.Runtime(rows=1, graphs=False),
    )  # fmt: skip
    times, last = [], time.process_time()
    for _ in zip(
        range(OURS), pipe.engine.run(pipe.requests([[65] * PROMPT], NEW, None), Wants(snapshots=True)), strict=False
    ):
        now = time.process_time()
        times.append(now - last)
        last = now
    every = STEPS * BLOCK // NEW
    whole, window = times[::every], [seconds for step, seconds in enumerate(times) if step % every]
    return {"whole pass": min(whole), "window step": statistics.median(window)}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--float", type=Path, help="the same model in 16 bits")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ours", action="store_true", help="what the program calls itself with")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.ours:
        print(json.dumps(timed(given.files[0], given.dtype)))
        return
    runs: dict[Path, list[tuple[dict[str, float], dict[str, float]]]] = {file: [] for file in given.files}
    whole = ours(given.float, given.threads, given.dtype) if given.float else None
    print("float", whole, flush=True)
    blocks, found = NEW // BLOCK, {}
    for _ in range(given.rounds):
        for file, rounds in runs.items():
            rounds.append((theirs(given.program, file, given.threads), ours(file, given.threads, given.dtype)))
            print(file.name, *rounds[-1], flush=True)
            their, own = (medians(list(side)) for side in zip(*rounds, strict=True))
            mean = (blocks * own["whole pass"] + (STEPS - blocks) * own["window step"]) / STEPS
            found[file.name] = {
                "llama.cpp": their, "ours": own, "whole pass, ours / theirs": own["whole pass"] / their["whole pass"],
                "tokens/s, ours / theirs": their["whole pass"] / mean,
                "peak memory, ours / theirs": own["peak MB"] / their["peak MB"],
                "window step / our float32": own["window step"] / whole["window step"] if whole else None,
                "rounds": rounds,
            }  # fmt: skip
            report = {
                "dtype": given.dtype, "threads": given.threads, "our float32": whole, "files": found,
                "seconds": "CPU time", "cpu": torch.backends.cpu.get_cpu_capability(), "load": os.getloadavg(),
                **provenance(torch.device("cpu")),
            }  # fmt: skip
            save(report, given.out)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
