"""The HTTP server's CPU time of a request, of a piece of a stream and of a round, and the bytes that it sends.

    python -m benchmarks.capacity.front_end --out FILE.json

It serves a small shape (benchmarks.serving.full_size) and reads the CPU time of the thread of the event loop, which
parses, encodes and writes; the engine has its own thread. Short answers, long ones and many at once separate the three
times. CPU time counts only the thread's own work, so other load on the machine changes it little.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import begun, command_line, show
from benchmarks.serving.process import Started, started

SHORT, LONG = 4, 256  # tokens of answers
PROMPT = 512
STREAMS = 16
SERVER = (
    "--port", "0", "--shape", "small-llada2", "--device", "cpu", "--prompt", str(PROMPT), "--new", str(LONG),
    "--in-flight", str(STREAMS), "--rounds", "1",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """Seconds of CPU."""

    request: float = 0.0  # of the server's event loop for a request
    piece: float = 0.0  # of the event loop for a piece of a stream
    round: float = 0.0  # of the event loop for a round of the engine
    routed: float = 0.0  # of a router's process for a request with all its pieces

    @classmethod
    def read(cls, path: Path) -> FrontEnd:
        try:
            found = json.loads(path.read_text())["front_end"]
            return cls(**{name: float(found[name]) for name in found})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--front-end {path} is not a file of benchmarks.capacity.front_end: {type(error).__name__}: {error}"
            ) from error


def loop_seconds(pid: int) -> float:
    """CPU time of a process's main thread, in which the event loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def rounds(server: Started) -> float:
    """The number of rounds that the engine has run."""
    with urllib.request.urlopen(f"{server.url}metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("dinfer_round_seconds_count"))


def ask(url: str, number: int, new: int) -> tuple[int, int]:
    """Streams an answer. Returns its pieces and bytes."""
    words = " ".join(f"w{(number * PROMPT + i) * 7 % 500}" for i in range(PROMPT))
    body = {"model": "shape", "prompt": words, "max_tokens": new, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        text = response.read()
    return text.count(b"data: "), len(text)


def answered(server: Started, requests: int, new: int, streams: int) -> dict[str, float]:
    """The event loop's figures of `count` requests, `streams` at a time."""
    before, first = loop_seconds(server.pid), rounds(server)
    with ThreadPoolExecutor(streams) as pool:
        found = [*pool.map(lambda number: ask(server.url, number, new), range(requests))]
    pieces, size = (sum(values) for values in zip(*found, strict=True))
    taken = rounds(server) - first
    return {
        "requests": requests, "tokens": requests * new, "streams": streams, "pieces": pieces, "rounds": taken,
        "bytes": size, "seconds": loop_seconds(server.pid) - before,
    }  # fmt: skip


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=96, help="of each length")
    given = parser.parse_args(args)
    command = [sys.executable, "-m", "benchmarks.serving.full_size", *SERVER]
    with tempfile.TemporaryDirectory() as folder, started(command, f"{folder}/server.log") as server:
        answered(server, STREAMS, LONG, STREAMS)
        runs = [
            answered(server, given.requests, new, streams)
            for new, streams in ((SHORT, 1), (SHORT, STREAMS), (LONG, 1), (LONG, STREAMS))
        ]
    names = ("requests", "pieces", "rounds")
    parts = np.linalg.lstsq([[run[name] for name in names] for run in runs], [run["seconds"] for run in runs])[0]
    short, _, long, many = runs
    report: dict[str, Any] = {
        **begun(given, torch.device("cpu")), "runs": runs,
        "front_end": {name.removesuffix("s"): float(part) for name, part in zip(names, parts, strict=True)},
        "bytes_per_piece": (long["bytes"] - short["bytes"]) / (long["pieces"] - short["pieces"]),
        "bytes_per_token": many["bytes"] / many["tokens"],
    }  # fmt: skip
    show(report, given.out)


if __name__ == "__main__":
    main()
