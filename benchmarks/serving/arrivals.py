"""The server under Poisson arrivals: goodput, the requests a second whose first block comes in time.

    python -m benchmarks.serving.arrivals --rates 8,16,24 --trace AzureLLMInferenceTrace_conv.csv --out FILE.json \
        --shape llada2-mini --spread --favour throughput --in-flight 64 --length 2048
    python -m benchmarks.serving.arrivals --rates 1,2 --seconds 8 --shape small-llada2 --device cpu --prompt 32 --new 64

Prompts and answers have the lengths of the trace's requests, as far as they fit into `--length`; without a trace those
of `--prompt` and `--new`. `--rates` are of all servers together. `--replicas 2` starts a server on each of two cards,
and requests go to them in turn. Other arguments go to `benchmarks.serving.full_size`. Before the first rate, the engine
runs as many requests as `--in-flight` twice, and the last rate comes for as long as it counts later.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import throughput
from benchmarks.feeds import random_prompts
from benchmarks.provenance import provenance, save
from benchmarks.serving.load import DEVICE, PROCESSES, Clients
from benchmarks.serving.process import started
from benchmarks.serving.streams import percentiles
from benchmarks.serving.traffic import Asked, poisson, trace
from benchmarks.shapes import shape

IN_TIME = 1.0  # seconds until the first block
WARM = 0.25  # share of a rate's time that does not count at its beginning


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def drawn(setting: dict[str, Any], rate: float) -> list[Asked]:
    """The requests of a rate, the same at every call."""
    lengths = [(setting["prompt"], setting["new"])]
    if setting["trace"]:
        every = [(one.prompt, one.new) for one in trace(Path(setting["trace"]))]
        lengths = [one for one in every if sum(one) <= setting["length"]]
    return [*poisson(rate, lengths, setting["seconds"], Random(0))]


def figures(rows: Iterable[tuple[float, float | None, float, int]], seconds: float) -> dict[str, Any]:
    """Of requests that were sent when the beginning was over: when each was sent, its first block, its end, its tokens.

    A request without a first block was refused, or failed.
    """
    found = [row for row in rows if row[0] >= WARM * seconds]
    firsts = [first for _, first, _, _ in found if first is not None]
    return {
        "requests_per_s": round(len(found) / (seconds * (1 - WARM)), 2),
        "goodput_per_s": round(sum(first <= IN_TIME for first in firsts) / (seconds * (1 - WARM)), 2),
        "tokens_per_s": round(sum(tokens for *_, tokens in found) / (seconds * (1 - WARM)), 1),
        "without_answer": len(found) - len(firsts), "first_block_ms": percentiles(firsts),
        "latency_ms": percentiles([ended for _, first, ended, _ in found if first is not None]),
    }  # fmt: skip


def sent(urls: list[str], asked: list[Asked], prompts: list[list[int]]) -> list[tuple[float, float | None, float, int]]:
    """The rows of `figures`: each request at its time, to the servers in turn."""
    bodies = [
        {"model": "shape", "prompt": prompt, "max_tokens": one.new, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True}, "dinfer": {"drafts": False}}
        for one, prompt in zip(asked, prompts, strict=True)
    ]  # fmt: skip
    start = time.monotonic() + 2  # processes of clients begin meanwhile
    outcomes: list[dict[str, Any]] = []
    parts = max(PROCESSES // len(urls), 1) * len(urls)  # each asks one server
    clients = [
        Clients(
            outcomes, url=f"{url}v1/completions", streams=len(bodies[part::parts]), bodies=bodies[part::parts],
            at=[start + one.at for one in asked[part::parts]],
        )
        for part, url in zip(range(parts), cycle(urls), strict=False)
    ]  # fmt: skip
    if any([client.wait() for client in clients]):
        raise RuntimeError("a process of clients failed")
    for why in {found["error"] or f"status {found['status']}" for found in outcomes if not found["done"]}:
        print("a request failed:", why, flush=True)
    return [
        (found["began"] - start, found["first"] if found["done"] else None, found["ended"] - found["began"],
         found["tokens"])
        for found in outcomes
    ]  # fmt: skip


def measure(own: argparse.Namespace, rest: list[str]) -> None:
    """Starts the servers, and measures each rate."""
    given = throughput.arguments(rest)
    setting = vars(given) | vars(own) | {"out": None, "trace": own.trace and str(own.trace)}
    spec, runs = shape(given.shape)[1], list[dict[str, Any]]()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = ["benchmarks.serving.full_size", "--port", "0", "--out", f"{folder}/engine.json", *rest]
        cards = [{"CUDA_VISIBLE_DEVICES": str(card)} for card in range(own.replicas)] if own.replicas > 1 else [{}]
        with ThreadPoolExecutor() as pool:  # servers load at the same time
            starts = [
                pool.submit(stack.enter_context, started([sys.executable, "-m", *server], f"{folder}/{i}.log", **card))
                for i, card in enumerate(cards)
            ]
        urls = [start.result().url for start in starts]
        print("ready:", *urls, flush=True)
        for number, rate in enumerate([own.rates[-1], *own.rates]):
            asked = drawn(setting, rate)
            longest = max(one.prompt for one in asked)
            tokens = random_prompts(spec, len(asked), longest)
            prompts = [each[: one.prompt] for one, each in zip(asked, tokens, strict=True)]
            found = {"rate": rate, **figures(sent(urls, asked, prompts), own.seconds)}
            print("warm-up:" if number == 0 else "", found, flush=True)
            if number:
                runs.append(found)
                save({"setting": setting, **provenance(DEVICE), "runs": runs}, own.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=numbers, required=True, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument("--trace", type=Path, help="whose lengths requests have: Azure's CSV or Mooncake's JSON lines")
    parser.add_argument("--replicas", type=int, default=1, help="servers, each on a card of its own")
    parser.add_argument("--out", type=Path)
    own, rest = parser.parse_known_args()
    measure(own, rest)


if __name__ == "__main__":
    main()
