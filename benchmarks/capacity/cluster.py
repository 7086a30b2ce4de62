"""Replicas behind a router, their load, and the figures."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import simpy

from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.replica import ByLoad, Job, Replica, Setting
from benchmarks.capacity.steps import StepTimes
from benchmarks.capacity.traffic import Asked

PERCENTILES = (50, 95, 99)
POLICIES = ("two_choices", "least", "turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router of requests to replicas."""

    policy: str = "two_choices"  # as Ray Serve: the less loaded of two replicas; or the least loaded; or in turn
    processes: int = 1
    seconds: float = 0.0  # of one process for a request, with all the pieces of its answer

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"--policy {self.policy} must be one of {', '.join(POLICIES)}")


@dataclass(slots=True)
class Tally:
    """The counts of a cluster's run."""

    warm: float  # seconds that do not count at the beginning
    jobs: list[Job] = field(default_factory=list)
    tokens: int = 0
    offered: int = 0
    refused: int = 0
    ended: int = 0
    inside: int = 0  # requests in the system
    area: float = 0.0  # their integral over time
    since: float = 0.0

    def change(self, now: float, by: int) -> None:
        self.area += self.inside * max(now - max(self.since, self.warm), 0.0)
        self.inside, self.since = self.inside + by, now


class Cluster:
    """Replicas with the same step times."""

    def __init__(
        self, times: StepTimes, denoising: Denoising, setting: Setting, router: Router, *, replicas: int, seed: int,
        warm: float = 0.0, few: tuple[int, StepTimes, Denoising] | None = None,
    ) -> None:  # fmt: skip
        """`few`: the number in flight up to which requests get another recipe, with its steps."""
        if replicas < 1:
            raise ValueError(f"--cards: {replicas} replicas of {times.cards} cards each: there must be at least 1")
        self.env, self.draw, self.router = simpy.Environment(), Random(seed), router
        self.times, self.tally = times, Tally(warm)
        times.steps = times.beyond = 0
        self._ends: dict[Job, simpy.Event] = {}
        self._desk = simpy.Resource(self.env, capacity=router.processes)
        self.replicas = [self._replica(times, denoising, setting, few) for _ in range(replicas)]
        for replica in self.replicas:
            replica.start()
        self._turn = 0

    def _replica(
        self, times: StepTimes, denoising: Denoising, setting: Setting, few: tuple[int, StepTimes, Denoising] | None
    ) -> Replica:
        def one(times: StepTimes, denoising: Denoising, setting: Setting) -> Replica:
            draw = Random(self.draw.random())
            return Replica(self.env, times, denoising, setting, draw, self._finished, self._committed)

        usual = one(times, denoising, setting)
        if few is None:
            return usual
        rows, *own = few
        return ByLoad([one(*own, replace(setting, rows=min(rows, setting.rows))), usual])

    def open_loop(self, requests: Iterable[Asked], seconds: float) -> dict[str, Any]:
        """Runs requests at their own times for some seconds, and does not wait for those that have not ended then."""

        def arrive() -> Generator[simpy.Event, Any, None]:
            for one in requests:
                yield self.env.timeout(max(one.at - self.env.now, 0.0))
                self.env.process(self._send(one))

        self.env.process(arrive())
        self.env.run(until=seconds)
        return self._result(seconds)

    def closed_loop(self, requests: Iterable[Asked], in_flight: int) -> dict[str, Any]:
        """`in_flight` clients ask again when their answer has ended, until all requests are answered."""
        waiting = iter(requests)

        def client() -> Generator[simpy.Event, Any, None]:
            for one in waiting:
                yield self.env.process(self._send(one._replace(at=self.env.now)))

        self.env.run(until=self.env.all_of([self.env.process(client()) for _ in range(in_flight)]))
        return self._result(self.env.now)

    def _send(self, asked: Asked) -> Generator[simpy.Event, Any, None]:
        job = Job(asked, sent=self.env.now)
        self.tally.offered += job.sent >= self.tally.warm
        self.tally.change(self.env.now, 1)
        if self.router.seconds:
            with self._desk.request() as turn:
                yield turn
                yield self.env.timeout(self.router.seconds)
        ended = self._ends[job] = self.env.event()
        if not self._choose().offer(job):
            self.tally.refused += job.sent >= self.tally.warm
            self.tally.change(self.env.now, -1)
            del self._ends[job]
            return
        yield ended

    def _choose(self) -> Replica:
        if self.router.policy == "turns" or len(self.replicas) == 1:
            self._turn = (self._turn + 1) % len(self.replicas)
            return self.replicas[self._turn]
        few = self.replicas if self.router.policy == "least" else self.draw.sample(self.replicas, 2)
        return min(few, key=lambda replica: replica.load)

    def _finished(self, job: Job) -> None:
        self.tally.change(self.env.now, -1)
        self.tally.ended += self.env.now >= self.tally.warm
        if job.sent >= self.tally.warm:
            self.tally.jobs.append(job)
        self._ends.pop(job).succeed()

    def _committed(self, tokens: int) -> None:
        if self.env.now >= self.tally.warm:
            self.tally.tokens += tokens

    def _result(self, until: float) -> dict[str, Any]:
        """Rates and times after the warm-up. Times are those of requests that came after it and have ended."""
        tally, span = self.tally, until - self.tally.warm
        tally.change(until, 0)
        jobs = tally.jobs
        return {
            "cards": len(self.replicas) * self.times.cards,
            "replicas": len(self.replicas),
            "seconds": round(span, 3),
            "offered": tally.offered,
            "ended": tally.ended,
            "refused": tally.refused,
            "left": sum(replica.load for replica in self.replicas),
            "requests_per_s": tally.ended / span,
            "tokens_per_s": tally.tokens / span,
            "pieces_per_s": sum(replica.pieces for replica in self.replicas) / until,
            "rounds_per_s": sum(replica.rounds for replica in self.replicas) / until,
            "in_system": tally.area / span,
            "beyond": self.times.beyond / max(self.times.steps, 1),
            "card_busy": statistics.fmean(replica.busy for replica in self.replicas) / until,
            "queue_s": percentiles([job.admitted - job.sent for job in jobs]),
            "first_text_s": percentiles([job.first_text - job.sent for job in jobs]),
            "first_block_s": percentiles([job.first_block - job.sent for job in jobs]),
            "latency_s": percentiles([job.ended - job.sent for job in jobs]),
        }


def percentiles(values: list[float]) -> dict[str, float]:
    """Mean, median, 95% and 99%; empty without values."""
    if not values:
        return {}
    ranked = sorted(values)
    found = {f"p{p}": ranked[min(len(ranked) * p // 100, len(ranked) - 1)] for p in PERCENTILES}
    return {name: round(value, 5) for name, value in {"mean": statistics.fmean(ranked), **found}.items()}


def cost(result: dict[str, Any], price: float) -> float:
    """The price of a million tokens if a card costs `price` an hour."""
    if price < 0:
        raise ValueError(f"--price {price} must be at least 0 an hour")
    if not result["tokens_per_s"]:
        raise ValueError("no token was generated: run it for longer")
    return price * result["cards"] / 3600 / result["tokens_per_s"] * 1e6
