"""A decision of three questions, read from one canvas, beside the same three as a generated JSON answer.

    python -m benchmarks.decisions --out benchmarks/results/decisions-tiny-cpu.json

Problems are held-out `turns`: the questions are where somebody looks after the first, second and third turn. `tiny` is
read with one forward and with three; `tiny-json`, the same network with an adapter, writes all steps as JSON. All in
turns, one request at a time. Temperatures are fitted on every second problem, and errors are of the others.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from math import log

import torch

import dinfer
from benchmarks.provenance import begun, command_line, save, show
from dinfer.demo.problems import generate
from dinfer.lab.calibration import Calibrated, fit
from dinfer.lab.metrics import wilson

SIDES = ["north", "east", "south", "west"]
QUARTERS = {"right": 1, "around": 2, "left": 3}
ASKED = 3
FLOOR = 1e-30


def turns(question: str) -> list[str]:
    return re.findall("left|right|around", question)[:ASKED]


def truth(question: str) -> list[str]:
    """Where somebody looks after each of the first turns."""
    at, found = SIDES.index(re.findall("|".join(SIDES), question)[0]), []
    for turn in turns(question):
        at = (at + QUARTERS[turn]) % 4
        found.append(SIDES[at])
    return found


def told(text: str) -> list[str | None]:
    """The same as a JSON answer tells it; None: it does not."""
    steps = json.loads(text)["steps"][:ASKED]
    sides = [re.findall("|".join(SIDES), step) for step in steps]
    first = [step.startswith("Now") for step in steps]
    found = [names[0 if now else -1] if names else None for names, now in zip(sides, first, strict=True)]
    return [*found, *[None] * (ASKED - len(found))]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--problems", type=int, default=200)
    given = parser.parse_args()
    report = begun(given, torch.device("cpu"))
    runtime = dinfer.Runtime(rows=1)
    plain, writer = (dinfer.load(name, device="cpu", runtime=runtime) for name in ("tiny", "tiny-json"))
    slots = {str(i): SIDES for i in range(ASKED)}
    names = ("one forward", "three forwards", "generated JSON")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    forwards: dict[str, list[int]] = {name: [] for name in names}
    hits: dict[str, list[bool]] = {name: [] for name in names}
    logps: list[list[float]] = []
    right: list[int] = []
    for number, problem in enumerate(generate("heldout", given.problems + 2, 0, ["turns"])):
        text, answers = problem.question, truth(problem.question)
        canvas = "\n".join(f"Now [SLOT:{i}], by turning {turn}." for i, turn in enumerate(turns(text)))
        for name in names:
            began = time.perf_counter()
            if name == "generated JSON":
                done = writer.generate(text, max_new_tokens=128)
                got, count = told(done.text), done.counts.forwards
            else:
                read = plain.read(text, canvas, slots=slots, steps=1 if name == "one forward" else ASKED)
                got, count = [read[str(i)].choice for i in range(ASKED)], sum(one.forwards for one in read.counts)
            if number < 2:  # the first of each meets new shapes
                continue
            seconds[name].append(time.perf_counter() - began)
            forwards[name].append(count)
            hits[name] += [one == answer for one, answer in zip(got, answers, strict=True)]
            if name == "one forward":
                rows = [read[str(i)].probabilities for i in range(ASKED)]
                logps += [[log(max(row[side], FLOOR)) for side in SIDES] for row in rows]
                right += [SIDES.index(answer) for answer in answers]
        save(report, given.out)
    report["methods"] = {
        name: {
            "questions": len(hits[name]), "right": sum(hits[name]),
            "interval": wilson(sum(hits[name]), len(hits[name])),
            "median seconds": sorted(seconds[name])[len(seconds[name]) // 2],
            "forwards": sum(forwards[name]) / len(forwards[name]),
        }
        for name in names
    }  # fmt: skip
    slow = report["methods"]["generated JSON"]["median seconds"]
    report["times as fast"] = {name: slow / report["methods"][name]["median seconds"] for name in names}
    order = [*range(0, len(right), 2 * ASKED)]
    chosen = [[i + k for i in order for k in range(ASKED)], [i + ASKED + k for i in order for k in range(ASKED)]]
    (fitted, fitted_right), held = (([logps[i] for i in one], [right[i] for i in one]) for one in chosen)
    temperature = fit(fitted, fitted_right)
    report["calibration"] = {
        "before": asdict(Calibrated.of(*held, 1.0)),
        "after": asdict(Calibrated.of(*held, temperature)),
    }
    show(report, given.out)


if __name__ == "__main__":
    main()
