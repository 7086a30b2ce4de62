"""Seeded word problems for the model in the box: eight families, two splits that cannot overlap.

They are made, not read from a file, since a trainer wants new ones for as long as it runs (`stream`).

from dinfer.demo.problems import generate, is_correct
problems = generate("heldout", count=500, seed=0)
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TypeVar

T = TypeVar("T")

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


def ask(rng: Random, *templates: str) -> str:
    """One way to put a question, all equally likely."""
    return rng.choice(templates)


def in_some_order(rng: Random, first: T, second: T) -> tuple[T, T]:
    """Two facts of equal standing, in either order."""
    return (second, first) if rng.random() < OTHER_ORDER else (first, second)


def commuting(rng: Random, sign: str, left: int, right: int) -> str:
    """`left sign right` for a commuting operation, its operands in either order."""
    if rng.random() < SWAPPED_OPERANDS:
        left, right = right, left
    return f"{left} {sign} {right}"


ANSWER_LABEL = "Answer:"
_ANSWER = re.compile(re.escape(ANSWER_LABEL) + r"[ \t]*([^\n]*)")


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem with one of its many correct solution texts.

    `question` is what a user asks, `solution` a worked text ending in `Answer: ...`, `answer` the reference.
    """

    family: str
    question: str
    solution: str
    answer: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem before one of its solution texts is chosen.

    `key` holds the facts without their wording: it alone decides the split, so that a held-out problem cannot
    come back in the training split under another wording. `solve` yields the steps of one solution, each as the ways
    to word it; every call may choose another order. `answer` is computed from the facts, independently of the text.
    """

    key: tuple[object, ...]
    question: str
    answer: str
    solve: Callable[[Random], Iterator[tuple[str, ...]]]

    def solution(self, rng: Random) -> str:
        """One complete solution text: the worked steps, a line each, all wordings equally likely; the answer line."""
        lines = [wordings[int(rng.random() * len(wordings))] for wordings in self.solve(rng)]
        return "\n".join([*lines, f"{ANSWER_LABEL} {self.answer}"])


def extract_answer(text: str) -> str | None:
    """The text after the first `Answer:`, up to the end of its line; None where there is no such line."""
    found = _ANSWER.search(text)
    if found is None:
        return None
    return found[1].strip().rstrip(".").rstrip() or None


def is_correct(problem: Problem, text: str) -> bool:
    """Exact match: the answer in `text` is the reference, compared without regard to case."""
    answer = extract_answer(text)
    return answer is not None and answer.casefold() == problem.answer.casefold()


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

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        step = commuting(rng, "+", age, gap) if older else f"{age} - {gap}"
        product = commuting(rng, "*", times, middle)
        (one, one_age), (other, other_age) = in_some_order(rng, (partner, years), (third, old))
        yield (
            f"{second} is {step} = {middle} years old.",
            f"Age of {second}: {step} = {middle}.",
            f"From the age of {first} we get {step} = {middle} for {second}.",
        )
        yield (
            f"{third} is {product} = {old} years old.",
            f"Age of {third}: {product} = {old}.",
            f"From the age of {second} we get {product} = {old} for {third}.",
        )
        yield (
            f"Together {one} and {other} are {one_age} + {other_age} = {one_age + other_age}.",
            f"Sum for {one} and {other}: {one_age} + {other_age} = {one_age + other_age}.",
            f"So {one} and {other} have {one_age} + {other_age} = {one_age + other_age} years.",
        )

    return Draft((age, gap, times, older, with_first), question, str(years + old), solve)


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

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        held = start
        for (sign, number, result), verb in zip(steps, told, strict=True):
            work = f"{held} - {number}" if sign == "-" else commuting(rng, sign, held, number)
            yield (
                f"{verb}: {work} = {result}",
                f"now {work} = {result}",
                f"we {verb} and get {work} = {result}",
            )
            held = result

    return Draft((start, *steps), question, str(value), solve)


_PLACES = ("first", "second", "third", "fourth")


# what the question says -> (the operation, how a solution may say it)
_OPERATIONS: dict[str, tuple[Callable[[list[int]], list[int]], tuple[str, ...]]] = {
    "sort it": (sorted, ("Sorted:", "In order that is", "Sorting gives us")),
    "reverse it": (lambda row: row[::-1], ("Reversed:", "Backwards that is", "Reversing gives us")),
    "remove the largest": (
        lambda row: [number for number in row if number != max(row)],
        ("Without the largest:", "The largest goes, leaving", "What stays is"),
    ),
    "remove the smallest": (
        lambda row: [number for number in row if number != min(row)],
        ("Without the smallest:", "The smallest goes, leaving", "What stays is"),
    ),
}


def lists(rng: Random) -> Draft:
    """Five numbers, three different operations, and the number at a place."""
    numbers = rng.sample(range(10, 100), 5)
    told = rng.sample(list(_OPERATIONS), 3)
    rows = [numbers]
    for operation in told:
        rows.append(_OPERATIONS[operation][0](rows[-1]))
    place = rng.randrange(min(len(rows[-1]), len(_PLACES)))
    found, listed = rows[-1][place], ", ".join(map(str, numbers))
    question = (
        ask(
            rng,
            f"Take the list {listed}. First {told[0]}, then {told[1]}, then {told[2]}.",
            f"Given is the list {listed}; {told[0]}, {told[1]} and {told[2]}.",
        )
        + f" Which number is {_PLACES[place]}?"
    )

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        for operation, row in zip(told, rows[1:], strict=True):
            listed = ", ".join(map(str, row))
            yield tuple(f"{words} {listed}." for words in _OPERATIONS[operation][1])
        yield (
            f"The {_PLACES[place]} is {found}.",
            f"So we find {found} there.",
            f"In the {_PLACES[place]} place stands {found}.",
        )

    return Draft((*numbers, *told, place), question, str(found), solve)


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

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        for goods, count, each in in_some_order(rng, (one, n, price), (other, m, fee)):
            yield (
                f"The {goods} cost {commuting(rng, '*', count, each)} = {count * each} coins.",
                f"{count} {goods}: {commuting(rng, '*', count, each)} = {count * each}.",
                f"{name} pays {commuting(rng, '*', count, each)} = {count * each} coins for the {goods}.",
            )
        both = commuting(rng, "+", n * price, m * fee)
        yield (
            f"Together that is {both} = {total} coins.",
            f"In total {name} pays {both} = {total}.",
            f"Sum: {both} = {total}.",
        )
        if note:
            yield (
                f"Change: {note} - {total} = {note - total}.",
                f"{name} gets back {note} - {total} = {note - total} coins.",
            )

    return Draft((n, price, m, fee, note), question, str(note - total if note else total), solve)


def sharing(rng: Random) -> Draft:
    """A heap, something given away, another heap, and equal shares of what there is."""
    name, giver = rng.sample(NAMES, 2)
    goods = rng.choice(GOODS)
    friends, share = rng.randint(3, 9), rng.randint(12, 49)
    total = friends * share
    start = rng.randint(24, total - 11)
    lost = rng.randint(11, start - 11)
    gift, rest, have = total - start + lost, start - lost, total + lost
    question = ask(
        rng,
        f"{name} has {start} {goods}, loses {lost} and gets {gift} from {giver}."
        f" {name} shares all {goods} equally among {friends} friends. How many does each friend get?",
        f"{giver} gives {gift} {goods} to {name}, who had {start} {goods} but lost {lost}."
        f" {friends} friends share them equally. How many {goods} are there for each?",
    )

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        loss, gain = f"{start} - {lost} = {rest}", f"{commuting(rng, '+', rest, gift)} = {total}"
        gain_first = rng.random() >= 0.5
        if gain_first:
            loss, gain = f"{have} - {lost} = {total}", f"{commuting(rng, '+', start, gift)} = {have}"
        steps = [
            (
                f"After the loss {name} has {loss} {goods}.",
                f"Left: {loss}.",
                f"Without the lost {goods} there are {loss}.",
            ),
            (
                f"With the gift of {giver} it is {gain} {goods}.",
                f"All: {gain}.",
                f"Then {giver} makes it {gain}.",
            ),
        ]
        yield from reversed(steps) if gain_first else steps
        yield (
            f"Each friend gets {total} / {friends} = {share} {goods}.",
            f"Shared: {total} / {friends} = {share}.",
            f"So one share is {total} / {friends} = {share}.",
        )

    return Draft((start, lost, gift, friends), question, str(share), solve)


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

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        for by, time, rate in in_some_order(rng, (one, hours, speed), (other, more, pace)):
            yield (
                f"The {by} goes {commuting(rng, '*', time, rate)} = {time * rate} km.",
                f"By {by}: {commuting(rng, '*', time, rate)} = {time * rate}.",
                f"In {time} hours the {by} covers {commuting(rng, '*', time, rate)} = {time * rate} km.",
            )
        if differ:
            yield (
                f"The difference is {far} - {near} = {far - near} km.",
                f"Longer by {far} - {near} = {far - near}.",
                f"So the {one} goes {far} - {near} = {far - near} km more.",
            )
        else:
            both = commuting(rng, "+", far, near)
            yield (
                f"The whole way is {both} = {far + near} km.",
                f"Sum: {both} = {far + near}.",
                f"So {name} travels {both} = {far + near} km in all.",
            )

    return Draft((hours, speed, more, pace, differ), question, str(far - near if differ else far + near), solve)


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

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        for before, turn, after in moves:
            yield (
                f"{before}, {turn}: {after}.",
                f"Turning {turn} from {before} is {after}.",
                f"Now {after}, by turning {turn}.",
            )

    return Draft((first, *(turn for _, turn, _ in moves)), question, _COMPASS[facing], solve)


def walk(rng: Random) -> Draft:
    """Steps along two axes; how far from the start, and on which sides?"""
    name = rng.choice(NAMES)
    north, south, east, west = rng.sample(range(11, 99), 4)
    legs = [(north, "north"), (south, "south"), (east, "east"), (west, "west")]
    rng.shuffle(legs)
    up, across = abs(north - south), abs(east - west)
    side, edge = "north" if north > south else "south", "east" if east > west else "west"
    told = ", ".join(f"{steps} {way}" for steps, way in legs)
    question = ask(
        rng,
        f"{name} walks {told}. How far is {name} from the start, counting steps along the streets?",
        f"From the well {name} goes {told}. How many steps along the streets lead back to the well?",
    )

    def solve(rng: Random) -> Iterator[tuple[str, ...]]:
        axes = (side, max(north, south), min(north, south)), (edge, max(east, west), min(east, west))
        for way, high, low in in_some_order(rng, *axes):
            yield (
                f"{way.capitalize()}: {high} - {low} = {high - low}.",
                f"{name} ends {high} - {low} = {high - low} steps {way}.",
                f"The steps to the {way} are {high} - {low} = {high - low}.",
            )
        one, other = in_some_order(rng, up, across)
        yield (
            f"Back it is {one} + {other} = {up + across} steps.",
            f"Sum: {one} + {other} = {up + across}.",
            f"So the way is {one} + {other} = {up + across} steps long.",
        )

    return Draft((north, south, east, west), question, str(up + across), solve)


FAMILIES: dict[str, Callable[[Random], Draft]] = {
    "purchases": purchase,
    "sharing": sharing,
    "travel": travel,
    "ages": ages,
    "chains": chain,
    "turns": turns,
    "walks": walk,
    "lists": lists,
}
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
    names = list(FAMILIES if families is None else families)
    if not names or not FAMILIES.keys() >= {*names}:
        raise ValueError(f"families={names!r}: choose some of {', '.join(FAMILIES)}")
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
    source = islice(stream(split, seed, families), 101 * count + 10_000)  # most of them repeats
    while len(problems) < count:
        if (problem := next(source, None)) is None:
            raise ValueError(f"count={count}: these families have fewer different problems; ask for less")
        problems.setdefault(problem.question, problem)
    return list(problems.values())
