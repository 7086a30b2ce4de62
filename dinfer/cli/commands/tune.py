"""finds the fastest recipe that keeps the accuracy, and writes it as a preset

usage: dinfer tune [--max-drop POINTS] [overrides ...]

Searches components and options with Optuna. A recipe is good enough if it loses at most `max_drop` points of accuracy
against the reference, on the calibration problems and then on held-out ones. The reference is the recipe of the command
line; unless told otherwise, `recipe=careful`: one token a forward, no cache.

  --max-drop 1.0          the same as max_drop=1.0
  goal=tps                what fast means: tps (tokens a second, here and now) or tpf (tokens a forward)
  trials=40               recipes to try
  verify=3                candidates that may be measured on the held-out problems, the fastest first
  tasks=gsm8k_llada       a task of `dinfer eval`; null: generated problems
  num_fewshot=4 chat=true gen_kwargs={max_gen_toks: 256} metric=exact_match allow_code=true
                          as there
  count=200 heldout=200   problems for the search (of a task its first documents), and further ones to check on
  seed=0 families=null    seed of the search and of generated problems, and their kinds
  max_new_tokens=null     length of an answer; null: as the task says, or 128
  space={...}             what to search: `dinfer tune --cfg job` shows it; space.decoder.name=[threshold,factor]
                          space.decoder.threshold.low=0.8 +space.decoder.steps=[8,16] space.iteration=null (not that)
  name=tuned folder=conf  the preset is conf/recipe/tuned.yaml, used as recipe=tuned
  out=tune.json           all that was tried, with figures and settings; null: nothing

All else is as in `dinfer generate`:
  dinfer tune --max-drop 2 tasks=gsm8k_llada model=llada_8b_instruct device=cuda
  dinfer tune cache=dual decoder=threshold decoder.threshold=0.95   # faster than that one, and as good
"""

from __future__ import annotations

import json
import shlex
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dinfer.analysis.outputs import check_file, write
from dinfer.analysis.tuning import Found, NothingFound, Parts, Tried, tune
from dinfer.cli import preset
from dinfer.cli.application import launch
from dinfer.cli.conf import GROUPS
from dinfer.cli.progress import Report
from dinfer.cli.recipe import setting
from dinfer.cli.terminal import say
from dinfer.cli.tuning_objectives import judge_of

GOALS = ("tps", "tpf")


def run(args: list[str]) -> None:
    """Tunes for each point of a sweep."""
    launch("tune", flagged(args), partial(run_search, command=shlex.join(["dinfer", "tune", *args])))


def flagged(args: list[str]) -> list[str]:
    """The arguments, with `--max-drop 1.0` as the override that it stands for."""
    found, rest = [], list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag == "--max-drop":
            if not equals and not rest:
                raise ValueError("--max-drop needs a value, in points of accuracy: --max-drop 1.0")
            flag, equals, value = "max_drop", "=", value if equals else rest.pop(0)
        found.append(f"{flag}{equals}{value}")
    return found


def run_search(config: dict[str, Any], _text: str | None, *, command: str) -> None:
    """Searches, says what it tries, and writes what it found."""
    if find_spec("optuna") is None:
        raise ValueError("dinfer tune needs Optuna: pip install dinfer[tune]")
    goal = setting(config, "goal", str)
    if goal not in GOALS:
        raise ValueError(f"goal={goal} must be tps (tokens a second) or tpf (tokens a forward)")
    path = preset.target(Path(setting(config, "folder", str)), setting(config, "name", str))
    out = setting(config, "out", str | None)
    for file in (path, *([] if out is None else [Path(out)])):
        check_file(file)
    reference: Parts = {kind: config[kind] for kind in GROUPS if kind != "model"}
    found: Found | None = None
    tried: list[Tried] = []
    trials = setting(config, "trials", int)
    with Report() as progress:
        progress.at("loading the model")
        search = tune(
            judge_of(config), searched(config["space"]), reference, max_drop=setting(config, "max_drop", float),
            trials=trials, goal=goal, verify=setting(config, "verify", int), seed=setting(config, "seed", int),
        )  # fmt: skip
        progress.at("measuring the reference")
        for one in search:
            if isinstance(one, Found):
                found = one
            else:
                tried.append(one)
                say(f"{len(tried):>3}  {told(one, goal)}")
                progress.at("searching", len(tried), trials)
    if found is None:
        raise NothingFound("the search ended without a recipe")
    finish(config, found, path, command)


def searched(space: Any) -> Any:
    """The search space without what is null, which is how a default is taken out of it: space.iteration=null."""
    if not isinstance(space, dict):
        return space
    return {key: searched(value) for key, value in space.items() if value is not None}


def told(one: Tried, goal: str) -> str:
    """A recipe that was tried, in a line."""
    parts = one.parts
    names = " ".join(f"{kind}={words(kind, parts[kind])}" for kind in ("iteration", "decoder", "cache"))
    if one.drop is None or one.metrics is None:
        return f"{names}: refused: {one.refused}"
    return f"{names}: {one.metrics['accuracy']:.1f}%, {one.drop.points:+.1f} points lost, {one.speed:.4g} {goal}"


def words(kind: str, part: dict[str, Any]) -> str:
    options = [f"{name}={value}" for name, value in preset.changed(kind, part).items()]
    return f"{part['name']}({', '.join(options)})" if options else str(part["name"])


def finish(config: dict[str, Any], found: Found, path: Path, command: str) -> None:
    """Says what was found and writes the preset and the report."""
    out, goal, lines = config["out"], config["goal"], []
    for split, one in (("calibration", found.calibration), ("heldout", found.heldout)):
        row, before, drop = one.metrics or {}, found.reference[split], one.drop
        if drop is None:
            raise NothingFound(f"the recipe has no figures on the {split} problems")
        lines.append(
            f"{split}, {row['problems']} problems: {row['accuracy']:.1f}% against {before['accuracy']:.1f}%, "
            f"{drop.points:.2f} points lost (95% interval {drop.low:.2f} to {drop.high:.2f}), "
            f"{row[goal] / before[goal]:.2f} times the {goal} ({before[goal]:.4g} to {row[goal]:.4g})"
        )
    print(f"found: {told(found.heldout, goal)}")
    print("\n".join(lines))
    reference = ", ".join(words(kind, config[kind]) for kind in ("iteration", "decoder", "cache"))
    limit = f"At most {config['max_drop']} points lost against {reference}."
    model = config["model"].get("checkpoint") or config["model"]["name"]
    for file in preset.save(path, found.parts, [f"Found by `dinfer tune` for {model}. {limit}", *lines]):
        say(f"wrote {file}")
    if out is not None:
        report = {"command": command, "settings": config, **found.to_json()}
        write(Path(out), json.dumps(report, indent=1) + "\n")
        say(f"wrote {out}")
    print(f'use it: dinfer generate "question" {preset.usage(path, path.stem)}')
