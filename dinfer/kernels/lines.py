"""What kernels read of the languages that rows are in, and of the rows' active positions (`dinfer.kernels.languages`).

Shape suffixes: B lanes, X active positions in order, Q states, C classes, G places for languages, Y entries of all
languages one after the other, V vocabulary.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Line:
    """The active positions of each lane, as a language sees them."""

    token_BX: Tensor  # int64
    open_BX: Tensor  # bool: to be decoded
    outside_BX: Tensor  # bool: not in the language, such as the prompt; the state stays as it is
    state_B: Tensor  # int64, before the first position
    room_B: Tensor  # int64, open positions of the answer behind the last position; an answer may end before
