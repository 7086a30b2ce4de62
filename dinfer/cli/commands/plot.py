"""draws accuracy against speed of measured recipes, with Pareto fronts and areas

usage: dinfer plot RUNS [RUNS ...] [out=pareto.png] [task=NAME] [by=decoder,cache]

RUNS are folders of `dinfer eval` (their runs.csv), or CSV tables with at least accuracy, problems and tpf. For each
task it draws accuracy against tokens per forward and, where measured, tokens per second. A point is a recipe with its
95% Wilson interval, hollow if it has fewer than 100 problems. A curve is a method. It adds the Pareto front and each
method's area under accuracy and parallelism (AUP, see docs/research.md). It refuses to draw speeds of different
machines in one picture.

  out=pareto.png          the figure; .svg and .pdf too
  task=mini_gsm           only this task
  by=decoder,cache        what makes a method; the rest, such as thresholds, are points of its curve
                          (model,checkpoint,iteration,decoder,cache, as far as they differ)
"""

import csv
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dinfer.cli.conf import check_once, need
from dinfer.cli.terminal import say, show, table
from dinfer.core.registry import unknown
from dinfer.lab.outputs import check_file, replacing
from dinfer.lab.plots import AXES, FEW, areas, draw, front

SETTINGS = {"out": "pareto.png", "task": "", "by": "model,checkpoint,iteration,decoder,cache"}
FORMATS = (".png", ".svg", ".pdf")
NUMBERS = ("problems", "accuracy", "accuracy_low", "accuracy_high", "tpf", "tps")
NEEDED = ("problems", "accuracy", "tpf")


def run(args: Namespace) -> None:
    """Reads, draws and prints."""
    settings, paths, given = dict(SETTINGS), [], list[tuple[str, str]]()
    for arg in [*args.words, *args.literal]:
        name, equals, value = arg.partition("=")
        if not equals or Path(arg).exists():
            paths.append(Path(arg))
        elif name in SETTINGS:
            settings[name] = value
            given.append((name, arg))
        else:
            raise unknown("setting", name, list(SETTINGS))
    check_once(given)
    if not paths:
        raise ValueError("nothing to plot: name a folder of runs, as in dinfer plot runs")
    need("matplotlib", "plot", "dinfer plot needs matplotlib")
    out, by = Path(settings["out"]), settings["by"].split(",")
    if out.suffix not in FORMATS:
        raise ValueError(f"out={out} must end in {', '.join(FORMATS)}")
    check_file(out)
    rows, skipped = read(paths)
    columns = {name for row in rows for name in row}
    for name in by:
        if settings["by"] != SETTINGS["by"] and name not in columns:
            raise unknown("column in by:", name, sorted(columns))
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tasks.setdefault(row.get("task") or "all problems", []).append(row)
    if settings["task"]:
        if settings["task"] not in tasks:
            raise unknown("task", settings["task"], sorted(tasks))
        tasks = {settings["task"]: tasks[settings["task"]]}
    for task, own in tasks.items():
        check_hardware(task, own)
    with replacing(out) as part:
        draw(tasks, part, by=by)
    for task, own in tasks.items():
        methods = table([{"method": name, "AUP": f"{area:.1f}"} for name, area in areas(own, by).items()])
        show(f"\n{task}", fronts(own), methods)
    if skipped:
        say(f"{skipped} lines have no accuracy or no forwards (tasks of likelihoods) and are not drawn")
    say(f"wrote {out}")


def read(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], int]:
    """The rows that can be drawn, with their numbers as numbers, and how many cannot. Raises ValueError, OSError."""
    rows, skipped = [], 0
    for path in paths:
        file = path / "runs.csv" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{file} is not there: RUNS are folders that `dinfer eval` wrote to, or CSV tables")
        with file.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or [])]
            if missing:
                raise ValueError(f"{file} has no column {missing[0]}")
            for number, line in enumerate(reader, 2):
                if any(line[name] in ("", None) for name in NEEDED):
                    skipped += 1
                else:
                    rows.append(numbered(f"{file}:{number}", line))
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))}: no run has an accuracy and forwards to draw")
    return rows, skipped


def numbered(where: str, line: dict[str, Any]) -> dict[str, Any]:
    from dinfer.lab.metrics import wilson

    row = dict(line)
    for name in NUMBERS:
        try:
            row[name] = float(line[name]) if line.get(name) not in ("", None) else None
        except ValueError:
            raise ValueError(f"{where}: {name}={line[name]!r} must be a number") from None
    if row["accuracy_low"] is None or row["accuracy_high"] is None:
        share = row["accuracy"] / 100 * row["problems"]
        row["accuracy_low"], row["accuracy_high"] = wilson(share, int(row["problems"]))
    return row


def check_hardware(task: str, rows: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError for speeds of different machines."""
    machines = sorted({row["hardware"] for row in rows if row.get("hardware") and row["tps"] is not None})
    if len(machines) > 1:
        raise ValueError(
            f"{task} was measured on {' and on '.join(machines)}, whose speeds do not compare: plot each apart"
        )


def fronts(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """The recipes on the front of tokens per forward, by speed."""
    told = {name: "" if name in SETTINGS["by"].split(",") else f"{name}=" for name in options(rows)}
    return table([
        {
            "Pareto front": " ".join(f"{word}{row[name]}" for name, word in told.items() if row.get(name)),
            "accuracy": f"{row['accuracy']:.1f}%",
            "95%": f"{row['accuracy_low']:.1f} to {row['accuracy_high']:.1f}",
            "problems": f"{row['problems']:.0f}{' (few)' if row['problems'] < FEW else ''}",
        }
        | {name: f"{row[name]:.2f}" if row[name] is not None else "" for name in AXES}
        for row in front(rows)
    ])  # fmt: skip


def options(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The columns that say how the recipes differ: components first, then their options."""
    kinds = SETTINGS["by"].split(",")
    names = [*kinds, *(name for name in rows[0] if name.partition(".")[0] in kinds and "." in name), "options"]
    return [name for name in names if len({row.get(name) for row in rows}) > 1] or ["decoder"]
