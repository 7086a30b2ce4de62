"""Solves the same problems with several decoders, to put what that yields and costs side by side."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dinfer.analysis.metrics import Metrics, Sample, measure
from dinfer.core.registry import DECODERS, changed, values_of
from dinfer.demo.problems import Problem, is_correct
from dinfer.pipeline import Pipeline

Progress = Callable[[str, int, int, str], None]  # what is done, how much of it, of how much, a detail


@dataclass(frozen=True, slots=True)
class Score:
    """What one decoder made of the problems."""

    decoder: str
    metrics: Metrics


def compare(
    pipe: Pipeline, decoders: Sequence[Any], problems: Sequence[Problem], new_tokens: int, progress: Progress
) -> list[Score]:
    """One score for each decoder. `progress` is called after every step."""
    return [_score(pipe, decoder, problems, new_tokens, progress) for decoder in decoders]


def _score(pipe: Pipeline, decoder: Any, problems: Sequence[Problem], new_tokens: int, progress: Progress) -> Score:
    part = Pipeline(replace(pipe.recipe, decoder=decoder), pipe.tokenizer, pipe.engine.runtime)
    return Score(label(decoder), solve(part, problems, new_tokens, partial(progress, label(decoder)))[0])


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


def row(score: Score) -> dict[str, str]:
    """A score as a line of a table."""
    figures = score.metrics
    return {
        "decoder": score.decoder,
        "accuracy": f"{figures.accuracy:.1f}%",
        "correct": f"{figures.correct:.0f}/{figures.problems}",
        "NFE": f"{figures.nfe:.1f}",
        "TPF": f"{figures.tpf:.2f}",
        "tokens/s": f"{figures.tps:.0f}",
        "seconds": f"{figures.seconds:.1f}",
    }
