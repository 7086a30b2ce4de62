"""The report of a run: a JSON with scores, figures and settings, and a table with a line for each task."""

import csv
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from dinfer.analysis.metrics import measure
from dinfer.analysis.outputs import replacing
from evaluations.ledger import Answer, seconds

KINDS = ("model", "iteration", "decoder", "cache", "sampling")


def report(results: Mapping[str, Any], answers: Sequence[Answer], metric: str | None) -> dict[str, Any]:
    """Scores and figures of every task. Raises ValueError for a metric that a task does not have.

    `metric` counts as accuracy, for example "exact_match" or "exact_match,strict"; None: each task's first metric.
    """
    tasks = {}
    for task, lines in (results.get("samples") or {}).items():
        own = [answer for answer in answers if answer.task == task]
        scores = {name: value for name, value in results["results"][task].items() if "," in name}
        chosen = _chosen(task, lines, metric)
        tasks[task] = {
            "documents": len({line["doc_id"] for line in lines}),
            "version": results["versions"].get(task),
            "num_fewshot": results["n-shot"].get(task),
            "generation_kwargs": results["configs"][task].get("generation_kwargs"),
            "metric": ",".join(chosen),
            "scores": {name: _plain(value) for name, value in scores.items()},
            **_figures(own, lines, chosen),
        }
    groups = {
        name: {k: _plain(v) for k, v in found.items() if "," in k} for name, found in results.get("groups", {}).items()
    }
    return {"tasks": tasks, "groups": groups}


def samples_of(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every document with its responses and scores."""
    for task, lines in (results.get("samples") or {}).items():
        for line in lines:
            keep = ("doc_id", "filter", "doc", "target", "resps", "filtered_resps", *line["metrics"])
            yield {"task": task} | {name: line[name] for name in keep}


def write_table(out: Path) -> None:
    """Writes runs.csv, with a line for each task of each report in a folder."""
    lock = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that two evaluations that end together both see each other's report
        rows = [row for path in sorted(out.glob("*.json")) for row in rows_of(path)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        with replacing(out / "runs.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=names)
            writer.writeheader()
            writer.writerows(rows)
    finally:
        os.close(lock)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a report; none for a JSON of another kind."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("dinfer-eval/"):
        return
    recipe = document["recipe"]
    parts = {kind: recipe[kind]["name"] for kind in KINDS} | {"checkpoint": recipe["model"].get("checkpoint")}
    options = {f"{kind}.{name}": value for kind in KINDS[1:] for name, value in recipe[kind].items() if name != "name"}
    origin = {name: document[name] for name in ("commit", "date", "hardware", "replicas") if name in document}
    for task, found in document["tasks"].items():
        figures = found["metrics"] or {}
        likelihood = found["likelihood"] or {}
        yield (
            {"run": path.stem, "task": task, "metric": found["metric"], "score": found["score"], **parts, **options}
            | {**figures, **{f"likelihood.{name}": value for name, value in likelihood.items()}}
            | origin
        )


def _chosen(task: str, lines: Sequence[Mapping[str, Any]], metric: str | None) -> tuple[str, str]:
    """The metric and filter of the task's score. Raises ValueError."""
    known = list(dict.fromkeys((name, line["filter"]) for line in lines for name in line["metrics"]))
    for name, chosen in known:
        if metric is None or metric in (name, f"{name},{chosen}"):
            return name, chosen
    raise ValueError(f"metric={metric!r}: the task {task} has {', '.join(map(','.join, known))}")


def _figures(answers: Sequence[Answer], lines: Sequence[Mapping[str, Any]], chosen: tuple[str, str]) -> dict[str, Any]:
    """The metrics of generations, and the cost of likelihoods."""
    name, kind = chosen
    scores = {line["doc_id"]: line[name] for line in lines if line["filter"] == kind}
    judged = all(isinstance(score, Real) and 0 <= float(score) <= 1 for score in scores.values())
    mean = sum(float(score) for score in scores.values()) / len(scores) if judged and scores else None
    generated = [(answer.document, answer.sample) for answer in answers if answer.sample is not None]
    estimated = [answer for answer in answers if answer.error is not None]
    found: dict[str, Any] = {"score": mean, "metrics": None, "likelihood": None}
    if generated and {document for document, _ in generated} >= scores.keys():
        samples = [replace(one, score=float(scores[document]) if judged else None) for document, one in generated]
        found["metrics"] = measure(samples, seconds([answer for answer in answers if answer.sample])).row()
    if estimated:
        found["likelihood"] = {
            "requests": len(estimated),
            "passes": sum(answer.passes for answer in estimated),
            "error": sum(answer.error or 0.0 for answer in estimated) / len(estimated),  # nats, mean
            "seconds": seconds(estimated),
        }
    return found


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Real) else value
