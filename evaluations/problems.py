"""The held-out problems of the model in the box as tasks. It makes them here, without a download.

`limit=n` takes the first n, which are also those of `dinfer demo count=n` and `benchmarks.quality`.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from typing import Any

from datasets import Dataset

from dinfer.demo.problems import Problem, generate, is_correct

COUNT = 500
CHOICES = 4
_RESULT = re.compile(r"(?<== )\d+")


def questions(*, families: Sequence[str] | None = None, **_: Any) -> dict[str, Dataset]:
    """Questions with answers. lm-eval passes other arguments too, for its own use."""
    return {"test": Dataset.from_list([asdict(problem) for problem in generate("heldout", COUNT, 0, families)])}


def choices(**_: Any) -> dict[str, Dataset]:
    """Four worked solutions that differ in the last line: one has the answer, three have those of other problems."""
    rows = []
    problems = generate("heldout", COUNT, 0)
    for index, problem in enumerate(problems):
        rng = Random(index)
        others = sorted({other.answer for other in problems if other.family == problem.family} - {problem.answer})
        answers = [problem.answer, *rng.sample(others, CHOICES - 1)]
        rng.shuffle(answers)
        body = problem.solution.removesuffix(problem.answer)
        rows.append(
            {"question": problem.question, "choices": [body + answer for answer in answers]}
            | {"gold": answers.index(problem.answer)}
        )
    return {"test": Dataset.from_list(rows)}


def gaps(**_: Any) -> dict[str, Dataset]:
    """Worked solutions without the result of their first calculation, whose digits are one token each."""
    rows = []
    for problem in generate("heldout", COUNT, 0):
        if (found := _RESULT.search(problem.solution)) is not None:
            before, suffix = problem.solution[: found.start()], problem.solution[found.end() :]
            row = {"question": problem.question, "before": before, "suffix": suffix}
            rows.append(row | {"answer": found[0], "gap": len(found[0])})
    return {"test": Dataset.from_list(rows)}


def judged(document: dict[str, Any], responses: list[str]) -> dict[str, float]:
    """Exact match of the final answer, as everywhere in dinfer."""
    return {"exact_match": float(is_correct(Problem(**document), responses[0]))}
