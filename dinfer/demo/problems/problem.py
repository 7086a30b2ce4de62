"""What a problem is, and how an answer is read out of a text."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

ANSWER_LABEL = "Answer:"
_ANSWER = re.compile(re.escape(ANSWER_LABEL) + r"[ \t]*([^\n]*)")


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem with one of its many correct solution texts.

    `question` is what a user asks, `solution` a worked text ending in `Answer: ...`, `answer` the reference.
    """

    family: str
    question: str
    solution: str
    answer: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem before one of its solution texts is chosen.

    `key` holds the facts without their wording: it alone decides the split, so that a held-out problem cannot
    come back in the training split under another wording. `solve` writes one solution; every call may choose
    other wordings and orders. `answer` is computed from the facts, independently of the text.
    """

    key: tuple[object, ...]
    question: str
    answer: str
    solve: Callable[[Random], list[str]]

    def solution(self, rng: Random) -> str:
        """One complete solution text: the worked steps, a line each, then the answer line."""
        return "\n".join([*self.solve(rng), f"{ANSWER_LABEL} {self.answer}"])


def extract_answer(text: str) -> str | None:
    """The text after the first `Answer:`, up to the end of its line; None where there is no such line."""
    found = _ANSWER.search(text)
    if found is None:
        return None
    answer = found.group(1).strip().rstrip(".").rstrip()
    return answer or None


def is_correct(problem: Problem, text: str) -> bool:
    """Exact match: the answer in `text` is the reference, compared without regard to case."""
    answer = extract_answer(text)
    return answer is not None and answer.casefold() == problem.answer.casefold()
