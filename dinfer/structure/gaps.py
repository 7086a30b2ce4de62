"""Gaps of exact lengths, each with a text of its own, as one language over the row that they lie in."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dinfer.structure.language import Language

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
    state_E, class_E = np.nonzero(next_QC >= 0)
    edges_E3 = np.stack([state_E, class_E, next_QC[state_E, class_E]], 1).astype(np.int16)
    edges_E3 = edges_E3[np.lexsort((state_E, class_E))]
    pairs_P2 = np.unique(edges_E3[:, [0, 2]], axis=0)
    starts = firsts[:1] if len(languages) == 1 else [*firsts[1:-1], -1]
    for own, first, start in zip(languages, firsts, starts, strict=False):
        next_QC[first : first + own.states - 1, NOWHERE] = np.where(own.accepting_Q[:-1], start, -1)
    last, accepting_Q = languages[-1], np.zeros(firsts[-1], bool)
    accepting_Q[-last.states : -1] = last.accepting_Q[:-1]
    token_C = np.full(next_QC.shape[1], -1, np.int32)
    token_C[class_V[::-1]] = np.arange(len(class_V), dtype=np.int32)[::-1]
    by_next_P2 = pairs_P2[np.lexsort((pairs_P2[:, 0], pairs_P2[:, 1]))]
    return Language(
        class_V.astype(np.uint16), next_QC, accepting_Q, np.where(accepting_Q, 0, 1).astype(np.int32), token_C,
        edges_E3, pairs_P2, by_next_P2, last.automaton, exact=all(own.exact for own in languages), depth=last.depth,
        posterior=any(own.posterior for own in languages),
    )  # fmt: skip
