"""The choices in solution texts: wordings, orders of facts, and how many of each are in use.

A masked diffusion model that fills several positions at once draws them from their marginals. If a text may have two
wordings, or two orders of the same facts, the marginals are mixtures. Then a low confidence threshold commits pieces of
both: this is the cost of parallel decoding. The constants set how many such choices there are.
"""

from random import Random
from typing import TypeVar

T = TypeVar("T")

# How many of the alternatives that a family offers for a step are in use (1: one canonical text).
WORDINGS = 3
# How often two facts of equal standing are told in the other order, and operands are swapped.
OTHER_ORDER = 0.5
SWAPPED_OPERANDS = 0.3

NAMES = (
    "Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon",
    "Kai", "Lea", "Max", "Nora", "Omar", "Pia", "Quin", "Rosa", "Sam", "Tess",
)  # fmt: skip
GOODS = (
    "pens", "cups", "lamps", "books", "hats", "chairs", "bags", "plates", "boxes", "candles", "clocks", "scarves",
)  # fmt: skip


def choose(rng: Random, *alternatives: str) -> str:
    """One of the first `WORDINGS` alternatives, all equally likely."""
    return alternatives[int(rng.random() * min(WORDINGS, len(alternatives)))]


def ask(rng: Random, *templates: str) -> str:
    """One way to put a question, all equally likely; unlike solutions, questions are not cut to `WORDINGS`."""
    return rng.choice(templates)


def in_some_order(rng: Random, first: T, second: T) -> tuple[T, T]:
    """Two facts of equal standing, in either order."""
    return (second, first) if rng.random() < OTHER_ORDER else (first, second)


def commuting(rng: Random, sign: str, left: int, right: int) -> str:
    """`left sign right` for a commuting operation, its operands in either order."""
    if rng.random() < SWAPPED_OPERANDS:
        left, right = right, left
    return f"{left} {sign} {right}"
