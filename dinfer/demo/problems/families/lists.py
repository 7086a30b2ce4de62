"""Lists of numbers that are sorted, reversed and shortened."""

from collections.abc import Callable
from random import Random

from dinfer.demo.problems.problem import Draft
from dinfer.demo.problems.wording import ask, choose

_PLACES = ("first", "second", "third", "fourth")


def _row(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _reverse(numbers: list[int]) -> list[int]:
    return numbers[::-1]


def _drop_largest(numbers: list[int]) -> list[int]:
    return [number for number in numbers if number != max(numbers)]


def _drop_smallest(numbers: list[int]) -> list[int]:
    return [number for number in numbers if number != min(numbers)]


# what the question says -> (the operation, how a solution may say it)
_OPERATIONS: dict[str, tuple[Callable[[list[int]], list[int]], tuple[str, ...]]] = {
    "sort it": (sorted, ("Sorted:", "In order that is", "Sorting gives us")),
    "reverse it": (_reverse, ("Reversed:", "Backwards that is", "Reversing gives us")),
    "remove the largest": (_drop_largest, ("Without the largest:", "The largest goes, leaving", "What stays is")),
    "remove the smallest": (_drop_smallest, ("Without the smallest:", "The smallest goes, leaving", "What stays is")),
}


def lists(rng: Random) -> Draft:
    """Five numbers, three different operations, and the number at a place."""
    numbers = rng.sample(range(10, 100), 5)
    told = rng.sample(list(_OPERATIONS), 3)
    rows = [numbers]
    for operation in told:
        rows.append(_OPERATIONS[operation][0](rows[-1]))
    place = rng.randrange(min(len(rows[-1]), len(_PLACES)))
    question = (
        ask(
            rng,
            f"Take the list {_row(numbers)}. First {told[0]}, then {told[1]}, then {told[2]}.",
            f"Given is the list {_row(numbers)}; {told[0]}, {told[1]} and {told[2]}.",
        )
        + f" Which number is {_PLACES[place]}?"
    )

    def solve(rng: Random) -> list[str]:
        lines = []
        for operation, row in zip(told, rows[1:], strict=True):
            lines.append(f"{choose(rng, *_OPERATIONS[operation][1])} {_row(row)}.")
        found = rows[-1][place]
        lines.append(
            choose(
                rng,
                f"The {_PLACES[place]} is {found}.",
                f"So we find {found} there.",
                f"In the {_PLACES[place]} place stands {found}.",
            )
        )
        return lines

    return Draft((*numbers, *told, place), question, str(rows[-1][place]), solve)
