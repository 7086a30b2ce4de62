"""Seeded word problems for the model in the box: eight families, two splits that cannot overlap.

from dinfer.demo.problems import generate, is_correct
problems = generate("heldout", count=500, seed=0)
"""

from dinfer.demo.problems.families import FAMILIES
from dinfer.demo.problems.generate import SPLITS, generate, split_of, stream
from dinfer.demo.problems.problem import ANSWER_LABEL, Draft, Problem, extract_answer, is_correct

__all__ = [
    "ANSWER_LABEL",
    "FAMILIES",
    "SPLITS",
    "Draft",
    "Problem",
    "extract_answer",
    "generate",
    "is_correct",
    "split_of",
    "stream",
]
