"""Measured step times, interpolated between measurements and refused beyond them."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import SHAPES, shape

PERCENT = (5, 25, 50, 75, 95)
WEIGHTS = (0.15, 0.225, 0.25, 0.225, 0.15)  # of each quantile in the mean of `Spread.at`
LEAST = 4  # launches of a shape in a file of benchmarks.throughput: with fewer, captures are in the median

SAME = ("shape", "model", "dtype", "quantize", "block", "spread", "kv", "positions", "tensor_parallel")  # of all files


class Unmeasured(ValueError):
    """A step or a request is beyond the measurements."""


class Spread(NamedTuple):
    """Milliseconds at the percentiles 5, 25, 50, 75 and 95."""

    p5: float
    p25: float
    p50: float
    p75: float
    p95: float

    def at(self, share: float) -> float:
        """The quantile at `share` of 1, which is cut to the measured ones."""
        percent = min(max(100 * share, PERCENT[0]), PERCENT[-1])
        right = max(bisect_left(PERCENT, percent), 1)
        low, high = PERCENT[right - 1], PERCENT[right]
        return self[right - 1] + (self[right] - self[right - 1]) * (percent - low) / (high - low)

    @property
    def mean(self) -> float:
        """The mean of `at` over all shares."""
        return sum(weight * value for weight, value in zip(WEIGHTS, self, strict=True))


def between(points: Mapping[float, Sequence[float]], at: float) -> tuple[float, ...]:
    """Linear interpolation between points. Below the least point it is constant, since a smaller step takes no longer.

    Above the largest, its value in proportion, which is no less than a larger step takes.
    """
    places = sorted(points)
    right = bisect_left(places, at)
    if right == len(places):
        return tuple(value * at / places[-1] for value in points[places[-1]])
    if right == 0:
        return tuple(points[places[0]])
    low, high = places[right - 1], places[right]
    share = (at - low) / (high - low)
    return tuple(a + (b - a) * share for a, b in zip(points[low], points[high], strict=True))


class StepTimes:
    """Times of steps by shape, interpolated between measured shapes and refused beyond them.

    `reach`: by what share a step may be larger than the largest one measured; its time is then taken in proportion,
    and counted in `beyond`.

    Between numbers of lanes, and between lengths of canvases, time is taken as linear. A prefill takes what as many
    positions took in rows of another length, the nearest if several were measured. Where rows settle, wide windows are
    rare. One that was not measured takes what as many positions took in narrow windows: on an H200 that is off by 6%.
    """

    def __init__(self, report: Mapping[str, Any], name: str, *, reach: float = 0.0) -> None:
        """`report`: of benchmarks.capacity.measure or benchmarks.throughput. `name`: for messages."""
        if reach < 0:
            raise ValueError(f"--reach {reach} must be at least 0")
        self.name, self.report, self.reach = name, report, 1 + reach
        self.steps = self.beyond = 0  # requested steps, and those of them larger than measured ones
        setting = report["setting"]
        if setting.get("model") or setting.get("shape") not in SHAPES:
            raise ValueError(f"{name} is not of a shape of benchmarks.shapes: measure one with --shape")
        self.spec = shape(setting["shape"])[1]
        self.block, self.longest, self.cards = setting["block"], 0, int(setting.get("tensor_parallel") or 1)
        self.settle = bool(setting.get("settle", setting.get("favour") == "throughput"))
        self.ahead = setting.get("device", "").startswith("cuda")  # with graphs, the engine launches rounds ahead
        lines: Any = defaultdict(lambda: defaultdict(dict))
        launched = Counter[int]()  # window steps by their width
        for row in rows_of(report):
            phase, canvas = row["phase"], row["canvas"]
            self.longest = max(self.longest, canvas)
            # A window's lines are by length of canvas, over lanes; those of other steps by width, over all positions.
            if phase == "WINDOW":
                launched[row["width"]] += row["launches"]
                lines[phase, row["width"]][canvas][row["lanes"]] = spread_of(row)
            else:
                lines[phase, 0][row["width"]][row["lanes"] * row["width"]] = spread_of(row)
        self._lines: dict[tuple[str, int], dict[int, dict[float, Spread]]] = lines
        if not self._lines:
            raise ValueError(f"{name} has no step that was launched often enough: measure it with more requests")
        # A narrow window's later steps compute less than a block, as do a few where a canvas ends within one.
        self.narrow = max(launched, key=lambda width: (launched[width], -width), default=self.block)
        self.settle = self.settle and self.narrow == self.block
        self.kind = "dual" if ("FULL", 0) in self._lines else "block"
        # The shortest canvases come last: the most rows were measured with them.
        self.gaps = {row["rows"]: [row["gap_ms"]] for row in [*report.get("rounds", ())][::-1]}
        self.host = {row["rows"]: [row["round_ms"]] for row in report.get("host", ())}
        self.spreads = any("quantiles_ms" in row for row in report.get("steps", ()))

    @classmethod
    def read(cls, *paths: Path, reach: float = 0.0) -> StepTimes:
        """Reads files of the same shape: the steps of all, and everything else of the first. Raises ValueError."""
        reports = [_report(path) for path in paths]
        first = reports[0] | {"steps": [row for report in reports for row in rows_of(report)]}
        for path, report in zip(paths, reports, strict=True):
            for name in SAME:
                own, other = (one["setting"].get(name) for one in (report, first))
                if own != other:
                    raise ValueError(f"--steps {path} has {name}={own}, and {paths[0]} has {name}={other}")
        return cls(first, " and ".join(path.name for path in paths), reach=reach)

    @property
    def rows(self) -> int:
        """The most rows of a measured window step."""
        return int(max(max(line) for line in self._lines["WINDOW", self.narrow].values()))

    def window(self, lanes: int, width: int, canvas: int) -> Spread:
        """A window step of so many lanes, for rows with canvases of that mean length."""
        return self._counted(*self._window(lanes, width, canvas))

    def wide(self, phase: str, lanes: int, width: int) -> Spread:
        """A prefill, or a pass over whole canvases."""
        return self._counted(*self._wide(phase, lanes, width))

    def _counted(self, found: Spread, beyond: bool) -> Spread:
        self.steps, self.beyond = self.steps + 1, self.beyond + beyond
        return found

    @lru_cache(maxsize=65536)  # noqa: B019 (one object lives as long as the program)
    def _window(self, lanes: int, width: int, canvas: int) -> tuple[Spread, bool]:
        ways = [(lanes, width)]
        if width == 2 * self.block == 2 * self.narrow:
            ways.append((2 * lanes, self.block))
        elif width == self.block != self.narrow:  # in a file of narrow windows
            ways.append((-(-lanes // 2), 2 * self.block))
        for reach, (many, wide) in product((1.0, self.reach), ways):
            every = self._lines.get(("WINDOW", wide), {})
            lines = {length: line for length, line in every.items() if max(line) * reach >= many}
            if lines and max(lines) * reach >= canvas:
                found = between({length: between(line, many) for length, line in lines.items()}, canvas)
                return Spread(*found), reach > 1
        raise Unmeasured(
            f"{self.name} has no window step of {lanes} rows x {width} positions in canvases of {canvas}: use fewer "
            "rows or shorter requests, or measure more with benchmarks.capacity.measure"
        )

    @lru_cache(maxsize=65536)  # noqa: B019
    def _wide(self, phase: str, lanes: int, width: int) -> tuple[Spread, bool]:
        lines, positions = self._lines.get((phase, 0), {}), lanes * width
        points: dict[float, Spread] = {}
        for own in sorted(lines, key=lambda own: -abs(math.log(own / width))):  # the nearest width has the last word
            points |= lines[own]
        if not points or max(points) * self.reach < positions:
            raise Unmeasured(
                f"{self.name} has no step {phase} of {positions} positions: use fewer rows or shorter prompts, or "
                "measure more with benchmarks.capacity.measure"
            )
        return Spread(*between(points, positions)), max(points) < positions

    @lru_cache(maxsize=4096)  # noqa: B019
    def host_ms(self, rows: int) -> tuple[float, float]:
        """The card's wait after a round, and the host's time of a round; 0 if not measured."""
        found = [between(points, min(rows, max(points)))[0] if points else 0.0 for points in (self.gaps, self.host)]
        return found[0], found[1]


def _report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--steps {path}: {error}") from error
    if not isinstance(report, dict) or "setting" not in report or not {"steps", "runs"} & report.keys():
        raise ValueError(f"--steps {path} is not a file of benchmarks.capacity.measure or benchmarks.throughput")
    return report


def spread_of(row: Mapping[str, Any]) -> Spread:
    """The quantiles of a row, scaled to its mean; the median if there are no quantiles.

    A mean above the last quantile is that of a few launches which captured a graph, so it does not count.
    """
    if "quantiles_ms" not in row:
        return Spread(*[row["median_ms"]] * 5)
    found = Spread(*row["quantiles_ms"])
    if row["mean_ms"] > found[-1]:
        return found
    return Spread(*(value * row["mean_ms"] / found.mean for value in found))


def rows_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a file, each shape from the run with most launches of it."""
    if "steps" in report:
        rows = report["steps"]
    else:
        every = (row for run in report["runs"] for row in run.get("steps", ()))
        rows = [row | {"canvas": report["setting"]["length"]} for row in every if row["launches"] >= LEAST]
    found = {}
    for row in sorted(rows, key=lambda row: row["launches"]):
        found[row["phase"], row["lanes"], row["width"], row["canvas"]] = row
    return [*found.values()]
