"""What a user waits for at first: `dinfer serve` until /ready answers, and its first two requests.

    nice -n -15 python -m benchmarks.serving.ready --out benchmarks/results/serve-ready-cpu.json

Each start is a process of its own, in turns with the kernels in C compiled before and without: an empty
`XDG_CACHE_HOME`, as on a new machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from dinfer.serving.settings import Settings, listen

BODY = {"model": "tiny", "max_tokens": 32, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
PATIENCE = 120.0  # seconds


def start(cache: str | None) -> dict[str, Any]:
    """Seconds of one start. `cache`: the folder of compiled kernels; None: the user's own."""
    with listen(Settings(port=0)) as free:
        port = free.getsockname()[1]
    home, own = f"http://127.0.0.1:{port}", {} if cache is None else {"XDG_CACHE_HOME": cache}
    used, began = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "dinfer", "-q", "serve", "model=tiny", f"port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | own) as process:
        try:
            while not _answers(f"{home}/ready"):
                if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                    raise RuntimeError(f"{' '.join(command)} is not ready, with exit status {process.poll()}")
                time.sleep(0.01)
            seconds = {"ready_s": time.perf_counter() - began}
            for name in ("first_request_s", "second_request_s"):
                asked = time.perf_counter()
                data, kind = json.dumps(BODY).encode(), {"Content-Type": "application/json"}
                request = urllib.request.Request(f"{home}/v1/chat/completions", data, kind)
                urllib.request.urlopen(request, timeout=PATIENCE).read()
                seconds[name] = time.perf_counter() - asked
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
        finally:
            process.kill()
    ended = os.times()
    children = ended.children_user + ended.children_system - used.children_user - used.children_system
    return {name: round(value, 2) for name, value in (seconds | {"cpu_s": children}).items()}


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    except OSError:
        return False


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="starts of each kind")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    runs = []
    for _ in range(given.times):
        for compiled in (True, False):
            with tempfile.TemporaryDirectory() as empty:
                run = {"kernels": "compiled before" if compiled else "none", "load": round(os.getloadavg()[0], 1)}
                runs.append(run | start(None if compiled else empty))
            print(runs[-1], flush=True)
    if given.out:
        report = {**provenance(torch.device("cpu")), "cores": os.cpu_count(), "runs": runs}
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
