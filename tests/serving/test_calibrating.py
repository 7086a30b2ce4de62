"""`dinfer tune labelled=FILE`, and what it writes."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.command_line import CommandLine
from support.serving import served

from dinfer.demo.problems import generate
from dinfer.serving.settings import FORMS, Settings


@pytest.fixture
def dinfer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine(monkeypatch, capsys)


def lines(count: int, **other: Any) -> None:
    predicate = {"type": "predicate", "instructions": "Is it so?"}
    choice = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": True}]}
    asked = [
        {"input": f"It is {i}.", "questions": [predicate, choice], "answers": [i % 3 > 0, "a"]} for i in range(count)
    ]
    Path("in.jsonl").write_text("".join(f"{json.dumps(one | other)}\n" for one in asked))


def test_temperatures_are_fitted_said_and_served(dinfer: CommandLine) -> None:
    lines(24)
    said = dinfer("tune", "labelled=in.jsonl", "preset=own/recipe/sure.yaml", "device=cpu")
    assert said.status == 0, said.err
    assert "choice, 12 questions: temperature" in said.out and "noul, 12 questions: temperature" in said.out
    assert "use it: dinfer serve device=cpu --config-dir own recipe=sure" in said.out
    shown = dinfer("serve", "--config-dir", "own", "recipe=sure", "--cfg", "job")
    form = re.search(r"calibration:\n  labels: (\w+)\n  joint: (\w+)\n  choice: ", shown.out)
    assert shown.status == 0 and form, shown.out
    lines_of_forms = [line.partition(": ") for line in said.out.splitlines() if line.startswith("labels=")]
    assert {name for name, _, _ in lines_of_forms} == {
        f"labels={labels} joint={joint}" for labels, joint in product(*FORMS.values())
    }
    shares = {name: float(said[:-7]) for name, _, said in lines_of_forms if said.endswith("% right")}
    assert shares[f"labels={form[1]} joint={form[2].capitalize()}"] == max(shares.values())
    assert all("different numbers of tokens" in said for name, _, said in lines_of_forms if name not in shares)
    assert dinfer("generate", "1 + 1", "--config-dir", "own", "recipe=sure", "max_new_tokens=2").status == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"answers": [True]}, "line 1: answers must be a list of 2"),
        ({"answers": ["yes", "a"]}, "line 1: answers.0='yes' is none of [True, False]"),
        ({"answers": [True, 1]}, "line 1: answers.1=1 is none of ['a', True]"),
        ({"input": 3}, "line 1: input"), ({"state": "x"}, "line 1: state"),
        ({}, "2 labelled questions of kind choice: give 20 or more"),
    ],
)  # fmt: skip
def test_a_line_that_is_wrong_is_named(dinfer: CommandLine, other: dict[str, Any], message: str) -> None:
    lines(2, **other)
    said = dinfer("tune", "labelled=in.jsonl", "preset=own/recipe/sure.yaml", "device=cpu")
    assert said.status == 2 and message in said.err and not Path("own/recipe/sure.yaml").exists(), said.err


def test_a_calibration_is_of_a_kind_and_the_request_has_the_last_word() -> None:
    asked = {
        "input": "x", "questions": [
            {"type": "choice", "instructions": "Which?", "choices": [{"value": f"v{i}"} for i in range(3)]},
            {"type": "predicate", "instructions": "Is it so?"},
        ],
    }  # fmt: skip

    def shares(client: Any, **own: Any) -> tuple[list[float], dict[str, Any]]:
        answer = client.ask("/v1/decisions", asked | {"dinfer": own})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return [one["probability"] for one in found["answers"][0]["probabilities"]], found["usage"]["dinfer"]

    with served(Settings(calibration={"choice": 2.0})) as client:
        hot, told = shares(client)
        plain, _ = shares(client, temperature=1.0)
        assert told["temperature"] == [2.0, 1.0] and told["seeds"] == [1, 1]
        weights = [share**0.5 for share in plain]
        assert hot == pytest.approx([weight / sum(weights) for weight in weights])
        cold, _ = shares(client, temperature=5e-324)  # the least there is
        assert sorted(cold) == pytest.approx([0.0] * (len(cold) - 1) + [1.0])
        # Each seed is another order of the options, and a read that is sure takes no further one.
        many, told = shares(client, seeds=3)
        turned = [shares(client, seed=seed)[0] for seed in range(3)]
        assert many == pytest.approx([sum(column) / 3 for column in zip(*turned, strict=True)])
        assert told["seeds"] == [3, 3] and len(told["standard_errors"][0]) == 3
        assert shares(client, seeds=3, sure=max(hot) - 1e-6)[1]["seeds"][0] == 1
        assert shares(client, seeds=3, sure=1.0)[1]["seeds"] == [3, 3]
        joint, told = shares(client, joint=True, steps=2)
        assert sum(joint) == pytest.approx(1) and told["forwards"] <= 3 and len(told["mass"]) == 2
        for wrong in ({"sure": 0.5}, {"sure": 2, "seeds": 2}, {"joint": 1}):
            assert client.ask("/v1/decisions", asked | {"dinfer": wrong}).status_code == 400
    for wrong in ({"chioce": 2.0}, {"choice": 0.0}, {"choice": "2"}, {"labels": "words"}, {"joint": 3}):
        with pytest.raises(ValueError, match="calibration"):
            Settings(calibration=wrong)


def test_slots_stand_behind_names_or_in_the_clients_own_words() -> None:
    """The model in the box reads what it was trained to write: behind other words it guesses."""
    sides, (problem,) = ["north", "east", "south", "west"], generate("heldout", 1, 0, ["turns"])
    turns = re.findall("left|right|around", problem.question)[:3]
    questions = [
        {"type": "choice", "name": name, "instructions": "Where?", "choices": [{"value": side} for side in sides]}
        for name in (None, "q", "r")
    ]
    slots = {slot: sides for slot in ("1", "q", "r")}
    text = "\n".join(f"Now [SLOT:{slot}], by turning {turn}." for slot, turn in zip(slots, turns, strict=True))
    with served(Settings(calibration={"labels": "names", "joint": True, "choice": 1.0})) as client:

        def ask(**own: Any) -> Any:
            asked = {"input": problem.question, "questions": questions, "dinfer": own}
            return client.ask("/v1/decisions", asked).json()

        turn = {"role": "user", "content": problem.question}
        read = client.ask("/v1/read", {"messages": [turn], "answer": text, "slots": slots}).json()["slots"]
        found = ask(answer=text)["answers"]
        for slot, answer in zip(slots, found, strict=True):
            shares = {one["value"]: one["probability"] for one in answer["probabilities"]}
            assert shares == pytest.approx(read[slot]["probabilities"], rel=1e-3)
        at, quarters = sides.index(re.findall("|".join(sides), problem.question)[0]), ["", "right", "around", "left"]
        after = [(at := (at + quarters.index(turn)) % 4) for turn in turns]
        assert [one["choice"] for one in found] == [sides[i] for i in after]
        # What the request says of its form has the last word.
        assert ask()["answers"] == ask(labels="names", joint=True)["answers"] != ask(labels="letters")["answers"]
        assert ask()["usage"]["dinfer"]["forwards"] == 1 and ask(joint=False)["answers"] != ask()["answers"]
        for own, field, what in (
            ({"answer": "[SLOT:1]"}, "answer", "'q' is not in the answer"),
            ({"answer": text + "[SLOT:2]"}, "answer", "[SLOT:2] has no options"),
            ({"answer": text, "seeds": 2}, "seeds", "turns the options that are written"),
            ({"answer": text, "labels": "names"}, "labels", "give one of them"),
            ({"seeds": 2}, "seeds", "labels=names"),
        ):
            error = ask(**own)["error"]
            assert error["param"] == f"dinfer.{field}" and what in error["message"], error
        questions[1]["name"] = "q [SLOT:1]"  # is a name, and no slot
        assert len(ask()["answers"]) == 3
        questions[1]["name"] = "1"
        assert "two questions have the slot '1'" in ask(answer=text)["error"]["message"]
