"""Three questions decided in a canvas beside the same three as a generated JSON answer, over HTTP, in turns.

    python -m benchmarks.serving.decisions tiny --out benchmarks/results/decisions-tiny-cpu.json

`tiny` is asked where somebody looks after each of three turns; `tiny-json`, the same network with an adapter, writes
JSON. `smol` is asked what a sentence is about, whether its writer is pleased, and what it names; it writes JSON that is
held to a schema. Each form of a decision, one by one and joint; last the form and the temperatures of `dinfer tune
labelled=`, fitted on one half of further texts and judged on the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from statistics import median
from typing import Any

import httpx
import torch
from fastapi.testclient import TestClient

import dinfer
from benchmarks.clock import lap
from benchmarks.provenance import begun, command_line, save, show
from dinfer.demo.problems import generate
from dinfer.lab.metrics import wilson
from dinfer.serving.app import application
from dinfer.serving.calibrating import calibrated, parsed
from dinfer.serving.served import catalogue
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings

SIDES, QUARTERS = ["north", "east", "south", "west"], ["", "right", "around", "left"]
THINGS = {
    "food": ["soup", "pizza", "salad", "cake"], "travel": ["hotel", "flight", "train", "cruise"],
    "computers": ["laptop", "phone", "printer", "screen"], "music": ["concert", "song", "band", "choir"],
}  # fmt: skip
SAID = {
    True: ["The {} was wonderful. I loved it.", "I am very happy with the {}.", "What a great {}! Try it.",
           "The {} was even better than I had hoped."],
    False: ["The {} was terrible. I hated it.", "I am very unhappy with the {}.", "What an awful {}! Avoid it.",
            "The {} was even worse than I had feared."],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A text, the questions about it, and what is right."""

    text: str
    questions: list[dict[str, Any]]
    answers: list[Any]
    canvas: str  # the answer in the model's own words, with a slot for each question
    options: dict[str, list[str]]  # of the slots there
    asked: str = ""  # for JSON


def choice(name: str, text: str, values: list[str]) -> dict[str, Any]:
    return {"type": "choice", "name": name, "instructions": text, "choices": [{"value": value} for value in values]}


def turns(count: int) -> Iterator[Case]:
    for problem in generate("heldout", count, 0, ["turns"]):
        text = problem.question
        at, said = SIDES.index(re.findall("|".join(SIDES), text)[0]), re.findall("left|right|around", text)[:3]
        right = [SIDES[at := (at + QUARTERS.index(turn)) % 4] for turn in said]
        asked = [choice(f"Now{i}", f"Where, after turning {turn}?", SIDES) for i, turn in enumerate(said)]
        canvas = "\n".join(f"Now [SLOT:Now{i}], by turning {turn}." for i, turn in enumerate(said))
        yield Case(text, asked, right, canvas, {})


def opinions(count: int) -> Iterator[Case]:
    rng = Random(0)
    for _ in range(count):
        topic, pleased = rng.choice([*THINGS]), rng.random() < 0.5
        thing = rng.choice(THINGS[topic])
        named = [thing, *rng.sample([one for each in THINGS.values() for one in each if one != thing], 2)]
        rng.shuffle(named)
        asked = [
            choice("Topic", "What is the text about?", [*THINGS]),
            choice("Mood", "How does the writer feel?", ["happy", "sad"]),
            choice("Thing", "Which of these does the text name?", named),
        ]
        canvas = "Topic: [SLOT:Topic]\nThing: [SLOT:Thing]\nMood: [SLOT:Mood]"
        told = (
            f"Tell as JSON what the text is about (Topic: {', '.join(THINGS)}), how the writer feels (Mood: happy, "
            f"sad), and which of these it names (Thing: {', '.join(named)})."
        )
        options = {"Topic": [*THINGS], "Mood": ["happy", "sad"], "Thing": named}
        right = [topic, "happy" if pleased else "sad", thing]
        yield Case(rng.choice(SAID[pleased]).format(thing), asked, right, canvas, options, told)


def server_of(model: str) -> Server:
    pipe = dinfer.load(model, device="cpu", runtime=dinfer.Runtime(rows=4))
    return Server(catalogue(pipe, {model: pipe.recipe}, max_new_tokens=128, created=0), Settings())


def decided(http: httpx.Client, case: Case, **own: Any) -> list[Any]:
    asked = {"input": case.text, "questions": case.questions, "dinfer": own}
    return [one["choice"] for one in http.post("/v1/decisions", json=asked).raise_for_status().json()["answers"]]


def written(http: httpx.Client, case: Case) -> list[Any]:
    """The same three as JSON: held to a schema; of a model that was trained on JSON of its own, from its steps."""
    asked = {"max_tokens": 128, "messages": [{"role": "user", "content": f"{case.text}\n\n{case.asked}".strip()}]}
    if case.options:
        schema = {"type": "object", "properties": {name: {"enum": values} for name, values in case.options.items()},
                  "required": [*case.options], "additionalProperties": False}  # fmt: skip
        asked |= {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    answer = http.post("/v1/chat/completions", json=asked).raise_for_status().json()
    told = json.loads(answer["choices"][0]["message"]["content"])
    if case.options:
        return [*told.values()]
    steps = [*told["steps"], "", "", ""][:3]
    sides = [re.findall("|".join(SIDES), step) or [None] for step in steps]
    return [found[0 if step.startswith("Now") else -1] for found, step in zip(sides, steps, strict=True)]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", choices=("tiny", "smol"))
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--labelled", type=int, default=120)
    given = parser.parse_args()
    report = begun(given, torch.device("cpu"))
    cases = [*(turns if given.model == "tiny" else opinions)(2 + given.cases + given.labelled)]
    server = server_of(given.model)
    reader = TestClient(application(server), base_url="http://localhost")
    writer = (
        TestClient(application(server_of("tiny-json")), base_url="http://localhost")
        if given.model == "tiny"
        else reader
    )
    ways: dict[str, Callable[[Case], list[Any]]] = {
        "letters": lambda case: decided(reader, case), "letters, joint": lambda case: decided(reader, case, joint=True),
        "names": lambda case: decided(reader, case, labels="names"),
        "names, joint": lambda case: decided(reader, case, labels="names", joint=True),
        "own words": lambda case: decided(reader, case, answer=case.canvas),
        "own words, two forwards": lambda case: decided(reader, case, answer=case.canvas, steps=2),
        "generated JSON": lambda case: written(writer, case),
    }  # fmt: skip
    seconds, hits = ({name: list[Any]() for name in ways} for _ in range(2))
    with reader, writer:
        for number, case in enumerate(cases[: 2 + given.cases]):
            for name, way in ways.items():
                got, took, _ = lap(partial(way, case))
                if number > 1:  # the first of each meets new shapes
                    seconds[name].append(took)
                    hits[name] += [one == right for one, right in zip(got, case.answers, strict=True)]
            save(report, given.out)
    slow = median(seconds["generated JSON"])
    report["ways"] = {
        name: {
            "questions": len(hits[name]), "right": sum(hits[name]),
            "interval": wilson(sum(hits[name]), len(hits[name])),
            "median seconds": median(seconds[name]), "times as fast": slow / median(seconds[name]),
        }
        for name in ways
    }  # fmt: skip
    for name in ("names, joint", "own words"):
        lines = [
            {
                "input": case.text, "questions": case.questions, "answers": case.answers,
                "dinfer": {"answer": case.canvas} if name == "own words" else {"labels": "names", "joint": True},
            }
            for case in cases[2 + given.cases :]
        ]  # fmt: skip
        found = calibrated(server, parsed(json.dumps(line).encode() for line in lines))
        report.setdefault("calibration", {})[name] = [asdict(one) for one in found.temperatures]
        save(report, given.out)
    show(report, given.out)


if __name__ == "__main__":
    main()
