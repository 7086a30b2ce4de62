"""Kills workers, the driver and the head of `dinfer batch ... ray=ADDRESS` at random moments, and checks the answers.

    python -m tests.support.kills --files 4 --kills 5 --out benchmarks/results/serving-kills.json

Two replicas of the model in the box answer each file, on a Ray cluster of this machine. Who is killed, and after how
many answers, is drawn from the file's seed. The command runs again until it succeeds, on a new cluster if the head is
dead. Then every line must have one answer, that of the library.
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
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

import dinfer
from benchmarks.provenance import provenance, save
from dinfer.demo.problems import generate
from tests.support.ray_cluster import QUIET, Cluster, cluster

VICTIMS = ("worker", "driver", "head")
NEW_TOKENS = 32
ROWS = 8
HANGS = 300.0  # seconds after which a run counts as hung
WORKER = "MapWorker"  # Ray Data's name of its actors


@dataclass(frozen=True, slots=True)
class Kill:
    """A process to kill, and after how many answers."""

    victim: str
    after: int


@dataclass(slots=True)
class Trial:
    """One file, answered in spite of kills."""

    seed: int
    kills: list[Kill]
    done: list[Kill] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # of the command, each time
    seconds: float = 0.0
    hung: bool = False
    missing: int = 0
    repeated: int = 0
    wrong: int = 0

    @property
    def good(self) -> bool:
        return self.done == self.kills and not (self.hung or self.missing or self.repeated or self.wrong)


def drawn(seed: int, count: int, lines: int) -> list[Kill]:
    """Random kills, with some lines left after the last one."""
    draw = random.Random(seed)
    return [Kill(draw.choice(VICTIMS), after) for after in sorted(draw.sample(range(1, lines * 3 // 4), count))]


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
    """Clusters one after the other: the next starts when the last is dead."""

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


def trial(clusters: Clusters, seed: int, folder: Path, *, lines: int, kills: list[Kill]) -> Trial:
    """Answers one file. Kills that are still due move to the next run."""
    found, draw = Trial(seed, kills), random.Random(seed)
    asked, out = folder / f"in-{seed}.jsonl", folder / f"out-{seed}.jsonl"
    asked.write_text("".join(f"{line(i, question)}\n" for i, question in enumerate(questions(lines))))
    began = time.monotonic()
    while not found.hung and (not found.statuses or found.statuses[-1]) and len(found.statuses) <= len(kills) + 1:
        here = clusters.alive()
        command = [
            sys.executable, "-m", "dinfer", "batch", str(asked), str(out), f"ray={here.address}",
            "replicas=2", "device=cpu", f"runtime.rows={ROWS}",
        ]  # fmt: skip
        with (folder / f"log-{seed}.txt").open("ab") as log:
            run = subprocess.Popen(command, env=os.environ | QUIET, stderr=log, stdout=log)
        end = time.monotonic() + HANGS
        while run.poll() is None and not found.hung:
            left, there = kills[len(found.done) :], answers(out)
            if left and there >= left[0].after and here.alive and struck(left[0].victim, run, here, draw):
                found.done.append(left[0])
            found.hung = time.monotonic() > end
            time.sleep(0.02)
        if found.hung:
            run.kill()
        found.statuses.append(run.wait())
    found.seconds = round(time.monotonic() - began, 1)
    judge(found, out, lines)
    return found


def struck(victim: str, driver: subprocess.Popen[bytes], here: Cluster, draw: random.Random) -> bool:
    """Kills a process. False: there is none of this kind at the moment."""
    if victim == "worker":
        if workers := here.workers(WORKER):
            draw.choice(workers).kill()
        return bool(workers)
    if victim == "driver":
        driver.kill()
    else:
        here.kill()
    return True


def answers(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def judge(found: Trial, out: Path, lines: int) -> None:
    """Counts lines without an answer, with several answers, and with an answer that is not the library's."""
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
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="of each file's processes")
    parser.add_argument("--lines", type=int, default=80)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder, Clusters() as clusters:
        for seed in range(args.files):
            kills = drawn(seed, args.kills, args.lines)
            found.append(trial(clusters, seed, Path(folder), lines=args.lines, kills=kills))
            print(found[-1], flush=True)
            document = {**provenance(torch.device("cpu")), "lines": args.lines, "files": [asdict(one) for one in found]}
            save(document, args.out)
    if not all(one.good for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
