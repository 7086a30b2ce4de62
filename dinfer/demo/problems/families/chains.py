"""Operations applied to a number one after the other."""

from random import Random

from dinfer.demo.problems.problem import Draft
from dinfer.demo.problems.wording import ask, choose, commuting

_VERBS = {"+": "add", "-": "subtract", "*": "multiply by"}


def chain(rng: Random) -> Draft:
    """A start and three operations; every step is the result of the one before."""
    start = value = rng.randint(12, 99)
    steps: list[tuple[str, int, int]] = []
    while len(steps) < 3:
        sign = rng.choice("+-*")
        number = rng.randint(2, 6) if sign == "*" else rng.randint(11, 149)
        result = value + number if sign == "+" else value - number if sign == "-" else value * number
        if 10 <= result <= 599 and not (steps and sign == steps[-1][0] == "*"):
            steps.append((sign, number, result))
            value = result
    told = [f"{_VERBS[sign]} {number}" for sign, number, _ in steps]
    question = ask(
        rng,
        f"Start with {start}: " + ", ".join(told[:-1]) + f", then {told[-1]}. What is the result?",
        f"Take the number {start}, then " + ", ".join(told[:-1]) + f" and {told[-1]}. Which number is it?",
    )

    def solve(rng: Random) -> list[str]:
        lines, held = [], start
        for sign, number, result in steps:
            work = f"{held} - {number}" if sign == "-" else commuting(rng, sign, held, number)
            told = f"{_VERBS[sign]} {number}"
            lines.append(
                choose(
                    rng,
                    f"{told}: {work} = {result}",
                    f"now {work} = {result}",
                    f"we {told} and get {work} = {result}",
                )
            )
            held = result
        return lines

    return Draft((start, *steps), question, str(value), solve)
