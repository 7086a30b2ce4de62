"""Two heaps put together and shared equally."""

from random import Random

from dinfer.demo.problems.problem import Draft
from dinfer.demo.problems.wording import GOODS, NAMES, ask, choose, commuting


def sharing(rng: Random) -> Draft:
    """A heap, something given away, another heap, and equal shares of what there is."""
    name, giver = rng.sample(NAMES, 2)
    goods = rng.choice(GOODS)
    friends, share = rng.randint(3, 9), rng.randint(12, 49)
    total = friends * share
    start = rng.randint(24, total - 11)
    lost = rng.randint(11, start - 11)
    gift = total - start + lost
    question = ask(
        rng,
        f"{name} has {start} {goods}, loses {lost} and gets {gift} from {giver}."
        f" {name} shares all {goods} equally among {friends} friends. How many does each friend get?",
        f"{giver} gives {gift} {goods} to {name}, who had {start} {goods} but lost {lost}."
        f" {friends} friends share them equally. How many {goods} are there for each?",
    )

    def solve(rng: Random) -> list[str]:
        rest = start - lost
        both = commuting(rng, "+", rest, gift)
        if rng.random() < 0.5:
            first = [
                choose(
                    rng,
                    f"After the loss {name} has {start} - {lost} = {rest} {goods}.",
                    f"Left: {start} - {lost} = {rest}.",
                    f"Without the lost {goods} there are {start} - {lost} = {rest}.",
                ),
                choose(
                    rng,
                    f"With the gift of {giver} it is {both} = {total} {goods}.",
                    f"All: {both} = {total}.",
                    f"Then {giver} makes it {both} = {total}.",
                ),
            ]
        else:
            have = start + gift
            both = commuting(rng, "+", start, gift)
            first = [
                choose(
                    rng,
                    f"With the gift of {giver} it is {both} = {have} {goods}.",
                    f"All: {both} = {have}.",
                    f"Then {giver} makes it {both} = {have}.",
                ),
                choose(
                    rng,
                    f"After the loss {name} has {have} - {lost} = {total} {goods}.",
                    f"Left: {have} - {lost} = {total}.",
                    f"Without the lost {goods} there are {have} - {lost} = {total}.",
                ),
            ]
        last = choose(
            rng,
            f"Each friend gets {total} / {friends} = {share} {goods}.",
            f"Shared: {total} / {friends} = {share}.",
            f"So one share is {total} / {friends} = {share}.",
        )
        return [*first, last]

    return Draft((start, lost, gift, friends), question, str(share), solve)
