"""Tasks with programs as answers: takes the program out of an answer, and computes pass@1 in the sandbox."""

import re
from collections.abc import Sequence
from typing import Any

from evaluations.sandbox import CODE_EVAL

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def blocks(responses: list[list[str]], documents: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The first fenced block of each answer, closed or not; without one, the whole answer."""
    return [[found[1] if (found := _BLOCK.search(text)) else text for text in texts] for texts in responses]


def filled(responses: list[list[str]], documents: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The program with its gap filled."""
    pairs = zip(responses, documents, strict=True)
    return [[doc["prompt"] + text + doc["suffix"] for text in texts] for texts, doc in pairs]


def pass_at_1(references: list[str], predictions: list[list[str]], **_: Any) -> float:
    """The share of the programs that pass their tests."""
    scores, _runs = CODE_EVAL.compute(references=references, predictions=predictions, k=[1])
    return scores["pass@1"]
