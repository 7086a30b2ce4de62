"""What a constraint says about a canvas, in numpy: the plain form of what the step computes on the device.

A canvas is one row of positions with a token each, -1 where it is open. X positions, Q states, C classes, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dinfer.structure.language import Language

OPEN = -1


class Row:
    """A canvas with the states that each position can be entered in, and those from which it can be completed."""

    def __init__(self, language: Language, canvas: Sequence[int], right_Q: np.ndarray | None = None) -> None:
        """`right_Q`, bool [Q]: the states that are right behind the last position; None: the answer ends there."""
        self.language, self.canvas = language, list(canvas)
        self.forward_XQ = np.zeros((len(canvas) + 1, language.states), bool)
        self.backward_XQ = np.zeros((len(canvas) + 1, language.states), bool)
        self.forward_XQ[0, 0] = True
        self.backward_XQ[-1] = language.accepting_Q if right_Q is None else right_Q
        for i in range(len(canvas)):
            self.forward_XQ[i + 1] = self._after(i)
        for i in reversed(range(len(canvas))):
            self.backward_XQ[i] = self._before(i)

    @property
    def feasible(self) -> bool:
        """Whether some completion is accepted."""
        return bool(self.backward_XQ[0, 0])

    def _moves(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """From where to where position i leads."""
        if self.canvas[i] == OPEN:
            return self.language.pairs_P2[:, 0], self.language.pairs_P2[:, 1]
        to_Q = self.language.next_QC[:, self.language.class_V[self.canvas[i]]]
        from_ = np.flatnonzero(to_Q >= 0)
        return from_, to_Q[from_]

    def _after(self, i: int) -> np.ndarray:
        from_, to = self._moves(i)
        found_Q = np.zeros(self.language.states, bool)
        found_Q[to[self.forward_XQ[i, from_]]] = True
        return found_Q

    def _before(self, i: int) -> np.ndarray:
        from_, to = self._moves(i)
        found_Q = np.zeros(self.language.states, bool)
        found_Q[from_[self.backward_XQ[i + 1, to]]] = True
        return found_Q

    def allowed_classes(self, i: int) -> np.ndarray:
        """bool [C]: classes of the tokens that some accepted completion has at position i, whatever i holds now."""
        states = np.flatnonzero(self.forward_XQ[i])
        to_QC = self.language.next_QC[states]
        return ((to_QC >= 0) & self.backward_XQ[i + 1][to_QC]).any(0)

    def allowed(self, i: int) -> np.ndarray:
        """bool [V]: the tokens that some accepted completion has at position i, whatever i holds now."""
        return self.allowed_classes(i)[self.language.class_V]

    def put(self, i: int, token: int) -> bool:
        """Writes a token if the canvas then still has an accepted completion; returns whether it has."""
        if not self.feasible or not self.allowed_classes(i)[self.language.class_V[token]]:
            return False
        self.canvas[i] = token
        for k in range(i, len(self.canvas)):
            if np.array_equal(after_Q := self._after(k), self.forward_XQ[k + 1]):
                break
            self.forward_XQ[k + 1] = after_Q
        for k in range(i, -1, -1):
            if np.array_equal(before_Q := self._before(k), self.backward_XQ[k]):
                break
            self.backward_XQ[k] = before_Q
        return True

    def forced(self) -> dict[int, int]:
        """Open positions with exactly one allowed token, and that token."""
        found = {}
        for i in self.open():
            allowed = np.flatnonzero(self.allowed(i))
            if len(allowed) == 1:
                found[i] = int(allowed[0])
        return found

    def open(self) -> list[int]:
        return [i for i, token in enumerate(self.canvas) if token == OPEN]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step does: tokens proposed, the order in which they are tried, and what comes of them."""

    proposed: list[tuple[int, int, float]]
    order: list[int]
    committed: list[tuple[int, int]]
    skipped: list[tuple[int, int]]


def step(row: Row, logits_XV: np.ndarray, active: Iterable[int], commits: int, mask: int) -> Step:
    """One greedy step on a feasible row, which it changes.

    Each open active position is offered its allowed tokens and the mask. The `commits` positions of highest confidence
    are tried, in falling order of confidence, then of position.
    """
    proposed = []
    for i in active:
        if row.canvas[i] != OPEN:
            continue
        allowed_V = row.allowed(i)
        masked_V = np.where(allowed_V, logits_XV[i], -np.inf)
        token = int(masked_V.argmax())
        offered_V = np.where(np.arange(len(masked_V)) == mask, logits_XV[i], masked_V)
        weight_V = np.exp(offered_V - offered_V.max())
        proposed.append((i, token, float(weight_V[token] / weight_V.sum())))
    chosen = sorted(proposed, key=lambda p: (-p[2], p[0]))[:commits]
    done = [(i, token, row.put(i, token)) for i, token, _ in chosen]
    committed, skipped = ([(i, token) for i, token, put in done if put == kept] for kept in (True, False))
    return Step(proposed, [i for i, _, _ in chosen], committed, skipped)


# --- Variants over the whole distribution ----------------------------------------------------------------------------


def _class_scores(language: Language, logits_V: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a position: the log-probability of each token, its largest for each class, and that of the class."""
    log_p_V = logits_V - logits_V.max()
    log_p_V = log_p_V - np.log(np.exp(log_p_V).sum())
    best_C = np.full(language.classes, -np.inf)
    np.maximum.at(best_C, language.class_V, log_p_V)
    sum_C = np.zeros(language.classes)
    np.add.at(sum_C, language.class_V, np.exp(log_p_V))
    with np.errstate(divide="ignore"):
        return log_p_V, best_C, np.log(sum_C)


def best(row: Row, logits_XV: np.ndarray, counted: Iterable[int]) -> tuple[dict[int, int], float] | None:
    """The accepted completion with the largest sum of log-probabilities at the open positions `counted`.

    Elsewhere it need only exist. Returns its tokens at those positions and the sum; None if nothing is accepted.
    """
    language, counted = row.language, set(counted)
    if not row.feasible:
        return None
    state_E, class_E, to_E = row.language.edges_E3.T
    score_Q = np.where(np.arange(language.states) == 0, 0.0, -np.inf)
    back: list[np.ndarray] = []
    log_p: dict[int, np.ndarray] = {}
    for i, token in enumerate(row.canvas):
        weight_C = np.zeros(language.classes)
        if token != OPEN:
            weight_C[:] = -np.inf
            weight_C[language.class_V[token]] = 0.0
        elif i in counted:
            log_p[i], weight_C, _ = _class_scores(language, logits_XV[i])
        through_E = score_Q[state_E] + weight_C[class_E]
        through_E[~row.backward_XQ[i + 1, to_E]] = -np.inf
        order_E = np.lexsort((-through_E, to_E))
        first = np.unique(to_E[order_E], return_index=True)
        edge_Q = np.zeros(language.states, np.int64)
        edge_Q[first[0]] = order_E[first[1]]
        score_Q = np.full(language.states, -np.inf)
        score_Q[first[0]] = through_E[order_E[first[1]]]
        back.append(edge_Q)
    score_Q = np.where(row.backward_XQ[-1], score_Q, -np.inf)
    state, tokens = int(score_Q.argmax()), {}
    total = float(score_Q[state])
    for i in reversed(range(len(back))):
        edge = back[i][state]
        if i in log_p:
            tokens[i] = int(np.where(language.class_V == class_E[edge], log_p[i], -np.inf).argmax())
        state = int(state_E[edge])
    return dict(sorted(tokens.items())), total


def posterior(row: Row, logits_XV: np.ndarray) -> tuple[float, dict[int, np.ndarray]]:
    """The log-probability that independent tokens at the open positions make an accepted completion, and given that

    it is accepted, the distribution of the token at each of them, float64 [V].
    """
    language = row.language
    state_E, class_E, to_E = language.edges_E3.T
    length, states = len(row.canvas), language.states
    weight_XC = np.full((length, language.classes), -np.inf)
    log_p = {}
    for i, token in enumerate(row.canvas):
        if token == OPEN:
            log_p[i], _, weight_XC[i] = _class_scores(language, logits_XV[i])
        else:
            weight_XC[i, language.class_V[token]] = 0.0
    forward_XQ, backward_XQ = np.full((length + 1, states), -np.inf), np.full((length + 1, states), -np.inf)
    forward_XQ[0, 0] = 0.0
    backward_XQ[length, row.backward_XQ[-1]] = 0.0
    for i in range(length):
        forward_XQ[i + 1] = _log_sums(forward_XQ[i, state_E] + weight_XC[i, class_E], to_E, states)
    for i in reversed(range(length)):
        backward_XQ[i] = _log_sums(backward_XQ[i + 1, to_E] + weight_XC[i, class_E], state_E, states)
    log_z = float(backward_XQ[0, 0])
    marginals = {}
    for i in log_p:
        through_E = forward_XQ[i, state_E] + backward_XQ[i + 1, to_E] - log_z
        outside_C = _log_sums(through_E, class_E, language.classes)
        marginals[i] = np.exp(log_p[i] + outside_C[language.class_V])
    return log_z, marginals


def _log_sums(value_E: np.ndarray, group_E: np.ndarray, groups: int) -> np.ndarray:
    """The log-sum-exp of each group."""
    most_G = np.full(groups, -np.inf)
    np.maximum.at(most_G, group_E, value_E)
    finite_G = np.where(np.isfinite(most_G), most_G, 0.0)
    sum_G = np.zeros(groups)
    np.add.at(sum_G, group_E, np.exp(value_E - finite_G[group_E]))
    with np.errstate(divide="ignore"):
        return np.log(sum_G) + finite_G
