"""Expressions over bytes, and the minimal deterministic automata that accept their texts.

An expression is a `Node`: literal bytes, a range of bytes, a set of characters, an anchor, a finished automaton, or a
graph whose edges are expressions. `build` makes the minimal automaton of one, `both` and `without` those of two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from dinfer.structure.limits import Budget, ConstraintError, TooLarge, utf8_text

Edge = tuple[int, int, int]  # first byte, last byte, state
LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True, slots=True, eq=False)
class Automaton:
    """A minimal deterministic automaton over bytes.

    State 0 is the start; states are numbered breadth first by ascending byte. `edges[q]`: disjoint ranges, ascending.
    Every state leads to an accepting one, but for the start of the empty language.
    """

    edges: list[list[Edge]]
    final: list[bool]

    @property
    def states(self) -> int:
        return len(self.edges)

    @property
    def empty(self) -> bool:
        """Whether no text at all is accepted."""
        return not self.edges[0] and not self.final[0]

    def run(self, text: bytes, state: int = 0) -> int:
        """The state behind a text, -1 if none."""
        for byte in text:
            state = next((to for low, high, to in self.edges[state] if low <= byte <= high), -1)
            if state < 0:
                break
        return state

    def accepts(self, text: bytes) -> bool:
        return (state := self.run(text)) >= 0 and self.final[state]


@dataclass(frozen=True, slots=True)
class Span:
    """One byte of a range."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Chars:
    """One character whose code point is in one of the ranges; ascending, disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Anchor:
    """The empty text, at the beginning of the whole text or at its end alone."""

    end: bool


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Texts of the paths from state 0 to state `states - 1`; an edge without expression is the empty text."""

    states: int
    edges: tuple[tuple[int, Node | None, int], ...]


Node = bytes | Span | Chars | Anchor | Graph | Automaton


def cat(*nodes: Node) -> Node:
    """One after the other."""
    return Graph(len(nodes) + 1, tuple((i, node, i + 1) for i, node in enumerate(nodes))) if nodes else b""


def alt(nodes: Iterable[Node]) -> Node:
    """One of them; of none, nothing is accepted."""
    return Graph(2, tuple((0, node, 1) for node in nodes))


MOST = 8192  # copies of one thing: each has a state at least


def check_copies(count: int) -> None:
    """Raises TooLarge before so many copies take memory."""
    if count > MOST:
        raise TooLarge(f"repeats something more than {MOST:,} times")


def repeat(node: Node, least: int = 0, most: int | None = None) -> Node:
    """At least so many times; `most` None: any number. Raises TooLarge."""
    check_copies(max(least, most or 0))
    if most is None:
        loop, end = least + 1, least + 2
        more: list[tuple[int, Node | None, int]] = [(least, None, loop), (loop, node, loop), (loop, None, end)]
    else:
        end = most + 1
        more = [(i, node, i + 1) for i in range(least, most)] + [(i, None, end) for i in range(least, most + 1)]
    return Graph(end + 1, (*((i, node, i + 1) for i in range(least)), *more))


def chars(ranges: Iterable[tuple[int, int]], *, negated: bool = False) -> Chars:
    """The set of these code points, or of all others; surrogates are never in it."""
    merged: list[list[int]] = []
    for low, high in sorted([*ranges, (0xD800, 0xDFFF)] if negated else ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    if negated:
        edges = [-1, *(bound for low, high in merged for bound in (low, high)), LAST_CHARACTER + 1]
        return Chars(tuple((a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a > 1))
    cut = [(low, min(high, 0xD7FF)) for low, high in merged] + [(max(low, 0xE000), high) for low, high in merged]
    return Chars(tuple(sorted({(low, high) for low, high in cut if low <= high})))


ANY_CHARACTER = chars((), negated=True)
ANYTHING = repeat(ANY_CHARACTER)


def containing(texts: Iterable[str]) -> Node:
    """Any text in which one of these occurs."""
    return cat(ANYTHING, alt(map(utf8_text, texts)), ANYTHING)


@lru_cache(4096)
def utf8(low: int, high: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Sequences of byte ranges that together are the UTF-8 forms of the code points low ... high."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return utf8(low, last) + utf8(last + 1, high)
    for length in (1, 2, 3):  # trailing bytes must run over all their values, or the bytes before must be equal
        mask = (1 << 6 * length) - 1
        if high > 0x7F and low & ~mask != high & ~mask:
            if low & mask:
                return utf8(low, low | mask) + utf8((low | mask) + 1, high)
            if high & mask != mask:
                return utf8(low, (high & ~mask) - 1) + utf8(high & ~mask, high)
    return (tuple(zip(chr(low).encode(), chr(high).encode(), strict=True)),)


def copies(node: Node | None, known: dict[int, int]) -> int:
    """About how many states an expression has, all its copies counted, without building it."""
    match node:
        case Automaton():
            return node.states
        case bytes():
            return max(0, len(node) - 1)
        case Graph():
            if id(node) not in known:
                known[id(node)] = node.states + sum(copies(inner, known) for _, inner, _ in node.edges)
            return known[id(node)]
    return 0


HELD = 1 << 22  # states in all sets of states of one automaton, 32 bytes each and more
OFTEN = 1 << 16


class _Nfa:
    """An automaton under construction: edges over bytes, over nothing, and at the two ends of the text alone."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.edges: list[list[Edge]] = []
        self.free: list[list[int]] = []
        self.anchors: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
        self.looked = self.held = 0  # states looked at since the budget was asked; states that sets of them hold

    def state(self) -> int:
        self.edges.append([])
        self.free.append([])
        if len(self.edges) % 1024 == 0:
            self.budget.check()
            if len(self.edges) > 32 * self.budget.limits.states:
                raise TooLarge(
                    f"has more than {32 * self.budget.limits.states:,} states before it is made deterministic"
                )
        return len(self.edges) - 1

    def chain(self, spans: Iterable[tuple[int, int]], start: int, end: int) -> None:
        spans = list(spans)
        for low, high in spans[:-1]:
            to = self.state()
            self.edges[start].append((low, high, to))
            start = to
        if spans:
            self.edges[start].append((*spans[-1], end))
        else:
            self.free[start].append(end)

    def add(self, node: Node | None, start: int, end: int) -> None:
        """Lets the texts of `node` lead from `start` to `end`."""
        match node:
            case None:
                self.free[start].append(end)
            case bytes():
                self.chain(((byte, byte) for byte in node), start, end)
            case Span():
                self.edges[start].append((node.low, node.high, end))
            case Chars():
                for low, high in node.ranges:
                    for spans in utf8(low, high):
                        self.chain(spans, start, end)
            case Anchor():
                self.anchors[node.end].setdefault(start, []).append(end)
            case Automaton():
                places = [self.state() for _ in node.edges]
                for place, edges, final in zip(places, node.edges, node.final, strict=True):
                    self.edges[place] = [(low, high, places[to]) for low, high, to in edges]
                    if final:
                        self.free[place].append(end)
                self.free[start].append(places[0])
            case Graph():
                places = [self.state() for _ in range(node.states)]
                self.free[start].append(places[0])
                self.free[places[-1]].append(end)
                for before, inner, after in node.edges:
                    self.add(inner, places[before], places[after])

    def closure(self, state: int, begin: bool = False, end: bool = False) -> frozenset[int]:
        """What is reached without a byte."""
        seen, todo = {state}, [state]
        while todo:
            at = todo.pop()
            more = list(self.free[at])
            for anchors in self.anchors[:1] * begin + self.anchors[1:] * end:
                more += anchors.get(at, ())
            for to in more:
                if to not in seen:
                    seen.add(to)
                    todo.append(to)
        self.looked += len(seen)
        if self.looked > OFTEN:
            self.looked = 0
            self.budget.check()
        return frozenset(seen)

    def kept(self, states: frozenset[int]) -> frozenset[int]:
        """The set, which is kept. Raises TooLarge before such sets take all memory."""
        self.held += len(states)
        if self.held > HELD:
            raise TooLarge("leaves too many ways open at once; make it simpler")
        return states


def build(node: Node, budget: Budget | None = None) -> Automaton:
    """The minimal automaton of an expression. Raises ConstraintError above the limits."""
    budget = budget or Budget()
    nfa = _Nfa(budget)
    start, end = nfa.state(), nfa.state()
    nfa.add(node, start, end)
    if any(nfa.anchors):
        # A start of its own: only there the anchor of the beginning holds, and whether "" is accepted is asked alone.
        begin, first = nfa.closure(start, begin=True), nfa.state()
        nfa.edges[first] = [edge for state in begin for edge in nfa.edges[state]]
        done = {s for s in range(len(nfa.edges)) if s != first and end in nfa.closure(s, end=True)}
        if end in nfa.closure(start, begin=True, end=True):
            done.add(first)
        start = first
    else:
        done = {end}
    return minimal(*_deterministic(nfa, start, done), budget)


def _deterministic(nfa: _Nfa, start: int, done: set[int]) -> tuple[list[list[Edge]], list[bool]]:
    """Subsets of the states, as far as they are reached."""
    useful = [bool(edges) for edges in nfa.edges]
    for state in done:
        useful[state] = True
    reached: dict[int, frozenset[int]] = {}
    number: dict[frozenset[int], int] = {}
    sets: list[frozenset[int]] = []
    known: dict[tuple[int, ...], int] = {}

    def subset(targets: tuple[int, ...]) -> int:
        if targets not in known:
            for to in targets:
                if to not in reached:
                    reached[to] = nfa.kept(frozenset(s for s in nfa.closure(to) if useful[s]))
            whole = reached[targets[0]].union(*(reached[to] for to in targets[1:]))
            if whole not in number:
                number[whole] = len(sets)
                sets.append(nfa.kept(whole))
            known[targets] = number[whole]
        return known[targets]

    subset((start,))
    edges: list[list[Edge]] = []
    while len(edges) < len(sets):
        if len(edges) % 4 == 0:
            nfa.budget.check(len(sets))
        found = [edge for state in sets[len(edges)] for edge in nfa.edges[state]]
        edges.append([(low, high, subset(targets)) for low, high, targets in _disjoint(found)])
    return edges, [not done.isdisjoint(states) for states in sets]


def _disjoint(edges: list[Edge]) -> list[tuple[int, int, tuple[int, ...]]]:
    """The ranges cut at each other's ends, with all states that each part leads to."""
    edges.sort()
    if all(a[1] < b[0] for a, b in pairwise(edges)):
        return [(low, high, (to,)) for low, high, to in edges]
    cuts = sorted({edge[0] for edge in edges} | {edge[1] + 1 for edge in edges})
    parts: list[set[int]] = [set() for _ in cuts]
    for low, high, to in edges:
        for i in range(bisect_left(cuts, low), bisect_left(cuts, high + 1)):
            parts[i].add(to)
    return [(a, b - 1, tuple(sorted(part))) for (a, b), part in zip(pairwise(cuts), parts, strict=False) if part]


def byte_table(edges: list[list[Edge]]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that no edge tells apart are one class.

    Returns the class of each byte, int64 [256], and the next state by state and class, int32 [Q + 1, K]. State Q is the
    sink: what leads nowhere leads there.
    """
    count = len(edges)
    flat = np.array([(q, *edge) for q, row in enumerate(edges) for edge in row], np.int64).reshape(-1, 4)
    cut_B = np.zeros(257, np.int64)
    cut_B[flat[:, 1]] = cut_B[flat[:, 2] + 1] = 1
    cut_B[0] = 0
    class_B = np.cumsum(cut_B[:256])
    first, last = class_B[flat[:, 1]], class_B[flat[:, 2]]
    next_QK = np.full((count + 1, int(class_B[-1]) + 1), count, np.int32)
    width = last - first + 1
    place = np.repeat(first + width - np.cumsum(width), width) + np.arange(width.sum())
    next_QK[np.repeat(flat[:, 0], width), place] = np.repeat(flat[:, 3], width)
    return class_B, next_QK


def minimal(edges: list[list[Edge]], final: list[bool], budget: Budget) -> Automaton:
    """The minimal form, without states that lead to no accepting one."""
    before: list[list[int]] = [[] for _ in edges]
    for state, row in enumerate(edges):
        for to in {edge[2] for edge in row}:
            before[to].append(state)
    todo = [state for state, accepts in enumerate(final) if accepts]
    live = set(todo)
    while todo:
        more = [state for state in before[todo.pop()] if state not in live]
        live.update(more)
        todo += more
    if 0 not in live:
        return Automaton([[]], [False])
    if len(live) < len(edges):
        edges = [[edge for edge in row if edge[2] in live] for row in edges]
    block = _blocks(edges, before, final, live, budget)
    member = {block[state]: state for state in live}
    # A state for each block, numbered breadth first.
    number, order = {block[0]: 0}, [0]
    found: list[list[Edge]] = []
    for state in order:
        if state % 256 == 0:
            budget.check()
        flat = _signature(edges[state], block)
        for to in flat[2::3]:
            if to not in number:
                number[to] = len(order)
                order.append(member[to])
        rows = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        found.append([(low, high, number[to]) for low, high, to in rows])
    return Automaton(found, [final[state] for state in order])


def _signature(row: list[Edge], block: list[int]) -> tuple[int, ...]:
    """A state's edges to blocks, with neighbouring ranges joined: first byte, last byte, block, and so on."""
    found: list[int] = []
    for low, high, to in row:
        if found and found[-2] == low - 1 and found[-1] == block[to]:
            found[-2] = high
        else:
            found += (low, high, block[to])
    return tuple(found)


def _blocks(
    edges: list[list[Edge]], before: list[list[int]], final: list[bool], live: set[int], budget: Budget
) -> list[int]:
    """States of equal futures have the same block.

    Blocks are split by signature until nothing changes. The largest part keeps the block's number, and only states
    before renumbered ones are looked at again, so each state is renumbered a logarithmic number of times.
    """
    block = [int(accepts) for accepts in final]
    members = [{state for state in live if not final[state]}, {state for state in live if final[state]}]
    common: list[tuple[int, ...] | None] = [None, None]  # the signature of all members that are not looked at again
    dirty = live
    while dirty:
        parts: dict[int, dict[tuple[int, ...] | None, set[int]]] = {}
        for count, state in enumerate(dirty):
            if count % 256 == 0:
                budget.check()
            parts.setdefault(block[state], {}).setdefault(_signature(edges[state], block), set()).add(state)
        dirty = set()
        for number, groups in parts.items():
            if rest := len(members[number]) - sum(map(len, groups.values())):
                rest += len(groups.get(common[number], ()))
            keep = max(groups, key=lambda signature: len(groups[signature]))
            if rest >= len(groups[keep]):
                keep = common[number]
                groups.pop(keep, None)
            else:
                kept = groups.pop(keep)
                if rest:
                    groups[common[number]] = members[number].difference(
                        kept, *(group for signature, group in groups.items() if signature != common[number])
                    )
                common[number] = keep
            for signature, group in groups.items():
                members[number] -= group
                for state in group:
                    block[state] = len(members)
                    dirty.update(before[state])
                members.append(group)
                common.append(signature)
        dirty &= live
    return block


def words(texts: Iterable[bytes], budget: Budget | None = None) -> Automaton:
    """The minimal automaton of a finite set of texts, built along their sorted list.

    Daciuk, Mihov, Watson and Watson, "Incremental construction of minimal acyclic finite-state automata" (2000).
    """
    budget = budget or Budget()
    known: dict[tuple[bool, tuple[tuple[int, int], ...]], int] = {}
    path: list[tuple[int, list[tuple[int, int]]]] = [(0, [])]  # the byte that leads here, and finished edges from here
    final, before = [False], b""

    def finish(length: int) -> None:
        """Finishes the states of `before` behind its first `length` bytes."""
        while len(path) > length + 1:
            byte, edges = path.pop()
            path[-1][1].append((byte, known.setdefault((final.pop(), tuple(edges)), len(known))))
            budget.check(len(known))

    for text in sorted(set(texts)):
        shared = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        finish(shared)
        path += [(byte, []) for byte in text[shared:]]
        final += [False] * (len(text) - shared)
        final[-1], before = True, text
    finish(0)
    rows = [*known, (final[0], tuple(path[0][1]))]
    number, order = {len(known): 0}, [len(known)]
    found: list[list[Edge]] = []
    for state in order:
        row: list[Edge] = []
        for byte, to in rows[state][1]:
            if to not in number:
                number[to] = len(order)
                order.append(to)
            joined = row and row[-1][1] == byte - 1 and row[-1][2] == number[to]
            row[-1:] = [(row[-1][0], byte, number[to])] if joined else [*row[-1:], (byte, byte, number[to])]
        found.append(row)
    return Automaton(found, [rows[state][0] for state in order])


def both(a: Automaton, b: Automaton, budget: Budget | None = None, *, common: bool = True) -> Automaton:
    """The texts that both accept; if not `common`, those of `a` that `b` does not accept."""
    budget = budget or Budget()
    number, pairs = {(0, 0): 0}, [(0, 0)]
    edges: list[list[Edge]] = []
    for p, q in pairs:
        if len(edges) % 256 == 0:
            budget.check(len(pairs))
        row: list[Edge] = []
        other = b.edges[q] if q >= 0 else []
        for low, high, to in a.edges[p]:
            for first, last, beyond in (*(e for e in other if e[1] >= low and e[0] <= high), (256, 256, -1)):
                for start, end, pair in (
                    (low, min(first - 1, high), (to, -1)),
                    (max(first, low), min(last, high), (to, beyond)),
                ):
                    if start <= end:
                        if pair not in number:
                            number[pair] = len(pairs)
                            pairs.append(pair)
                        row.append((start, end, number[pair]))
                low = max(low, last + 1)
        edges.append(row)
    return minimal(edges, [a.final[p] and (q >= 0 and b.final[q]) is common for p, q in pairs], budget)


def without(a: Automaton, b: Automaton, budget: Budget | None = None) -> Automaton:
    """The texts of `a` that `b` does not accept."""
    return both(a, b, budget, common=False)


def avoiding(node: Node, texts: Sequence[str], what: str, budget: Budget) -> Automaton:
    """The texts in which none of these occurs. Raises ConstraintError if there are none; `what` they are."""
    found = without(build(node, budget), build(containing(texts), budget), budget)
    if found.empty:
        raise ConstraintError(f"every {what} contains one of the stop strings {[*texts]}")
    return found
