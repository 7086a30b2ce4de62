"""One model on one card, two, four: the time of a window step, its share of sums over cards, and the cards' memory.

    python -m benchmarks.tensor_parallel --out benchmarks/results/tensor-parallel-h200.json
    python -m benchmarks.tensor_parallel --tiny --device cpu                      # dry run over gloo

Processes, one for each card, run one case after the other. After a case that fails or hangs they start again, so it
costs no other case, and the report has the end of their stderr. Cases of few cards run side by side, on cards of their
own.
Steps are timed as in `benchmarks.step`, with its limit: the bytes that a card reads, at the rate of a copy in the same
process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.feeds import apart, random_prompts, usual
from benchmarks.limits import limits, rates
from benchmarks.parts import by_kernel, by_part, profiled
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import SMALLER, random_weights, shape
from benchmarks.step import experts_read, pool, timed_run
from dinfer import Pipeline, Runtime
from dinfer.core.ranks.ranks import ALONE, Ranks

BLOCK, PROMPT, NEW = 32, 128, 256


class Case(NamedTuple):
    """A shape on some cards."""

    shape: str
    cards: int
    quantize: str | None = None
    sums: str = "symmetric"  # or "fused" with the norms that read them, or "nccl"
    rows: int = 1
    experts: str = "divided"  # or "dealt out": each card has some whole

    @property
    def name(self) -> str:
        parts = (
            self.shape,
            self.quantize or "bf16",
            f"{self.cards} cards",
            "" if self.sums == "symmetric" else self.sums,
            "" if self.rows == 1 else f"{self.rows} rows",
            "" if self.experts == "divided" else self.experts,
        )
        return ", ".join(part for part in parts if part)


SHAPES: list[tuple[str, str | None]] = [
    ("llada-8b", None), ("llada-8b", "fp8"), ("llada2-mini", None), ("llada2-flash", "fp8"), ("llada2-flash", None),
]  # fmt: skip
CASES = [  # what matters most comes first: the budget may end before the last
    *(Case(shape, 4, kind, "fused") for shape, kind in SHAPES),
    *(Case(shape, 4, kind) for shape, kind in SHAPES[:4]),
    Case("llada2-mini", 4, None, "fused", 1, "dealt out"), Case("llada2-flash", 4, "fp8", "fused", 1, "dealt out"),
    *(Case("llada2-mini", 4, None, "fused", rows, kind) for rows in (64, 8) for kind in ("divided", "dealt out")),
    Case("llada-8b", 4, None, "nccl"),
    *(Case(shape, 2, kind, "fused") for shape, kind in SHAPES),
    Case("llada2-mini", 2, None, "fused", 1, "dealt out"), Case("llada2-mini", 2), Case("llada-8b", 2, None, "nccl"),
    *(Case("llada2-mini", 2, None, "fused", rows) for rows in (8, 32, 64)),
    *(Case(shape, 1, kind) for shape, kind in SHAPES[:4]),
    *(Case("llada2-mini", 1, None, rows=rows) for rows in (8, 64)),
]  # fmt: skip


def run_rank(case: Case, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """The figures of a case from one rank. Raises RuntimeError."""
    cuda = device.type == "cuda"
    if cuda and {"fused": ranks.exchange, "symmetric": ranks.small}.get(case.sums, ranks) is None and case.cards > 1:
        raise RuntimeError("the cards cannot read each other's memory")
    if case.sums != "fused":
        ranks = replace(ranks, exchange=None, small=None if case.sums == "nccl" else ranks.small)
    ranks = replace(ranks, rank=replace(ranks.rank, expert_parallel=case.experts != "divided"))
    family, spec = shape(case.shape)
    began = time.perf_counter()
    model = random_weights(family, spec, device, quantize=case.quantize, rank=ranks.rank)
    found: dict[str, Any] = {"case": case._asdict(), "weights_s": time.perf_counter() - began}
    if cuda:
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        found |= {"weights_gb": held / 1e9, "loading_peak": peak / held}
    model.join(ranks)
    recipe = apart(usual(model, block=BLOCK)) if spec.experts else usual(model, block=BLOCK)
    prompts, dealt = random_prompts(spec, case.rows, PROMPT), ranks.rank.expert_parallel

    def pipeline(graphs: bool) -> Pipeline:
        runtime = Runtime(rows=case.rows, graphs=graphs, tensor_parallel=ranks.size, expert_parallel=dealt)
        return Pipeline(recipe, None, runtime)

    # The room for keys changes the splits of attention, so all compared cases have the same room.
    eager = pipeline(False).generate_ids(prompts, max_new_tokens=NEW)
    pipe = pipeline(cuda)
    run = partial(pipe.generate_ids, prompts, max_new_tokens=NEW)
    timed, shapes = timed_run(pipe, run)
    canvas = timed.pop("canvas")
    found |= timed | {"with_host_ms": timed["step_ms"] + timed["host_ms"], "canvas": canvas[0]}
    if cuda:
        found["graph_equals_eager"] = canvas == [result.canvas for result in eager]
    every: list[Any] = [None] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(every, canvas, group=ranks.group)
        found["ranks_agree"] = all(one == canvas for one in every)
    found["experts_read"] = experts_read(recipe, prompts) if spec.experts else None
    keys = PROMPT + (NEW + BLOCK) / 2 if spec.causal_block else PROMPT + NEW
    found["limit"] = limits(
        model, pool(pipe.engine), rows=case.rows, width=timed["width"], block=BLOCK, keys=keys,
        experts=found["experts_read"], rates=card_rates(device, case.quantize) if cuda else None,
    )  # fmt: skip
    if cuda:
        found["bytes_reached"] = found["limit"]["bytes_ms"] / timed["step_ms"]
    spans, steps = profiled(pipe.engine, run, shapes)
    kernels = by_kernel(spans, steps)
    found["parts"] = by_part(kernels, timed["step_ms"])
    return found | {"kernels": kernels[:30]}


card_rates = cache(rates)  # once in a process


class Group:
    """Cases that a set of processes runs one after the other, with a process for each card."""

    def __init__(self, cases: Sequence[Case], cards: Sequence[str], given: argparse.Namespace, folder: str) -> None:
        """`cards`: their names for CUDA_VISIBLE_DEVICES."""
        self.cases, self.cards, self.given, self.folder = list(cases), cards, given, folder
        self.found: dict[str, Any] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts processes for the cases without an outcome."""
        self.place, self.since, self.processes = Path(tempfile.mkdtemp(dir=self.folder)), time.perf_counter(), []
        cases = json.dumps([case for case in self.cases if case.name not in self.found])
        environment = os.environ | {
            "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "2",
            "NCCL_GRAPH_REGISTER": "0",
            "CUDA_VISIBLE_DEVICES": ",".join(self.cards),
        }  # fmt: skip
        for rank in range(len(self.cards)):
            command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--device", self.given.device]
            command += ["--rank", str(rank), "--place", str(self.place), "--cases", cases]
            with (self.place / f"log{rank}").open("w") as log:
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def look(self) -> bool:
        """Collects outcomes, and starts again after a case that failed or takes too long. False: all cases are done."""
        for case in self.cases:
            written = self.place / f"{case.name}.json"
            if case.name not in self.found and written.is_file():
                self.found[case.name] = json.loads(written.read_text()) | {"seconds": time.perf_counter() - self.since}
                self.since = time.perf_counter()
        left = [case for case in self.cases if case.name not in self.found]
        codes, took = [process.poll() for process in self.processes], time.perf_counter() - self.since
        if left and (took > self.given.longest or any(code is not None for code in codes)):
            logs = [(self.place / f"log{rank}").read_text()[-1500:] for rank in range(len(self.cards))]
            self.found[left[0].name] = {"failed": f"exit codes {codes} after {took:.0f} s", "log": logs}
            self.stop()
            if left[1:]:
                self.start()
        return len(self.found) < len(self.cases)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def supervise(groups: Sequence[Group], until: float) -> Iterator[dict[str, Any]]:
    """Runs groups side by side until all is done or no time is left. Yields outcomes as they come, by names of cases.

    Whoever kills this process loses the running cases alone.
    """
    for group in groups:
        group.start()
    told, goes_on = set[str](), True
    try:
        while goes_on and time.perf_counter() < until:
            goes_on = any([group.look() for group in groups])
            found = {name: one for group in groups for name, one in group.found.items() if name not in told}
            told |= found.keys()
            yield found
            time.sleep(0.05)
    finally:
        for group in groups:
            group.stop()
    yield {
        case.name: {"failed": "no time was left"} for group in groups for case in group.cases if case.name not in told
    }


def compared(report: dict[str, Any]) -> None:
    """The number of tokens that several cards share with one card. Sums in bfloat16 round differently there."""
    for case in CASES:
        alone = case._replace(cards=1, sums="symmetric", experts="divided")
        several, one = report.get(case.name, {}), report.get(alone.name, {})
        if case.cards > 1 and "canvas" in one and "canvas" in several:
            same = [a == b for a, b in zip(one["canvas"], several["canvas"], strict=True)][PROMPT:]
            several["tokens_as_one_card"] = sum(same) / len(same)


def main(args: list[str] | None = None) -> None:
    parser = command_line(__doc__, device="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    parser.add_argument("--only", nargs="+", default=[""], help="cases with one of these in their names")
    parser.add_argument("--budget", type=float, default=290, help="seconds; what has not come out by then is left out")
    parser.add_argument("--longest", type=float, default=75, help="seconds that a case may take")
    parser.add_argument("--cards", type=int, help="how many to use; default: all, on a CPU two processes")
    for name in ("--rank", "--place", "--cases"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.cases:
        return run_cases(given)
    report = begun(given, torch.device(given.device))
    until = time.perf_counter() + given.budget
    cards = cards_of(given)

    def measure(*parts: tuple[Sequence[Case], Sequence[str]]) -> None:
        groups = [
            Group([case for case in cases if any(part in case.name for part in given.only)], own, given, folder)
            for cases, own in parts
        ]  # fmt: skip
        for found in supervise([group for group in groups if group.cases], until):
            if not found:
                continue
            report.update(found)
            compared(report)
            for name, one in found.items():
                print(json.dumps({name: one | {"canvas": None, "kernels": None, "steps": None}}, indent=1), flush=True)
            save(report, given.out)

    tiny = [case._replace(shape=SMALLER.get(case.shape, case.shape)) for case in CASES] if given.tiny else CASES
    with tempfile.TemporaryDirectory() as folder:
        for size in sorted({case.cards for case in tiny if case.cards <= len(cards)}, reverse=True):
            cases = [*dict.fromkeys(case for case in tiny if case.cards == size)]
            sides = [cards[first : first + size] for first in range(0, len(cards) - size + 1, size)]
            measure(*((cases[i :: len(sides)], own) for i, own in enumerate(sides)))


def cards_of(given: argparse.Namespace) -> list[str]:
    """The cards to use, by their names for CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count() if given.device == "cuda" else given.cards or 2
    there = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    if given.cards and given.cards > len(there):
        raise SystemExit(f"--cards {given.cards}: there are {len(there)}")
    return there[: given.cards]


def run_cases(given: argparse.Namespace) -> None:
    """The process of one card."""
    cases, rank, ranks = [Case(*case) for case in json.loads(given.cases)], int(given.rank), ALONE
    cuda = given.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device(given.device)
    if cuda:
        torch.cuda.set_device(device)
    if cases[0].cards > 1:
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=f"file://{given.place}/meeting", rank=rank,
            world_size=cases[0].cards, device_id=device if cuda else None,
        )  # fmt: skip
        ranks = Ranks.of()
    for case in cases:
        with torch.inference_mode():
            found = run_rank(case, device, ranks)
        if rank == 0:
            written = Path(given.place) / f"{case.name}.json"
            written.with_suffix(".part").write_text(json.dumps(found))
            written.with_suffix(".part").rename(written)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if ranks.size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
