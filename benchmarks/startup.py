"""The time to the first block and its parts: with nothing compiled before, and once more on the same machine.

    python -m benchmarks.startup --shape llada2-mini --out results.json
    python -m benchmarks.startup --shape small-llada2 --device cpu   # dry run: no kernel is compiled

Each start is a new process. The first finds an empty cache of kernels, the second the cache of the first. Weights are
random and made on the card in half a second. Reading a checkpoint takes longer, so a real load hides more of what it
prepares meanwhile (`dinfer.speed.startup.prepare`). The time begins when the weights are on the card. A decoder that
commits a fixed number of tokens at a step decodes `--blocks` blocks, once alone and once with `--in-flight` requests,
whose steps have other shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import torch

from benchmarks.feeds import random_prompts, usual
from benchmarks.provenance import begun, command_line, save
from benchmarks.shapes import SHAPES, random_model
from benchmarks.throughput import Scripted, closed_loop
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request
from dinfer.core.engine.runtime import Runtime
from dinfer.speed.startup.prepare import prepare

LIMIT = 900.0  # seconds that a start may take


class Compilations:
    """Kernels that are compiled or read from the cache, and the time of that, by thread."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, bool, float]] = []  # from the cache?, in another thread?, seconds

    def listen(self) -> None:
        from triton import knobs

        def heard(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
            stages = sum(seconds for _, seconds in times.lowering_stages)
            seconds = (times.ir_initialization + stages + times.store_results) / 1e6
            beside = threading.current_thread() is not threading.main_thread()
            self.found.append((cache_hit, beside, seconds, time.perf_counter()))

        knobs.compilation.listener = heard

    def report(self, began: float) -> dict[str, Any]:
        """What came since the last call, in a phase that began at this time of `time.perf_counter`."""
        found, self.found = self.found, []
        beside, cached = [f for f in found if f[1]], [f for f in found if f[0]]
        ready = [f[3] - began for f in found] or [0.0]
        return {
            "kernels": len(found), "of_them_cached": len(cached), "of_them_beside_each_other": len(beside),
            "compiler_s": round(sum(f[2] for f in found), 3),
            "first_kernel_s": round(min(ready), 3), "last_kernel_s": round(max(ready), 3),
        }  # fmt: skip


def start(given: argparse.Namespace) -> dict[str, Any]:
    """One start: the seconds and kernels of each phase."""
    began = time.perf_counter()
    device = torch.device(given.device)
    cuda = device.type == "cuda"
    prepare(device)  # as `dinfer.load` does
    model = random_model(given.shape, device, given.dtype, given.quantize)
    if cuda:
        torch.cuda.synchronize()
    ready = time.perf_counter()
    phases: list[dict[str, Any]] = [{"phase": "weights on the card", "seconds": ready - began}]
    compilations = Compilations()
    if cuda:
        compilations.listen()
    spec = model.spec
    block = given.block or min(spec.causal_block or 32, 32)
    recipe = usual(model, Scripted(rate=given.rate), block)
    length = given.prompt + given.blocks * block
    engine = Engine(recipe, Runtime(rows=given.in_flight, max_length=length, graphs=cuda))
    prompts = random_prompts(spec, given.in_flight, given.prompt)
    requests = [Request.behind(prompt, given.blocks * block) for prompt in prompts]
    for name, some in (("one request", requests[:1]), ("the same again", requests[:1]), ("all in flight", requests)):
        began, asked = ready, time.perf_counter()
        result = closed_loop(engine, some, len(some))
        ready = time.perf_counter()
        first = asked - began + result["first_block_s"]["max"]
        phases.append(
            {
                "phase": name, "seconds": ready - began, "first_block_s": first, "graphs": engine.runner.captured,
                **compilations.report(began),
            }
        )  # fmt: skip
    return {"phases": [{k: round(v, 3) if isinstance(v, float) else v for k, v in p.items()} for p in phases]}


def child(args: list[str], cache: str) -> dict[str, Any]:
    """A start in a new process. Raises RuntimeError with the end of its stderr if it fails."""
    command = [sys.executable, "-m", "benchmarks.startup", *args, "--child"]
    began = time.perf_counter()
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return {"process_s": round(time.perf_counter() - began, 3)} | json.loads(done.stdout.splitlines()[-1])


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, device="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llada2-mini", help="random weights")
    parser.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--quantize", choices=("fp8", "int8", "int4"))
    parser.add_argument("--block", type=int)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2.6, help="tokens a step")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    return given


def main(args: list[str] | None = None) -> None:
    given = arguments(args)
    if given.child:
        print(json.dumps(start(given)))
        return
    words = list(sys.argv[1:] if args is None else args)
    report = begun(given, torch.device(given.device))
    with tempfile.TemporaryDirectory(prefix="dinfer-kernels-") as cache:
        for name in ("cold", "warm"):
            report[name] = child(words, cache)
            print(f"{name}: {report[name]['process_s']} s in all")
            for phase in report[name]["phases"]:
                print("   ", phase, flush=True)
            save(report, given.out)


if __name__ == "__main__":
    main()
