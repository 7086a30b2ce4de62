"""Solves the same problems with several decoders, and puts accuracy and cost side by side."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dinfer.analysis.metrics import Metrics, Sample, measure
from dinfer.demo.problems import Problem, is_correct
from dinfer.pipeline import Pipeline
from dinfer.recipe.registry import DECODERS, changed, values_of

Progress = Callable[[str, int, int, str], None]  # what is done, how much of it, of how much, a detail


def compare(
    pipe: Pipeline, decoders: Sequence[Any], problems: Sequence[Problem], new_tokens: int, progress: Progress
) -> list[dict[str, str]]:
    """A line of a table for each decoder. `progress` is called after every step."""
    rows = []
    for decoder in decoders:
        part = Pipeline(replace(pipe.recipe, decoder=decoder), pipe.tokenizer, pipe.engine.runtime)
        figures, _ = solve(part, problems, new_tokens, partial(progress, label(decoder)))
        rows.append({
            "decoder": label(decoder),
            "accuracy": f"{figures.accuracy:.1f}%",
            "correct": f"{figures.correct:.0f}/{figures.problems}",
            "NFE": f"{figures.nfe:.1f}",
            "TPF": f"{figures.tpf:.2f}",
            "positions": f"{figures.positions_per_committed:.1f}",
            "tokens/s": f"{figures.tps:.0f}",
            "seconds": f"{figures.seconds:.1f}",
        })  # fmt: skip
    return rows


def solve(
    pipe: Pipeline,
    problems: Sequence[Problem],
    new_tokens: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Metrics, list[float]]:
    """The figures of all answers together, and for each problem 1.0 if its answer is right, else 0.0."""
    ids = [pipe.encode(problem.question) for problem in problems]
    samples, steps = dict[int, Sample](), 0
    began = time.perf_counter()
    for update in pipe.engine.run(pipe.requests(ids, new_tokens, None)):
        if update.completion is not None:
            right = is_correct(problems[update.index], pipe.decode(update.completion.output))
            samples[update.index] = Sample.of(update.completion.counts, update.completion.stopped, float(right))
        steps = max(steps, update.forwards)  # grows also while no problem is finished
        if progress is not None:
            progress(len(samples), len(problems), f"{steps} steps")
    seconds = time.perf_counter() - began
    return measure([*samples.values()], seconds), [samples[i].score or 0.0 for i in range(len(problems))]


def label(decoder: Any) -> str:
    """A decoder by name, with the first of its options and all that are not at their defaults.

    An option of the decoder's own name needs no saying twice: "threshold 0.9".
    """
    name, told = DECODERS.name_of(decoder), dict([*values_of(decoder).items()][:1]) | changed(decoder)
    options = (f"{'' if option == name else f'{option}='}{value}" for option, value in told.items())
    return f"{name} {' '.join(options)}".strip()
