"""What a set of answers was worth and what it cost: the one place where these figures are defined and computed.

Tokens are generated tokens before the first stop token, or stop string where a task has some. Prompt, padding and what
comes behind never count. `docs/metrics.md` defines every figure. `solve` and `compare` measure recipes on problems.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from dinfer.core.engine.request import Counts
from dinfer.core.pipeline import Pipeline
from dinfer.core.pipeline.pipeline import seeded
from dinfer.core.registry import DECODERS, changed, check_range, values_of
from dinfer.demo.problems import Problem, is_correct

PERCENTILES = (50, 90, 95, 99)
_NORMAL_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    forwards: int  # passes of the network that the request took part in
    refreshes: int  # of these, passes over the whole canvas whose keys and values were kept
    tokens: int  # generated before the first stop token or stop string
    seconds: float  # from admission to the last step
    stopped: bool  # at a stop token or stop string; else the length ran out
    score: float | None = None  # 0 to 1, as the task judges it; None: not judged
    positions: int = 0  # computed, those of the prompt included
    committed: int = 0  # masked positions decoded; 0: not known

    def __post_init__(self) -> None:
        check_range("sample", self, "forwards", least=1)
        check_range("sample", self, "refreshes", "tokens", "seconds", "positions", "committed", least=0)
        check_range("sample", self, "score", least=0, most=1)

    @classmethod
    def of(cls, counts: Counts, stopped: bool, score: float | None = None) -> Self:
        """The sample of a `Result` or a `Completion`."""
        cost = counts.forwards, counts.refreshes, counts.tokens, counts.seconds
        return cls(*cost, stopped, score, counts.positions, counts.committed)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one run, in the order of the columns of a table. Means are over requests."""

    problems: int  # requests
    correct: float | None  # sum of the scores; None, like all accuracies: nothing was judged
    accuracy: float | None  # percent: 100 * correct / problems
    accuracy_low: float | None  # percent, 95% Wilson score interval
    accuracy_high: float | None
    nfe: float  # forwards a request
    refreshes: float  # a request
    tpf: float  # all tokens / all forwards
    positions_per_committed: float | None  # all computed positions / all decoded ones; None: not known
    tps: float  # all tokens / wall time of the run
    tokens: float  # a request
    stopped: float  # percent of the requests that ended at a stop token or stop string
    tokens_to_eos: float | None  # a request that stopped; None: none did
    latency: float  # seconds from admission to the last step, mean
    latency_p50: float
    latency_p90: float
    latency_p95: float
    latency_p99: float
    seconds: float  # wall time of the run, from the first admission to the last answer

    def row(self) -> dict[str, Any]:
        """The figures by name, rounded to six significant digits, as tables and result files hold them."""
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in asdict(self).items()
        }


def measure(samples: Sequence[Sample], seconds: float) -> Metrics:
    """The figures of a run that took `seconds` in all. Either all samples are judged or none is.

    Raises ValueError for no samples, mixed ones, or a time that is not positive.
    """
    if not samples:
        raise ValueError("samples is empty: there is nothing to measure")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be positive: the wall time of the run")
    scores = [sample.score for sample in samples if sample.score is not None]
    if len(scores) not in (0, len(samples)):
        raise ValueError(f"{len(scores)} of {len(samples)} samples have a score: judge all of them, or none")
    count, tokens = len(samples), sum(sample.tokens for sample in samples)
    forwards = sum(sample.forwards for sample in samples)
    known, committed = all(sample.committed for sample in samples), sum(sample.committed for sample in samples)
    correct = sum(scores) if scores else None
    low, high = (None, None) if correct is None else wilson(correct, count)
    ended = [sample.tokens for sample in samples if sample.stopped]
    latencies = [sample.seconds for sample in samples]
    p50, p90, p95, p99 = (float(value) for value in np.percentile(latencies, PERCENTILES))
    return Metrics(
        problems=count,
        correct=correct,
        accuracy=None if correct is None else 100 * correct / count,
        accuracy_low=low,
        accuracy_high=high,
        nfe=forwards / count,
        refreshes=sum(sample.refreshes for sample in samples) / count,
        tpf=tokens / forwards,
        positions_per_committed=sum(sample.positions for sample in samples) / committed if known else None,
        tps=tokens / seconds,
        tokens=tokens / count,
        stopped=100 * len(ended) / count,
        tokens_to_eos=sum(ended) / len(ended) if ended else None,
        latency=sum(latencies) / count,
        latency_p50=p50,
        latency_p90=p90,
        latency_p95=p95,
        latency_p99=p99,
        seconds=seconds,
    )


def wilson(correct: float, count: int) -> tuple[float, float]:
    """The 95% Wilson score interval of a share, in percent (Wilson 1927): sound near 0% and 100% too."""
    share, z2 = correct / count, _NORMAL_95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _NORMAL_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


@dataclass(frozen=True, slots=True)
class Difference:
    """How much more right the first of two runs is than the second, on the same problems."""

    points: float  # of accuracy
    low: float  # 95% interval, Bonett and Price's (2012) for paired shares: sound for few problems and no difference
    high: float
    first: int  # problems that the first run answers better, and the second
    second: int
    chance: float  # p of McNemar's exact test: how likely so uneven a split is if both runs are equally good

    @classmethod
    def between(cls, first: Sequence[float], second: Sequence[float]) -> Self:
        """`first`, `second`: the scores of each problem, 0 to 1, in the same order. Raises ValueError."""
        lead = [100 * (a - b) for a, b in zip(first, second, strict=True)]
        seen = [*lead, 100.0, -100.0]  # as if each run had won one problem more
        middle = sum(seen) / len(seen)
        half = _NORMAL_95 * math.sqrt(sum((value - middle) ** 2 for value in seen)) / len(seen)
        won, lost = sum(value > 0 for value in lead), sum(value < 0 for value in lead)
        tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1)) / 2 ** (won + lost)
        points = sum(lead) / len(lead)
        return cls(points, max(middle - half, -100.0), min(middle + half, 100.0), won, lost, min(2 * tail, 1.0))


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
    usual = pipe.recipe.resolve({})
    options = [seeded(pipe.recipe, usual, index) for index in range(len(ids))]
    began = time.perf_counter()
    for update in pipe.engine.run(pipe.requests(ids, new_tokens, options)):
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
