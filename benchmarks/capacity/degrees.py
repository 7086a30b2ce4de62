"""Extrapolates figures of one card and of two to replicas of 2, 4 and 8 cards: which layout suits eight cards?

    python -m benchmarks.capacity.degrees --out FILE.json

Nobody has measured more than two cards, several requests on two cards, or LLaDA2-flash with several requests. So all
rows except LLaDA2-mini on one card are extrapolated, by these rules:

* Cards divide one part of a step and not the other. For LLaDA2-mini both follow from one card and two, with one request
  (`tensor-parallel-h200.json`). The second part is proportional to layers: LLaDA2-flash has 32, LLaDA2-mini 20.
* With more requests or wider steps, the first part grows as LLaDA2-mini's does on one card. LLaDA2-flash has as many
  experts, and a token chooses as many, so its bytes and operations grow alike.
* In fp8, steps of 64 positions a row were measured with up to 16 rows. With more rows they take the time of bf16, times
  the ratio of both formats in steps of as many positions, 32 a row.
* The two sums of a layer take their time alone on two cards, by rows, in proportion to the width. Among N cards each
  moves 2 (N - 1) / N of a tensor, so the time beyond that of one row grows by that factor. The time of one row is taken
  as the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.capacity.cluster import Cluster, Router
from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.limits import read
from benchmarks.capacity.replica import Setting
from benchmarks.capacity.steps import StepTimes, between
from benchmarks.capacity.traffic import Asked, poisson
from benchmarks.provenance import begun, save
from benchmarks.shapes import shape
from dinfer.step.contracts import ModelSpec

RESULTS = Path(__file__).parents[1] / "results"
TWO = "tensor-parallel-h200.json"
STEPS = {"bf16": "capacity-llada2-mini-h200.json", "fp8": "capacity-llada2-mini-fp8-h200.json"}
MORE = "capacity-llada2-mini-wide-h200.json"  # in bf16: steps of 64 positions a row, with more rows
MEASURED_WIDTH = 4096  # of the sums in TWO
CARDS, DEGREES, ROWS = 8, (1, 2, 4, 8), 64
FIRST = ("WINDOW", 1, 32)  # the step of one request
PROMPT, NEW = 512, 128  # tokens; canvases of this length were measured in both formats
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the capacity of a shape's best layout


@dataclass(frozen=True, slots=True)
class Split:
    """The time of a step of one request on one card, in milliseconds."""

    whole: float  # that cards do not divide
    shared: float  # that cards divide

    @classmethod
    def of(cls, one: float, two: float, sums: float) -> Split:
        """From the times of the step on one card, on two, and of the sums on two."""
        shared = 2 * (one - two + sums)
        return cls(one - shared, shared)


def sums_ms(two: Mapping[str, Any], spec: ModelSpec, positions: float, cards: int) -> float:
    """The time of the sums of a step over so many positions, in milliseconds."""
    if cards == 1:
        return 0.0
    measured = two["collectives, bf16, 2 cards"]["us"]
    points = {float(name.split()[0]): (min(us.values()),) for name, us in measured.items()}
    begin = points[min(points)][0]
    beyond = between(points, positions * spec.hidden / MEASURED_WIDTH)[0] - begin
    moved = 2 * (cards - 1) / cards  # 1 on two cards
    return 2 * spec.layers * (begin + beyond * moved) / 1e3


def splits(two: Mapping[str, Any]) -> dict[tuple[str, str], Split]:
    """By shape and format. LLaDA2-flash was measured only in bf16 on two cards, and only in fp8 on one."""

    def step(name: str) -> float:
        return float(two[name]["step_ms"])

    def sums(name: str) -> float:
        return float(two[name]["parts"]["collectives"]["own_us"]) / 1e3

    pair = "llada2-mini, bf16, 2 cards"  # symmetric sums alone, which are kernels of their own
    mini = Split.of(step("llada2-mini, bf16, 1 cards"), step(pair), sums(pair))
    large = "llada2-flash, bf16, 2 cards"
    whole = mini.whole * shape("llada2-flash")[1].layers / shape("llada2-mini")[1].layers
    return {
        ("llada2-mini", "bf16"): mini,
        ("llada2-flash", "bf16"): Split(whole, 2 * (step(large) - sums(large) - whole)),
        ("llada2-flash", "fp8"): Split(whole, step("llada2-flash, fp8, 1 cards") - whole),
    }


def steps_of_one(format: str) -> dict[str, Any]:
    """A report of LLaDA2-mini's steps on one card."""
    plain, more, found = (read(RESULTS / name) for name in (STEPS["bf16"], MORE, STEPS[format]))
    if format == "bf16":
        return found | {"steps": found["steps"] + more["steps"]}

    def narrow(report: Mapping[str, Any]) -> dict[float, tuple[float]]:
        return {
            row["lanes"]: (row["mean_ms"],) for row in report["steps"] if (row["phase"], row["width"]) == FIRST[::2]
        }

    wide, ours, theirs = [], narrow(found), narrow(plain)
    for row in (row for row in more["steps"] if row["phase"] == "WINDOW" and row["width"] == 64):
        share = between(ours, 2 * row["lanes"])[0] / between(theirs, 2 * row["lanes"])[0]
        times = [share * value for value in row["quantiles_ms"]]
        wide.append(row | {"mean_ms": share * row["mean_ms"], "quantiles_ms": times})
    return found | {"steps": found["steps"] + wide}


def extrapolated(
    report: Mapping[str, Any], name: str, own: Split, two: Mapping[str, Any], cards: int, alone: float
) -> StepTimes:
    """The step times of a shape on some cards. `report`: LLaDA2-mini's. `alone`: its step of one request, in ms."""
    spec, steps = shape(name)[1], []
    for row in report["steps"]:
        at_one = row["mean_ms"] * (own.whole + own.shared) / alone  # of this shape, on one card
        ms = own.whole + max(at_one - own.whole, 0.0) / cards
        ms += sums_ms(two, spec, row["lanes"] * row["width"], cards)
        scale = ms / row["mean_ms"]
        steps.append(row | {"mean_ms": ms, "quantiles_ms": [scale * value for value in row["quantiles_ms"]]})
    setting = report["setting"] | {"shape": name, "tensor_parallel": cards}
    return StepTimes(
        {**report, "setting": setting, "steps": steps}, f"{name} on {cards} cards, extrapolated", reach=0.1
    )


class Layout:
    """Eight cards, divided into replicas."""

    def __init__(self, times: StepTimes, rate: float) -> None:
        self.times, self.denoising = times, Denoising.at_rate(rate, times.block)

    def cluster(self, replicas: int, warm: float) -> Cluster:
        setting = Setting(rows=ROWS, gather=True)
        return Cluster(self.times, self.denoising, setting, Router(), replicas=replicas, seed=0, warm=warm)

    def alone(self) -> float:
        """Seconds of an answer, one request at a time."""
        return float(self.cluster(1, 0.0).closed_loop([Asked(0.0, PROMPT, NEW)] * 4, 1)["latency_s"]["p50"])

    def most(self) -> float:
        """Requests a second of all cards if the rows of each replica are always full."""
        work = [Asked(0.0, PROMPT, NEW)] * (4 * ROWS)
        one = self.cluster(1, 0.0).closed_loop(work, ROWS)["requests_per_s"]
        return float(one) * CARDS / self.times.cards

    def under(self, load: float, seconds: float, warm: float) -> dict[str, Any]:
        found = self.cluster(CARDS // self.times.cards, warm).open_loop(
            poisson(load, PROMPT, NEW, seconds, Random(0)), seconds
        )
        return {name: found[name] for name in ("tokens_per_s", "first_block_s", "latency_s", "left", "beyond")}


def compared(rate: float, seconds: float, warm: float) -> list[dict[str, Any]]:
    two, rows = read(RESULTS / TWO), list[dict[str, Any]]()
    for (name, format), own in splits(two).items():
        report = steps_of_one(format)
        alone = next(row["mean_ms"] for row in report["steps"] if (row["phase"], row["lanes"], row["width"]) == FIRST)
        for cards in (degree for degree in DEGREES if degree > 1 or (name, format) != ("llada2-flash", "bf16")):
            layout = Layout(extrapolated(report, name, own, two, cards, alone), rate)
            rows.append(
                {
                    "shape": name, "format": format, "cards": cards, "layout": layout, "alone_s": layout.alone(),
                    "most": layout.most(), "measured": name == "llada2-mini" and cards == 1, "loads": [],
                }
            )  # fmt: skip
    for row in rows:
        best, layout = max(one["most"] for one in rows if one["shape"] == row["shape"]), row.pop("layout")
        for share in SHARES:
            if share * best < 0.97 * row["most"]:
                row["loads"].append({"share": share, **layout.under(share * best, seconds, warm)})
        print({name: value for name, value in row.items() if name != "loads"}, flush=True)
    return rows


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-step", type=float, default=2.6)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--warm", type=float, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    rows = compared(given.tokens_per_step, given.seconds, given.warm)
    how = {"prompt": PROMPT, "new": NEW, "rows_of_replica": ROWS, "of_cards": CARDS, "extrapolated": True}
    save({**begun(given, torch.device("cpu")), **how, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
