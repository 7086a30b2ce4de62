"""Compiled constraints: languages over the tokens of a vocabulary, and those of gaps of exact lengths in a row."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dinfer.structure.automaton import Automaton
from dinfer.structure.limits import Budget, ConstraintError
from dinfer.structure.tokens import Vocabulary, classes, skipping_space

NEVER = 1_000_000_000  # a distance: no accepting state is reached


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """A constraint, compiled for one vocabulary: a deterministic automaton over classes of tokens. Immutable.

    Dimensions: V tokens, C classes, Q states, E edges, P pairs of neighbouring states.

    States: 0 is the start. `end` = Q - 1 is END: behind the first stop token; there tail tokens alone are accepted.
    Classes: 0 leads nowhere from any state. The last two are the stop tokens and the tail tokens that do not stop; they
    are there even if no token is in them.

    An answer w of text tokens is in the language if it leads from state 0 to an accepting state; an answer that is
    shorter than the canvas goes on with a stop token, to END, and then with tail tokens.
    """

    class_V: np.ndarray
    """uint16 [V]: the class of each token."""
    next_QC: np.ndarray
    """int16 [Q, C]: the state behind a token of the class, -1 if it is not accepted there."""
    accepting_Q: np.ndarray
    """bool [Q]: whether an answer may end here, END included."""
    distance_Q: np.ndarray
    """int32 [Q]: the least number of text tokens to an accepting state; 0 there; `NEVER` without one."""
    token_C: np.ndarray
    """int32 [C]: the lowest token of each class, -1 if it has none."""
    edges_E3: np.ndarray
    """int16 [E, 3]: (state, class, next state), sorted by class, then by state."""
    pairs_P2: np.ndarray
    """int16 [P, 2]: (state, next state), each once, sorted by state. They are A, the relation of an open position."""
    pairs_by_next_P2: np.ndarray
    """int16 [P, 2]: the same rows, sorted by next state."""
    automaton: Automaton
    """The automaton over bytes, whose states are the same; END is not among them."""
    exact: bool = True
    """Whether the language is all that the constraint allows. False: what nests too deep is left out."""
    depth: int | None = None
    """How deep recursion was unrolled; None: there is none."""
    posterior: bool = False
    """As of the constraint."""

    @property
    def states(self) -> int:
        """Q."""
        return len(self.next_QC)

    @property
    def classes(self) -> int:
        """C."""
        return self.next_QC.shape[1]

    @property
    def end(self) -> int:
        """The state END."""
        return self.states - 1

    @property
    def shortest(self) -> int:
        """The least number of tokens of an answer, a stop token not counted."""
        return int(self.distance_Q[0])

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name."""
        return {
            "class_V": self.class_V, "next_QC": self.next_QC, "accepting_Q": self.accepting_Q,
            "distance_Q": self.distance_Q, "token_C": self.token_C, "edges_E3": self.edges_E3,
            "pairs_P2": self.pairs_P2, "pairs_by_next_P2": self.pairs_by_next_P2,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def right(self, room: int) -> np.ndarray:
        """bool [Q]: states from which an answer can end in exactly `room` open positions, tail tokens included."""
        return self.distance_Q <= room


@lru_cache(64)
def as_text(language: Language) -> str:
    """The arrays of a language as text, for another process. `of_text` reads it."""
    file = io.BytesIO()
    np.savez(file, posterior=np.array(language.posterior), **language.arrays)  # type: ignore[arg-type]
    return base64.b64encode(file.getvalue()).decode()


@lru_cache(64)
def of_text(text: str) -> Language:
    """The language of a text, without its automaton over bytes. The same one for the same text."""
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as held:
        arrays = dict(held)
        return Language(posterior=bool(arrays.pop("posterior")), automaton=Automaton([], []), **arrays)


def language(
    automaton: Automaton,
    vocabulary: Vocabulary,
    budget: Budget | None = None,
    *,
    exact: bool = True,
    depth: int | None = None,
) -> Language:
    """The language of an automaton over bytes. Raises ConstraintError if no tokens spell any of its texts."""
    budget = budget or Budget()
    if automaton.empty:
        raise ConstraintError("nothing is allowed: no text meets the constraint")
    if vocabulary.strips_space:
        automaton = skipping_space(automaton)
    if automaton.states >= budget.limits.states:
        raise ConstraintError(f"has {automaton.states:,} states; at most {budget.limits.states - 1:,} are possible")
    class_V, next_QC = classes(automaton, vocabulary, budget)
    derived = _derived(class_V, next_QC)
    accepting_Q = np.array([*automaton.final, True])
    distance_Q = _distances(accepting_Q, pairs_P2=derived[2])
    if distance_Q[0] == NEVER:
        raise ConstraintError("no sequence of the tokenizer's tokens spells an accepted answer")
    arrays = (class_V, next_QC, accepting_Q, distance_Q, *derived)
    for array in arrays:
        array.flags.writeable = False
    return Language(*arrays, automaton, exact, depth)


def _derived(class_V: np.ndarray, next_QC: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What follows from a table of next states: token_C, edges_E3, pairs_P2 and pairs_by_next_P2."""
    states, columns = next_QC.shape
    token_C = np.full(columns, -1, np.int32)
    token_C[class_V[::-1]] = np.arange(len(class_V), dtype=np.int32)[::-1]
    class_E, state_E = np.nonzero(next_QC.T >= 0)
    to_E = next_QC[state_E, class_E]
    pair_P = np.unique(state_E * states + to_E)
    pairs_P2 = np.stack([pair_P // states, pair_P % states], 1).astype(np.int16)
    by_next_P2 = pairs_P2[np.lexsort((pairs_P2[:, 0], pairs_P2[:, 1]))]
    return token_C, np.stack([state_E, class_E, to_E], 1).astype(np.int16), pairs_P2, by_next_P2


def _distances(accepting_Q: np.ndarray, pairs_P2: np.ndarray) -> np.ndarray:
    distance_Q = np.where(accepting_Q, 0, NEVER).astype(np.int32)
    text_P2 = pairs_P2[pairs_P2[:, 1] != len(accepting_Q) - 1]
    steps = 0
    while True:
        steps += 1
        reach_P = (distance_Q[text_P2[:, 1]] == steps - 1) & (distance_Q[text_P2[:, 0]] == NEVER)
        if not reach_P.any():
            return distance_Q
        distance_Q[text_P2[reach_P, 0]] = steps


OPEN = -1  # in place of a token
NOWHERE = 0  # the class of tokens that lead nowhere; here of what stands between two gaps


def fits(language: Language, canvas: Sequence[int]) -> bool:
    """Whether an accepted answer of just so many tokens has these ones. `canvas`: tokens, and `OPEN`."""
    right_Q, (from_P, to_P) = language.accepting_Q, language.pairs_P2.T
    for token in reversed(canvas):
        left_Q = np.zeros_like(right_Q)
        if token == OPEN:
            left_Q[from_P[right_Q[to_P]]] = True
        else:
            to_Q = language.next_QC[:, language.class_V[token]]
            left_Q = (to_Q >= 0) & right_Q[to_Q]
        right_Q = left_Q
    return bool(right_Q[0])


@lru_cache(64)
def in_gaps(languages: tuple[Language, ...]) -> Language:
    """The language of gaps and one token between each two of them. `languages`: of each gap, or one for all.

    The token between two gaps is any of class 0, which no gap holds: it leads from what the first gap may end in to the
    start of the second. A gap is filled, so nothing stands for an end of the text: there are no stop and tail tokens.
    """
    class_GV = np.stack([np.where(own.class_V < own.classes - 2, own.class_V, NOWHERE) for own in languages])
    class_GC, class_V = np.unique(class_GV, axis=1, return_inverse=True)  # column 0 is NOWHERE in all
    firsts = np.cumsum([0, *(own.states for own in languages)])
    next_QC = np.full((firsts[-1], class_GC.shape[1] + 2), -1, np.int16)
    for own, first, class_C in zip(languages, firsts, class_GC, strict=False):
        to_QC = own.next_QC[:, class_C]
        next_QC[first : first + own.states, :-2] = np.where(to_QC < 0, -1, to_QC + first)
    next_QC[:, NOWHERE] = -1
    derived = _derived(class_V, next_QC)
    starts = firsts[:1] if len(languages) == 1 else [*firsts[1:-1], -1]
    for own, first, start in zip(languages, firsts, starts, strict=False):
        next_QC[first : first + own.states - 1, NOWHERE] = np.where(own.accepting_Q[:-1], start, -1)
    last, accepting_Q = languages[-1], np.zeros(firsts[-1], bool)
    accepting_Q[-last.states : -1] = last.accepting_Q[:-1]
    distance_Q = np.where(accepting_Q, 0, 1).astype(np.int32)
    return Language(
        class_V.astype(np.uint16), next_QC, accepting_Q, distance_Q, *derived, last.automaton,
        exact=all(own.exact for own in languages), depth=last.depth, posterior=any(own.posterior for own in languages),
    )  # fmt: skip
