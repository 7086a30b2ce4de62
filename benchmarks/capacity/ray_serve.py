"""Ray Serve's CPU time of a request, of a piece of a stream, and of an idle replica.

    python -m benchmarks.capacity.ray_serve --out FILE.json

A deployment streams pieces as long as a server's (benchmarks.capacity.front_end) and computes nothing. CPU time is read
for each kind of process: the proxy of a machine, the controller of the cluster, the head's bookkeeping. Answers of one
piece and of many separate the times of a request and of a piece. Times without requests, with few replicas and with
more, give the controller's time of a replica.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from benchmarks.provenance import begun, show

PIECE = 201  # bytes, measured by benchmarks.capacity.front_end
FEW, MANY = 1, 50  # pieces
PAUSE = 0.01  # seconds between pieces, so that each is sent alone
STREAMS = 16
PARTS = {"proxy": "ProxyActor", "controller": "ServeController", "replica": "ServeReplica", "head": "gcs_server"}


@serve.deployment
class Streams:
    async def __call__(self, request: Request) -> StreamingResponse:
        async def pieces() -> AsyncGenerator[bytes]:
            for _ in range(int(request.query_params["pieces"])):
                yield b"x" * PIECE
                await asyncio.sleep(PAUSE)

        return StreamingResponse(pieces(), media_type="text/event-stream")


def taken() -> dict[str, float]:
    """CPU seconds of this program's children so far, by kind of process."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join([process.name(), *process.cmdline()])
            times = process.cpu_times()
        except psutil.Error:
            continue
        for part, name in PARTS.items():
            if name in words:
                found[part] += times.user + times.system
    return found


def used(before: dict[str, float]) -> dict[str, float]:
    return {part: round(value - before[part], 3) for part, value in taken().items()}


def load(url: str, requests: int, pieces: int) -> dict[str, Any]:
    """The CPU seconds of so many answers."""

    def ask(_: int) -> None:
        with urllib.request.urlopen(f"{url}?pieces={pieces}") as response:
            if len(response.read()) != pieces * PIECE:
                raise RuntimeError("an answer is not whole")

    before = taken()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(ask, range(requests)))
    return {"requests": requests, "pieces": requests * pieces, "streams": STREAMS, "cpu_s": used(before)}


def idle(replicas: int, seconds: float) -> dict[str, Any]:
    """The CPU seconds of some time without requests."""
    actor = {"num_cpus": 0}
    app = Streams.options(num_replicas=replicas, ray_actor_options=actor, max_ongoing_requests=64).bind()  # type: ignore[attr-defined]
    serve.run(app, route_prefix="/")
    time.sleep(5)
    before, began = taken(), time.perf_counter()
    time.sleep(seconds)
    return {"replicas": replicas, "seconds": time.perf_counter() - began, "cpu_s": used(before)}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="of each length")
    parser.add_argument("--replicas", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30, help="without requests")
    parser.add_argument("--port", type=int, default=8317)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": given.port})
    try:
        few = idle(1, given.seconds)
        url = f"http://127.0.0.1:{given.port}/"
        load(url, 50, MANY)
        short, long = (load(url, given.requests, pieces) for pieces in (FEW, MANY))
        many = idle(given.replicas, given.seconds)
    finally:
        serve.shutdown()
        ray.shutdown()
    count = long["pieces"] - short["pieces"]
    piece = (long["cpu_s"]["proxy"] - short["cpu_s"]["proxy"]) / count
    each = [run["cpu_s"]["controller"] / run["seconds"] for run in (few, many)]
    report = {
        **begun(given, torch.device("cpu")), "ray": ray.__version__,
        "idle": [few, many], "loads": [short, long],
        "proxy": {"request": (short["cpu_s"]["proxy"] - short["pieces"] * piece) / given.requests, "piece": piece},
        "controller": {"alone": each[0], "per_replica": (each[1] - each[0]) / (given.replicas - 1)},
    }  # fmt: skip
    show(report, given.out)


if __name__ == "__main__":
    main()
