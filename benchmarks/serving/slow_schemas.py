"""How much longer free requests take while eight schemas that compile slowly are on their way.

    python -m benchmarks.serving.slow_schemas --out benchmarks/results/slow-schemas-cpu.json

One server, rounds in turn: free requests alone, then the same beside eight new slow schemas, with a small new schema as
well. The figure is the ratio of the medians in one run: times themselves depend on what else the machine does.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import torch

from benchmarks.provenance import begun, command_line, show
from benchmarks.serving.process import serving

SLOW = 8


def asked(url: str, form: dict[str, Any] | None, length: int = 32) -> tuple[float, int]:
    """Seconds of one request, and its status."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Start with 7, then add 5. What is it?"}]}
    body |= {"model": "tiny", "max_tokens": length}
    if form is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
    request = urllib.request.Request(
        f"{url}v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    return time.perf_counter() - began, status


def slow(number: int) -> dict[str, Any]:
    """A schema of which compilation takes seconds; each is new."""
    return {"type": "string", "pattern": f"^(a|b)*a(a|b){{{13 + number % 2}}}(c|d){{{number}}}$"}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=12)
    given = parser.parse_args()
    report = begun(given, torch.device("cpu"))
    alone: list[float] = []
    beside: list[float] = []
    small: list[float] = []
    slowly: list[float] = []
    with serving("model=tiny", log="/tmp/slow_schemas.log") as server:
        for _ in range(3):
            asked(server.url, None)
        for turn in range(given.rounds):
            alone += [asked(server.url, None)[0] for _ in range(given.requests)]
            threads = []
            for i in range(SLOW):
                form = slow(1 + turn * SLOW + i)
                threads.append(threading.Thread(target=lambda form=form: slowly.append(asked(server.url, form)[0])))
                threads[-1].start()
            time.sleep(0.2)
            small.append(asked(server.url, {"enum": [f"{turn}", "x"]}, 8)[0])
            while any(thread.is_alive() for thread in threads) and len(beside) < given.requests * (turn + 1):
                beside.append(asked(server.url, None)[0])
            for thread in threads:
                thread.join()
    report["seconds"] = {"alone": alone, "beside": beside, "small schema beside": small, "slow schemas": slowly}
    report["median"] = {name: statistics.median(values) for name, values in report["seconds"].items()}
    report["ratio"] = report["median"]["beside"] / report["median"]["alone"]
    show(report, given.out)


if __name__ == "__main__":
    main()
