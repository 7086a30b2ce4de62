"""Runs a thousand streams at once, many of which break off, and measures the cost of a server beside its engine.

    python -m benchmarks.serving.load endure --seconds 600 --out benchmarks/results/serving-endure.json
    python -m benchmarks.serving.load measure --in-flight 1,16,64,256 --shape llada2-mini --out FILE.json
    python -m benchmarks.serving.load measure --in-flight 1,8 --url http://127.0.0.1:8000/ --name tiny
    python -m benchmarks.serving.load picture --model FOLDER --out benchmarks/results/serving-picture-cpu.json

`endure` starts a server of the model in the box. 30% of its clients leave, 5% read slowly, and whole processes of
clients are killed. All complete answers must be those of the library. Afterwards every slot and page must be free, and
memory must not have grown by more than 50 MB since the server was warm.

It is warm after the first tenth of the time, and 30 seconds at least. By then all clients are there, and every page of
keys and values has been written, which is when the system gives memory for it. A figure of memory is the lowest of 30
seconds, since a step holds some 100 MB more while it runs. What leaks is in the lowest figure too. `memory_mb` has all.

`measure` keeps so many requests in flight, in a closed loop, without drafts and with them. Arguments that it does not
know go to `benchmarks.serving.full_size`, which runs the same requests in the engine alone and then serves them. With
`--url` there is no such baseline; it asks held-out problems as chats. Each load comes until the server captures no
CUDA graph (`benchmarks.clock`). `rounds` and `round_ms` are of its engine, so that a figure can be set beside the steps
that it should take.

`picture` keeps 30 text requests in flight, in turns without and with a request that has a picture of 4,000 x 3,000, of
which the next one begins when it has ended, or one alone. FOLDER is a DiffusionGemma with its vision tower.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from base64 import b64encode
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dinfer
from benchmarks import throughput
from benchmarks.clock import Lap, bounds, settled
from benchmarks.feeds import random_prompts
from benchmarks.provenance import provenance, save, show
from benchmarks.serving.process import Started, serving, started
from benchmarks.serving.streams import Outcome, taken
from benchmarks.shapes import shape
from dinfer.demo.problems import generate

LEAVE, SLOW = 0.3, 0.05  # shares of the requests
PROCESSES = 8  # of clients
STREAMS = 16  # of a process of clients that is timed
QUESTIONS = 64
NEW_TOKENS = 32
MEGABYTE = 2**20
MOST_GROWTH = 50 * MEGABYTE
WINDOW = 30.0  # seconds of one figure of memory; the first figure never counts
SETTLED = 20  # seconds after which everything must be free
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SERVER = ("device=cpu", f"max_new_tokens={NEW_TOKENS}", "runtime.rows=128", "max_requests=4096")


class Clients:
    """A process of clients. A thread collects their outcomes."""

    def __init__(self, outcomes: list[dict[str, Any]], **crowd: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.streams"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        json.dump(crowd, self.process.stdin)
        self.process.stdin.close()
        self._reader = threading.Thread(target=self._collect, args=(outcomes,))
        self._reader.start()

    def _collect(self, outcomes: list[dict[str, Any]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a process that was killed
                outcomes.append(json.loads(line))

    def wait(self) -> int:
        status = self.process.wait()
        self._reader.join()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.wait()


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def metrics(url: str, *names: str) -> dict[str, float]:
    """The server's figures of these names, summed over its engines."""
    with urllib.request.urlopen(f"{url}metrics", timeout=60) as response:
        text = response.read().decode()
    return {
        name: sum(map(float, re.findall(rf"^dinfer_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))) for name in names
    }


GAUGES = ("requests_in_flight", "tokens_in_flight", "waiting", "running", "pages_free", "pages")


def work(url: str) -> dict[str, float]:
    """The graphs that the server's engines have captured so far, their rounds, and the seconds of these."""
    found = metrics(url, "graphs", "round_seconds_count", "round_seconds_sum")
    return dict(zip(("graphs", "rounds", "seconds"), found.values(), strict=True))


def free(taken: dict[str, float]) -> bool:
    """Whether the server is idle."""
    return not any(taken[name] for name in GAUGES[:4]) and taken["pages"] == taken["pages_free"]


def endured(server: Started, seconds: float, streams: int, want: list[str], bodies: list[Any]) -> dict[str, Any]:
    """Runs the clients for so many seconds."""
    outcomes: list[dict[str, Any]] = []
    began, draw, seeds, killed = time.monotonic(), random.Random(0), itertools.count(), 0

    def crowd() -> Clients:
        left = max(seconds - (time.monotonic() - began), 1)
        return Clients(
            outcomes, url=f"{server.url}v1/chat/completions", streams=streams // PROCESSES, bodies=bodies,
            seed=next(seeds), seconds=left, leave=LEAVE, slow=SLOW,
        )  # fmt: skip

    clients = [crowd() for _ in range(PROCESSES)]
    ready, lows, most, next_kill = memory(server.pid), list[int](), 0.0, seconds / 8
    while (now := time.monotonic() - began) < seconds:
        time.sleep(min(1, seconds - now))
        now, resident = time.monotonic() - began, memory(server.pid)
        most = max(most, in_flight := metrics(server.url, *GAUGES)["requests_in_flight"])
        if now < WINDOW * len(lows):
            lows[-1] = min(lows[-1], resident)
        elif now < seconds:
            low = lows[-1] // MEGABYTE if lows else 0
            print(f"{now:.0f} s: {in_flight:.0f} in flight, {len(outcomes)} done, {low} MB", flush=True)
            lows.append(resident)
        if now >= next_kill and now < 0.9 * seconds:
            index = draw.randrange(PROCESSES)
            clients[index].kill()
            killed, clients[index], next_kill = killed + 1, crowd(), next_kill + seconds / 8
    statuses = [client.wait() for client in clients]
    lasted, end = time.monotonic() - began, time.monotonic() + SETTLED
    while not free(taken := metrics(server.url, *GAUGES)) and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(1)
    after, warm = memory(server.pid), lows[min(max(math.ceil(seconds / 10 / WINDOW), 1), len(lows) - 1)]
    growth = max(after, lows[-1]) - warm
    return answered(outcomes, want, lasted) | {
        "streams": streams,
        "seconds": round(lasted, 1),
        "most_in_flight": most,
        "processes_killed": killed,
        "streams_killed": killed * (streams // PROCESSES),
        "clients_ended_well": not any(statuses),
        "taken_after": taken,
        "all_free_after": free(taken),
        "memory_mb": {
            "ready": round(ready / MEGABYTE, 1), "each_30_s": [low // MEGABYTE for low in lows],
            "warm": round(warm / MEGABYTE, 1), "after": round(after / MEGABYTE, 1),
            "growth": round(growth / MEGABYTE, 1),
        },
        "memory_is_steady": growth <= MOST_GROWTH,
    }  # fmt: skip


def answered(outcomes: list[dict[str, Any]], want: list[str], lasted: float) -> dict[str, Any]:
    """What became of the requests whose clients did not leave."""
    read = [found for found in outcomes if found["fate"] != "leave"]
    right = [found for found in read if found["done"] and found["text"] == want[found["asked"]]]
    errors = Counter(found["error"] or f"status {found['status']}" for found in read if not found["done"])
    return {
        "requests": len(outcomes),
        "left": len(outcomes) - len(read),
        "read_slowly": sum(found["fate"] == "slow" for found in read),
        "survivors": len(read),
        "survivors_right": len(right),
        "survivors_wrong": sum(found["done"] for found in read) - len(right),
        "survivors_unfinished": dict(errors),
        "answers_per_s": round(len(right) / lasted, 1),
        "tokens_per_s": round(sum(found["tokens"] for found in right) / lasted, 1),
        "survivors_are_right": bool(right) and len(right) == len(read),
    }


def endure(args: argparse.Namespace) -> dict[str, Any]:
    asked = [[{"role": "user", "content": p.question}] for p in generate("heldout", QUESTIONS, 0)]
    want = [r.text for r in dinfer.load("tiny", device="cpu").generate(asked, max_new_tokens=NEW_TOKENS)]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"model": "tiny", "messages": messages, **usage} for messages in asked]
    with tempfile.TemporaryDirectory() as folder, serving(*SERVER, log=f"{folder}/server.log") as server:
        found = endured(server, args.seconds, args.streams, want, bodies)
        errors = [line for line in Path(f"{folder}/server.log").read_text().splitlines() if '"level": "error"' in line]
    found["errors_in_the_log"] = errors[:5]
    return {"server": list(SERVER), **found}


def measure(args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """The latency of N requests in flight, and the share of the engine's throughput that the server keeps."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        levels: list[int] = args.in_flight
        if args.url:
            if rest:
                raise SystemExit(f"{' '.join(rest)}: a server at a URL has settings of its own")
            asked = [p.question for p in generate("heldout", max(levels), 0)]
            bodies = [{"messages": [{"role": "user", "content": text}]} for text in asked]
            url, path, alone, setting, stagger = args.url, "v1/chat/completions", {}, {"new": args.new}, False
        else:
            shared = [
                *rest, "--in-flight", ",".join(map(str, levels)), "--new", str(args.new), "--rounds", str(args.rounds)
            ]  # fmt: skip
            given, report = throughput.arguments(shared), f"{folder}/engine.json"
            command = [sys.executable, "-m", "benchmarks.serving.full_size", "--port", "0", "--out", report, *shared]
            url = stack.enter_context(started(command, f"{folder}/server.log")).url
            alone = {run["in_flight"]: run["tokens_per_s"] for run in json.loads(Path(report).read_text())["runs"]}
            asked = random_prompts(shape(given.shape)[1], max(levels), given.prompt)
            bodies = [{"prompt": prompt, "ignore_eos": True} for prompt in asked]
            path, setting, stagger = "v1/completions", vars(given) | {"out": None}, given.stagger
        usage = {"model": args.name, "stream": True, "stream_options": {"include_usage": True}}
        runs = []
        for level, drafts in itertools.product(levels, (False,) if args.no_drafts else (False, True)):
            each = throughput.lengths(level, args.rounds, args.new, stagger)
            own = [
                body | usage | {"max_tokens": new, "dinfer": {"drafts": drafts}}
                for body, new in zip(itertools.cycle(bodies[:level]), each, strict=False)
            ]
            (found, *_), about = settled(partial(once, url, path, level, own), args.passes, args.warm_up)
            engine = alone.get(level)
            share = {"engine_tokens_per_s": engine, "share": found["tokens_per_s"] / engine} if engine else {}
            runs.append({"in_flight": level, "drafts": drafts, **found, **about, **share})
            print(runs[-1], flush=True)
            save({**provenance(DEVICE), "setting": setting, "runs": runs}, args.out)
    return {"setting": setting, "runs": runs}


def once(url: str, path: str, level: int, bodies: list[dict[str, Any]]) -> Lap:
    """A load, and what the server's engines did for it."""
    before = work(url)
    found = timed(f"{url}{path}", level, bodies)
    done = {name: value - before[name] for name, value in work(url).items()}
    rounds = {"rounds": done["rounds"], "round_ms": 1e3 * done["seconds"] / max(done["rounds"], 1)}
    return Lap(found | rounds, found["seconds"], int(done["graphs"]))


def timed(url: str, streams: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """A closed loop over the requests."""
    outcomes: list[dict[str, Any]] = []
    clients = [
        Clients(
            outcomes, url=url, streams=len(own := range(first, min(first + STREAMS, streams))),
            bodies=[body for i, body in enumerate(bodies) if i % streams in own],
        )
        for first in range(0, streams, STREAMS)
    ]  # fmt: skip
    if any([client.wait() for client in clients]):
        raise RuntimeError("a process of clients failed")
    return taken([Outcome(**found) for found in outcomes])


def picture(args: argparse.Namespace) -> dict[str, Any]:
    """How much longer 30 requests take beside one with a large picture, and what memory that takes."""
    from PIL import Image

    noise = Image.effect_noise((250, 188), 90).resize((4000, 3000))  # a file of some 3 MB
    noise.convert("RGB").save(file := io.BytesIO(), "JPEG", quality=args.quality)
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"}}
    ]
    usage = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": args.new}
    texts = [usage | {"messages": [{"role": "user", "content": "w1 w2"}], "seed": i} for i in range(30 * args.rounds)]
    seen = [usage | {"messages": [{"role": "user", "content": parts}]}]
    own = (
        f"model={args.model}",
        "device=cpu",
        "max_requests=64",
        "runtime.rows=32",
        "runtime.max_length=512",
        "decoder.steps=8",
    )
    runs = []
    with tempfile.TemporaryDirectory() as folder, serving(*own, log=f"{folder}/server.log") as server:
        url = f"{server.url}v1/chat/completions"
        timed(url, 30, texts)
        for kind in ("none", "one", "one", "none", "always", "none") * args.repeats:
            pictures: list[dict[str, Any]] = []
            before, seconds = memory(server.pid), 600 if kind == "always" else None
            beside = [] if kind == "none" else [Clients(pictures, url=url, streams=1, bodies=seen, seconds=seconds)]
            run = timed(url, 30, texts)
            for client in beside:
                client.kill() if kind == "always" else client.wait()
            if not all(found["done"] for found in pictures) or (beside and not pictures):
                raise RuntimeError(f"a picture failed: {pictures[-1:]}")
            growth = (memory(server.pid) - before) / MEGABYTE
            runs.append({"pictures": kind, "answered": len(pictures), **run, "memory_growth_mb": round(growth, 1)})
            print(runs[-1], flush=True)
    median = {
        kind: statistics.median(run["latency_s"]["median"] for run in runs if run["pictures"] == kind)
        for kind in ("none", "one", "always")
    }
    ratio = {kind: round(median[kind] / median["none"], 3) for kind in ("one", "always")}
    return {"server": list(own), "file_bytes": len(file.getvalue()), "median_s": median, "ratio": ratio, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("endure")
    first.add_argument("--seconds", type=float, default=600)
    first.add_argument("--streams", type=int, default=1000)
    second = commands.add_parser("measure")
    second.add_argument("--in-flight", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16])
    second.add_argument("--rounds", type=int, default=2, help="timed requests for each in flight")
    bounds(second)
    second.add_argument("--new", type=int, default=512, help="tokens of an answer")
    second.add_argument("--no-drafts", action="store_true", help="without the runs that show drafts")
    second.add_argument("--url", help="of a server that runs; ends in a slash")
    second.add_argument("--name", default="shape", help="the model at that URL")
    third = commands.add_parser("picture")
    third.add_argument("--model", required=True, help="a folder")
    third.add_argument("--rounds", type=int, default=4, help="requests of each of the thirty")
    third.add_argument("--repeats", type=int, default=3, help="of the six turns")
    third.add_argument("--new", type=int, default=32, help="tokens of an answer")
    third.add_argument("--quality", type=int, default=90, help="of the JPEG")
    for each in (first, second, third):
        each.add_argument("--out", type=Path, help="a JSON file")
    args, rest = parser.parse_known_args()
    if args.command != "measure" and rest:
        parser.error(f"{rest[0]} is not an argument of {args.command}")
    if args.command == "endure" and args.seconds < 3 * WINDOW:
        parser.error(
            f"--seconds {args.seconds:g} is too short to tell a leak from warming up: give {3 * WINDOW:g} or more"
        )
    found = (
        measure(args, rest) if args.command == "measure" else {"endure": endure, "picture": picture}[args.command](args)
    )
    report = {**provenance(DEVICE), **found}
    show(report, args.out)
    if failed := [name for name, value in found.items() if value is False]:
        raise SystemExit(f"not so: {', '.join(failed)}")


if __name__ == "__main__":
    main()
