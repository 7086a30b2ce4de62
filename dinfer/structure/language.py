"""Languages over the tokens of a vocabulary: compiled constraints, and those of gaps of exact lengths in a row.

A vocabulary is tokens as bytes; a language has classes of tokens, those that the automaton over bytes does not tell
apart.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, Self

import numpy as np

from dinfer.structure.automaton import Automaton, byte_table
from dinfer.structure.limits import Budget, ConstraintError, TooLarge

NEVER = 1_000_000_000  # a distance: no accepting state is reached
TABLE = 2**27  # entries of the functions that are kept while classes are made: 256 MB


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model.

    `bytes_V`: the bytes of each token, None for one without text: special tokens, the mask, rows of the head without a
    token, and what is never to be written. `stop`: tokens that end an answer; `tail`: what may stand behind its end,
    the stop tokens included. `strips_space`: decoding drops one space at the beginning of an answer.
    """

    bytes_V: Sequence[bytes | None]
    stop: frozenset[int]
    tail: frozenset[int]
    strips_space: bool = False

    def __post_init__(self) -> None:
        if wrong := [t for t in self.stop | self.tail if not 0 <= t < len(self.bytes_V)]:
            raise ValueError(f"token {wrong[0]} ends answers, but the vocabulary has {len(self.bytes_V)} tokens")
        if not self.stop <= self.tail:
            raise ValueError("the stop tokens are to be among the tail tokens")

    @cached_property
    def levels(self) -> list[PrefixLevel]:
        """The prefixes of all tokens with bytes, by length."""
        tokens = {t: b for t, b in enumerate(self.bytes_V) if b and t not in self.tail}
        order = sorted(tokens, key=tokens.__getitem__)
        length_T = np.array([len(tokens[t]) for t in order], np.int64)
        longest = int(length_T.max(initial=0))
        padded = b"".join(tokens[t].ljust(longest, b"\0") for t in order)
        byte_TL = np.frombuffer(padded, np.uint8).reshape(len(order), longest)
        same_TL = np.zeros_like(byte_TL, bool)
        same_TL[1:] = byte_TL[1:] == byte_TL[:-1]
        shared_T = np.where(same_TL.all(1), longest, same_TL.argmin(1)) if longest else length_T
        shared_T[1:] = np.minimum(shared_T[1:], np.minimum(length_T[1:], length_T[:-1]))
        token_T, before_T = np.array(order, np.int64), np.zeros(len(order), np.int64)
        levels = []
        for depth in range(longest):
            reaches_T = length_T > depth
            new_T = reaches_T & (shared_T <= depth)
            place_T = np.cumsum(new_T) - 1
            ends_T = length_T == depth + 1
            levels.append(PrefixLevel(before_T[new_T], byte_TL[new_T, depth], token_T[ends_T], place_T[ends_T]))
            before_T = place_T
        return levels

    @cached_property
    def spelled(self) -> dict[bytes, list[int]]:
        """The tokens with these bytes."""
        found: dict[bytes, list[int]] = {}
        for token, text in enumerate(self.bytes_V):
            if text and token not in self.tail:
                found.setdefault(text, []).append(token)
        return found

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.spelled))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLevel:
    """The prefixes of one length: the prefix without its last byte, by its place in the level before, and that byte.

    `tokens_T` are whole prefixes of this length: the token and its place.
    """

    parent_N: np.ndarray
    byte_N: np.ndarray
    tokens_T: np.ndarray
    place_T: np.ndarray


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
    def nbytes(self) -> int:
        """Bytes of the arrays that grow with states times classes."""
        return self.next_QC.nbytes + self.edges_E3.nbytes + self.pairs_P2.nbytes + self.pairs_by_next_P2.nbytes

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

    def plain(self) -> str:
        """What another process reads with `of_plain`."""
        return _as_text(self)

    @classmethod
    def of_plain(cls, text: str) -> Self:
        """Without its automaton over bytes. The same one for the same text."""
        of: Any = cls
        return _of_text(of, text)


@lru_cache(64)
def _as_text(language: Language) -> str:
    file = io.BytesIO()
    np.savez(file, posterior=np.array(language.posterior), **language.arrays)  # type: ignore[arg-type]
    return base64.b64encode(file.getvalue()).decode()


@lru_cache(64)
def _of_text(cls: Any, text: str) -> Any:
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as held:
        arrays = dict(held)
        return cls(posterior=bool(arrays.pop("posterior")), automaton=Automaton([], []), **arrays)


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


def classes(automaton: Automaton, vocabulary: Vocabulary, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that lead from every state to the same states are one class; class 0 leads nowhere.

    Returns the class of each token, uint16 [V], and the next state by state and class, int16 [Q + 1, C], -1: none.
    State Q is END, behind the first stop token.

    A token is a function of states. That of a prefix is the function of the prefix before, then a byte; equal functions
    are kept once, so each pair of a function and a class of bytes is composed once.
    """
    class_B, next_QK = byte_table(automaton.edges)
    next_KQ, kinds = np.ascontiguousarray(next_QK.T.astype(np.int16)), next_QK.shape[1]
    states = automaton.states
    function_FQ = np.stack([np.full(states + 1, states, np.int16), np.arange(states + 1, dtype=np.int16)])
    number = {_digest(row): f for f, row in enumerate(function_FQ)}
    step_FK = np.full((2, kinds), -1, np.int32)
    step_FK[0] = 0
    of_token_V = np.zeros(len(vocabulary.bytes_V), np.int64)
    before_N = np.ones(1, np.int64)  # nothing read yet: the identity
    count = 2
    for level in vocabulary.levels:
        budget.check()
        key_N = before_N[level.parent_N] * kinds + class_B[level.byte_N]
        missing_M = np.unique(key_N[step_FK.ravel()[key_N] < 0])
        for part_M in np.array_split(missing_M, len(missing_M) // 1024 + 1):
            composed_MQ = next_KQ[(part_M % kinds)[:, None], function_FQ[part_M // kinds]]
            found = [number.setdefault(_digest(row), len(number)) for row in composed_MQ]
            if len(number) * (states + 1) > TABLE:
                raise TooLarge(f"has too many kinds of tokens, {len(number):,} in {states:,} states")
            if len(number) > count:
                grown = max(2 * len(function_FQ), len(number)) if len(number) > len(function_FQ) else len(function_FQ)
                function_FQ = _grown(function_FQ, grown, 0)
                step_FK = _grown(step_FK, grown, -1)
                function_FQ[found] = composed_MQ
                count = len(number)
            step_FK.ravel()[part_M] = found
        before_N = step_FK.ravel()[key_N].astype(np.int64)
        of_token_V[level.tokens_T] = before_N[level.place_T]
    return _with_end(automaton, vocabulary, of_token_V, function_FQ, budget)


def _digest(row: np.ndarray) -> bytes:
    return blake2b(row.tobytes(), digest_size=16).digest()


def _grown(table: np.ndarray, rows: int, value: int) -> np.ndarray:
    more = np.full((rows - len(table), table.shape[1]), value, table.dtype)
    return np.concatenate([table, more])


def _with_end(
    automaton: Automaton, vocabulary: Vocabulary, of_token_V: np.ndarray, function_FQ: np.ndarray, budget: Budget
) -> tuple[np.ndarray, np.ndarray]:
    """Only functions that a token has, and the classes of the tokens that end an answer and that stand behind it."""
    states = automaton.states
    stop, behind = sorted(vocabulary.stop), sorted(vocabulary.tail - vocabulary.stop)
    used_C, first_C, class_V = np.unique(of_token_V, return_index=True, return_inverse=True)
    order_C = np.lexsort((first_C, used_C != 0))  # class 0 leads nowhere, the others by their first token
    if used_C[0] != 0:
        order_C = np.concatenate([[-1], order_C])
    count = len(order_C) + 2
    if count > budget.limits.classes:
        raise TooLarge(f"tells {count:,} classes of tokens apart; at most {budget.limits.classes:,} are possible")
    rank_C = np.empty(len(used_C), np.int64)
    rank_C[order_C[order_C >= 0]] = np.flatnonzero(order_C >= 0)
    class_V = rank_C[class_V].astype(np.uint16)
    class_V[stop], class_V[behind] = count - 2, count - 1
    next_QC = np.full((states + 1, count), -1, np.int16)
    table_QC = function_FQ[used_C[order_C[1:]], :states].T
    next_QC[:states, 1 : count - 2] = np.where(table_QC == states, -1, table_QC)
    next_QC[:states, count - 2] = np.where(automaton.final, states, -1)
    next_QC[states, count - 2 :] = states
    return class_V, next_QC


def skipping_space(automaton: Automaton) -> Automaton:
    """The texts of an automaton, with one space before them or, unless they begin with a space, none.

    It is what a model must write if decoding drops one space at the beginning.
    """
    edges = [[(low, high, to + 1) for low, high, to in row] for row in automaton.edges]
    start = [(low, min(high, 0x1F), to) for low, high, to in edges[0] if low < 0x20]
    start += [(0x20, 0x20, 1)]
    start += [(max(low, 0x21), high, to) for low, high, to in edges[0] if high > 0x20]
    return Automaton([start, *edges], [automaton.final[0], *automaton.final])


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


# --- The bytes of a tokenizer's tokens -------------------------------------------------------------------------------


def vocabulary_of(
    tokenizer: Any, size: int, stop: Collection[int], tail: Collection[int] = (), never: Iterable[int] = ()
) -> Vocabulary:
    """The vocabulary of a fast tokenizer of transformers.

    `size`: rows of the model's head. `tail`: tokens that may stand behind the answer's end beside the stop tokens, such
    as padding. `never`: tokens that are never written: the mask and what the recipe suppresses.

    Raises ConstraintError if the text of its tokens is not the same wherever they stand; this is tried out.
    """
    if not tokenizer.is_fast:
        raise ConstraintError("the tokenizer has no tokenizer.json, so the bytes of its tokens are not known")
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = _decoders(whole.get("decoder"))
    found: list[bytes | None] = [None] * size
    read = _reader(steps)
    for text, token in tokenizer.get_vocab().items():
        if token < size:
            found[token] = read(text)
    for added in whole.get("added_tokens", ()):
        if added["id"] < size:
            found[added["id"]] = None if added["special"] else added["content"].encode()
    ends = {*stop, *tail}
    for token in {*ends, *never}:
        found[token] = None
    vocabulary = Vocabulary(found, frozenset(stop), frozenset(ends), any(step["type"] == "Strip" for step in steps))
    check(vocabulary, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    return vocabulary


def _decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, those known to keep bytes. Raises ConstraintError for others."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder or {"type": "none"}]
    for step in steps:
        plain = {
            "ByteLevel": True, "ByteFallback": True, "Fuse": True,
            "Replace": step.get("pattern") == {"String": "▁"} and step.get("content") == " ",
            "Metaspace": step.get("replacement") == "▁" and step.get("prepend_scheme") == "never",
            "Strip": (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0),
        }  # fmt: skip
        if not plain.get(step["type"], False):
            raise ConstraintError(
                f"the tokenizer decodes by {step['type']}, for which the bytes of a token are not known; constraints "
                "need byte-level BPE, or SentencePiece with ▁ for a space"
            )
    return steps


def _reader(steps: list[dict[str, Any]]) -> Callable[[str], bytes | None]:
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:  # printable bytes of Latin-1 are written as themselves, the others from U+0100 on
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in shown]
        alphabet = {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(others)}
        return lambda text: bytes(alphabet[c] for c in text) if alphabet.keys() >= {*text} else text.encode()
    fallback = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if "ByteFallback" in kinds else {}
    return lambda text: fallback.get(text) or text.replace("▁", " ").encode()


def check(vocabulary: Vocabulary, decode: Callable[[list[int]], str], tries: int = 200) -> None:
    """Raises ConstraintError unless decoding random tokens gives their joined bytes, where these are UTF-8."""
    rng = np.random.default_rng(0)
    text = [t for t, b in enumerate(vocabulary.bytes_V) if b]
    if not text:
        raise ConstraintError("the tokenizer has no token with text")
    whole = [t for t in text if _is_text(vocabulary.bytes_V[t] or b"")] or text
    single = {b[0]: t for t in text if len(b := vocabulary.bytes_V[t] or b"") == 1}
    spelled = [[single[b] for b in char.encode() if b in single] for char in " .,'\"n't{é€😀 ▁\n"]
    for i in range(tries):
        ids = rng.choice(whole, 1 + i % 12).tolist()
        ids[i % len(ids) : i % len(ids)] = spelled[i % len(spelled)]
        joined = b"".join(vocabulary.bytes_V[t] or b"" for t in ids)
        if not _is_text(joined):
            continue
        expected = joined.decode()
        expected = expected[1:] if vocabulary.strips_space and expected[0] == " " else expected
        if (got := decode(ids)) != expected:
            raise ConstraintError(
                f"the tokenizer does not keep bytes, so constraints are refused: tokens {ids} are {expected!r}, but "
                f"decode to {got!r}"
            )


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
