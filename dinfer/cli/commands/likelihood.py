"""estimates how probable answers are

usage: dinfer likelihood FILE.jsonl [estimator=NAME] [options={...}] [overrides ...]

Each line of FILE is an object with `prompt` and `answer`, texts or lists of token ids. Estimators that replay a run
also want `steps`, for each token of the answer the step that wrote it. Prints a JSON line for each, in their order:
its `likelihood` in nats, the standard `error` of that (null: one sample), `tokens`, and `per_token` with
per_token=true. docs/likelihoods.md has a table of estimators. `elbo` is the default.

  dinfer likelihood pairs.jsonl model=tiny estimator=diffu_grpo options={prompt_rate:0}
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dinfer.cli.application import launch
from dinfer.cli.conf import counted, pipeline, ranks_of, setting
from dinfer.cli.terminal import say, several

if TYPE_CHECKING:
    from dinfer.core.pipeline import Pipeline

FIELDS = ("prompt", "answer", "steps")
GROUP = 64  # lines at a time


def estimate(config: dict[str, Any]) -> None:
    """Estimates each line of the file. All of it is checked before the first estimate."""
    name, seed = setting(config, "estimator", str), setting(config, "seed", int)
    most, each = counted(config, "batch_tokens"), setting(config, "per_token", bool)
    options, chat = config["options"] or {}, setting(config, "chat", bool | None)
    if not isinstance(options, dict):
        raise ValueError(f"options={options!r} must be names and values, such as {{samples:32}}")
    if ranks_of(config) > 1:
        raise ValueError("dinfer likelihood runs on one card: leave out runtime.tensor_parallel")
    lines = read(Path(config["file"]))

    from dinfer.lab.likelihood import LIKELIHOODS, Samples, combine, logps, passes

    LIKELIHOODS.build({"name": name, **options})  # before the weights are read
    pipe = pipeline(config)
    as_it_is = {"chat": False, "add_special_tokens": False}
    pairs = [(ids(pipe, line["prompt"], chat=chat), ids(pipe, line["answer"], **as_it_is)) for line in lines]
    steps = [line["steps"] for line in lines] if "steps" in lines[0] else None
    passes(name, pipe.model.spec, Samples.of(pairs, steps=steps), masks=[], **options)
    for begin in range(0, len(pairs), GROUP):
        part = slice(begin, begin + GROUP)
        samples = Samples.of(pairs[part], steps=steps and steps[part])
        drawn = passes(name, pipe.model.spec, samples, seed=seed, **options)
        found = combine(drawn, logps(pipe.model, drawn, batch_tokens=most, grad=False))
        token_NA = found.per_token.sum(0).cpu() / drawn.samples_N.clamp_min(1)[:, None]
        for n, (_, answer) in enumerate(pairs[part]):
            error = float(found.error[n])
            line = {"likelihood": float(found.sequence[n]), "error": error if error < float("inf") else None}
            more = {"per_token": token_NA[n, : len(answer)].tolist()} if each else {}
            print(json.dumps(line | {"tokens": len(answer)} | more), flush=True)
    say(f"{several(len(pairs), 'answer')} by {name}")


def ids(pipe: Pipeline, given: str | list[int], **how: Any) -> list[int]:
    """Token ids of what a line says."""
    return pipe.encode(given, **how) if isinstance(given, str) else given


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of the file. Raises ValueError with the number of a wrong one."""
    found: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        allowed = [{*found[0]}] if found else [{*FIELDS}, {*FIELDS[:2]}]
        if not isinstance(line, dict) or {*line} not in allowed:
            raise ValueError(f"{path}, line {number} must be an object with prompt and answer, and steps if a run is "
                             "replayed: the same fields in each line")  # fmt: skip
        for name, value in line.items():
            numbers = isinstance(value, list) and all(type(token) is int for token in value)
            if not (numbers or (isinstance(value, str) and name != "steps")):
                kind = "a list of integers" if name == "steps" else "a text or a list of token ids"
                raise ValueError(f"{path}, line {number}: {name} must be {kind}")
        found.append(line)
    if not found:
        raise ValueError(f"{path} has no lines: give it objects with prompt and answer")
    return found


run = partial(launch, task=estimate, text="file", needed="a file is needed: dinfer likelihood FILE.jsonl")
