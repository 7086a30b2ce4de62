"""The same code as before, as fast? Two checkouts side by side, in parts of under ten minutes.

    python -m benchmarks.card graph_kernels step_times --out $OUT/new.json         # ten shapes; goes on with a file
    python benchmarks/card.py --root OLD graph_kernels step_times --out $OUT/old.json   # an older one
    python -m benchmarks.card --compare $OUT/old.json $OUT/new.json --out FILE
    python -m benchmarks.card graph_kernels step_times --tiny --device cpu --out /tmp/dry.json
    python -m benchmarks.card starts --device cpu --out new.json        # in turns with --root OLD, then --compare

`--root` is a checkout of 7fb8a893 or later.

`graph_kernels`: names and order of the kernels of each captured graph; on a CPU operators. `step_times`: medians of a
step in three runs, and their spread. `starts`: CPU seconds of commands and of the first text on the CPU, a run for each
call. All stop before `--seconds` are over and say what they left out. Results are written as they come to OUT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

MINI = "--shape llada2-mini --prompt 384 --iteration block_diffusion --cache block --spread"
CASES = {  # the shapes of docs/performance.md, as arguments of benchmarks.step
    "llada-8b": "",
    "llada-8b-batch8": "--batch 8",
    "llada-8b-fp8": "--quantize fp8",
    "llada-8b-int4": "--quantize int4",
    "llada-8b-smooth": "--iteration smooth --new 64",
    "llada2-mini": MINI,
    "llada2-mini-fp8": f"{MINI} --quantize fp8",
    "llada2-mini-int4": f"{MINI} --quantize int4",
    "llada2-mini-batch64": f"{MINI} --batch 64 --new 64",
    "sdar-4b-batch128": "--shape sdar-4b --batch 128 --new 32 --block 4 --iteration block_diffusion --cache block",
}
SMALL = {"llada-8b": "small", "llada2-mini": "small-llada2", "sdar-4b": "small-sdar"}
RUNS = 3
NOISE = ("Memcpy HtoD", "Memcpy DtoH")  # copies of the host beside a step, not in its graph


def pipeline(given: argparse.Namespace, case: str) -> tuple[Any, Callable[[], Any]]:
    """A pipeline with random weights, and a generation with it, by what a checkout of 7fb8a893 has, too."""
    import torch

    from benchmarks import step
    from benchmarks.feeds import apart, random_prompts
    from benchmarks.shapes import shape
    from dinfer import Pipeline, Runtime, compose
    from dinfer.formats.holding import quantize
    from dinfer.lab.random_network import random_network

    settings = step.arguments([*CASES[case].split(), "--device", given.device])
    if given.tiny:
        settings.shape, settings.batch = SMALL[settings.shape], min(settings.batch, 2)
        settings.prompt, settings.new = 40, min(settings.new, 64)
    device = torch.device(given.device)
    family, spec = shape(settings.shape)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_network(family, spec, dtype=dtype, device=device)
    if settings.quantize:
        quantize(model, settings.quantize)
    iteration = {"name": settings.iteration, "block": settings.block, "stop": "off"}
    recipe = compose(model, iteration=iteration, decoder="threshold", cache=settings.cache)
    recipe = apart(recipe) if settings.spread else recipe
    pipe = Pipeline(recipe, None, Runtime(rows=settings.batch, graphs=device.type == "cuda"))
    prompts = random_prompts(spec, settings.batch, settings.prompt)
    return pipe, partial(pipe.generate_ids, prompts, max_new_tokens=settings.new)


def kernels(engine: Any, run: Callable[[], Any]) -> dict[str, list[str]]:
    """The kernels of one launch of each shape of step, in the order in which they begin."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda, found = engine.device.type == "cuda", dict[str, list[str]]()

    @contextmanager
    def watched(shape: Any, slots: Sequence[int]) -> Iterator[None]:
        words = f"{shape.phase.name} {shape.lanes}x{shape.width}"
        if words in found:
            yield
            return
        torch.cuda.synchronize() if cuda else None
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
            yield
            torch.cuda.synchronize() if cuda else None
        kind = DeviceType.CUDA if cuda else DeviceType.CPU
        events = sorted(
            (event.time_range.start, event.name) for event in profiler.events() if event.device_type == kind
        )
        found[words] = [name for _, name in events if not name.startswith(NOISE)]

    engine.runner.observer = watched
    try:
        run()
    finally:
        engine.runner.observer = None
    return found


def measured(given: argparse.Namespace, case: str) -> dict[str, Any]:
    """What was asked of one shape."""
    from benchmarks.clock import Clock

    pipe, run = pipeline(given, case)
    run(), run()  # eagerly, then captured
    found: dict[str, Any] = {"graphs": pipe.engine.runner.captured, "refused": [*pipe.engine.runner.refused.values()]}
    if "step_times" in given.parts:
        times, before = dict[str, list[float]](), pipe.engine.runner.captured
        for _ in range(RUNS):
            with Clock(pipe.engine) as clock:
                run()
            for row in clock.table():
                times.setdefault(f"{row['phase']} {row['lanes']}x{row['width']}", []).append(row["median_ms"])
        found["step_ms"] = {
            name: {"median": statistics.median(runs), "runs": runs, "spread": round(max(runs) / min(runs) - 1, 4)}
            for name, runs in times.items()
        }
        found["captured_while_timed"] = pipe.engine.runner.captured - before
    if "graph_kernels" in given.parts:
        found["kernels"] = kernels(pipe.engine, run)
    return found


def shapes(given: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    """Both parts of each shape. Shapes that the file has already are left as they are."""
    import torch

    cases = report.setdefault("cases", {})
    for case in (case for case in given.cases if case not in cases):
        if time.monotonic() > given.end - given.seconds / 8:
            print(f"{case}: no time is left; call again with the same file")
            continue
        try:
            cases[case] = measured(given, case)
        except (RuntimeError, ValueError) as error:  # of one shape, such as a lack of memory
            cases[case] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
        save()
        times = {name: (row["median"], row["spread"]) for name, row in cases[case].get("step_ms", {}).items()}
        counts = {name: len(names) for name, names in cases[case].get("kernels", {}).items()}
        print(case, times, counts, cases[case].get("error", ""), flush=True)
        gc.collect()
        torch.cuda.empty_cache() if given.device == "cuda" else None


COMMAND = "import sys; sys.path.insert(0, {root!r}); sys.argv[0] = 'dinfer'; from dinfer.__main__ import main; main()"
FIRST = """
import statistics, sys, time
sys.path.insert(0, {root!r})
import dinfer
spent = [time.process_time()]
pipe = dinfer.load("tiny", device="cpu")
spent.append(time.process_time())
texts = []
for _ in range(9):
    began = time.process_time()
    stream = iter(pipe.stream("Take the number 71, then add 124. Which number is it?"))
    next(stream)
    texts.append(time.process_time() - began)
    [*stream]
print(spent[0], spent[1] - spent[0], texts[0], statistics.median(texts[1:]))
"""
STARTED = {
    "dinfer list": ["list"],
    "dinfer generate --cfg job": ["generate", "2 + 3 = ?", "model=tiny", "--cfg", "job"],
    "dinfer generate": ["generate", "2 + 3 = ?", "model=tiny", "max_new_tokens=8"],
}


def starts(given: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    """CPU seconds of whole processes; of one up to its first text; and to that of later answers."""
    found, root = report.setdefault("starts", {}), str((given.root or Path.cwd()).resolve())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name, words in STARTED.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", COMMAND.format(root=root), *words], check=True, env=environment,
                       stdout=subprocess.DEVNULL, cwd="/")  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.setdefault(name, []).append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    told = subprocess.check_output([sys.executable, "-c", FIRST.format(root=root)], env=environment, cwd="/")
    for name, spent in zip(("import", "load", "first text", "later text"), told.split(), strict=True):
        found.setdefault(name, []).append(float(spent))
    save()


def compared(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Each step in two files of `graph_kernels` and `step_times`: kernels that only one of them has, and times.

    `order`: the same kernels begin in the same order.
    """
    about = {which: {name: report[name] for name in report if name not in ("cases", "starts")} for which, report in
             (("old", old), ("new", new))}  # fmt: skip
    steps: dict[str, Any] = {}
    for name, then in old.get("starts", {}).items():
        runs = {"old": then, "new": new["starts"][name]}
        steps[name] = {"cpu_s": {which: {"median": statistics.median(own), "runs": own} for which, own in runs.items()}}
    for case in (case for case in new.get("cases", {}) if case in old["cases"]):
        before, after = old["cases"][case], new["cases"][case]
        for name, a in before.get("kernels", {}).items():
            b = after.get("kernels", {}).get(name)
            if b is None:
                continue
            gone, more = Counter(a) - Counter(b), Counter(b) - Counter(a)
            steps[f"{case} {name}"] = {"kernels": [len(a), len(b)], "order": a == b, "gone": gone, "more": more}
        for name, then in before.get("step_ms", {}).items():
            if now := after.get("step_ms", {}).get(name):
                steps.setdefault(f"{case} {name}", {})["step_ms"] = {"old": then, "new": now}
    return about | {"steps": steps}


def told(name: str, found: dict[str, Any]) -> str:
    """A line about one step."""
    words = [name + ":"]
    if "kernels" in found:
        same = "in the same order" if found["order"] else "in another order"
        differ = f"without {[*found['gone']]} and with {[*found['more']]}"
        words.append(f"{found['kernels'][1]} kernels, " + (differ if found["gone"] or found["more"] else same))
    if spent := found.get("cpu_s"):
        words.append(f"{spent['old']['median']:.3f} -> {spent['new']['median']:.3f} CPU seconds")
    if times := found.get("step_ms"):
        then, now = times["old"], times["new"]
        words.append(f"{then['median']:.3f} -> {now['median']:.3f} ms ({now['median'] / then['median'] - 1:+.1%}, "
                     f"spread {then['spread']:.1%} and {now['spread']:.1%})")  # fmt: skip
    return " ".join(words)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="graph_kernels, step_times, starts")
    parser.add_argument("--root", type=Path, help="checkout whose packages are imported")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--seconds", type=float, default=520, help="after which no more is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and a few cases: a dry run")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    if given.compare:
        found = compared(*(json.loads(path.read_text()) for path in given.compare))
        print("\n".join(told(name, step) for name, step in found["steps"].items()))
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    known = ("graph_kernels", "step_times", "starts")
    if not given.parts or given.out is None or {*given.parts} - {*known}:
        parser.error(f"give parts, of {', '.join(known)}, and --out")
    given.end = time.monotonic() + given.seconds
    if given.root is not None:
        sys.path[0] = str(given.root.resolve())
    import torch

    from benchmarks.provenance import provenance

    report = json.loads(given.out.read_text()) if given.out.is_file() else {}
    report |= provenance(torch.device(given.device))

    def save() -> None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")

    if {"graph_kernels", "step_times"} & set(given.parts):
        shapes(given, report, save)
    if "starts" in given.parts:
        starts(given, report, save)


if __name__ == "__main__":
    main()
