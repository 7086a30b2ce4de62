"""Who has what, after some swaps."""

from __future__ import annotations

from random import Random

from dinfer.problems.problem import Draft
from dinfer.problems.wording import NAMES, TREASURES, choose, in_some_order


def swaps(rng: Random) -> Draft:
    """Four people with a thing each swap three times; what does one of them have?"""
    people = rng.sample(NAMES, 4)
    holds = dict(zip(people, rng.sample(TREASURES, 4), strict=True))
    have = ", ".join(f"{name} the {thing}" for name, thing in holds.items())
    pairs, after = [], []
    while len(pairs) < 3:
        one, other = rng.sample(people, 2)
        if pairs and set(pairs[-1]) == {one, other}:
            continue  # two equal swaps in a row undo each other
        holds[one], holds[other] = holds[other], holds[one]
        pairs.append((one, other))
        after.append((holds[one], holds[other]))
    asked = rng.choice(people)
    told = ", then ".join(f"{one} and {other}" for one, other in pairs)
    question = rng.choice(
        [
            f"{have}: so it begins. These swap: {told}. What does {asked} have at the end?",
            f"At first: {have}. Swaps: {told}. Which thing has {asked} now?",
        ]
    )

    def solve(rng: Random) -> list[str]:
        lines = []
        for (one, other), (mine, yours) in zip(pairs, after, strict=True):
            (one, mine), (other, yours) = in_some_order(rng, (one, mine), (other, yours))
            lines.append(
                choose(
                    rng,
                    f"{one}: {mine}, {other}: {yours}.",
                    f"{one} gets the {mine}, {other} the {yours}.",
                    f"Now {one} has the {mine} and {other} has the {yours}.",
                )
            )
        return lines

    return Draft((have, told, asked), question, holds[asked], solve)
