"""The host's time of a round, and how busy it would keep a GPU. It needs no card.

    python -m benchmarks.rounds --in-flight 64,256 --out results.json

It runs a closed loop over a model without a network. Steps run eagerly on the CPU, and their time does not count, since
on a GPU the host launches a graph instead. The rest is the host's work: admission, planning, reading, delivery, and the
caller's loop. It is the CPU time of one thread, so other programs hardly disturb it.

The device is simulated. It runs one step after the other. A step takes `--step-us`, and `--position-us` for each of its
positions; the defaults are those of `tiny` on an H200 (results/throughput-tiny-h200.json). The host waits for the
device where the engine does. The host's time of a launch is not simulated, and no graph is captured.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.feeds import Hollow, random_prompts
from benchmarks.provenance import provenance
from benchmarks.shapes import shape
from benchmarks.throughput import closed_loop
from dinfer.engine.engine import Engine
from dinfer.engine.loop import Loop
from dinfer.engine.request import Request
from dinfer.engine.runner import bucket
from dinfer.engine.runtime import Runtime
from dinfer.engine.worker import Worker
from dinfer.loading.checkpoint import random_network
from dinfer.recipe.recipe import Recipe, compose
from dinfer.step.contracts import BlockView, Decoder, Proposal, State, StepShape, TokenStats

COUNTS = (1, 1, 1, 2, 2, 3, 4, 6)  # tokens that a step commits: 2.5 on average, as uneven as with a threshold


@dataclass(frozen=True, kw_only=True)
class Uneven(Decoder):
    """Commits a varying number of masked positions from the left, whatever their probabilities."""

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        draw_R = (view.forward_R * 5 + view.pos_RL[:, 0] * 3 + view.prompt_R * 7) % len(COUNTS)
        count_R1 = torch.tensor(COUNTS)[draw_R][:, None]
        return Proposal(view.masked_RL & (view.masked_RL.cumsum(-1) <= count_R1))


class Mark:
    """Stands for a CUDA event: the time at which the simulated device reaches it."""

    def __init__(self, device: Simulated) -> None:
        self._device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self._device.free


class Simulated(Worker):
    """Runs steps, and counts them as the work of a device beside the host. All times are in seconds."""

    def __init__(self, recipe: Recipe, runtime: Runtime, step: float, position: float) -> None:
        super().__init__(recipe, runtime)
        self._step, self._position = step, position
        self._left_out = time.thread_time()
        self.waited = self.free = self.busy = 0.0
        self.launches = 0

    @property
    def host(self) -> float:
        """The host's time so far."""
        return time.thread_time() - self._left_out

    @property
    def now(self) -> float:
        return self.host + self.waited

    def launch(self, shape: StepShape, slots: list[int], run: StepShape | None = None) -> None:
        now, began = self.now, time.thread_time()
        super().launch(shape, slots, run)
        kv, canvas = self.state.kv, self.state.canvas
        rounded = bucket(shape, kv.page, kv.table_NP.shape[1], canvas.capacity, self.recipe.model.spec.vocab)
        takes = self._step + self._position * rounded.lanes * rounded.width
        self.free = max(now, self.free) + takes
        self.busy, self.launches = self.busy + takes, self.launches + 1
        self._left_out += time.thread_time() - began

    def event(self) -> Any:
        return Mark(self)

    def wait(self, done: Any) -> None:
        self.waited += max(done.at - self.now, 0.0)


def engine_of(given: argparse.Namespace) -> Engine:
    family, spec = shape("small")
    torch.manual_seed(0)
    model = Hollow(random_network(family, spec, dtype=torch.float32, device=torch.device("cpu")))
    recipe = compose(
        model, iteration={"name": "blockwise", "block": 32, "stop": "off"}, decoder=Uneven(), cache=given.cache
    )
    runtime = Runtime(rows=max(given.in_flight), max_length=given.prompt + given.new)
    engine = Engine(recipe, runtime)
    engine.loop = Loop(Simulated(recipe, runtime, given.step_us / 1e6, given.position_us / 1e6))
    engine.loop.ahead = True  # as with CUDA graphs
    return engine


def requests_of(engine: Engine, given: argparse.Namespace, count: int) -> list[Request]:
    """Requests of all lengths from a third of the longest on, so that rows are at all stages."""
    prompts = random_prompts(engine.recipe.model.spec, count, given.prompt)

    def size(most: int, number: int) -> int:
        return most // 3 + number % (most - most // 3 + 1)

    return [Request(p[: size(given.prompt, 37 * i)], size(given.new, 53 * i)) for i, p in enumerate(prompts)]


def measured(engine: Engine, requests: list[Request], in_flight: int, queued: bool) -> dict[str, Any]:
    """`queued`: requests wait all the time, while at most `runtime.rows` run."""
    closed_loop(engine, requests[:in_flight], in_flight)  # warms the host's caches
    worker: Any = engine.loop.worker
    host, waited, busy, launches = worker.host, worker.waited, worker.busy, worker.launches
    rounds = _Rounds(engine)
    asked = len(requests) if queued else in_flight
    tokens = closed_loop(rounds, requests, asked)["tokens"]  # type: ignore[arg-type]
    host, waited, busy = worker.host - host, worker.waited - waited, worker.busy - busy
    return {
        "in_flight": in_flight, "requests": len(requests), "rounds": rounds.count,
        "launches": worker.launches - launches, "host_ms_a_round": round(1e3 * host / rounds.count, 3),
        "device_ms_a_round": round(1e3 * busy / rounds.count, 3), "device_share": round(busy / (host + waited), 4),
        "tokens_per_s": round(tokens / (host + waited), 1),
    }  # fmt: skip


class _Rounds:
    """An engine that counts its rounds."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.count = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self) -> Any:
        self.count += 1
        return self.engine.step()


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=lambda text: [int(part) for part in text.split(",")], default=[64, 256])
    parser.add_argument("--rounds", type=int, default=4, help="requests for each in flight")
    parser.add_argument("--queued", action="store_true", help="ask for all at once: the largest --in-flight run")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=96, help="max_new_tokens of the longest")
    parser.add_argument("--cache", default="dual")
    parser.add_argument("--step-us", type=float, default=300, help="what each step takes on the simulated device")
    parser.add_argument("--position-us", type=float, default=0.45, help="and each position of it")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    engine = engine_of(given)
    runs = []
    for in_flight in given.in_flight:
        requests = requests_of(engine, given, given.rounds * in_flight)
        runs.append(measured(engine, requests, in_flight, given.queued))
        print(runs[-1], flush=True)
    if given.out:
        setting = vars(given) | {"out": None}
        report = {"setting": setting, **provenance(torch.device("cpu")), "runs": runs}
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
