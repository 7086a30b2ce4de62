"""Structured reads: an answer of which some text stands already, and the probabilities of what may stand in its slots.

`{"size": "[SLOT:size]"}` with the options small and large for `size` is an answer with one slot. A backslash in front
of a marker makes it text, as with gaps.

The answer is tokenised as a whole, once for each option, so options may join with the text around them. What differs
is open, and so many tokens long; all else stands on the canvas, and so does EOS behind the answer. Options of one token
are compared by the model's own probabilities of these tokens. Options of several tokens are compared by the posterior:
the probability that independent tokens at the open positions spell this option, however they divide it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Ask, Completion, Counts, Request
from dinfer.core.pipeline.inputs import as_int, encodable, is_conversation, listed, named, refuse_names, short
from dinfer.core.provided import provided
from dinfer.core.step.contracts import Iteration
from dinfer.core.step.mixins import Pads
from dinfer.core.terms.spec import ModelSpec
from dinfer.structure import Compiler, Vocabulary
from dinfer.structure.abilities.reading import POSITIONS, Blank, Noted, Read, ReadOut
from dinfer.structure.infilling import marked

MARKER = re.compile(r"(\\*)\[SLOT:([^\]]*)\]")
CHOICE = "choice"  # the slot of a read that has but one, without a name
Edges = list[list[tuple[int, int, int]]]
"""How tokens spell an option: at each position, (bytes spelled before, token, bytes spelled behind it)."""

Questions = tuple[list[str | tuple[str]], dict[str, list[str]]]
"""The pieces of an answer, text or the name of a slot, and the options of each slot."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What a model says in one slot."""

    choice: str  # the most probable option
    probabilities: dict[str, float]  # of each option; their sum is 1
    mass: float  # the probability that the model gives to all options together: near 0, it would say something else
    standard_errors: dict[str, float] | None = None  # of `probabilities`, over several seeds; None: of one


@dataclass(frozen=True, slots=True, repr=False)
class Reading:
    """What a model says in the slots of an answer. With several seeds, probabilities are means."""

    text: str  # the answer with the choice of each slot
    slots: dict[str, Slot]
    prompt_ids: list[int]
    counts: list[Counts]  # of each seed

    def __getitem__(self, name: str) -> Slot:
        return self.slots[name]

    def __repr__(self) -> str:
        return f"Reading({short(self.text)}, {sum(counts.forwards for counts in self.counts)} forwards)"


@dataclass(frozen=True, slots=True)
class Open:
    """A slot on the canvas."""

    name: str
    options: list[str]
    first: int  # position in the answer
    fillings: list[list[int]]  # the tokens of each option; behind a shorter one EOS
    spellings: list[Edges]  # of each option

    @property
    def length(self) -> int:
        return len(self.fillings[0])

    def blank(self, offset: int) -> Blank:
        """`offset`: where the answer begins."""
        others = []
        for at in range(self.length):
            used = {token for edges in self.spellings for _, token, _ in edges[at]}
            others.append((*sorted(used - {filling[at] for filling in self.fillings}),))
        positions = tuple(offset + self.first + at for at in range(self.length))
        return Blank(positions, tuple(map(tuple, self.fillings)), (*others,))

    def divided(self) -> ValueError:
        """What to say if its tokens cannot be read together."""
        return ValueError(
            f"slot {self.name!r}: a block of the iteration ends within it, so its {self.length} tokens cannot be read "
            "together. Use options of one token, a longer iteration.block, or other text before the slot."
        )

    def weights(self, noted: Noted) -> list[float]:
        """The log-probability of each option."""
        if len({*noted.steps}) > 1:
            raise self.divided()
        tokens = self.blank(0)
        known = [dict(zip(tokens.tokens(at), noted.logprobs[at], strict=True)) for at in range(self.length)]
        return [spelled(edges, known) for edges in self.spellings]


@dataclass(frozen=True, slots=True)
class Layout:
    """An answer with slots, in tokens."""

    pieces: list[str | tuple[str]]  # text, or the name of a slot
    tokens: list[int]  # any where it is open
    slots: list[Open]
    asks: tuple[Ask, ...] = ()  # of the pipeline's requests

    def requests(self, engine: Engine, prompt: Sequence[int], steps: int, seeds: int, seed: int) -> list[Request]:
        """One for each seed. Raises ValueError for what cannot be read."""
        spec, iteration = engine.recipe.model.spec, engine.recipe.iteration
        for name, number in (("steps", steps), ("seeds", seeds)):
            if as_int(number, name) < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        if spec.mask_id is not None and (seeds, seed) != (1, 0):
            raise ValueError(
                f"seeds={seeds} and seed={seed}: this model has a mask token at open positions, so every seed reads "
                "the same. Leave both out."
            )
        tokens, offset = [*self.tokens, spec.eos_id], len(prompt)
        room = engine.max_length - offset - len(tokens)
        padding = iteration.padding(len(tokens)) if isinstance(iteration, Pads) else 0
        tokens += [spec.eos_id] * min(padding, max(room, 0))  # a canvas that is decoded as a whole
        blanks = [slot.blank(offset) for slot in self.slots]
        opened = {position for blank in blanks for position in blank.positions}
        # Where the text before the first slot is read otherwise than a prompt, it is left to the canvas.
        first = offset if spec.encoder or spec.prompt_block else min(opened)
        own = provided("asks_of")
        asks = (Read((*blanks,), steps), *self.asks, *(own(prompt) if own else ()))
        found = []
        for number in range(seeds):
            options = engine.recipe.resolve({"sampling.seed": seed + number} if seed + number else {})
            gaps = [at in opened for at in range(offset + len(tokens))]
            found.append(Request([*prompt, *tokens], gaps, options, asks, stops=False, first=first))
            engine.check(found[-1])
        ends = {end for _, end in regions(iteration, found[0])}
        for slot in self.slots:
            if ends & {*range(offset + slot.first + 1, offset + slot.first + slot.length)}:
                raise slot.divided()
        return found

    def reading(self, prompt: Sequence[int], completions: Sequence[Completion]) -> Reading:
        """What the completions of the requests say. Raises ValueError for a slot that could not be read as a whole."""
        slots, reads = {}, [read for done in completions if (read := done.counts.tells(ReadOut)) is not None]
        for g, slot in enumerate(self.slots):
            slots[slot.name] = mean(slot.options, [slot.weights(read.blanks[g]) for read in reads])
        text = "".join(slots[piece[0]].choice if isinstance(piece, tuple) else piece for piece in self.pieces)
        return Reading(text, slots, [*prompt], [replace(done.counts, told=()) for done in completions])


def regions(iteration: Iteration, request: Request) -> Iterator[tuple[int, int]]:
    """The active regions of a request, one after the other. None if several blocks are active, which enter singly."""
    at = request.start if iteration.blocks == 1 else request.length
    while at < request.length:
        yield (region := iteration.first_region(at, request.length))
        at = next((place for place in range(region[1], request.length) if request.open[place]), request.length)


def mean(options: Sequence[str], weights: Sequence[Sequence[float]]) -> Slot:
    """A slot from the log-probabilities of its options, for each seed."""
    masses = [math.exp(log_sum(row)) for row in weights]
    if not all(masses):
        raise ValueError(
            f"the model gives none of the options {[*options]!r:.200} a probability that can be told from 0"
        )
    means, errors = averaged(
        [[math.exp(value) / total for value in row] for row, total in zip(weights, masses, strict=True)]
    )
    told = dict(zip(options, means, strict=True))
    spread = None if errors is None else dict(zip(options, errors, strict=True))
    return Slot(max(told, key=told.__getitem__), told, statistics.fmean(masses), spread)


def averaged(reads: Sequence[Sequence[float]]) -> tuple[list[float], list[float] | None]:
    """The mean of each column, and its standard error; None: of one read."""
    columns, scale = [*zip(*reads, strict=True)], math.sqrt(len(reads))
    errors = [statistics.stdev(column) / scale for column in columns] if len(reads) > 1 else None
    return [*map(statistics.fmean, columns)], errors


def log_sum(values: Sequence[float]) -> float:
    most = max(values, default=-math.inf)
    return most if most == -math.inf else most + math.log(math.fsum(math.exp(value - most) for value in values))


# --- From text to tokens ---------------------------------------------------------------------------------------------


def questions(answer: Any, slots: Any, choice: Any) -> Questions:
    """The pieces of an answer and the options of its slots. Raises ValueError that names the argument."""
    if (slots is None) == (choice is None):
        raise ValueError("give either slots, the options of each slot, or choice, those of a single one")
    given = {CHOICE: choice} if slots is None else slots
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"slots={slots!r:.80} must map the name of each slot to its options")
    if answer is None:
        if len(given) > 1:
            raise ValueError("answer is missing: with several slots, give the text that they stand in, as [SLOT:name]")
        answer = f"[SLOT:{next(iter(given))}]"
    if not isinstance(answer, str):
        raise ValueError(f"answer={answer!r:.80} must be a text with slots")
    pieces = [piece if isinstance(piece, str) else (piece[2],) for piece in marked(encodable(answer), MARKER)]
    found = [piece[0] for piece in pieces if isinstance(piece, tuple)]
    for name in found:
        if found.count(name) > 1:
            raise ValueError(f"answer: [SLOT:{name:.80}] stands there {found.count(name)} times: name each by itself")
        if name not in given:
            raise ValueError(f"answer: [SLOT:{name:.80}] has no options: slots has {', '.join(map(str, given)):.200}")
    if missing := [name for name in given if name not in found]:
        raise ValueError(f"slots: {missing[0]!r:.80} is not in the answer: put [SLOT:{missing[0]}] where it belongs")
    which = "choice" if slots is None else "slots: {!r:.80}"
    return pieces, {name: options_of(given[name], which.format(name)) for name in found}


def options_of(value: Any, what: str) -> list[str]:
    with named(what):
        options = listed(value, "the options")
        if len(options) < 2:
            raise ValueError(f"{options!r:.80} has {len(options)} options: give two or more to choose from")
        for option in options:
            if not isinstance(option, str) or not option:
                raise ValueError(f"the option {option!r:.80} must be a text that is not empty")
            if options.count(encodable(option)) > 1:
                raise ValueError(f"the option {option!r:.80} is given twice")
    return options


def read(
    pipe: Any, prompts: Any, answer: str | None = None, *, slots: Mapping[str, Sequence[str]] | None = None,
    choice: Sequence[str] | None = None, steps: int = 1, seeds: int = 1, seed: int = 0, **shown: Any,
) -> Any:  # fmt: skip
    """What the model says in the slots of an answer to one prompt (a Reading) or to a list of them (a list).

    `answer`: its text, `[SLOT:name]` for each slot; None: one slot alone. `slots`: the options of each; `choice`: those
    of a single slot, called "choice". `steps`: denoise steps of each block. One reads all slots at once; with more, the
    surest are filled first, and the others read what stands there. `seeds`: how often a model without a mask token is
    read, from other noise each time; `seed`: the first. `shown`: `chat` and `images`, as for
    `Pipeline.generate`.

    Nothing is drawn, so no other option has an effect. Raises ValueError for bad input.
    """
    single, ids = isinstance(prompts, str) or is_conversation(prompts), list[list[int]]()
    refuse_names("read", shown, ("chat", "images"))
    prompts = pipe.seeing(prompts, shown, single=single, chat=shown.get("chat"))
    for index, prompt in enumerate([prompts] if single else listed(prompts, "prompts")):
        with nullcontext() if single else named(f"prompt {index}"):
            ids.append(pipe.encode(prompt, **shown))
    found = layout(pipe, answer, slots, choice)
    made = [found.requests(pipe.engine, prompt, steps, seeds, seed) for prompt in ids]
    updates = pipe.engine.run([request for each in made for request in each])
    done = {update.index: update.completion for update in updates if update.completion is not None}
    order = iter(sorted(done))
    readings = [
        found.reading(prompt, [done[next(order)] for _ in each]) for prompt, each in zip(ids, made, strict=True)
    ]
    return readings[0] if single else readings


def layout(pipe: Any, answer: Any, slots: Any, choice: Any) -> Layout:
    """The answer that a pipeline reads, in tokens. Raises ValueError if its slots cannot be read."""
    if pipe.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer, and options are texts")
    write, spec = partial(pipe.tokenizer.encode, add_special_tokens=False), pipe.model.spec
    pieces, options = questions(answer, slots, choice)
    firsts = {name: each[0] for name, each in options.items()}

    def ids(chosen: Mapping[str, str]) -> list[int]:
        text = "".join(chosen[piece[0]] if isinstance(piece, tuple) else piece for piece in pieces)
        return write(text)

    found = list[Open]()
    for name, each in options.items():
        texts = [ids(firsts | {name: option}) for option in each]
        found.append(opened(name, each, texts, spec, lambda: pipe.compiler, ends=pieces[-1] == (name,)))
    found.sort(key=lambda slot: slot.first)
    for slot, then in zip(found, found[1:], strict=False):
        if slot.first + slot.length > then.first:
            raise ValueError(f"slots {slot.name!r} and {then.name!r} share a token: put text between them")
    tokens = ids(firsts)
    end = found[-1].first + found[-1].length
    return Layout(pieces, tokens[:end] + [0] * (end - len(tokens)) + tokens[end:], found, pipe.asks)


def opened(
    name: str, options: list[str], texts: list[list[int]], spec: ModelSpec, compiler: Callable[[], Compiler], *,
    ends: bool,
) -> Open:  # fmt: skip
    """A slot from the whole answer's tokens with each of its options. `ends`: no text stands behind it."""
    sizes, before = [len(ids) for ids in texts], alike(texts)
    behind = min(alike([ids[::-1] for ids in texts]), min(sizes) - before)
    if len({*sizes}) > 1:
        if not ends:
            counts = ", ".join(f"{o!r}: {n - before - behind}" for o, n in zip(options, sizes, strict=True))
            raise ValueError(
                f"slot {name!r}: its options have different numbers of tokens ({counts:.200}), and the text behind it "
                "must stand at one place. Use options of one length, or put the slot at the end of the answer."
            )
        behind = 0
    length = max(sizes) - behind - before
    if length > POSITIONS:
        raise ValueError(f"slot {name!r}: its options have up to {length} tokens; at most {POSITIONS} can be read")
    parts = [ids[before : len(ids) - behind] for ids in texts]
    for at, part in enumerate(parts):
        if part in parts[:at]:
            same = options[parts.index(part)]
            raise ValueError(f"slot {name!r}: the tokenizer writes {same!r} and {options[at]!r} with the same tokens")
    stops = sorted({*spec.stop_ids}) if ends and not behind else []
    if length == 1:
        spellings: list[Edges] = [[[(0, t, 1) for t in part or stops]] for part in parts]
    else:
        with named(f"slot {name!r}: options of several tokens"):
            vocabulary = compiler().vocabulary
        spellings = [spelling(part, length, vocabulary, stops) for part in parts]
    return Open(name, options, before, [part + [spec.eos_id] * (length - len(part)) for part in parts], spellings)


def alike(texts: Sequence[Sequence[int]]) -> int:
    """How many of the first tokens are the same in all."""
    return next((at for at, column in enumerate(zip(*texts, strict=False)) if len({*column}) > 1), min(map(len, texts)))


def spelling(tokens: list[int], length: int, vocabulary: Vocabulary, stops: Sequence[int]) -> Edges:
    """All ways in which tokens at `length` positions spell the bytes of `tokens`. `stops`: what may stand behind them.

    Tokens that stand for no bytes are spelled as they are.
    """
    parts = [vocabulary.bytes_V[token] for token in tokens]
    text, ways = b"".join(part or b"" for part in parts), dict[int, list[tuple[int, int]]]()
    if None in parts:
        text, ways = bytes(len(tokens)), {at: [(token, at + 1)] for at, token in enumerate(tokens)}
    else:
        for at in range(len(text)):
            ends = range(at + 1, min(at + vocabulary.longest, len(text)) + 1)
            ways[at] = [(token, end) for end in ends for token in vocabulary.spelled.get(text[at:end], ())]
    ways[len(text)] = [(token, len(text)) for token in stops]
    reached, edges = {0}, list[list[tuple[int, int, int]]]()
    for _ in range(length):
        edges.append([(at, token, end) for at in sorted(reached) for token, end in ways[at]])
        reached = {end for _, _, end in edges[-1]}
    leads = {len(text)}
    for at in reversed(range(length)):
        edges[at] = [edge for edge in edges[at] if edge[2] in leads]
        leads = {edge[0] for edge in edges[at]}
    return edges


def spelled(edges: Edges, logprobs: Sequence[Mapping[int, float]]) -> float:
    """The log-probability that tokens, each drawn by itself, spell an option."""
    sums = {0: 0.0}
    for here, known in zip(edges, logprobs, strict=True):
        terms: dict[int, list[float]] = {}
        for at, token, end in here:
            if at in sums:
                terms.setdefault(end, []).append(sums[at] + known[token])
        sums = {end: log_sum(values) for end, values in terms.items()}
    return log_sum([*sums.values()])
