"""The answers of a run on disk, and its report: a JSON with scores, figures and settings, and a table of the tasks.

Each answer is a JSON line that is written at once, so that a killed run can continue. A run has a file for each rank. A
later session reads the files of all ranks. The first line of a session holds its settings, since sessions that would
answer differently must not share a file.
"""

import csv
import fcntl
import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Self

from dinfer.lab.metrics import Sample, measure
from dinfer.lab.outputs import JsonLines, check_folder, replacing, whole_lines
from evaluations.replicas import ALONE, Replicas

KINDS = ("model", "iteration", "decoder", "cache", "sampling")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    key: str
    task: str
    document: int
    response: Any  # a text; [log-likelihood, greedy]; or a log-likelihood
    at: float  # seconds of the rank's work on this task in this session
    session: str = ""
    rank: int = 0
    sample: Sample | None = None  # of a generation
    error: float | None = None  # standard error of a log-likelihood
    passes: int = 0  # forwards behind a log-likelihood


def key_of(*parts: Any) -> str:
    """A unique name of a request, the same in every session."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


class Ledger:
    """All answers so far. Without a path it keeps them only in memory."""

    def __init__(
        self, stem: Path | None = None, *, among: Replicas = ALONE, setup: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:  # fmt: skip
        """`stem`: the path without `.answers-RANK.jsonl`. `overwrite`: removes the files of an earlier run.

        Raises ValueError for files of another setup or of a run that has not ended, and OSError.
        """
        self._answers: dict[str, Answer] = {}
        self._session, self._rank, self._file = uuid.uuid4().hex, among.rank, None
        if stem is None:
            return
        check_folder(stem.parent)
        self._file = JsonLines(stem.with_name(f"{stem.name}.answers-{self._rank}.jsonl"), overwrite=overwrite)
        if overwrite:
            if self._rank == 0:
                _forget(stem, of=among.size)
            among.wait()
        self._file.mend()
        for path in files(stem):
            for answer in _read(path, setup or {}):
                self._answers[answer.key] = answer
        self._file.write({"session": self._session, "setup": setup or {}})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def add(self, key: str, task: str, document: int, response: Any, at: float, **fields: Any) -> Answer:
        """Keeps an answer, which is then in the file. Raises OSError."""
        answer = Answer(key, task, document, response, at, self._session, self._rank, **fields)
        self._answers[key] = answer
        if self._file is not None:
            self._file.write(asdict(answer))
        return answer

    @property
    def answers(self) -> list[Answer]:
        return list(self._answers.values())


def files(stem: Path) -> list[Path]:
    """The files of a run, one for each rank."""
    return sorted(path for path in stem.parent.glob("*.jsonl") if path.name.startswith(f"{stem.name}.answers-"))


def kept(stem: Path) -> int:
    """How many answers the files of a run hold."""
    return sum(b'"key"' in line for path in files(stem) for line in path.read_bytes().splitlines())


def _forget(stem: Path, of: int) -> None:
    """Removes the report of a run, and the answers of ranks that this run does not have."""
    own = {f"{stem.name}.answers-{rank}.jsonl" for rank in range(of)}
    report = [stem.with_name(f"{stem.name}{ending}") for ending in (".json", ".samples.jsonl")]
    for path in [*report, *(path for path in files(stem) if path.name not in own)]:
        path.unlink(missing_ok=True)


def seconds(answers: Sequence[Answer]) -> float:
    """The wall time of a task: the sum of a rank's sessions, of the rank for which it is longest."""
    sessions: dict[tuple[int, str], float] = {}
    for answer in answers:
        own = answer.rank, answer.session
        sessions[own] = max(sessions.get(own, 0.0), answer.at)
    ranks = {rank for rank, _ in sessions}
    return max((sum(at for (own, _), at in sessions.items() if own == rank) for rank in ranks), default=0.0)


def sessions(answers: Sequence[Answer]) -> int:
    """In how many sessions a run was made: of the replica that had most."""
    own = {(answer.rank, answer.session) for answer in answers}
    return max(Counter(rank for rank, _ in own).values(), default=0)


def _read(path: Path, setup: dict[str, Any]) -> Iterator[Answer]:
    for number, text in enumerate(whole_lines(path), 1):  # another rank may be writing the last one
        try:
            line = json.loads(text)
            if "setup" in line:
                _check(path, line["setup"], setup)
                continue
            sample = None if line["sample"] is None else Sample(**line["sample"])
            yield Answer(**{**line, "sample": sample})
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}, is not an answer ({error}); overwrite=true begins anew"
            ) from error


def _check(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise ValueError(
                f"{path} was begun with {name}={old.get(name)!r}, and this run has {new.get(name)!r}, so the figures "
                "would mix both. Give another folder with out=, or overwrite=true to begin anew."
            )


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
