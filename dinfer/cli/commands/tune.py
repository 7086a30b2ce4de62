"""finds the fastest recipe that keeps the accuracy, and writes it as a preset

usage: dinfer tune [--max-drop POINTS] [overrides ...]

Searches components and options with Optuna. A recipe qualifies if it loses at most `max_drop` points of accuracy
against the reference, on the calibration problems and on held-out ones. The reference is the recipe of the command
line. By default that is `recipe=careful`: one token a forward, no cache.

You may change the space of the search: space.decoder.name=[threshold,factor] space.decoder.threshold.low=0.8
+space.decoder.steps=[8,16] space.iteration=null.

With labelled=FILE it finds how this model reads decisions best (letters, values or names, one by one or joint), and the
temperatures by which probabilities agree with how often they are right. It writes them as a preset for `dinfer serve`.
A line of FILE is the body of a request to /v1/decisions and its `answers`: true or false, the value of a choice, the
number of a level.

  dinfer tune --max-drop 2 tasks=gsm8k_llada model=llada_8b_instruct device=cuda
  dinfer tune cache=dual decoder=threshold decoder.threshold=0.95   # faster than that one, and as good
  dinfer tune labelled=decisions.jsonl preset=conf/recipe/sure.yaml model=llada2_mini
"""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from dinfer.cli import conf
from dinfer.cli.application import Parser, launch
from dinfer.cli.commands.compare import read as evaluated
from dinfer.cli.commands.eval import settings_of, tasks_of
from dinfer.cli.commands.serve import made, needed
from dinfer.cli.conf import GROUPS, beside, counted, need, pipeline, problems_of, ranks_of, setting
from dinfer.cli.terminal import Report, say, several
from dinfer.core.registry import options_of
from dinfer.lab.outputs import check_file, write

if TYPE_CHECKING:
    from dinfer.demo.problems import Problem
    from dinfer.lab.tuning import Components, Found, Measured, Split, Tried

GOALS = ("tps", "tpf")
NO_ROUND = 10.0**9  # seconds: nobody waits for an answer


def arguments(parser: Parser) -> None:
    parser.add_argument(
        "--max-drop", dest="overrides", action="append", type="max_drop={}".format, metavar="POINTS",
        help="the same as max_drop=POINTS",
    )  # fmt: skip


def run(args: Namespace) -> None:
    """Tunes for each point of a sweep."""
    launch(args, partial(run_search, command=shlex.join(args.line)))


def run_search(config: dict[str, Any], *, command: str) -> None:
    """Searches, says what it tries, and writes what it found."""
    if (labelled := setting(config, "labelled", str | None)) is not None:
        return calibrate(config, labelled, command)
    need("optuna", "tune", "dinfer tune needs Optuna")
    goal = setting(config, "goal", str)
    if goal not in GOALS:
        raise ValueError(f"goal={goal} must be tps (tokens a second) or tpf (tokens a forward)")
    path = preset_file(Path(setting(config, "preset", str)))
    out = setting(config, "out", str | None)
    for file in (path, *(Path(name) for name in (out,) if name is not None)):
        check_file(file)
    reference: Components = {kind: config[kind] for kind in GROUPS if kind != "model"}
    found: Found | None = None
    tried: list[Tried] = []
    trials, drop = counted(config, "trials"), setting(config, "max_drop", float)
    for name in ("count", "heldout"):
        counted(config, name)
    if config["max_new_tokens"] is not None:
        counted(config, "max_new_tokens")
    from dinfer.lab.tuning import Found, tune

    with Report() as progress:
        progress.at("loading the model")
        objective = Problems(config) if config["tasks"] is None else Task(config)
        search = tune(
            objective, searched(config["space"]), reference, max_drop=drop, trials=trials, goal=goal,
            seed=setting(config, "seed", int),
        )  # fmt: skip
        progress.at("measuring the reference")
        for one in search:
            if isinstance(one, Found):
                found = one
            else:
                tried.append(one)
                say(f"{len(tried):>3}  {told(one, goal)}")
                progress.at("searching" if len(tried) < trials else "checking on held-out problems", len(tried), trials)
        assert found is not None, "a search that finds nothing raises"
    finish(config, found, path, command)


def calibrate(config: dict[str, Any], labelled: str, command: str) -> None:
    """Finds the form and the temperatures of decisions on labelled ones, and writes them as a preset."""
    from dinfer.core.pipeline.inputs import named  # needs torch

    needed("dinfer tune labelled=")
    path = preset_file(Path(setting(config, "preset", str)))
    check_file(path)
    from dinfer.lab.calibration import MOST
    from dinfer.serving.calibrating import calibrated, parsed
    from dinfer.serving.errors import ApiError
    from dinfer.serving.settings import unlimited

    try:
        with named(f"labelled={labelled}"), Path(labelled).open("rb") as file:
            asked = parsed(file)
        with Report() as progress:
            progress.at("loading the model")
            server = made(config | {"name": "model", "max_new_tokens": 1}, {}, unlimited(NO_ROUND))
            progress.at("reading")
            found = calibrated(server, asked)
    except ApiError as error:
        raise ValueError(f"labelled={labelled}: {error.message}") from error
    forms = {" ".join(f"{name}={value}" for name, value in form.items()): share for share, form in found.tried if form}
    lines = [
        f"{form}: {share if isinstance(share, str) else f'{100 * share:.1f}% right'}" for form, share in forms.items()
    ]
    for one in found.temperatures:
        before, after = one.before, one.after
        lines.append(
            f"{one.kind}, {one.fitted} questions: temperature {after.temperature:.3f}. On {after.questions} others, of "
            f"which {100 * after.accuracy:.1f}% are right: expected calibration error {before.ece:.3f} before and "
            f"{after.ece:.3f} after, log loss {before.log_loss:.3f} and {after.log_loss:.3f}"
            + (", the most there is: this model's answers tell nothing" if after.temperature > 0.99 * MOST else "")
        )
    known = found.form | {one.kind: round(one.after.temperature, 4) for one in found.temperatures}
    head = ["# @package _global_", f"# Fitted by `{command}`.", *(f"# {line}" for line in lines)]
    write(path, "\n".join([*head, OmegaConf.to_yaml({"calibration": known})]))
    say(f"wrote {path}")
    print("\n".join(lines))
    folder = path.parent.parent
    where = "" if folder.resolve() == conf.folder().resolve() else f"--config-dir {folder} "
    print(
        f"use it: dinfer serve {again(command, 'model', 'dtype', 'quantize', 'device')}{where}{conf.RECIPE}={path.stem}"
    )


def again(command: str, *names: str) -> str:
    """The overrides of a command that set these, as they are typed again, each with a space behind it."""
    kept = [word for word in shlex.split(command) if re.match(rf"({'|'.join(names)})[.=]", word)]
    return "".join(f"{shlex.quote(word)} " for word in kept)


def searched(space: Any) -> Any:
    """The search space without null values, by which a user removes defaults: space.iteration=null."""
    if not isinstance(space, dict):
        return space
    return {key: searched(value) for key, value in space.items() if value is not None}


def told(one: Tried, goal: str) -> str:
    """A recipe that was tried, in a line."""
    parts = one.parts
    names = " ".join(f"{kind}={words(kind, parts[kind])}" for kind in ("iteration", "decoder", "cache"))
    positions = one.metrics["positions_per_committed"]
    return (
        f"{names}: {one.metrics['accuracy']:.1f}%, {one.drop.points:+.1f} points lost, {one.speed:.4g} {goal}, "
        f"{'-' if positions is None else f'{positions:.1f}'} positions per token"
    )


def words(kind: str, part: dict[str, Any]) -> str:
    options = [f"{name}={value}" for name, value in changed_options(kind, part).items()]
    return f"{part['name']}({', '.join(options)})" if options else str(part["name"])


def finish(config: dict[str, Any], found: Found, path: Path, command: str) -> None:
    """Says what was found and writes the preset and the report."""
    out, goal, lines = config["out"], config["goal"], []
    if found.refused:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in found.refused.items())
        say(f"left out, since they cannot run: {several(sum(found.refused.values()), 'recipe')} ({reasons})")
    for split, one in (("calibration", found.calibration), ("heldout", found.heldout)):
        row, before, drop = one.metrics, found.reference[split], one.drop
        lines.append(
            f"{split}, {row['problems']} problems: {row['accuracy']:.1f}% against {before['accuracy']:.1f}%, "
            f"{drop.points:.2f} points lost (95% interval {drop.low:.2f} to {drop.high:.2f}), "
            f"{row[goal] / before[goal]:.2f} times the {goal} ({before[goal]:.4g} to {row[goal]:.4g})"
        )
    reference = ", ".join(words(kind, config[kind]) for kind in ("iteration", "decoder", "cache"))
    limit = f"At most {config['max_drop']} points lost against {reference}."
    model = config["model"].get("checkpoint") or config["model"]["name"]
    for file in save_preset(path, found.parts, [f"Found by `dinfer tune` for {model}. {limit}", *lines]):
        say(f"wrote {file}")
    if out is not None:
        report = {"command": command, "settings": config, **asdict(found)}
        write(Path(out), json.dumps(report, indent=1) + "\n")
        say(f"wrote {out}")
    print("\n".join([f"found: {told(found.heldout, goal)}", *lines]))
    folder = path.parent.parent
    where = "" if folder.resolve() == conf.folder().resolve() else f"--config-dir {folder} "
    same = again(command, "model", "dtype", "quantize", "device")
    print(f'use it: dinfer generate "question" {same}{where}{conf.RECIPE}={path.stem}')


def preset_file(path: Path) -> Path:
    """The file of a recipe. Raises ValueError for one that is none, or whose name a preset of dinfer's has."""
    folder, name, own = path.parent.parent, path.stem, conf.folder()
    if not re.fullmatch(rf"(.*/)?{conf.RECIPE}/[A-Za-z]\w*\.yaml", str(path)):
        raise ValueError(
            f"preset={path} must be FOLDER/{conf.RECIPE}/NAME.yaml, NAME of letters, digits and underscores"
        )
    taken = {path.stem for path in (own / conf.RECIPE).glob("*.yaml")} if folder.resolve() != own.resolve() else set()
    if name in taken | {choice for registry in conf.GROUPS.values() for choice in registry.names()}:
        raise ValueError(f"preset={path}: {name} is a component or recipe of dinfer's: choose another name")
    return path


def changed_options(kind: str, part: dict[str, Any]) -> dict[str, Any]:
    """The options of a component that are not at their defaults."""
    infos = options_of(conf.GROUPS[kind].get(part["name"]))
    defaults = {info.name: list(info.default) if isinstance(info.default, tuple) else info.default for info in infos}
    return {name: value for name, value in part.items() if name != "name" and value != defaults.get(name)}


def save_preset(path: Path, parts: dict[str, dict[str, Any]], heading: Sequence[str]) -> list[Path]:
    """Writes the recipe, and a preset of each component with an option that is not at its default; all files.

    So a component of the recipe can be exchanged like any other, its options with it. Raises OSError.
    """
    comments = [f"# {line}" for line in heading]
    lines, files = ["# @package _global_", *comments, "defaults:"], {}
    for kind, part in parts.items():
        own = changed_options(kind, part)
        lines.append(f"  - override /{kind}: {path.stem if own else part['name']}")
        if own:
            text = f"defaults: [{part['name']}, _self_]\n{OmegaConf.to_yaml(own)}"
            files[path.parent.parent / kind / path.name] = "\n".join([*comments, text])
    files[path] = "\n".join(lines) + "\n"
    for file, text in files.items():
        check_file(file)
        write(file, text)
    return list(files)


# --- What recipes are measured on -----------------------------------------------------------------------------------


class Problems:
    """Measures recipes on generated problems; the network is loaded once."""

    def __init__(self, config: dict[str, Any]) -> None:
        count, heldout = config["count"], config["heldout"]
        every = problems_of(config, count + heldout)
        self.problems: dict[Split, list[Problem]] = {"calibration": every[:count], "heldout": every[count:]}
        self.new_tokens = setting(config, "max_new_tokens", int | None) or 128
        self.timed = config["goal"] == "tps"
        self.base = cache(partial(pipeline, config))  # what is wrong with a search is told before

    def __call__(self, parts: Components, split: Split) -> Measured:
        from dinfer.lab.metrics import solve
        from dinfer.lab.tuning import Measured

        problems = self.problems[split]
        pipe = beside(self.base(), parts)
        if self.timed:  # memory, kernels and graphs are nobody's speed
            solve(pipe, problems[: pipe.engine.runtime.rows], self.new_tokens)
        return Measured(*solve(pipe, problems, self.new_tokens))


class Task:
    """Measures recipes on documents of one task: the first `count` for the search, as many as `heldout` behind them."""

    def __init__(self, config: dict[str, Any]) -> None:
        need("lm_eval", "eval", "tasks= needs lm-eval")
        tasks_of(config)
        from evaluations.replicas import replicas

        count, heldout = config["count"], config["heldout"]
        self.config = config
        self.bounds: dict[Split, tuple[int, int]] = {"calibration": (0, count), "heldout": (count, count + heldout)}
        self.settings = partial(settings_of, conf.compose("eval", []) | config)
        if len(self.settings(documents=(0, count)).tasks) != 1:
            raise ValueError(f"tasks={config['tasks']}: tune on one task at a time")
        self.among = replicas(setting(config, "device", str | None), ranks_of(config))
        if self.among.size > 1:
            raise ValueError(f"dinfer tune runs on one rank, not on {self.among.size}: start it without torchrun")
        self.base = cache(partial(pipeline, config | {"device": str(self.among.device)}))

    def __call__(self, parts: Components, split: Split) -> Measured:
        from dinfer.lab.metrics import Metrics
        from dinfer.lab.tuning import Measured
        from evaluations import run as runs

        settings = self.settings(documents=self.bounds[split])
        recipe = {"model": self.config["model"], **parts}
        with TemporaryDirectory(prefix="dinfer-tune-") as folder:
            stem = Path(folder) / "tune"
            found = runs.evaluate(
                lambda: beside(self.base(), parts), settings, among=self.among, recipe=recipe, runtime={}, stem=stem,
                command="dinfer tune",
            )  # fmt: skip
            if found is None or len(found["tasks"]) != 1:
                raise ValueError(f"tasks={self.config['tasks']} is a group of tasks: tune on one of them")
            ((name, task),) = found["tasks"].items()
            if task["metrics"] is None or task["score"] is None:
                raise ValueError(
                    f"tasks={self.config['tasks']}: {task['metric']} is no share of right answers of a generation. "
                    "Choose another with metric=, or another task"
                )
            _, scores = evaluated(runs.report_of(stem))[name]
        return Measured(Metrics(**task["metrics"]), [scores[document][1] for document in sorted(scores)])
