"""benchmarks.ablation: what it turns off, and the report of a dry run."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import pytest

from benchmarks import ablation
from benchmarks.shapes import shape
from dinfer.core.kernels.dispatch import GROUPS, groups_off
from dinfer.speed import scheduler
from dinfer.speed.abilities import open_positions
from dinfer.speed.grouping import PrefillBatching
from dinfer.speed.scheduler import Lookahead


@pytest.mark.rest  # ten seconds
def test_a_dry_run_writes_the_ratio_of_every_variant(tmp_path: Path) -> None:
    out = tmp_path / "ablation.json"
    line = f"--cases small,small-llada2 --only canvas,gather,experts,early --new 16 --device cpu --out {out}"
    ablation.main(line.split())
    cases = json.loads(out.read_text())["cases"]
    assert [*cases["small"]] == ["all on", "canvas", "all on, again", "early"]
    assert [*cases["small-llada2"]] == ["all on", "canvas", "gather", "experts", "all on, again", "early"]
    for rows in cases.values():
        base = statistics.median(rows["all on"]["step_runs"] + rows["all on, again"]["step_runs"])
        for row in rows.values():
            assert row["step_ratio"] == pytest.approx(row["step_ms"] / base, abs=1e-3)
            assert row["same_tokens"] and row["window_steps"] > 0 and row["wall_ratio"] > 0


@pytest.mark.parametrize("name", [*GROUPS, *ablation.HOST])
def test_one_thing_is_off_at_a_time_and_all_are_on_again(name: str) -> None:
    def state() -> tuple[object, ...]:
        groups = groups_off(os.environ.get("DINFER_KERNELS", "triton"))
        early, holds = os.environ.get("DINFER_EARLY"), PrefillBatching.holds
        return groups, early, Lookahead().pays, open_positions.MANY, vars(scheduler)["narrow_width"], holds

    before = state()
    with ablation.without(name):
        assert sum(mine != theirs for mine, theirs in zip(state(), before, strict=True)) == 1
        assert name not in GROUPS or state()[0] == {name}
    assert state() == before


def test_what_a_case_does_not_run_is_not_turned_off() -> None:
    names = {
        case: {name for name in (*GROUPS, *ablation.HOST) if ablation.applies(name, found, shape(found.shape)[1])}
        for case, found in ablation.CASES.items()
    }
    every = {*GROUPS, *ablation.HOST}
    assert set().union(*(names[case] for case in names if not case.startswith("small"))) == every
    assert every - names["llada-8b-int4"] == {"experts", "router", "draw", "settle", "gather", "scored"}
    assert every - names["llada2-mini-64"] == {"packed", "draw"}


@pytest.mark.rest
def test_a_variant_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(recipe: object, case: object, new: int) -> object:
        if "canvas" in os.environ.get("DINFER_KERNELS", ""):
            raise RuntimeError("no room\nat all")
        return {"step_ms": 2.0, "wall_ms": 4.0, "step_runs": [2.0], "wall_runs": [4.0]}, [[1]]

    monkeypatch.setattr(ablation, "measured", broken)
    out = tmp_path / "ablation.json"
    ablation.main(["--cases", "small", "--only", "canvas,commit", "--device", "cpu", "--out", str(out)])
    rows = json.loads(out.read_text())["cases"]["small"]
    assert rows["canvas"] == {"error": "no room"} and rows["commit"]["step_ratio"] == 1.0


def test_what_repeated_runs_differ_by_is_not_told() -> None:
    runs = {"all on": [2.0, 2.1], "canvas": [2.0, 2.05], "commit": [3.0, 3.0], "all on, again": [2.0, 2.0]}
    rows = {
        name: {"step_ms": own[0], "wall_ms": 4.0, "step_runs": own, "wall_runs": [4.0]} for name, own in runs.items()
    }
    ablation.compared(rows)
    assert rows["all on"]["step_spread"] == pytest.approx(0.05) and rows["commit"]["step_spread"] == 0
    assert ablation.beyond(rows) == {"commit": "+50.0% / ·"}


@pytest.mark.parametrize(("line", "message"), [
    ("--cases small,tiny", "--cases: tiny not known; use llada-8b, "),
    ("--only canvsa", "--only: canvsa not known; use linear, "),
    ("--new 6", "--new 6 must be a multiple of 4, at least 4"),
])  # fmt: skip
def test_a_wrong_option_is_named(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ablation.main(line.split())
    assert message in capsys.readouterr().err
