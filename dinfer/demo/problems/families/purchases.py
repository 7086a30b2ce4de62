"""Buying two kinds of goods, sometimes paying with a larger note."""

from random import Random

from dinfer.demo.problems.problem import Draft
from dinfer.demo.problems.wording import GOODS, NAMES, ask, choose, commuting, in_some_order


def purchase(rng: Random) -> Draft:
    """`n` of one thing at a price each and `m` of another: the total, or the change."""
    name = rng.choice(NAMES)
    (one, other) = rng.sample(GOODS, 2)
    n, price, m, fee = rng.randint(12, 39), rng.randint(3, 9), rng.randint(12, 39), rng.randint(3, 9)
    total = n * price + m * fee
    note = rng.choice([0, 1000])
    question = ask(
        rng,
        f"{name} buys {n} {one} at {price} coins each and {m} {other} at {fee} coins each.",
        f"{name} wants {n} {one} and {m} {other}."
        f" One of the {one} costs {price} coins, one of the {other} {fee} coins.",
    ) + (f" {name} pays with {note} coins. How many coins come back?" if note else f" How many coins does {name} pay?")

    def solve(rng: Random) -> list[str]:
        lines = [
            choose(
                rng,
                f"The {goods} cost {commuting(rng, '*', count, each)} = {count * each} coins.",
                f"{count} {goods}: {commuting(rng, '*', count, each)} = {count * each}.",
                f"{name} pays {commuting(rng, '*', count, each)} = {count * each} coins for the {goods}.",
            )
            for goods, count, each in in_some_order(rng, (one, n, price), (other, m, fee))
        ]
        both = commuting(rng, "+", n * price, m * fee)
        lines.append(
            choose(
                rng,
                f"Together that is {both} = {total} coins.",
                f"In total {name} pays {both} = {total}.",
                f"Sum: {both} = {total}.",
            )
        )
        if note:
            lines.append(
                choose(
                    rng,
                    f"Change: {note} - {total} = {note - total}.",
                    f"{name} gets back {note} - {total} = {note - total} coins.",
                )
            )
        return lines

    return Draft((n, price, m, fee, note), question, str(note - total if note else total), solve)
