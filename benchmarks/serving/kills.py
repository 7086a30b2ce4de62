"""Kills a worker, the driver or the head of `dinfer batch ... ray=ADDRESS` at random moments, and looks what is left.

    python -m benchmarks.serving.kills --trials 20 --out benchmarks/results/serving-kills.json

Each trial answers the same lines with two replicas of the model in the box, on a Ray cluster of this machine. What is
killed, and when, is drawn from the trial's seed. The same command runs again until it succeeds, on a new cluster if the
head was killed. Then every line must have one answer, that of the library.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

import dinfer
from benchmarks.provenance import provenance
from benchmarks.serving.cluster import QUIET, Cluster, cluster
from dinfer.demo.problems import generate

VICTIMS = ("worker", "driver", "head")
NEW_TOKENS = 32
ROWS = 8
HANGS = 300.0  # seconds after which a run does
MOST_RUNS = 4
WORKER = "MapWorker"  # as Ray Data calls its actors


@dataclass(slots=True)
class Trial:
    """One file, answered in spite of a kill."""

    seed: int
    victim: str
    after: int  # answers that were there when it was killed
    kept: int = 0  # answers that were there when the killed run had ended
    killed: bool = False
    runs: int = 0
    statuses: tuple[int, ...] = ()
    seconds: float = 0.0
    hung: bool = False
    missing: int = 0
    repeated: int = 0
    wrong: int = 0

    @property
    def good(self) -> bool:
        return self.killed and not (self.hung or self.missing or self.repeated or self.wrong)


@cache
def questions(count: int) -> list[str]:
    return [problem.question for problem in generate("heldout", count, 0, None)]


@cache
def expected(count: int) -> dict[str, str]:
    """The library's answers by custom id."""
    asked = [[{"role": "user", "content": question}] for question in questions(count)]
    found = dinfer.load("tiny", device="cpu").generate(asked, max_new_tokens=NEW_TOKENS)
    return {f"q{i}": one.text for i, one in enumerate(found)}


def line(number: int, question: str) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": NEW_TOKENS}
    return json.dumps({"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


class Clusters:
    """One cluster after the other: the next one starts when the last one is dead."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._last: Cluster | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def alive(self) -> Cluster:
        if self._last is None or not self._last.alive:
            self._last = self._stack.enter_context(cluster(2))
        return self._last


def trial(clusters: Clusters, seed: int, folder: Path, *, lines: int, victim: str | None = None) -> Trial:
    """Runs one. `victim`: instead of a drawn one."""
    draw = random.Random(seed)
    found = Trial(seed, victim or draw.choice(VICTIMS), draw.randrange(1, lines // 2))
    asked, out = folder / f"in-{seed}.jsonl", folder / f"out-{seed}.jsonl"
    asked.write_text("".join(f"{line(i, question)}\n" for i, question in enumerate(questions(lines))))
    began = time.monotonic()
    while not found.statuses or (found.statuses[-1] and found.runs < MOST_RUNS):
        here = clusters.alive()
        command = [
            sys.executable, "-m", "dinfer.cli.main", "batch", str(asked), str(out), f"ray={here.address}",
            "replicas=2", "device=cpu", f"runtime.rows={ROWS}",
        ]  # fmt: skip
        with (folder / f"log-{seed}.txt").open("ab") as log:
            run = subprocess.Popen(command, env=os.environ | QUIET, stderr=log, stdout=log)
        end = time.monotonic() + HANGS
        while run.poll() is None and time.monotonic() < end:
            if not found.killed and answers(out) >= found.after:
                found.killed = True
                if found.victim == "driver":
                    run.kill()
                elif found.victim == "head":
                    here.kill()
                else:
                    draw.choice(here.workers(WORKER)).kill()
            time.sleep(0.02)
        if run.poll() is None:
            found.hung = True
            run.kill()
        found.runs, found.statuses = found.runs + 1, (*found.statuses, run.wait())
        found.kept = found.kept or answers(out)
    found.seconds = round(time.monotonic() - began, 1)
    judge(found, out, lines)
    return found


def answers(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def judge(found: Trial, out: Path, lines: int) -> None:
    """Counts lines without an answer, with several, and with another than the library's."""
    got = [json.loads(text) for text in out.read_text().splitlines()]
    names = [answer["custom_id"] for answer in got]
    want = expected(lines)
    found.missing, found.repeated = len(want.keys() - set(names)), len(names) - len(set(names))
    found.wrong = sum(text_of(answer) != want[answer["custom_id"]] for answer in got)


def text_of(answer: dict[str, Any]) -> str | None:
    response = answer["response"]
    return None if answer["error"] else response["body"]["choices"][0]["message"]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder, Clusters() as clusters:
        for seed in range(args.seed, args.seed + args.trials):
            found.append(trial(clusters, seed, Path(folder), lines=args.lines))
            print(found[-1], flush=True)
            document = {
                **provenance(torch.device("cpu")),
                "lines": args.lines,
                "trials": [asdict(one) for one in found],
            }
            args.out.write_text(json.dumps(document, indent=1) + "\n")
    if not all(one.good for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
