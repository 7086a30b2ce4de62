"""Records a request, for each forward what was computed, proposed and committed, and plays the record on an HTML page.

The recipe runs as it always does, one request at a time and eagerly. The ability `tracing` reads the step's own
records, and takes part in no step of a request that asks for no trace. docs/trace.md documents the JSON.

The page loads no file, font or script. Text of the prompt and of the model reaches it as data only: as JSON that no
text can break out of, and, for readers without JavaScript, escaped. A content policy names its style and script by
their hashes.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from threading import Event
from typing import Any

from dinfer import __version__
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import CACHES, DECODERS, ITERATIONS, SAMPLINGS, values_of
from dinfer.lab.abilities.tracing import Offer, Passes, Traced


def page(document: dict[str, Any]) -> str:
    """The page of a document as `dinfer.lab.trace.record.document` returns it."""
    style, script = asset("page.css"), asset("page.js")
    answers = "".join(
        f"<h2>{html.escape(run['name'])}</h2><p>{html.escape(run['text'])}</p>" for run in document["runs"]
    )
    parts = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'",
        "title": f"Denoising: {html.escape(' '.join(document['prompt'].split())[:60])}",
        "prompt": html.escape(document["prompt"]),
        "answers": answers,
        "style": style,
        "script": script,
        "data": embedded(document),
    }
    # One pass, so that a marker within what is put in stays what it is.
    return re.sub(r"@@(\w+)@@", lambda marker: parts[marker[1]], asset("page.html"))


def embedded(document: dict[str, Any]) -> str:
    """JSON that may stand in a script element, whatever its texts: nothing in it can open or close a tag."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    """A file of this package."""
    return (resources.files("dinfer.lab.trace") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class Pieces:
    """Texts of tokens, one at a time: a tokenizer may drop the space before a token that stands alone."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._anchor = pipe.encode("a", chat=False)
        self._before = len(pipe.decode(self._anchor))
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._pipe.decode([*self._anchor, token])[self._before :]
        return self._known[token]


SCHEMA = "dinfer.analysis.trace/1"
Span = tuple[int, int]  # positions [start, end) of the canvas; the prompt begins at 0


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One forward of the request."""

    forward: int  # from 1
    phase: str  # "prefill", "full" or "window", see `Phase`
    refresh: bool  # a pass over the whole canvas whose keys and values were kept
    block: int  # from 0: which active region
    region: Span  # the active blocks
    computed: list[Span]  # positions that went through the network
    offers: list[Offer]
    commits: list[tuple[int, int]]  # position and token; edits of decoded positions are among them
    remasked: list[int]  # decoded positions that were masked again


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """What one active region cost and yielded."""

    index: int
    region: Span
    forwards: int  # NFE; those of a prefill are the first block's
    refreshes: int
    commits: int


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """A recorded request. Positions count from the first token of the prompt."""

    name: str
    recipe: dict[str, Any]
    prompt_ids: list[int]
    length: int  # of the canvas
    masked: list[int]  # positions that were to be decoded
    stop_ids: list[int]
    steps: list[TracedStep]
    blocks: list[TracedBlock]
    canvas: list[int]  # after the last step
    text: str  # the answer
    counts: dict[str, float]
    pieces: dict[int, str]  # the text of every token that occurs

    def __repr__(self) -> str:
        return f"Trace({self.name}, {len(self.steps)} steps, {self.text!r:.60})"

    def _repr_html_(self) -> str:
        """The page that plays it, in a frame."""
        prompt = "".join(self.pieces.get(token, "") for token in self.prompt_ids)
        return f'<iframe width="100%" height="600" srcdoc="{html.escape(page(document(prompt, [self])))}"></iframe>'


def document(prompt: str, traces: Sequence[Trace]) -> dict[str, Any]:
    """The JSON document of one prompt under one or more recipes."""
    return {
        "schema": SCHEMA,
        "dinfer": __version__,
        "prompt": prompt,
        "runs": [asdict(trace) for trace in traces],
    }


def record(
    pipe: Pipeline,
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    options: Any = None,
    chat: bool | None = None,
    model: str | None = None,
) -> Trace:
    """Answers a prompt (a text, or a conversation) with the pipeline's recipe and records every forward.

    `model`: a name for the checkpoint, which the pipeline does not know. Raises as `Pipeline.generate` does.
    """
    requests = pipe.requests([pipe.encode(prompt, chat=chat)], max_new_tokens, options)
    return record_request(pipe, requests[0], model=model)


def record_request(
    pipe: Pipeline, request: Request, *, model: str | None = None, unwanted: Event | None = None
) -> Trace:
    """Like `record`, for a request as the engine takes it: token ids, with or without gaps.

    `unwanted`: ends the recording after the next step, with InterruptedError, once another thread has set it.
    """
    recipe, request = pipe.recipe, replace(request, padding=0, asks=(*request.asks, Traced()))
    kv, rank = pipe.engine.runtime.kv, recipe.ranks.rank
    runtime = Runtime(rows=1, kv=kv, tensor_parallel=rank.ranks, expert_parallel=rank.expert_parallel)
    completion = None
    for update in Engine(recipe, runtime).run([request]):
        if unwanted is not None and unwanted.is_set():
            raise InterruptedError("nobody wants the trace any more")
        if update.error is not None:
            raise update.error
        completion = update.completion
    passes = None if completion is None else completion.counts.tells(Passes)
    if completion is None or passes is None:
        raise RuntimeError("the engine ended without a completion")
    steps = _steps(passes)
    counts = completion.counts
    described, piece = describe(recipe), str if pipe.tokenizer is None else Pieces(pipe).of
    offered = {offer.token for step in steps for offer in step.offers}
    committed = {token for step in steps for _, token in step.commits}
    return Trace(
        name=f"{_short(described['decoder'])}, {_short(described['cache'])}",
        recipe={"model": model or recipe.model.spec.family, **described},
        prompt_ids=request.tokens if request.text_behind_a_gap else request.prompt,
        length=request.length,
        masked=[position for position, is_open in enumerate(request.open) if is_open],
        stop_ids=list(recipe.model.spec.stop_ids),
        steps=steps,
        blocks=_blocks(steps),
        canvas=completion.canvas,
        text="" if pipe.tokenizer is None else pipe.decode(completion.output),
        counts={
            "tokens": counts.tokens, "forwards": counts.forwards, "tpf": counts.tpf, "refreshes": counts.refreshes,
            "positions": counts.positions, "positions_per_committed": counts.positions_per_committed,
        },
        pieces={token: piece(token) for token in sorted({*request.tokens, *completion.canvas, *offered, *committed})},
    )  # fmt: skip


def describe(recipe: Recipe) -> dict[str, Any]:
    """The components of a recipe, each a mapping of `name` and options, as `dinfer.load` takes them."""
    parts = (
        (ITERATIONS, recipe.iteration),
        (DECODERS, recipe.decoder),
        (CACHES, recipe.cache),
        (SAMPLINGS, recipe.sampling),
    )
    return {registry.kind: {"name": registry.name_of(part), **values_of(part)} for registry, part in parts}


def _short(part: dict[str, Any]) -> str:
    """A component in few words: its name, and its first option if that is a number."""
    first = next(iter(list(part.values())[1:]), None)
    return f"{part['name']} {first}" if isinstance(first, (int, float)) and first else str(part["name"])


def spans(positions: Iterable[int]) -> list[Span]:
    """Positions as the fewest spans `[start, end)`, in order."""
    found: list[Span] = []
    for position in sorted(set(positions)):
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


def _steps(passes: Passes) -> list[TracedStep]:
    found, block, before = [], 0, None
    for forward, own in passes.passes.items():
        block += before is not None and own.region != before
        before = own.region
        found.append(
            TracedStep(
                forward, own.phase.name.lower(), own.refresh, block, own.region, spans(own.computed), own.offers,
                sorted(own.commits), sorted(own.remasked),
            )
        )  # fmt: skip
    return found


def _blocks(steps: Sequence[TracedStep]) -> list[TracedBlock]:
    found = []
    for index in dict.fromkeys(step.block for step in steps):
        own = [step for step in steps if step.block == index]
        refreshes, commits = sum(step.refresh for step in own), sum(len(step.commits) for step in own)
        found.append(TracedBlock(index, own[0].region, len(own), refreshes, commits))
    return found
