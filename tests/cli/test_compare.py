"""`dinfer compare`: the lead of one evaluation over another, and evaluations that do not pair."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dinfer.__main__ import main


def written(path: Path, scores: list[float], *, task: str = "mini", metric: str = "exact,none", first: int = 0) -> Path:
    """A report of `dinfer eval`, with its samples."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"schema": "dinfer-eval/1", "tasks": {task: {"metric": metric}}}))
    name, kind = metric.split(",")
    lines: list[dict[str, Any]] = [
        {"task": task, "doc_id": number, "doc": {"q": number + first}, "filter": kind, name: score}
        for number, score in enumerate(scores)
    ]
    other = [line | {"filter": "other", name: 1.0} for line in lines]
    path.with_suffix(".samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*other, *lines]))
    return path


def test_the_lead_is_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a" / "a.json", [1.0] * 10 + [0.0] * 10 + [1.0])
    b = written(tmp_path / "b.json", [1.0] * 10 + [1.0] * 10 + [0.0])
    main(["compare", str(a.parent), str(b)])  # a folder with one report stands for it
    line = capsys.readouterr().out.splitlines()[1]
    # 10 of 21 documents won and 1 lost; McNemar's p is 2 (1 + 11) / 2^11.
    assert re.fullmatch(r"mini +21 +52\.4% +95\.2% +\+42\.9 +\+12\.9 to \+65\.4 +1 +10 +0\.012", line)
    main(["compare", str(a), str(a), "task=mini"])
    assert re.search(r"\+0\.0 +-12\.1 to \+12\.1 +0 +0 +1\.000", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a.json"], "give two evaluations"),
        (["a.json", "none.json"], "none.json is not there: name a report"),
        (["a.json", "b.json", "task=maxi"], "unknown task 'maxi'"),
        (["a.json", "other.json"], "no task is in both"),
        (["a.json", "long.json"], "A has 2 documents and B 3"),
        (["a.json", "moved.json"], "they are not the same: give both the same limit="),
        (["a.json", "judged.json"], "A was judged by exact,none and B by bleu,none"),
        (["a.json", "."], "has 6 reports of `dinfer eval`, so name one of them"),
        (["a.json", "a.samples.jsonl"], "are no results of `dinfer eval`"),
    ],
)
def test_evaluations_that_do_not_pair_are_refused(
    tmp_path: Path, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, settings in {
        "a": {}, "b": {}, "other": {"task": "maxi"}, "moved": {"first": 1}, "judged": {"metric": "bleu,none"},
    }.items():  # fmt: skip
        written(Path(f"{name}.json"), [1.0, 0.0], **settings)
    written(Path("long.json"), [1.0, 0.0, 1.0])
    with pytest.raises(SystemExit) as end:
        main(["compare", *args])
    assert end.value.code == 2 and message in capsys.readouterr().err
