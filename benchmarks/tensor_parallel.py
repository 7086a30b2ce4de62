"""One model on one card and on two: time of a window step, what of it the cards spend on sums, and what they hold.

    python -m benchmarks.tensor_parallel --out benchmarks/results/tensor-parallel-h200.json
    python -m benchmarks.tensor_parallel --tiny --device cpu                      # dry run over gloo

Every case runs in processes of its own, one for each card, so a case that fails or hangs loses no other; what it says
is in the report. Steps are timed as `benchmarks.step` does, with its limit: the bytes that a card reads, at the rate of
a copy measured in the same process. `collectives` times the sums alone, 64 in a CUDA graph, by size and method.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.feeds import apart, random_prompts
from benchmarks.limits import limits, rates
from benchmarks.parts import by_kernel, by_part, profiled
from benchmarks.provenance import provenance
from benchmarks.shapes import shape
from benchmarks.step import experts_read, pool, timed_run
from dinfer import Pipeline, Runtime, compose
from dinfer.core.ranks import ALONE, Ranks
from dinfer.loading.checkpoint import random_network

LONGEST = 100  # seconds that a case may take
BLOCK, PROMPT, NEW = 32, 128, 256
SUMS = 64  # in a graph, as many as a step of 32 layers has


class Case(NamedTuple):
    """A shape on so many cards."""

    shape: str
    cards: int
    quantize: str | None = None
    sums: str = "symmetric"  # or all of them by nccl

    @property
    def name(self) -> str:
        parts = (
            self.shape,
            self.quantize or "bf16",
            f"{self.cards} cards",
            "" if self.sums == "symmetric" else self.sums,
        )
        return ", ".join(part for part in parts if part)


CASES = [
    Case("collectives", 2),
    Case("llada-8b", 1), Case("llada-8b", 2), Case("llada2-mini", 1), Case("llada2-mini", 2),
    Case("llada-8b", 1, "fp8"), Case("llada-8b", 2, "fp8"), Case("llada2-flash", 1, "fp8"), Case("llada2-flash", 2),
    Case("llada-8b", 2, None, "nccl"),
]  # fmt: skip
TINY = {"llada-8b": "small", "llada2-mini": "small-llada2", "llada2-flash": "small-llada2"}


def run_rank(case: Case, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """What one rank measures of a case."""
    cuda = device.type == "cuda"
    if case.shape == "collectives":
        return {"us": collective_times(ranks, device)} if cuda else {}
    if case.sums == "nccl":
        ranks = replace(ranks, small=None)
    family, spec = shape(case.shape)
    torch.manual_seed(0)
    began = time.perf_counter()
    dtype = torch.bfloat16 if cuda else torch.float32
    model = random_network(family, spec, dtype=dtype, device=device, quantize=case.quantize, rank=ranks.rank)
    found: dict[str, Any] = {"case": case._asdict(), "weights_s": time.perf_counter() - began}
    if cuda:
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        found |= {"weights_gb": held / 1e9, "loading_peak": peak / held}
    model.join(ranks)
    causal = spec.causal_block is not None
    iteration = {"name": "block_diffusion" if causal else "blockwise", "block": BLOCK, "stop": "off"}
    recipe = compose(model, iteration=iteration, decoder="threshold", cache="block" if causal else "dual")
    recipe = apart(recipe) if spec.experts else recipe
    prompts = random_prompts(spec, 1, PROMPT)

    def pipeline(graphs: bool) -> Pipeline:
        return Pipeline(recipe, None, Runtime(rows=1, graphs=graphs, tensor_parallel=ranks.size))

    eager = pipeline(False).generate_ids(prompts, max_new_tokens=2 * BLOCK)
    pipe = pipeline(cuda)
    run = partial(pipe.generate_ids, prompts, max_new_tokens=NEW)
    timed, shapes = timed_run(pipe, run)
    canvas, first = timed.pop("canvas"), [result.canvas for result in eager]
    found |= timed | {"with_host_ms": timed["step_ms"] + timed["host_ms"], "canvas": canvas[0]}
    if cuda:
        short = [result.canvas for result in pipe.generate_ids(prompts, max_new_tokens=2 * BLOCK)]
        found["graph_equals_eager"] = short == first
    every: list[Any] = [None] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(every, canvas, group=ranks.group)
        found["ranks_agree"] = all(one == canvas for one in every)
    found["experts_read"] = experts_read(recipe, prompts) if spec.experts else None
    keys = PROMPT + (NEW + BLOCK) / 2 if causal else PROMPT + NEW
    found["limit"] = limits(
        model, pool(pipe.engine), rows=1, width=timed["width"], block=BLOCK, keys=keys, experts=found["experts_read"],
        rates=rates(device, case.quantize) if cuda else None,
    )  # fmt: skip
    if cuda:
        found["bytes_reached"] = found["limit"]["bytes_ms"] / timed["step_ms"]
    spans, steps = profiled(pipe.engine, run, shapes)
    kernels = by_kernel(spans, steps)
    found["parts"] = by_part(kernels, timed["step_ms"])
    return found | {"kernels": kernels[:30]}


def collective_times(ranks: Ranks, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of one sum of [rows, 4096] bfloat16, by rows and method."""
    small = ranks.small
    found: dict[str, dict[str, float]] = {}
    for rows in (1, 8, 32, 64, 128, 256, 1024):
        x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=device)
        ways: dict[str, Any] = {"nccl": lambda x=x: dist.all_reduce(x, group=ranks.group)}
        if small is not None and small.takes(x):
            ways |= {"one-shot": partial(small.one_shot, x), "two-shot": partial(small.two_shot, x)}
        found[f"{rows} rows"] = {name: graph_us(way) for name, way in ways.items()}
    return found


def graph_us(work: Any) -> float:
    """Microseconds of a piece of work, of which a CUDA graph holds many."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(SUMS):
            work()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(1e3 * sorted(times)[len(times) // 2] / SUMS, 2)


def measure(case: Case, device: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """Runs a case in processes of its own, and reads what the first rank has written. What failed is said."""
    shape_name = TINY.get(case.shape, case.shape) if tiny else case.shape
    given = [shape_name, str(case.cards), case.quantize or "none", case.sums]
    place = Path(tempfile.mkdtemp(dir=folder))
    environment = os.environ | {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "OMP_NUM_THREADS": "1",
    }
    began, processes = time.perf_counter(), []
    for rank in range(case.cards):
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--device", device]
        command += ["--rank", str(rank), "--place", str(place), "--case", *given]
        with (place / f"log{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    failed = ""
    try:
        while any(process.poll() is None for process in processes):
            codes = [process.poll() for process in processes]
            if time.perf_counter() - began > LONGEST or any(code not in (None, 0) for code in codes):
                failed = f"exit codes {codes} after {time.perf_counter() - began:.0f} s"
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    written = place / "rank0.json"
    if failed or not written.is_file():
        logs = "\n".join((place / f"log{rank}").read_text()[-1500:] for rank in range(case.cards))
        return {"failed": failed or "no report", "log": logs}
    return json.loads(written.read_text()) | {"seconds": round(time.perf_counter() - began, 1)}


def compared(report: dict[str, Any]) -> None:
    """How many tokens two cards have as one does, where a shape ran on both; weights in bfloat16 round otherwise."""
    for case in CASES:
        two, one = report.get(case.name, {}), report.get(case._replace(cards=1, sums="symmetric").name, {})
        if case.cards > 1 and "canvas" in one and "canvas" in two:
            same = [a == b for a, b in zip(one["canvas"], two["canvas"], strict=True)][PROMPT:]
            two["tokens_as_one_card"] = sum(same) / len(same)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    parser.add_argument("--only", help="cases with this in their names")
    parser.add_argument("--budget", type=float, default=290, help="seconds; no case begins later")
    parser.add_argument("--out", type=Path)
    for name in ("--rank", "--place"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.case:
        return one_rank(given)
    report: dict[str, Any] = {"setting": vars(given) | {"out": None}, **provenance(torch.device(given.device))}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for case in CASES if (given.only or "") in case.name):
            if time.perf_counter() - began > given.budget:
                report[case.name] = {"failed": "no time was left"}
                continue
            found = report[case.name] = measure(case, given.device, given.tiny, Path(folder))
            compared(report)
            print(
                json.dumps({case.name: found | {"canvas": None, "kernels": None, "steps": None}}, indent=1), flush=True
            )
            if given.out is not None:
                given.out.write_text(json.dumps(report, indent=1) + "\n")


def one_rank(given: argparse.Namespace) -> None:
    """The process of one card."""
    name, cards, quantize, sums = given.case
    case, rank, ranks = Case(name, int(cards), None if quantize == "none" else quantize, sums), int(given.rank), ALONE
    device = torch.device(given.device, rank) if given.device == "cuda" else torch.device(given.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if case.cards > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{given.place}/meeting", rank=rank,
            world_size=case.cards, device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        ranks = Ranks.of()
    with torch.inference_mode():
        found = run_rank(case, device, ranks)
    if rank == 0:
        (Path(given.place) / "rank0.json").write_text(json.dumps(found))
    if ranks.size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
