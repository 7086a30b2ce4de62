"""People ordered by height from pairwise comparisons."""

from __future__ import annotations

from random import Random

from dinfer.problems.problem import Draft
from dinfer.problems.wording import NAMES, choose, in_some_order

_RANKS = ("first", "second", "third", "fourth")


def ordering(rng: Random) -> Draft:
    """Four people, three neighbouring comparisons in any order; who stands at a rank?"""
    tall_to_small = rng.sample(NAMES, 4)
    facts = []
    for taller, smaller in zip(tall_to_small, tall_to_small[1:], strict=False):
        facts.append(
            f"{taller} is taller than {smaller}." if rng.random() < 0.5 else f"{smaller} is smaller than {taller}."
        )
    rng.shuffle(facts)
    rank, from_top = rng.randrange(4), rng.random() < 0.5
    asked = f"{_RANKS[rank]} from the {'tall' if from_top else 'small'} end"
    answer = (tall_to_small if from_top else tall_to_small[::-1])[rank]
    question = " ".join(facts) + rng.choice([f" Who is the {asked}?", f" They stand by height. Who comes {asked}?"])

    def solve(rng: Random) -> list[str]:
        down, up = ", ".join(tall_to_small), ", ".join(tall_to_small[::-1])
        ends = in_some_order(
            rng,
            choose(rng, f"{tall_to_small[0]} is the tallest.", f"Nobody is taller than {tall_to_small[0]}."),
            choose(rng, f"{tall_to_small[-1]} is the smallest.", f"Nobody is smaller than {tall_to_small[-1]}."),
        )
        row = in_some_order(
            rng,
            choose(rng, f"From tall to small: {down}.", f"By height, the tallest first, they are {down}."),
            choose(rng, f"From small to tall: {up}.", f"By height, the smallest first, they are {up}."),
        )[0]
        found = choose(
            rng,
            f"The {asked} is {answer}.",
            f"So {answer} is {_RANKS[rank]}.",
            f"Counting gives {answer} as the {asked}.",
        )
        return [*ends, row, found]

    return Draft((*facts, asked), question, answer, solve)
