"""`dinfer plot`: what is read, what is drawn, and what is refused."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from dinfer.__main__ import main
from dinfer.cli.commands.plot import read
from dinfer.lab.plots import areas, aup, methods

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def row(decoder: str, threshold: float, accuracy: float, tpf: float, **more: Any) -> dict[str, Any]:
    return {
        "run": "r", "task": "mini", "decoder": decoder, "cache": "dual", "decoder.threshold": threshold,
        "problems": 100, "accuracy": accuracy, "accuracy_low": accuracy - 5, "accuracy_high": accuracy + 4, "tpf": tpf,
        "tps": 100 * tpf, "hardware": "here",
    } | more  # fmt: skip


ROWS = [
    row("threshold", 0.9, 90, 2),
    row("threshold", 0.7, 86, 3),
    row("credit", 0.9, 85, 2.5),
    row("credit", 0.7, 60, 4),
]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "runs.csv") -> Path:
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in rows for key in line)))
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


def test_a_folder_is_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(
        tmp_path, [*ROWS, row("threshold", 0.9, 50, 1.5, task="other"), row("x", 0, 0, 0) | {"accuracy": "", "tpf": ""}]
    )
    main(["plot", str(tmp_path), f"out={tmp_path}/p.svg"])
    said, told = capsys.readouterr()
    front = [line.split("  ")[0].strip() for line in said.split("mini\n")[1].splitlines()[1:4]]
    assert front == [
        "threshold decoder.threshold=0.9", "threshold decoder.threshold=0.7", "credit decoder.threshold=0.7",
    ]  # fmt: skip
    best = aup([(2, 90), (3, 86)], best=90)
    assert re.search(rf"^threshold +{best:.1f}$", said, re.MULTILINE) and "1 lines have no accuracy" in told
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "p.svg").read_text())
    for text in (f"threshold ({best:.0f})", "Pareto front", "mini", "other", "tokens per second (TPS)"):
        assert text in drawn, text


def test_the_figure_shows_every_point_with_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure's own data: error bars from low to high, the front through what is not beaten."""
    from matplotlib.figure import Figure

    kept: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: kept.append(figure) or savefig(figure, *a, **b))
    main(["plot", str(written(tmp_path, ROWS)), f"out={tmp_path}/p.png"])
    left, right = kept[0].axes
    assert left.get_xlabel() == "tokens per forward (TPF)" and right.get_xlabel() == "tokens per second (TPS)"
    lines = {str(line.get_label()): line for line in left.get_lines()}
    assert [list(map(float, xy)) for xy in lines["Pareto front"].get_xydata()] == [[2, 90], [3, 86], [4, 60]]
    bars = {str(bar.get_label()).split(" ")[0]: bar for bar in left.containers}
    spans = [[float(y) for y in segment[:, 1]] for segment in bars["credit"].lines[2][0].get_segments()]
    assert spans == [[80, 89], [55, 64]]


def test_points_of_few_problems_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.figure import Figure

    kept: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: kept.append(figure) or savefig(figure, *a, **b))
    main(["plot", str(written(tmp_path, [*ROWS, row("fixed", 0, 99, 1, problems=12)])), f"out={tmp_path}/p.png"])
    hollow = [line for line in kept[0].axes[0].get_lines() if line.get_markerfacecolor() == "white"]
    assert [xy.tolist() for line in hollow for xy in line.get_xydata()] == [[1, 99]]
    assert "hollow: fewer than 100 problems" in {str(line.get_label()) for line in hollow}
    assert re.search(r"99\.0% +94\.0 to 103\.0 +12 \(few\)", capsys.readouterr().out)


def test_a_png_is_written_without_speeds(tmp_path: Path) -> None:
    rows = [{key: value for key, value in line.items() if key not in ("tps", "task", "accuracy_low")} for line in ROWS]
    main(["plot", str(written(tmp_path, rows, "table.csv")), f"out={tmp_path}/p.png"])
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    found, _ = read([tmp_path / "table.csv"])
    assert found[0]["accuracy_low"] == pytest.approx(82.56, abs=0.01)  # Wilson's, of 90 in 100


def test_methods_are_what_differs() -> None:
    rows = [line | {"model": "tiny"} for line in ROWS]
    assert {name: len(own) for name, own in methods(rows, ["model", "decoder", "cache"]).items()} == {
        "threshold": 2, "credit": 2,
    }  # fmt: skip
    assert list(methods(rows[:1], ["model", "decoder"])) == ["tiny"]
    assert list(areas(rows, ["decoder"])) == ["threshold", "credit"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to plot"),
        (["nowhere"], "nowhere is not there"),
        (["FOLDER", "out=p.txt"], "out=p.txt must end in .png, .svg, .pdf"),
        (["FOLDER", "tsk=a"], "unknown setting 'tsk'. Did you mean 'task'?"),
        (["FOLDER", "task=minni"], "unknown task 'minni'. Did you mean 'mini'?"),
        (["FOLDER", "by=decodr"], "unknown column in by: 'decodr'. Did you mean 'decoder'?"),
        (["FOLDER", "FOLDER/other"], "was measured on here and on there, whose speeds do not compare"),
        (["FOLDER/bad"], "accuracy='high' must be a number"),
        (["FOLDER/none"], "no run has an accuracy"),
        (["FOLDER/less/runs.csv"], "has no column tpf"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    written(tmp_path, ROWS)
    for name, rows in (
        ("other", [row("threshold", 0.9, 90, 2, hardware="there")]),
        ("bad", [row("a", 1, 1, 1) | {"accuracy": "high"}]),
        ("none", [row("a", 1, 1, 1) | {"accuracy": ""}]), ("less", [{"accuracy": 1, "problems": 1}]),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        written(tmp_path / name, rows)
    with pytest.raises(SystemExit) as ended:
        main(["plot", *(arg.replace("FOLDER", str(tmp_path)) for arg in args)])
    assert ended.value.code == 2 and message in capsys.readouterr().err
