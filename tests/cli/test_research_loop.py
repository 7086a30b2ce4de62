"""The loop as a researcher runs it: a sweep of evaluations, the same again with more in it, a plot, a tuned recipe."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from dinfer.__main__ import main

for package in ("lm_eval", "optuna", "matplotlib"):
    pytest.importorskip(package, reason=f"{package} is not installed")


def test_sweep_resume_plot(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["eval", "-m", "tasks=mini_turns", "limit=2", "max_new_tokens=8", "iteration.block=8", checkpoint]
    sweep = [*line, "decoder=threshold,factor", "decoder.factor=4"]
    main([*sweep, "decoder.threshold=0.9"])
    assert capsys.readouterr().err.count("wrote runs") == 2
    main([*sweep, "decoder.threshold=0.5,0.9"])  # one more: what is there is not done again
    said = capsys.readouterr()
    assert said.err.count("done on") == 2 and said.err.count("wrote runs") == 1
    with (tmp_path / "runs" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["decoder"], row["decoder.threshold"], row["decoder.factor"]) for row in rows} == {
        ("threshold", "0.5", ""), ("threshold", "0.9", ""), ("factor", "", "4.0"),
    }  # fmt: skip
    main(["plot", "runs", "out=front.svg"])
    said = capsys.readouterr()
    assert "mini_turns" in said.out and "Pareto front" in (tmp_path / "front.svg").read_text()


@pytest.mark.rest  # ten seconds
def test_tuning_on_a_task(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calibration documents are the task's first, the held-out ones those behind them."""
    monkeypatch.chdir(tmp_path)
    from evaluations import run as runs

    asked, evaluate = [], runs.evaluate

    def watched(load, settings, **given):  # type: ignore[no-untyped-def]
        found = evaluate(load, settings, **given)
        asked.append((settings.documents, found["tasks"]["mini_turns"]["documents"]))
        return found

    monkeypatch.setattr(runs, "evaluate", watched)
    common = [
        "tune",
        "goal=tpf",
        "trials=1",
        "max_new_tokens=8",
        "iteration.block=8",
        "space.iteration=null",
        checkpoint,
    ]
    main([*common, "tasks=mini_turns", "count=3", "heldout=2"])
    assert asked == [((0, 3), 3)] * 2 + [((3, 5), 2)] * 2
    report = json.loads((tmp_path / "tune.json").read_text())
    assert report["heldout"]["metrics"]["problems"] == 2 and report["heldout"]["drop"]["points"] == 0
    said = capsys.readouterr().out
    quoted = shlex.quote(checkpoint)
    assert f'use it: dinfer generate "question" {quoted} --config-dir conf recipe=tuned' in said
    for more, message in (
        (["tasks=[mini_turns,mini_ages]"], "tune on one task at a time"),
        (["tasks=mini_turns", "count=499", "heldout=2"], "has 500 documents, and 501 are asked for"),
    ):
        with pytest.raises(SystemExit):
            main([*common, *more])
        assert message in capsys.readouterr().err
