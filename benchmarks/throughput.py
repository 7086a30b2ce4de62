"""Tokens per second over the number of requests in flight: a closed loop, a new request for each that finishes.

    python -m benchmarks.throughput --shape llada2-mini --favour throughput --stagger --out results.json
    python -m benchmarks.throughput --model tiny --prompts problems --new 96 --decoder threshold
    python -m benchmarks.throughput --shape small-llada2 --device cpu --in-flight 4 --prompt 40 --new 40   # dry run

Full-size shapes have random weights, so a scripted decoder commits a fixed number of tokens at a step: the work is that
of a real model, whatever the logits say. The models in the box decode for real. Before anything else, one request alone
says how long the first block takes with nothing compiled. Then, for each number in flight, passes over the requests
until one captures no graph: that one is timed (`--warm-up` and `--passes` bound them). With `--stagger` the first
requests are of all lengths, so that rows are at all stages afterwards, as they are where requests come when they like.
`steady` is what was finished while that many were in flight, without the last requests, which have the card to
themselves. With `--stagger` and three rounds or more, all figures are those of the time under load: from when all of
the first requests have finished a block, since they are prefilled at once, until the last is asked for. With `--spread`
tokens choose their experts independently of each other (`benchmarks.feeds`). The limit beside tokens/s is what they
would be if every step took its least time, by bytes or by multiply-adds (`benchmarks.limits`), and the host none.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, get_args

import torch
import yaml

import dinfer
from benchmarks.clock import MOST_S, PASSES, Clock, Lap, bounds, settled
from benchmarks.feeds import apart, random_prompts
from benchmarks.limits import WARM, rates, run_limit
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import SHAPES, random_model, shape
from benchmarks.step import pool
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import ONLY_COUNTS, Completion, Request, Update
from dinfer.core.engine.runtime import Kv
from dinfer.core.registry import check_range, option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats
from dinfer.demo.problems import generate
from dinfer.scale.parallel.divided_model import Source, divided
from dinfer.speed.memory import graph_bytes


@dataclass(frozen=True, kw_only=True)
class Scripted(Decoder):
    """The masked positions from the left, `rate` a step on average, whatever their probabilities."""

    rate: float = option(2.6, "tokens a step", per_request=True)

    def __post_init__(self) -> None:
        check_range("decoder", self, "rate", least=1)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        step_R1, rate_R1 = view.step_R[:, None], view.options["rate"]
        count_R1 = ((step_R1 + 1) * rate_R1).floor() - (step_R1 * rate_R1).floor()
        return Proposal(view.masked_RL & (view.masked_RL.cumsum(-1) <= count_R1))


def rounds_of(
    engine: Engine, requests: list[Request], in_flight: int, asked: dict[int, tuple[Request, float]]
) -> Iterator[tuple[list[Update], bool]]:
    """Keeps `in_flight` of the requests running: the updates of each round, and whether requests still wait.

    `asked` is filled with each request by its number, and when it was asked for. What runs when the caller stops is
    taken out.
    """
    waiting, running = list(requests)[::-1], set()
    try:
        while waiting or engine.busy:
            while waiting and len(running) < in_flight:
                request = waiting.pop()
                index = engine.add(request, ONLY_COUNTS)
                asked[index] = request, time.perf_counter()
                running.add(index)
            updates = engine.step()
            for update in updates:
                if update.error is not None:
                    raise update.error
                if update.completion is not None:
                    running.discard(update.index)
            yield updates, bool(waiting)
    finally:
        for index in running:
            engine.cancel(index)


def closed_loop(engine: Engine, requests: list[Request], in_flight: int) -> dict[str, Any]:
    """Keeps `in_flight` of the requests running until all are done."""
    asked: dict[int, tuple[Request, float]] = {}
    blocks: dict[int, int] = {}
    first, latency, done = {}, [], []
    start = time.perf_counter()
    full = 0.0, 0  # seconds, and blocks finished, while so many were in flight
    for updates, more in rounds_of(engine, requests, in_flight, asked):
        now = time.perf_counter()
        for update in updates:
            blocks[update.index] = update.blocks
            if update.blocks:
                first.setdefault(update.index, now - asked[update.index][1])
            if update.completion is not None:
                latency.append(now - asked[update.index][1])
                done.append(update.completion)
        if more:
            full = now - start, sum(blocks.values())
    found = told(done, sum(completion.counts.tokens for completion in done), time.perf_counter() - start)
    steady = full[1] * engine.recipe.iteration.block / full[0] if full[1] and aligned(engine, requests) else None
    return found | {
        "steady_tokens_per_s": steady, "first_block_s": spread([*first.values()]), "latency_s": spread(latency),
    }  # fmt: skip


def under_load(
    engine: Engine, requests: list[Request], in_flight: int, begun: Callable[[], None], most_s: float = math.inf
) -> dict[str, Any] | None:
    """A closed loop without its beginning and its end, when the load is another one.

    It calls `begun` when as many as are in flight have finished a block, since all are prefilled at once before. It
    ends when the last request was asked for. Tokens are those of blocks that were finished in between, latencies those
    of the longest requests that were asked for and finished in between. None: `most_s` seconds were over before.
    """
    asked: dict[int, tuple[Request, float]] = {}
    blocks: dict[int, int] = {}
    first, latency, done = {}, [], []
    longest, start = max(request.new_tokens for request in requests), time.perf_counter()
    since: tuple[float, int] | None = None
    for updates, more in rounds_of(engine, requests, in_flight, asked):
        now = time.perf_counter()
        for update in updates:
            request, then = asked[update.index]
            blocks[update.index] = update.blocks
            if since is not None and then >= since[0]:
                if update.blocks:
                    first.setdefault(update.index, now - then)
                if update.completion is not None and request.new_tokens == longest:
                    latency.append(now - then)
            if since is not None and update.completion is not None:
                done.append(update.completion)
        if since is None and sum(count > 0 for count in blocks.values()) >= in_flight:
            since = now, sum(blocks.values())
            begun()
        if now - start > most_s:
            return None
        if not more:
            break
    assert since is not None
    tokens = (sum(blocks.values()) - since[1]) * engine.recipe.iteration.block
    found = told(done, tokens, now - since[0])
    return found | {
        "steady_tokens_per_s": found["tokens_per_s"], "first_block_s": spread([*first.values()]),
        "latency_s": spread(latency),
    }  # fmt: skip


def told(done: list[Completion], tokens: int, seconds: float) -> dict[str, Any]:
    """What the requests that are done needed, and the rate of all tokens."""
    counts = [completion.counts for completion in done]
    own, forwards = sum(c.tokens for c in counts), sum(c.forwards for c in counts)
    return {
        "requests": len(done), "most_forwards": max(c.forwards for c in counts), "tokens": tokens, "seconds": seconds,
        "tokens_per_s": tokens / seconds, "tpf": own / forwards,
        "tokens_per_denoise_step": own / (forwards - sum(c.prefills for c in counts)),
    }  # fmt: skip


def aligned(engine: Engine, requests: list[Request]) -> bool:
    """Whether every block that they finish is a whole one."""
    block = engine.recipe.iteration.block
    return all(len(r.prompt) % block == 0 and r.new_tokens % block == 0 for r in requests)


def spread(values: list[float]) -> dict[str, float]:
    """Median and the worst."""
    return {"median": round(statistics.median(values), 4), "max": round(max(values), 4)}


def lengths(in_flight: int, rounds: int, new: int, stagger: bool) -> list[int]:
    """The tokens of each request. `stagger`: the first have all lengths, so that rows end one by one from then on."""
    some = max(new // 16, 1)
    first = [some * (1 + i % 16) if stagger else new for i in range(in_flight)]
    return first + [new] * in_flight * (rounds - 1)


def repeated(requests: list[Request], rounds: int, stagger: bool) -> list[Request]:
    """The requests, so many times, with `lengths`."""
    each = lengths(len(requests), rounds, requests[0].new_tokens, stagger)
    return [
        Request.behind(one.prompt, new, one.options, asks=one.asks)
        for one, new in zip(cycle(requests), each, strict=False)
    ]


def measured(
    engine: Engine, requests: list[Request], rounds: int, stagger: bool,
    card: tuple[dict[str, float], dict[str, float]], passes: int = PASSES, most_warm_up: float = MOST_S,
) -> dict[str, Any]:  # fmt: skip
    """`rounds` of the requests, after as many passes over them as warm-up as it takes.

    With `stagger` and three rounds or more, figures and limits are those under load. `card`: its rates at rest
    and after seconds of products, see `benchmarks.limits`. `most_warm_up`: seconds after which the next pass counts;
    the first one under load is cut short by then.
    """
    in_flight, work = len(requests), repeated(requests, rounds, stagger)
    loaded = stagger and rounds > 2 and aligned(engine, work)  # or there is no time in which the load is steady

    def run() -> Lap:
        with Clock(engine) as clock:
            found = under_load(engine, work, in_flight, clock.restart) if loaded else None
            found = found or closed_loop(engine, work, in_flight)
        return Lap((found, clock), found["seconds"], clock.captured)

    cut = partial(under_load, engine, work, in_flight, lambda: None, most_warm_up) if loaded else None
    ((result, clock), *_), about = settled(run, passes, most_warm_up, cut)
    steps = clock.table()
    busy = sum(row["total_ms"] for row in steps) / 1e3
    least, sustained = (
        run_limit(
            engine.recipe.model, pool(engine), steps, block=engine.recipe.iteration.block, rates=rates,
            prompt=statistics.mean(len(r.prompt) for r in work), new=statistics.mean(r.new_tokens for r in work),
        ) for rates in card
    )  # fmt: skip
    for limit in (least, sustained):
        limit["tokens_per_s"] = result["tokens"] / limit["all"]["limit_s"]
    return {
        "in_flight": in_flight, **result, **about, "device_share": busy / result["seconds"],
        "graphs": engine.runner.captured, "refused_graphs": [*engine.runner.refused.values()], "limit": least,
        "limit_warm": sustained,
        "steps": steps[:12],
    }  # fmt: skip


def pipeline(given: argparse.Namespace, device: torch.device) -> dinfer.Pipeline:
    runtime = dinfer.Runtime(
        rows=max(given.in_flight), max_length=given.length, favour=given.favour,
        graphs=device.type == "cuda", positions=given.positions, compile=given.compile, kv=given.kv,
        tensor_parallel=given.tensor_parallel, expert_parallel=given.expert_parallel,
    )  # fmt: skip
    tokenizer = None
    if given.model:
        base = dinfer.load(given.model, device=device, dtype=given.dtype, quantize=given.quantize, runtime=runtime)
        model, tokenizer = base.model, base.tokenizer
    elif given.tensor_parallel > 1:
        family, dtype = shape(given.shape)[0], getattr(torch, given.dtype)
        source = Source(family, None, dtype, given.quantize, SHAPES[given.shape])
        model = divided(source, given.tensor_parallel, device, given.expert_parallel)
    else:
        model = random_model(given.shape, device, given.dtype, given.quantize)
    causal = model.spec.causal_block is not None
    iteration = {
        "name": given.iteration or ("block_diffusion" if causal else "blockwise"), "block": given.block,
        "stop": "block" if given.model else "off",
    }  # fmt: skip
    decoder = Scripted(rate=given.rate) if given.decoder == "scripted" else given.decoder
    recipe = dinfer.compose(
        model, iteration=iteration, decoder=decoder, cache=given.cache or ("block" if causal else "dual")
    )
    return dinfer.Pipeline(apart(recipe) if given.spread else recipe, tokenizer, runtime)


def prompts(given: argparse.Namespace, pipe: dinfer.Pipeline, count: int) -> list[list[int]]:
    """Held-out problems, or random tokens."""
    if given.prompts == "problems":
        return [pipe.encode(problem.question) for problem in generate("heldout", count, 0)]
    return random_prompts(pipe.model.spec, count, given.prompt)


def memory(engine: Engine, before: int) -> dict[str, float]:
    """Bytes beyond the weights: of keys and values, and of all else that torch has taken from the card."""
    kv = pool(engine)
    keys = kv.k_JPTGE.nbytes + kv.v_JPTGE.nbytes
    return {
        "kv_gb": keys / 1e9, "beyond_weights_and_kv_gb": (torch.cuda.max_memory_reserved() - before - keys) / 1e9,
        "graphs_gb": graph_bytes(kv.k_JPTGE.device) / 1e9,
    }  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, device="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llada2-mini", help="random weights")
    parser.add_argument("--model", help="a real model in place of random weights, such as tiny")
    parser.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--in-flight", type=numbers, default=[64])
    parser.add_argument(
        "--rounds", type=numbers, default=[2], help="timed requests for each in flight: one number, or one for each"
    )
    bounds(parser)
    parser.add_argument("--prompts", choices=("random", "problems"), default="random")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a random prompt")
    parser.add_argument("--new", type=int, default=512, help="max_new_tokens")
    parser.add_argument("--length", type=int, help="runtime.max_length; default: prompt + new")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--iteration")
    parser.add_argument("--cache", type=yaml.safe_load, help="a name, or {name: narrow_block, ahead: 6, back: 2}")
    parser.add_argument("--decoder", default="scripted")
    parser.add_argument("--rate", type=float, default=2.6, help="tokens a step, of the scripted decoder")
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--favour", choices=["latency", "throughput"], default="latency")
    parser.add_argument("--stagger", action="store_true")
    parser.add_argument("--quantize", choices=("fp8", "int8", "int4"))
    parser.add_argument("--kv", choices=get_args(Kv), default="model", help="runtime.kv")
    parser.add_argument("--spread", action="store_true", help="tokens choose experts independently")
    parser.add_argument("--compile", default="none")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="runtime.tensor_parallel")
    parser.add_argument("--expert-parallel", action="store_true", help="runtime.expert_parallel")
    parser.add_argument("--kept-kernels", action="store_true", help="take kernels that earlier programs have compiled")
    given = parser.parse_args(args)
    if given.spread and given.model:
        parser.error("--spread is for random weights: leave it out, or --model")
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    given.length = given.length or given.prompt + given.new
    if len(given.rounds) == 1:
        given.rounds *= len(given.in_flight)
    if len(given.rounds) != len(given.in_flight):
        parser.error(f"--rounds has {len(given.rounds)} numbers and --in-flight {len(given.in_flight)}: give as many")
    return given


def main(args: list[str] | None = None) -> None:
    given = arguments(args)
    device = torch.device(given.device)
    cuda = device.type == "cuda"
    if cuda and not given.kept_kernels:  # of an earlier program's kernels the first block would take none
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="dinfer-kernels-")
    report: dict[str, Any] = {**begun(given, device), "runs": []}
    report["card"], report["warm_card"] = (rates(device, given.quantize, warm) for warm in (0.0, WARM))
    pipe = pipeline(given, device)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_reserved() if cuda else 0
    requests = pipe.requests(prompts(given, pipe, max(given.in_flight)), given.new, None)
    alone = closed_loop(pipe.engine, requests[:1], 1)
    report["cold"] = {"first_block_s": alone["first_block_s"]["max"], "all_s": alone["seconds"]}
    for in_flight, rounds in zip(given.in_flight, given.rounds, strict=True):
        card = report["card"], report["warm_card"]
        run = measured(pipe.engine, requests[:in_flight], rounds, given.stagger, card, given.passes, given.warm_up)
        run["memory"] = memory(pipe.engine, weights) if cuda else None
        report["runs"].append(run)
        print(
            f"{in_flight:4d} in flight: {run['tokens_per_s']:.1f} tokens/s of {run['limit']['tokens_per_s']:.1f}, "
            f"steady {run['steady_tokens_per_s'] or 0:.1f}, TPF {run['tpf']:.2f}, first block "
            f"{1e3 * run['first_block_s']['median']:.0f} ms, device {100 * run['device_share']:.0f}%, "
            f"{run['graphs']} graphs, {run['captured_while_timed']} of them while timed",
            flush=True,
        )
        print(*run["steps"][:6], sep="\n")
        save(report, given.out)
    print("cold:", report["cold"])
    if cuda:
        print("memory:", report["runs"][-1]["memory"])


if __name__ == "__main__":
    main()
