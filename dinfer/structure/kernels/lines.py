"""What kernels read of the languages that rows are in, and of the rows' active positions (`kernels.languages`).

Shape suffixes: B lanes, X active positions in order, Q states, C classes, G places for languages, Y entries of all
languages one after the other, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Languages:
    """The languages that rows are in, on the device. What is said of one language begins at its entry of `meta_G8`."""

    class_GV: Tensor  # int16, the class of each token
    size_GC: Tensor  # int32, the tokens of each class
    token_GC: Tensor  # int32, the lowest token of each class
    distance_GQ: Tensor  # int32, the least number of text tokens to an accepting state
    next_Y: Tensor  # int16 [C, Q] of each language: the next state, -1: none
    pair_Y2: Tensor  # int16, (state, next state)
    edge_Y3: Tensor  # int16, (state, class, next state)
    meta_G8: Tensor  # int64: states, classes, first entry of next, of pairs, how many, of edges, how many; 0


@dataclass
class LaneLanguages:
    """The languages of the lanes of a step."""

    languages: Languages
    language_B: Tensor  # int64, a place of each lane; any place in lanes without a constraint
    states: int  # at least as many as each of these languages has; likewise the next two
    pairs: int
    edges: int


@dataclass(frozen=True, slots=True)
class Line:
    """The active positions of each lane, as a language sees them."""

    token_BX: Tensor  # int64
    open_BX: Tensor  # bool: to be decoded
    outside_BX: Tensor  # bool: not in the language, such as the prompt; the state stays as it is
    state_B: Tensor  # int64, before the first position
    room_B: Tensor  # int64, open positions of the answer behind the last position; an answer may end before


class Settled(NamedTuple):
    """What is written of a choice, and what the language then leaves. [B, X]"""

    written_BX: Tensor  # bool: what is admitted of the choice, and what is forced
    token_BX: Tensor  # int64, what is written there
    forced_BX: Tensor  # bool: open, and only one token is left, or only tokens behind the end
    text_BX: Tensor  # bool: forced, and no end
    only_BX: Tensor  # bool: as `forced_BX`, at decoded positions too
