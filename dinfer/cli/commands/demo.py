"""solves held-out word problems with the model in the box and compares decoders

usage: dinfer demo [overrides ...]

Shows how one problem is solved, then solves a batch of them with several decoders. For each: accuracy (exact match
of the answer), forwards per problem (NFE), tokens per forward (TPF), and seconds for the whole batch. Progress goes to
stderr.

Examples:
  dinfer demo count=200 cache=none
  dinfer demo decoder=threshold decoder.threshold=0.7
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.rule import Rule

from dinfer.cli.application import launch
from dinfer.cli.conf import counted, pipeline, problems_of, setting
from dinfer.cli.terminal import Report, show, table
from dinfer.core.registry import DECODERS
from dinfer.demo.problems import Problem, is_correct

if TYPE_CHECKING:
    from dinfer.core.pipeline import Pipeline


def demo(config: dict[str, Any]) -> None:
    """Solves one problem in view, then all of them with every decoder."""
    problems = problems_of(config, counted(config, "count"))
    delay, new_tokens = setting(config, "delay", float), setting(config, "max_new_tokens", int)
    decoders = decoders_of(config)
    with Report() as progress:
        progress.at("loading the model")
        pipe = pipeline(config)
    from dinfer.lab.metrics import compare

    show(heading("a held-out problem"))
    work_out(pipe, problems[0], new_tokens, delay)
    show(heading(f"{len(problems)} held-out problems"))
    with Report() as progress:
        rows = compare(pipe, decoders, problems, new_tokens, progress.at)
    iteration, cache = pipe.recipe.iteration, pipe.recipe.cache
    caption = (
        "NFE: forwards per problem. TPF: tokens per forward, before the first stop token.\n"
        f"{type(iteration).__name__} of {iteration.block}, {type(cache).__name__}."
    )
    show(table(rows, caption))


def heading(text: str) -> RenderableType:
    """A title, on a terminal with a line over its width."""
    return Rule(text, style="bright_black", align="left") if sys.stdout.isatty() else f"{text}:"


def decoders_of(config: dict[str, Any]) -> list[Any]:
    """The decoders to compare: those of the setting, and the chosen one."""
    entries = config["compare"]
    if not isinstance(entries, list) or not all(isinstance(entry, (str, dict)) for entry in entries):
        raise ValueError(f"compare={entries!r} must be a list of decoders, such as [{{name: fixed, steps: 8}}]")
    decoders = [DECODERS.build(entry) for entry in entries]
    chosen = DECODERS.build(config["decoder"])
    return decoders if chosen in decoders else [*decoders, chosen]


def work_out(pipe: Pipeline, problem: Problem, new_tokens: int, delay: float) -> None:
    """Solves one problem before the reader's eyes."""
    from dinfer.cli.watch import in_colour, watch, write_answer
    from dinfer.core.pipeline.inputs import figures

    if in_colour(sys.stdout):
        updates = pipe.updates(problem.question, max_new_tokens=new_tokens)
        completion = watch(pipe, pipe.encode(problem.question), updates, delay)
    else:
        print(f"{problem.question}\n")
        completion = write_answer(pipe.stream(problem.question, max_new_tokens=new_tokens))
    right = is_correct(problem, pipe.decode(completion.output))
    print(f"\n{'right' if right else 'wrong'}: the answer is {problem.answer}")
    print(figures(completion.counts))


run = partial(launch, task=demo)
