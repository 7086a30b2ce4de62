"""Fills the gaps of texts.

`The capital of [MASK:4] is Paris.` stands for a text in which four tokens are to be found. A backslash in front of a
marker makes it a part of the text: `\\\\[MASK:4]`; two stand for one and leave it a marker. Backslashes elsewhere are
themselves.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Unpack

from dinfer.core.engine.request import Ask, Completion, Counts, Request, Resolved
from dinfer.core.pipeline.inputs import FormKeywords, each, encodable, figures, listed, named, short, tokens_of
from dinfer.core.provided import provided
from dinfer.core.step.told import TokenLogprob
from dinfer.structure.form import gaps_of, in_gaps_of, languages_of

MARKER = re.compile(r"(\\*)\[MASK:([^\]]*)\]")


def infill(
    pipe: Any, texts: str | Sequence[str], *, options: Any = None, stop: bool = False, trace: bool = False,
    logprobs: bool = False, scope: str = "answer", **held: Unpack[FormKeywords],
) -> Any:  # fmt: skip
    """Fills the gaps of one text (returns an Infilled) or of a list of them (returns a list, in order).

    `[MASK:n]` is a gap of n tokens, `\\[MASK:n]` that very text. The stretches between gaps are tokenised each
    for itself, without a chat template. `stop`: a stop token in a gap ends it all, as `iteration.stop` says, and
    what is left is EOS; else stop tokens are tokens like others. `logprobs`: of what fills the gaps, and of the
    likeliest tokens there. `options`: per-request options, as for `generate`.

    `held`: what is held to a form, as for `generate`. `scope`: all text from the first gap on ("answer"), or the
    text of each gap ("gap"); then a list gives each gap its own form. Raises ValueError for bad input.
    """
    if isinstance(texts, str):
        canvases = [template(pipe, texts)]
    else:
        canvases = []
        for index, text in enumerate(listed(texts, "texts")):
            with named(f"text {index}"):
                canvases.append(template(pipe, text))
    results = infill_ids(
        pipe, canvases, options=options, stop=stop, trace=trace, logprobs=logprobs, scope=scope, **held
    )
    return results[0] if isinstance(texts, str) else results


def infill_ids(
    pipe: Any, canvases: Sequence[Sequence[int]], *, options: Any = None, stop: bool = False, trace: bool = False,
    logprobs: bool = False, scope: str = "answer", **held: Unpack[FormKeywords],
) -> "list[Infilled]":  # fmt: skip
    """Like `infill`, for canvases of token ids in which the model's mask token stands at every open position."""
    canvases = listed(canvases, "canvases")
    values = each({} if options is None else options, len(canvases), "options")
    asked = held or scope != "answer"
    languages: Sequence[Any] = languages_of(held, scope, lambda: pipe.compiler) if asked else ()
    pairs = enumerate(zip(canvases, values, strict=True))
    requests = [_request(pipe, i, *given, stop, (languages, scope)) for i, given in pairs]
    done = zip(requests, pipe.completed(requests, trace, logprobs), strict=True)
    return [infilled(pipe, request, *finished) for request, finished in done]


def infill_request(
    pipe: Any, text: str, options: Mapping[str, Any] | Resolved, languages: Sequence[Any] = (), scope: str = "answer",
    *, asks: tuple[Ask, ...] = (), stop: bool = False,
) -> Request:  # fmt: skip
    """The request that `infill` makes of one text."""
    return _request(pipe, 0, template(pipe, text), options, stop, (languages, scope), asks)


def infilled(
    pipe: Any, request: Request, completion: Completion, trace: list[list[int]] | None = None,
    logprobs: Iterable[TokenLogprob] | None = None,
) -> "Infilled":  # fmt: skip
    """What `infill` makes of the completion of one request. `logprobs`: of the output."""
    runs = gaps_of(request.tokens, pipe.model.spec.mask)
    gaps = [[completion.canvas[position] for position in run] for run in runs]
    text, *texts = ["" if pipe.tokenizer is None else pipe.decode(ids) for ids in (completion.canvas, *gaps)]
    heard = None if logprobs is None else iter(logprobs)
    scores = None if heard is None else [[*islice(heard, len(gap))] for gap in gaps]
    return Infilled(text, completion.canvas, gaps, texts, completion.counts, trace, scores)


def template(pipe: Any, text: Any) -> list[int]:
    """Token ids of a text with markers: BOS if the tokenizer puts one in front of texts, masks in the gaps."""
    if not isinstance(text, str):
        raise ValueError(f"a text with gaps must be a text, not {text!r:.80}")
    tokenizer, spec = pipe.need_tokenizer(), pipe.model.spec
    ids = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]
    for piece in parse(encodable(text)):
        if isinstance(piece, str):
            ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        elif piece > spec.max_length:
            raise ValueError(f"[MASK:{piece}] exceeds the model's {spec.max_length} positions")
        else:
            ids += [spec.mask] * piece
    return ids


def _request(
    pipe: Any, index: int, canvas: Any, options: Any, stop: bool, form: tuple[Sequence[Any], str],
    asks: tuple[Ask, ...] = (),
) -> Request:  # fmt: skip
    """`form`: what is held to it, and what its scope is."""
    what, mask_id = f"canvas {index}", pipe.model.spec.mask
    if mask_id not in (ids := tokens_of(canvas, what)):
        raise ValueError(f"{what} has no gap: put [MASK:n] into the text, or the mask token {mask_id}")
    with named(what):
        asks += (in_gaps_of(form[0], ids, mask_id, form[1]),) if form[0] else ()
    return pipe.checked(what, options, Request(ids, [token == mask_id for token in ids], asks=asks, stops=stop))


@dataclass(frozen=True, slots=True, repr=False)
class Infilled:
    """A text or canvas with its gaps filled."""

    text: str  # without special tokens; empty where there is no tokenizer
    ids: list[int]  # the canvas as a whole
    gaps: list[list[int]]  # what fills each gap: a run of mask tokens
    gap_texts: list[str]  # the same as text
    counts: Counts
    trace: list[list[int]] | None = None  # if asked for, the canvas after every step
    logprobs: list[list[TokenLogprob]] | None = None  # if asked for, of each token of each gap, up to a stop token

    def __repr__(self) -> str:
        return f"Infilled({short(self.text)}, gaps={self.gap_texts!r:.80}, {figures(self.counts)})"

    def _repr_html_(self) -> str | None:
        show = provided("as_html")
        return show and show(self.text, self.counts, self.ids, 0, self.trace)


def marked(text: str, marker: re.Pattern[str]) -> Iterator[str | re.Match[str]]:
    """Stretches of text, and the markers between them. Group 1 of `marker`: the backslashes in front of one."""
    words, begin = "", 0
    for match in marker.finditer(text):
        slashes = match[1]
        words += text[begin : match.start()] + "\\" * (len(slashes) // 2)
        begin = match.end()
        if len(slashes) % 2:
            words += match[0][len(slashes) :]
            continue
        if words:
            yield words
        yield match
        words = ""
    if words := words + text[begin:]:
        yield words


def parse(text: str) -> list[str | int]:
    """Stretches of text, and the lengths of the gaps between them. Raises ValueError for a marker that is none."""
    pieces: list[str | int] = []
    for piece in marked(text, MARKER):
        if isinstance(piece, str):
            pieces.append(piece)
            continue
        if not re.fullmatch(r"[0-9]{1,99}", piece[2]) or int(piece[2]) < 1:  # `int` takes 4300 digits at most
            raise ValueError(
                f"{piece[0]!r:.80} is no gap: write [MASK:n] with the number n of tokens, or \\[MASK:...] for the text"
            )
        pieces.append(int(piece[2]))
    return pieces


def escaped(text: str, marker: re.Pattern[str] = MARKER) -> str:
    """A text that `marked` reads as nothing but this text."""
    return marker.sub(lambda found: "\\" * (len(found[1]) + 1) + found[0], text)
