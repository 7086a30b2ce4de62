"""Runs the simulations of benchmarks/results/capacity.md and writes their results.

    python -m benchmarks.capacity.ask --steps FILE.json ... --rows 16,64,256 --out FILE.json
    python -m benchmarks.capacity.ask --steps FILE.json ... --trace TRACE.csv --speed 4 --cards 1,8,64 --out FILE.json

For each number of rows, one card gets Poisson arrivals, from a fifth of its capacity to a little more than it. Then 1,
8, 64 and 1,024 cards get the same load a card, in turn and to the less loaded of two, with the load on shared parts.
With `--trace` some cards run a trace instead, played `--speed` times as fast for each card.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.capacity.__main__ import number, numbers, told
from benchmarks.capacity.cluster import Cluster, Router
from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.front_end import FrontEnd
from benchmarks.capacity.limits import read, shared
from benchmarks.capacity.replica import Setting
from benchmarks.capacity.steps import StepTimes
from benchmarks.capacity.traffic import Asked, poisson, trace
from benchmarks.provenance import begun, save
from dinfer.analysis.outputs import check_file

LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05)  # of the capacity of a card
USUAL = 0.8
CARDS = (1, 8, 64, 1024)


class Question:
    """A kind of replica with a kind of request."""

    def __init__(self, given: argparse.Namespace, times: StepTimes, rows: int) -> None:
        self.times = times
        front = FrontEnd.read(given.front_end) if given.front_end else FrontEnd()
        self.prompt, self.new, self.seed, self.rows = given.prompt, given.new, given.seed, rows
        if given.denoising:
            self.denoising = Denoising.read(given.denoising, self.times.block)
        else:
            self.denoising = Denoising.at_rate(given.tokens_per_step, self.times.block)
        self.setting = Setting(
            rows=rows, gather=True, per_request=front.request, per_piece=front.piece, per_round=front.round
        )

    def cluster(self, router: Router, replicas: int, warm: float) -> Cluster:
        return Cluster(self.times, self.denoising, self.setting, router, replicas=replicas, seed=self.seed, warm=warm)

    def most(self) -> float:
        """Requests a second of a replica whose rows are always full."""
        work = [Asked(0.0, self.prompt, self.new)] * (6 * self.rows)
        return self.cluster(Router(), 1, 0.0).closed_loop(work, self.rows)["requests_per_s"]

    def under(self, load: float, router: Router, replicas: int, seconds: float, warm: float) -> dict[str, Any]:
        """Poisson arrivals at `load` requests a second and replica."""
        work = poisson(load * replicas, self.prompt, self.new, seconds, Random(self.seed))
        found = self.cluster(router, replicas, warm).open_loop(work, seconds)
        return {"rows": self.rows, "load": load, **found}


def answers(given: argparse.Namespace) -> dict[str, Any]:
    times, curves, scale = StepTimes.read(*given.steps, reach=given.reach), [], []
    for rows in given.rows:
        question = Question(given, times, rows)
        most = question.most()
        for share in LOADS:
            row = question.under(share * most, Router(), 1, given.seconds, given.warm)
            curves.append({"share": share, "most": most, **row})
            print(told(curves[-1]), flush=True)
    front = read(given.front_end, "front_end", "bytes_per_piece") if given.front_end else None
    ray = read(given.ray, "proxy", "controller") if given.ray else None
    question = Question(given, times, given.usual_rows)
    load = USUAL * question.most()
    for cards in given.cards:
        span = given.warm + (given.seconds - given.warm) / max(
            cards / 64, 1
        )  # many cards give as many requests in less time
        for policy in ("turns", "two_choices") if cards > 1 else ("turns",):
            row = question.under(load, Router(policy=policy), cards // question.times.cards, span, given.warm)
            asked = shared(row, front, ray) if front and ray else {}
            scale.append({"policy": policy, **row, "shared": asked})
            print(policy, told(scale[-1]), flush=True)
    return {"curves": curves, "scale": scale}


def traced(given: argparse.Namespace) -> dict[str, Any]:
    """The rows of a trace, without requests longer than those that were measured."""
    times, rows = StepTimes.read(*given.steps, reach=given.reach), list[dict[str, Any]]()
    question = Question(given, times, given.usual_rows)
    for cards in given.cards:
        played = trace(given.trace, given.speed * cards)
        kept = [one for one in played if one.prompt + one.new <= times.longest]
        seconds = min(given.seconds, kept[-1].at)
        warm = seconds * given.warm / given.seconds
        for policy in ("turns", "two_choices", "least") if cards > 1 else ("turns",):
            cluster = question.cluster(Router(policy=policy), cards // times.cards, warm)
            row = {"policy": policy, "rows": given.usual_rows, **cluster.open_loop(kept, seconds)}
            rows.append(row | {"left_out": len(played) - len(kept)})
            print(policy, told(rows[-1]), flush=True)
    return {"trace": rows}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, nargs="+", required=True)
    parser.add_argument("--reach", type=number, default=0.0, help="share by which a step may exceed what was measured")
    parser.add_argument("--rows", type=numbers(int), default=[16, 64, 128])
    parser.add_argument("--usual-rows", type=int, default=64, help="of the replicas of many cards")
    parser.add_argument("--cards", type=numbers(int), default=CARDS)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--tokens-per-step", type=number, default=2.6)
    parser.add_argument("--denoising", type=Path)
    parser.add_argument("--front-end", type=Path)
    parser.add_argument("--ray", type=Path, help="of benchmarks.capacity.ray_serve")
    parser.add_argument("--seconds", type=number, default=90)
    parser.add_argument("--warm", type=number, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="Azure's CSV or Mooncake's JSON lines")
    parser.add_argument(
        "--speed", type=number, default=1.0, help="by how much faster the trace is played for each card"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    try:
        if given.out is not None:
            check_file(given.out)
        report = {**begun(given, torch.device("cpu")), **(traced(given) if given.trace else answers(given))}
        save(report, given.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"benchmarks.capacity.ask: {error}") from error


if __name__ == "__main__":
    main()
