"""Random texts of an automaton."""

from __future__ import annotations

import random

from dinfer.structure.automaton import Automaton


def walk(automaton: Automaton, rng: random.Random, length: int) -> bytes:
    """A random accepted text; behind `length` bytes the shortest way to the end."""
    far = [0 if final else 10**6 for final in automaton.final]
    changed = True
    while changed:
        best = [min([far[q], *(far[to] + 1 for _, _, to in row)]) for q, row in enumerate(automaton.edges)]
        changed, far = best != far, best
    text, state = bytearray(), 0
    while not (automaton.final[state] and (not automaton.edges[state] or len(text) >= length or rng.random() < 0.1)):
        edges = automaton.edges[state]
        near = [edge for edge in edges if far[edge[2]] < far[state]]
        low, high, state = rng.choice(near if len(text) >= length and near else edges)
        text.append(rng.randint(low, high))
    return bytes(text)
