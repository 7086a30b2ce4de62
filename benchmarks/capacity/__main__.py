"""Simulates cards under a load: throughput, times to the first text and block, latency, and cost.

    python -m benchmarks.capacity --steps benchmarks/results/throughput-llada-8b-h200.json --rows 8 --cards 1,8 \
        --rate 4,8,32 --prompt 128 --new 256 --tokens-per-step 2.6 --price PRICE
    python -m benchmarks.capacity --steps FILE.json --rows 64 --cards 8 --trace AzureLLMInferenceTrace_conv.csv

It simulates every combination of `--cards`, `--rows` and `--rate`. `--steps` has the times of a model, recipe and
number format on one replica's cards. `--rate` is for all cards together. Each replica runs like the engine, and refuses
steps that were not measured. Shared prompts, `runtime.pages` and speculation are not simulated.
"""

from __future__ import annotations

import argparse
from itertools import product
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.capacity.cluster import POLICIES, Cluster, Router, cost
from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.replica import FrontEnd, Setting
from benchmarks.capacity.steps import StepTimes
from benchmarks.capacity.traffic import longer, poisson, trace
from benchmarks.provenance import begun, save
from dinfer.lab.outputs import check_file


def number(text: str) -> float:
    if not isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number")
    return value


def numbers(kind: Any) -> Any:
    def read(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them: {error}") from error

    return read


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=Path, nargs="+", required=True, help="files of benchmarks.capacity.measure or .throughput"
    )
    parser.add_argument("--reach", type=number, default=0.0, help="share by which a step may exceed what was measured")
    parser.add_argument("--cards", type=numbers(int), default=[1])
    parser.add_argument("--rows", type=numbers(int), required=True, help="runtime.rows of a replica")
    parser.add_argument("--gather", action="store_true", help="prefills wait, as with runtime.favour=throughput")
    parser.add_argument("--max-requests", type=int, help="that run or wait at a replica; others are refused")
    parser.add_argument(
        "--few", type=int, help="as runtime.load=adaptive: so many in flight at most get another recipe"
    )
    parser.add_argument("--few-steps", type=Path, nargs="+", help="its steps, as --steps")
    parser.add_argument("--few-tokens-per-step", type=number, help="its blocks, as --tokens-per-step")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--rate", type=numbers(number), help="Poisson: requests a second of all cards together")
    load.add_argument("--trace", type=Path, help="Azure's CSV or Mooncake's JSON lines")
    parser.add_argument("--speed", type=number, default=1.0, help="by how much faster the trace is played")
    parser.add_argument("--leave-out-longer", action="store_true", help="than what was measured, of a trace")
    parser.add_argument("--prompt", type=int, default=512, help="tokens, with --rate")
    parser.add_argument("--new", type=int, default=256, help="tokens, with --rate")
    steps = parser.add_mutually_exclusive_group(required=True)
    steps.add_argument("--tokens-per-step", type=number, help="every block alike")
    steps.add_argument("--denoising", type=Path, help="of benchmarks.capacity.denoising: as a model took them")
    parser.add_argument("--front-end", type=Path, help="the file of its CPU times; default: it takes none")
    parser.add_argument("--policy", choices=POLICIES, default="two_choices", help="which replica takes a request")
    parser.add_argument("--routers", type=int, default=1, help="processes that route")
    parser.add_argument("--seconds", type=number, default=60.0, help="simulated, the warm-up included")
    parser.add_argument("--warm", type=number, default=10.0, help="seconds that are left out at the start")
    parser.add_argument("--price", type=number, help="of a card for an hour, in any currency")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args(args)
    if not 0 <= given.warm < given.seconds:
        parser.error(f"--warm {given.warm} must be at least 0 and less than --seconds {given.seconds}")
    if len({given.few is None, given.few_steps is None, given.few_tokens_per_step is None}) > 1:
        parser.error("--few, --few-steps and --few-tokens-per-step belong together: give all of them, or none")
    for name, least in (("cards", 1), ("rows", 1)):
        if min(getattr(given, name)) < least:
            parser.error(f"--{name} {min(getattr(given, name))} must be at least {least}")
    for name in ("prompt", "new", "routers", "max_requests", "few"):
        if (value := getattr(given, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    return given


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every combination. Raises ValueError, and Unmeasured for steps without figures in the files."""
    times = StepTimes.read(*given.steps, reach=given.reach)
    if given.denoising:
        denoising = Denoising.read(given.denoising, times.block)
    else:
        denoising = Denoising.at_rate(given.tokens_per_step, times.block)
    few = None
    if given.few:
        own = StepTimes.read(*given.few_steps, reach=given.reach)
        few = given.few, own, Denoising.at_rate(given.few_tokens_per_step, own.block)
    front = FrontEnd.read(given.front_end) if given.front_end else FrontEnd()
    played = trace(given.trace, given.speed) if given.trace else []
    left_out = longer(played, times.longest)
    if left_out and not given.leave_out_longer:
        raise ValueError(
            f"--trace {given.trace}: {left_out} of {len(played)} requests are longer than the {times.longest} "
            f"positions that {times.name} was measured with: measure longer ones, or give --leave-out-longer"
        )
    played = [one for one in played if one.prompt + one.new <= times.longest]
    found = []
    for cards, rows, rate in product(given.cards, given.rows, given.rate or [None]):
        if cards % times.cards:
            raise ValueError(f"--cards {cards} must be a multiple of {times.cards}, the cards of a replica")
        setting = Setting(rows=rows, gather=given.gather, most=given.max_requests, front=front)
        router = Router(policy=given.policy, processes=given.routers, seconds=front.routed)
        cluster = Cluster(
            times, denoising, setting, router, replicas=cards // times.cards, seed=given.seed, warm=given.warm, few=few
        )
        draw = Random(given.seed)
        work = played if rate is None else poisson(rate, [(given.prompt, given.new)], given.seconds, draw)
        row = {"rate": rate, "rows": rows, **cluster.open_loop(work, given.seconds)}
        if given.trace:
            row["left_out"] = left_out
        if given.price is not None:
            row["cost_per_million_tokens"] = round(cost(row, given.price), 4)
        found.append(row)
        print(told(row), flush=True)
    return found


def told(row: dict[str, Any]) -> str:
    """A row in words."""
    words = [f"{row['cards']} cards, {row['rows']} rows, {row['tokens_per_s']:.0f} tokens/s"]
    words += [f"{row['requests_per_s']:.2f} of {row['offered'] / row['seconds']:.2f} requests/s"]
    if row["first_block_s"]:
        words += [f"first block {row['first_block_s']['p50']:.3f} s (p99 {row['first_block_s']['p99']:.3f})"]
        words += [f"latency {row['latency_s']['p50']:.2f} s (p99 {row['latency_s']['p99']:.2f})"]
    words += [f"{row['refused']} refused, {row['left']} left, cards busy {row['card_busy']:.0%}"]
    words += [f"{row['beyond']:.0%} of the steps beyond what was measured"] if row["beyond"] else []
    words += [f"{row['left_out']} left out"] if row.get("left_out") else []
    cost = row.get("cost_per_million_tokens")
    return ", ".join(words + ([] if cost is None else [f"{cost} per million tokens"]))


def main(args: list[str] | None = None) -> None:
    given = arguments(args)
    report = begun(given, torch.device("cpu"))
    try:
        if given.out is not None:
            check_file(given.out)
        report["runs"] = run(given)
        save(report, given.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"benchmarks.capacity: {error}") from error


if __name__ == "__main__":
    main()
