"""Seeded generation, with splits that cannot overlap."""

import hashlib
from collections.abc import Iterator, Sequence
from random import Random

from dinfer.demo.problems.families import FAMILIES
from dinfer.demo.problems.problem import Problem

SPLITS = ("train", "heldout")
_HELDOUT_ONE_IN = 10


def split_of(family: str, key: tuple[object, ...]) -> str:
    """The split that the facts of a problem belong to: a tenth of all possible problems is held out."""
    # A digest, since Python's own hash differs from process to process.
    digest = hashlib.blake2b(repr((family, key)).encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % _HELDOUT_ONE_IN == 0 else "train"


def stream(split: str, seed: int, families: Sequence[str] | None = None) -> Iterator[Problem]:
    """An endless stream of problems of a split, the families in turn; the same for the same arguments."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: not a split; choose one of {', '.join(SPLITS)}")
    names = tuple(FAMILIES) if families is None else tuple(families)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        raise ValueError(f"families={list(names)!r}: choose some of {', '.join(FAMILIES)}")
    rng = Random(f"{seed}/{split}")
    while True:
        for name in names:
            draft = FAMILIES[name](rng)
            while split_of(name, draft.key) != split:
                draft = FAMILIES[name](rng)
            yield Problem(name, draft.question, draft.solution(rng), draft.answer)


def generate(split: str, count: int, seed: int, families: Sequence[str] | None = None) -> list[Problem]:
    """`count` different problems of a split ("train" or "heldout"), the families in turn.

    The same arguments give the same problems, and a smaller `count` gives the first ones of a larger.
    """
    if count < 0:
        raise ValueError(f"count={count}: must not be negative")
    problems: dict[str, Problem] = {}
    repeats = 0
    source = stream(split, seed, families)
    while len(problems) < count:
        problem = next(source)
        if problem.question in problems:
            repeats += 1
            if repeats > 100 * count + 10_000:
                raise ValueError(f"count={count}: these families have fewer different problems; ask for less")
            continue
        problems[problem.question] = problem
    return list(problems.values())
