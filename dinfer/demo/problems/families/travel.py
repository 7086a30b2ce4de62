"""Two legs of a journey, each with its own speed."""

from random import Random

from dinfer.demo.problems.problem import Draft
from dinfer.demo.problems.wording import NAMES, ask, choose, commuting, in_some_order

_VEHICLES = ("bus", "train", "car", "ferry", "tram", "bike")


def travel(rng: Random) -> Draft:
    """Distance as speed times hours on two legs: their sum, or how much longer the first is."""
    name = rng.choice(NAMES)
    one, other = rng.sample(_VEHICLES, 2)
    hours, speed, more, pace = rng.randint(3, 9), rng.randint(12, 49), rng.randint(3, 9), rng.randint(12, 49)
    if hours * speed == more * pace:
        hours += 1
    if hours * speed < more * pace:
        hours, speed, more, pace = more, pace, hours, speed
    differ = rng.random() < 0.4
    far, near = hours * speed, more * pace
    question = ask(
        rng,
        f"{name} goes {hours} hours by {one} at {speed} km per hour and {more} hours by {other} at {pace} km per hour.",
        f"The {one} of {name} does {speed} km per hour and the {other} {pace} km per hour."
        f" {name} takes the {one} for {hours} hours and the {other} for {more} hours.",
    ) + (f" How much longer is the way by {one}?" if differ else f" How many km does {name} travel?")

    def solve(rng: Random) -> list[str]:
        lines = [
            choose(
                rng,
                f"The {by} goes {commuting(rng, '*', time, rate)} = {time * rate} km.",
                f"By {by}: {commuting(rng, '*', time, rate)} = {time * rate}.",
                f"In {time} hours the {by} covers {commuting(rng, '*', time, rate)} = {time * rate} km.",
            )
            for by, time, rate in in_some_order(rng, (one, hours, speed), (other, more, pace))
        ]
        if differ:
            lines.append(
                choose(
                    rng,
                    f"The difference is {far} - {near} = {far - near} km.",
                    f"Longer by {far} - {near} = {far - near}.",
                    f"So the {one} goes {far} - {near} = {far - near} km more.",
                )
            )
        else:
            both = commuting(rng, "+", far, near)
            lines.append(
                choose(
                    rng,
                    f"The whole way is {both} = {far + near} km.",
                    f"Sum: {both} = {far + near}.",
                    f"So {name} travels {both} = {far + near} km in all.",
                )
            )
        return lines

    return Draft((hours, speed, more, pace, differ), question, str(far - near if differ else far + near), solve)
