"""The comparison with other engines: which runs there are, going on with a file, and the table of Diffulex."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import compare, work
from benchmarks.report import diffulex
from benchmarks.shapes import SHAPES

ALL = [
    f"{side}-{shape}-batch{batch}"
    for batch in (1, 16)
    for shape in ("llada", "sdar-4b", "sdar-8b")
    for side in ("diffulex", "ours")
]


def measured(name: str) -> dict[str, Any]:
    """What a run of that name may have found. Its speed is its place among all, so that rows can be told apart."""
    place = ALL.index(name)
    steps = {"512": {"forwards": 1, "median_ms": 66.0}, "4": {"forwards": 192, "median_ms": place + 0.25}}
    return {
        "new": 256, "all_s": [1.0, 1.0], "forwards": 193, "ms_per_forward": place + 0.5, "tokens_per_s": 1000 + place,
        "warm_up_s": 1.0, "by_width": steps,
    }  # fmt: skip


def report(folder: Path, file: str, names: list[str], **other: str) -> None:
    about = {"commit": "abc", "diffulex_commit": "184ba97", "hardware": "a card", "torch": "2", "transformers": "5"}
    (folder / file).write_text(json.dumps(about | other | {"runs": {name: measured(name) for name in names}}))


def test_diffulex_and_ours_run_every_shape_on_the_same_work() -> None:
    given = compare.arguments(["--diffulex", "folder", "--out", "out.json"])
    assert sorted(given.only) == sorted(ALL)
    for theirs, ours in zip(ALL[::2], ALL[1::2], strict=True):
        assert compare.RUNS[theirs][1:] == compare.RUNS[ours][1:]
        _, shape, options = compare.RUNS[ours]
        assert shape in SHAPES and compare.SMALLER[shape] in SHAPES
        asked = work.arguments(None, ["--config", "config.json", "--out", "out.json", *options])
        assert asked.cache == "block" and ours.endswith(f"-batch{asked.batch}")
        assert (asked.prompt, asked.block, asked.rate) == ((128, 32, 4) if "llada" in ours else (512, 4, 2))


def test_runs_are_added_to_a_file_and_one_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def run(name: str, given: Namespace, scratch: Path) -> dict[str, Any]:
        begun.append(name)
        if name == ALL[1] and len(begun) < 4:
            raise subprocess.TimeoutExpired(name, given.limit)
        return measured(name)

    monkeypatch.setattr(compare, "run", run)
    line = ["--diffulex", str(tmp_path), "--out", str(tmp_path / "out.json"), "--dry-run", "--only"]
    with pytest.raises(SystemExit, match=f"{ALL[1]} failed"):
        compare.main([*line, *ALL[:3]])
    assert list(json.loads((tmp_path / "out.json").read_text())["runs"]) == [ALL[0], ALL[2]]
    compare.main([*line, *ALL[:4]])
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["runs"]) == [ALL[0], ALL[2], ALL[1], ALL[3]] and begun == [*ALL[:3], ALL[1], ALL[3]]
    monkeypatch.setenv("DINFER_COMMIT", "another")  # figures of two commits never share a file
    with pytest.raises(ValueError, match=r"commit .* now it is another: name another file"):
        compare.main([*line, ALL[4]])


def test_the_table_joins_the_files_of_one_session(tmp_path: Path) -> None:
    assert "Not measured" in diffulex(tmp_path)
    report(tmp_path, "diffulex-h200.json", ALL[::2])
    report(tmp_path, "diffulex-second-h200.json", ALL[1::2])
    text = diffulex(tmp_path)
    assert "a card, torch 2, commit abc, transformers" in text
    rows = [line for line in text.splitlines() if line.startswith(("| Diffulex,", "| ours,"))]
    assert [row.split(" | ")[-1] for row in rows] == [f"{1000 + place:,} |" for place in range(12)]
    assert rows[11] == "| ours, SDAR-8B, blocks of 4 | 16 | 11.50 | 11.25 ms | 193 | 1,011 |"
    report(tmp_path, "diffulex-sdar-h200.json", ALL[:1])
    with pytest.raises(ValueError, match=rf"diffulex-sdar-h200\.json has {ALL[0]} again"):
        diffulex(tmp_path)
    report(tmp_path, "diffulex-sdar-h200.json", [], torch="3")
    with pytest.raises(ValueError, match=r"diffulex-sdar-h200\.json has another torch than diffulex-h200\.json"):
        diffulex(tmp_path)
