"""What `dinfer tune` measures recipes on: generated word problems, or a task of `dinfer eval`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dinfer.analysis.metrics import Metrics, solve
from dinfer.analysis.tuning import Measured, Parts, Split
from dinfer.cli import conf
from dinfer.cli.conf import beside, counted, need, pipeline, problems_of, ranks_of, setting
from dinfer.demo.problems import Problem


def objective_of(config: dict[str, Any]) -> Problems | Task:
    """What the configuration asks to measure recipes on. Raises ValueError, OSError."""
    for name in ("count", "heldout"):
        counted(config, name)
    return Problems(config) if config["tasks"] is None else Task(config)


def some(rows: int) -> int:
    """How many problems show the speed of so many in flight."""
    return max(4 * rows, 16)


class Problems:
    """Measures recipes on generated problems; the network is loaded once."""

    def __init__(self, config: dict[str, Any]) -> None:
        count, heldout = config["count"], config["heldout"]
        every = problems_of(config, count + heldout)
        self.problems: dict[Split, list[Problem]] = {"calibration": every[:count], "heldout": every[count:]}
        self.new_tokens = setting(config, "max_new_tokens", int | None) or 128
        self.timed = config["goal"] == "tps"
        self.base = pipeline(config)

    def __call__(self, parts: Parts, split: Split, rows: int | None = None) -> Measured:
        problems = self.problems[split][: rows and some(rows)]
        pipe = beside(self.base, parts, rows)
        if self.timed or rows:  # memory, kernels and graphs are nobody's speed
            solve(pipe, problems[: pipe.engine.runtime.rows], self.new_tokens)
        return Measured(*solve(pipe, problems, self.new_tokens))


class Task:
    """Measures recipes on documents of one task: the first `count` for the search, as many as `heldout` behind them."""

    def __init__(self, config: dict[str, Any]) -> None:
        need("lm_eval", "eval", "tasks= needs lm-eval")
        from dinfer.cli.commands.eval import settings_of
        from evaluations.replicas import replicas

        count, heldout = config["count"], config["heldout"]
        self.config = config
        asked = {name: value for name, value in conf.read(conf.folder() / "eval.yaml").items() if name != "defaults"}
        asked |= {name: config[name] for name in asked.keys() & config.keys()}
        self.bounds: dict[Split, tuple[int, int]] = {"calibration": (0, count), "heldout": (count, count + heldout)}
        self.settings = partial(settings_of, asked)
        if len(self.settings(documents=(0, count)).tasks) != 1:
            raise ValueError(f"tasks={config['tasks']}: tune on one task at a time")
        self.among = replicas(setting(config, "device", str | None), ranks_of(config))
        if self.among.size > 1:
            raise ValueError(f"dinfer tune runs on one rank, not on {self.among.size}: start it without torchrun")
        self.base = pipeline(config | {"device": str(self.among.device)})

    def __call__(self, parts: Parts, split: Split, rows: int | None = None) -> Measured:
        from evaluations import run as runs

        first, end = self.bounds[split]
        documents = first, end if rows is None else min(end, first + some(rows))
        pipe, settings = beside(self.base, parts, rows), self.settings(documents=documents)
        recipe = {"model": self.config["model"], **parts}
        with TemporaryDirectory(prefix="dinfer-tune-") as folder:
            found = runs.evaluate(
                lambda: pipe, settings, among=self.among, recipe=recipe, runtime={}, stem=Path(folder) / "tune",
                command="dinfer tune",
            )  # fmt: skip
            lines = [json.loads(line) for path in Path(folder).glob("*.samples.jsonl") for line in path.open()]
        if found is None or len(found["tasks"]) != 1:
            raise ValueError(f"tasks={self.config['tasks']} is a group of tasks: tune on one of them")
        (task,) = found["tasks"].values()
        if task["metrics"] is None or task["score"] is None:
            raise ValueError(
                f"tasks={self.config['tasks']}: {task['metric']} is no share of right answers of a generation. Choose "
                "another with metric=, or another task"
            )
        name, kind = task["metric"].rsplit(",", 1)
        scores = {line["doc_id"]: float(line[name]) for line in lines if line["filter"] == kind}
        return Measured(Metrics(**task["metrics"]), [scores[document] for document in sorted(scores)])
