"""A walk on a grid with turns: facing and position are tracked."""

from random import Random

from dinfer.demo.problems.problem import Draft
from dinfer.demo.problems.wording import NAMES, ask, choose, in_some_order

_COMPASS = ("north", "east", "south", "west")
_TURNS = {"right": 1, "left": -1, "around": 2}


def turns(rng: Random) -> Draft:
    """A first direction and six turns; which way does the walker face at the end?"""
    name = rng.choice(NAMES)
    facing = first = rng.randrange(4)
    moves: list[tuple[str, str, str]] = []
    for _ in range(6):
        turn = rng.choice(list(_TURNS))
        to = (facing + _TURNS[turn]) % 4
        moves.append((_COMPASS[facing], turn, _COMPASS[to]))
        facing = to
    told = ", ".join(f"turns {turn}" for _, turn, _ in moves[:-1]) + f" and turns {moves[-1][1]}"
    question = ask(
        rng,
        f"{name} faces {_COMPASS[first]}, {told}. Which way does {name} face now?",
        f"At first {name} looks {_COMPASS[first]}. Then {name} {told}. Where does {name} look at the end?",
    )

    def solve(rng: Random) -> list[str]:
        lines = []
        for before, turn, after in moves:
            lines.append(
                choose(
                    rng,
                    f"{before}, {turn}: {after}.",
                    f"Turning {turn} from {before} is {after}.",
                    f"Now {after}, by turning {turn}.",
                )
            )
        return lines

    return Draft((first, *(turn for _, turn, _ in moves)), question, _COMPASS[facing], solve)


def walk(rng: Random) -> Draft:
    """Steps along two axes; how far from the start, and on which sides?"""
    name = rng.choice(NAMES)
    north, south, east, west = rng.sample(range(11, 99), 4)
    legs = [(north, "north"), (south, "south"), (east, "east"), (west, "west")]
    rng.shuffle(legs)
    up, across = max(north, south) - min(north, south), max(east, west) - min(east, west)
    side, edge = "north" if north > south else "south", "east" if east > west else "west"
    told = ", ".join(f"{steps} {way}" for steps, way in legs)
    question = ask(
        rng,
        f"{name} walks {told}. How far is {name} from the start, counting steps along the streets?",
        f"From the well {name} goes {told}. How many steps along the streets lead back to the well?",
    )

    def solve(rng: Random) -> list[str]:
        lines = [
            choose(
                rng,
                f"{way.capitalize()}: {high} - {low} = {high - low}.",
                f"{name} ends {high} - {low} = {high - low} steps {way}.",
                f"The steps to the {way} are {high} - {low} = {high - low}.",
            )
            for way, high, low in in_some_order(
                rng, (side, max(north, south), min(north, south)), (edge, max(east, west), min(east, west))
            )
        ]
        one, other = in_some_order(rng, up, across)
        lines.append(
            choose(
                rng,
                f"Back it is {one} + {other} = {up + across} steps.",
                f"Sum: {one} + {other} = {up + across}.",
                f"So the way is {one} + {other} = {up + across} steps long.",
            )
        )
        return lines

    return Draft((north, south, east, west), question, str(up + across), solve)
