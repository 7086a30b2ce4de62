"""Compares answers of this commit's `dinfer` with an older one's: held-out problems and the models in the box.

    python -m benchmarks.before_tokens /tmp/5453251 --out benchmarks/results/before-tokens-h200.json
    python -m benchmarks.before_tokens /tmp/5453251 --device cpu --count 20                             # dry run

The folder is that of `benchmarks.before`. Each side is a process of its own with `threshold` 0.9 and the model's best
cache. Sums of the same numbers in another order differ in their last digits, so tokens may differ where two are about
as likely. To tell such differences from others, this commit also solves the problems with half as many in flight.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {"iteration": {"name": "blockwise", "block": 32}, "cache": "dual"},
    "tiny-llada2": {"iteration": {"name": "block_diffusion"}, "cache": "block"},
}
WORKS = [*product(RECIPES, ("float32", "bfloat16"))]
NEW = 128


def solve(work: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The answers of one process, with the `dinfer` that it imports; a list for each of `WORKS`."""
    import dinfer

    assert str(work["folder"]) == str(Path(dinfer.__file__).parents[1])
    found = []
    for model, dtype in WORKS:
        runtime = dinfer.Runtime(rows=work["rows"], graphs=work["device"] != "cpu")
        decoder = {"name": "threshold", "threshold": 0.9}
        pipe = dinfer.load(
            model, decoder=decoder, device=work["device"], dtype=dtype, runtime=runtime, **RECIPES[model]
        )
        results = pipe.generate(work["questions"], max_new_tokens=NEW)
        found.append([{"ids": one.ids, "text": one.text, "forwards": one.counts.forwards} for one in results])
    return found


def begun(folder: Path, work: dict[str, Any]) -> subprocess.Popen[str]:
    """Starts a process with the package of a folder."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(work | {"folder": str(folder)}))
    child.stdin.close()
    return child


def ended(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    text = child.stdout.read()
    if child.wait():
        raise SystemExit("benchmarks.before_tokens: a side failed, see above")
    return json.loads(text.splitlines()[-1])


def main(args: list[str] | None = None) -> None:
    from benchmarks.before import folder_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=folder_of, help="an older dinfer's, named after its commit")
    parser.add_argument("--count", type=int, default=200, help="problems")
    parser.add_argument("--rows", type=int, default=64, help="in flight")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    import torch

    from benchmarks.provenance import provenance, save
    from dinfer.demo.problems import generate, is_correct

    problems = generate("heldout", given.count, 0)
    work = {"device": given.device, "questions": [problem.question for problem in problems]}
    sides = ((given.folder, given.rows), (ROOT, given.rows), (ROOT, given.rows // 2))
    children = [begun(folder, work | {"rows": rows}) for folder, rows in sides]  # beside each other
    rows = []
    for (model, dtype), *answers in zip(WORKS, *(ended(child) for child in children), strict=True):
        before, now, half = answers
        pairs = [*zip(problems, before, strict=True)], [*zip(problems, now, strict=True)]
        rows.append(
            {
                "model": model, "dtype": dtype,
                "same": sum(a["ids"] == b["ids"] for a, b in zip(before, now, strict=True)),
                "same_at_half": sum(a["ids"] == b["ids"] for a, b in zip(half, now, strict=True)),
                "correct": [sum(is_correct(problem, one["text"]) for problem, one in side) for side in pairs],
                "forwards": [sum(one["forwards"] for _, one in side) for side in pairs],
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    setting = {"count": given.count, "rows": given.rows, "new": NEW}
    report = {"setting": setting, "before": given.folder.name, **provenance(torch.device(given.device)), "rows": rows}
    save(report, given.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.path[0] = sys.argv[2]
        print(json.dumps(solve(json.load(sys.stdin))))
    else:
        main()
