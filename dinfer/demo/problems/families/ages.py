"""A chain of ages, each told by the one before."""

from random import Random

from dinfer.demo.problems.problem import Draft
from dinfer.demo.problems.wording import NAMES, choose, commuting, in_some_order


def ages(rng: Random) -> Draft:
    """Three people: an age, a difference, a multiple; the question asks for the sum of two of them."""
    first, second, third = rng.sample(NAMES, 3)
    age, gap, times = rng.randint(24, 69), rng.randint(8, 29), rng.randint(2, 4)
    older = rng.random() < 0.5 or gap > age - 12
    middle = age + gap if older else age - gap
    old = times * middle
    facts = [
        f"{first} is {age} years old.",
        f"{second} is {gap} years {'older' if older else 'younger'} than {first}.",
        f"{third} is {times} times as old as {second}.",
    ]
    rng.shuffle(facts)
    with_first = rng.random() < 0.5
    partner, years = (first, age) if with_first else (second, middle)
    question = " ".join(facts) + f" How old are {partner} and {third} together?"

    def solve(rng: Random) -> list[str]:
        step = commuting(rng, "+", age, gap) if older else f"{age} - {gap}"
        product = commuting(rng, "*", times, middle)
        (one, one_age), (other, other_age) = in_some_order(rng, (partner, years), (third, old))
        return [
            choose(
                rng,
                f"{second} is {step} = {middle} years old.",
                f"Age of {second}: {step} = {middle}.",
                f"From the age of {first} we get {step} = {middle} for {second}.",
            ),
            choose(
                rng,
                f"{third} is {product} = {old} years old.",
                f"Age of {third}: {product} = {old}.",
                f"From the age of {second} we get {product} = {old} for {third}.",
            ),
            choose(
                rng,
                f"Together {one} and {other} are {one_age} + {other_age} = {one_age + other_age}.",
                f"Sum for {one} and {other}: {one_age} + {other_age} = {one_age + other_age}.",
                f"So {one} and {other} have {one_age} + {other_age} = {one_age + other_age} years.",
            ),
        ]

    return Draft((age, gap, times, older, with_first), question, str(years + old), solve)
