"""says how much better one evaluation is than another, on the same documents

usage: dinfer compare A B [task=NAME]

A and B are reports of `dinfer eval` (NAME.json), or folders with one report each. For each task that both have it shows
the accuracies and B's lead over A in points, with a 95% interval of Bonett and Price. The lead is paired: it counts the
documents that one answers right and the other does not, so it is much surer than two accuracies side by side. `p` is
McNemar's exact test: how often equally good recipes would differ so unevenly. Below 0.05 the lead is hardly chance.

  dinfer compare runs/mini_gsm-llada-fixed.json runs/mini_gsm-llada-threshold.json
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from dinfer.cli.terminal import show, table
from dinfer.core.registry import unknown

Scores = dict[int, tuple[Any, float]]  # of each document: the document, and its score


def run(args: Namespace) -> None:
    """Reads both evaluations and prints how they differ."""
    given = [*args.words, *args.literal]
    paths = [Path(word) for word in given if not word.startswith("task=") or Path(word).exists()]
    if len(paths) != 2 or len(given) - len(paths) > 1:
        raise ValueError("give two evaluations: dinfer compare A.json B.json [task=NAME]")
    first, second = (read(report_in(path)) for path in paths)
    common = [task for task in first if task in second]
    if not common:
        raise ValueError(f"{paths[0]} has {', '.join(first)}, {paths[1]} has {', '.join(second)}: no task is in both")
    for word in given:
        if word.startswith("task=") and not Path(word).exists():
            if (name := word.removeprefix("task=")) not in common:
                raise unknown("task", name, common)
            common = [name]
    show(table([compared(task, first[task], second[task]) for task in common], "B - A in points of accuracy."))


def report_in(path: Path) -> Path:
    """The report that a path means. Raises ValueError."""
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path} is not there: name a report of `dinfer eval`, or the folder that holds it")
    found = [file for file in sorted(path.glob("*.json")) if file.with_suffix(".samples.jsonl").is_file()]
    if len(found) != 1:
        names = "".join(f"\n  {file}" for file in found)
        raise ValueError(f"{path} has {len(found)} reports of `dinfer eval`, so name one of them:{names or ' none'}")
    return found[0]


def read(report: Path) -> dict[str, tuple[str, Scores]]:
    """The metric of each task, and the score of each document by it. Raises ValueError, OSError."""
    samples = report.with_suffix(".samples.jsonl")
    try:
        tasks = json.loads(report.read_text(encoding="utf-8"))["tasks"]
        found: dict[str, tuple[str, Scores]] = {task: (tasks[task]["metric"], {}) for task in tasks}
        for line in map(json.loads, samples.open(encoding="utf-8")):
            metric, scores = found[line["task"]]
            name, kind = metric.rsplit(",", 1)
            if line["filter"] == kind:
                scores[line["doc_id"]] = line["doc"], float(line[name])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{report} and {samples.name} are no results of `dinfer eval` ({error!r})") from error
    return found


def compared(task: str, first: tuple[str, Scores], second: tuple[str, Scores]) -> dict[str, str]:
    """A line of the table. Raises ValueError for evaluations that do not pair."""
    from dinfer.lab.metrics import Difference

    (metric, a), (other, b) = first, second
    if metric != other:
        raise ValueError(f"{task}: A was judged by {metric} and B by {other}: evaluate both with the same metric=")
    if not a or {key: doc for key, (doc, _) in a.items()} != {key: doc for key, (doc, _) in b.items()}:
        raise ValueError(
            f"{task}: A has {len(a)} documents and B {len(b)}, and they are not the same: give both the same limit="
        )
    if not all(0 <= score <= 1 for scores in (a, b) for _, score in scores.values()):
        raise ValueError(f"{task}: {metric} is not between 0 and 1, so it is no accuracy: choose another with metric=")
    ours, theirs = ([scores[key][1] for key in a] for scores in (a, b))
    lead = Difference.between(theirs, ours)
    return {
        "task": task,
        "documents": str(len(ours)),
        "A": f"{100 * sum(ours) / len(ours):.1f}%",
        "B": f"{100 * sum(theirs) / len(theirs):.1f}%",
        "B - A": f"{lead.points:+.1f}",
        "95%": f"{lead.low:+.1f} to {lead.high:+.1f}",
        "only A": str(lead.second),
        "only B": str(lead.first),
        "p": f"{lead.chance:.3f}",
    }
