"""Runs prompts several times each, and records what every step did.

    samples = pipe.rollout(prompts, n=8, max_new_tokens=256, seed=step, temperature=1.0)
    drawn = passes("diffu_grpo", pipe.model.spec, samples.samples(), seed=step)

Shape suffixes as in `dinfer.rollouts.rollouts`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from dinfer.core.engine.request import Completion, Request
from dinfer.core.pipeline.inputs import FormKeywords, as_int, each, listed, named, refuse_names
from dinfer.core.provided import needed
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import unknown
from dinfer.core.step.ability import Ask
from dinfer.core.step.mixins import Branches, Edits, Feeds, Verifies
from dinfer.core.step.window import exact
from dinfer.rollouts.abilities.beginnings import OneOfSeveral
from dinfer.rollouts.abilities.recording import Record, RecordAsk, RecordRead
from dinfer.rollouts.abilities.versions import Aborted, MadeWith
from dinfer.rollouts.rollouts import Rollouts

SEED = "sampling.seed"
ALIKE = "samples of a prompt at temperature 0 are alike, unless the decoder draws: give temperature=1.0"
OWN = FormKeywords.__annotations__


def rollout(
    pipe: Any, prompts: Sequence[Any], *, n: int = 1, max_new_tokens: int | Sequence[int] = 128,
    seed: int | Sequence[int] = 0, record: str = "logps", whole_blocks: bool = True,
    on_finish: Callable[[int, Rollouts], None] | None = None, **more: Any,
) -> Rollouts:  # fmt: skip
    """`n` samples of each prompt, a text, a conversation or token ids: those of the first prompt first.

    `seed`: a number of which each sample's seed is a function, together with the places of prompt and sample; or a seed
    for each sample. `record`: "none", "steps", "logps" or "events", each with what the ones before it have.
    `whole_blocks`: answers are lengthened to where a block ends; False refuses lengths that end within one. `on_finish`
    is given each sample, and its number, as soon as it is done.

    `more`: per-request options by name, such as temperature=1.0, or options=, one mapping for all or one for each
    prompt; and what each answer is held to, as `Pipeline.generate` takes it. Raises ValueError before any work, and the
    error of a request that fails.
    """
    asked = Asked(n, max_new_tokens, seed, record, whole_blocks)
    made, done = planned(pipe, prompts, asked, **more), dict[int, Rollouts]()
    for update in pipe.engine.run(made.requests):
        if update.completion is not None:
            done[update.index] = made.read(update.index, update.completion)
            if on_finish is not None:
                on_finish(update.index, done[update.index])
    return Rollouts.cat([done[index] for index in range(len(made.requests))])


class Asked(NamedTuple):
    """What a rollout is to be, see `rollout`."""

    n: int = 1
    max_new_tokens: int | Sequence[int] = 128
    seed: int | Sequence[int] = 0
    record: str = "logps"
    whole_blocks: bool = True


@dataclass(frozen=True, slots=True)
class Round:
    """The requests of a rollout."""

    recipe: Recipe
    requests: list[Request]
    seeds: list[int]
    level: Record
    origin: Literal["position", "prompt"]
    inexact: list[str]

    def read(self, index: int, done: Completion) -> Rollouts:
        """One sample."""
        request, spec, block = self.requests[index], self.recipe.model.spec, self.recipe.iteration.block
        start, width = len(request.prompt), request.new_tokens
        said = done.counts.tells(RecordRead) or RecordRead({})
        decoded_A = torch.tensor(done.decoded[start:])
        rows = {name: row_S[start : start + width] for name, row_S in said.rows.items()}
        if "last" in rows:
            decoded_A = decoded_A | (rows["last"] >= 0)
        length = int(decoded_A.nonzero().max()) + 1 if bool(decoded_A.any()) else 0
        before, unit = start if self.origin == "position" else 0, unit_of(self.recipe)
        length = min(-(-(length + before) // unit) * unit - before, width)
        answer_A = torch.tensor(done.canvas[start:], dtype=torch.int64)
        stop_A = torch.isin(answer_A, torch.tensor(spec.stop_ids)) & decoded_A
        stopped = request.stops and bool(stop_A.any())
        if "logps" in rows:
            none_A = rows["last"] < 0
            rows |= {name: rows[name].masked_fill(none_A, 0) for name in ("logps", "drawn")}
        events = None if said.events is None else [_events(said.events, start)]
        if said.lost:
            raise ValueError(
                f"sample {index} has {said.lost} events more than there is room for: record='logps' has room"
            )
        inexact = self.inexact[index]
        one = {name: row[None] for name, row in rows.items()}
        return Rollouts(
            prompt_ids=torch.tensor([request.prompt]), prompt_lengths=torch.tensor([start]), answer_ids=answer_A[None],
            lengths=torch.tensor([length]), widths=torch.tensor([width]),
            stops=torch.tensor([int(stop_A.nonzero()[0]) + 1 if stopped else length]), stopped=torch.tensor([stopped]),
            aborted=torch.tensor([done.counts.tells(Aborted) is not None]),
            forwards=torch.tensor([done.counts.forwards]), seeds=torch.tensor([self.seeds[index]]),
            versions=versions_of(done.counts.tells(MadeWith), one.get("last"), width),
            steps=one.get("last"), first_steps=one.get("first"),
            logps=one.get("logps"), sampled_logps=one.get("drawn"), events=events,
            event_logps=None if said.chances is None else [said.chances], block=block or None, origin=self.origin,
            eos_id=spec.eos_id, attention=spec.causal_block, inexact=inexact,
        )  # fmt: skip


def versions_of(made: MadeWith | None, steps_NA: Tensor | None, width: int) -> Tensor:
    """The version of the weights that wrote each position; without steps, the last one. int64 [1, A]"""
    spans = ((0, 0),) if made is None else made.versions
    if steps_NA is None:
        return torch.full((1, width), spans[-1][0])
    found_NA = torch.full((1, width), spans[0][0])
    for version, step in spans[1:]:
        found_NA[steps_NA >= step] = version
    return found_NA


def seed_of(seed: int, prompt: int, sample: int) -> int:
    """The seed of a sample: the same however prompts are divided among calls with these numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {prompt} {sample}".encode()).digest()[:6], "big")


def origin_of(recipe: Recipe) -> Literal["position", "prompt"]:
    """Whether an iteration counts its blocks from position 0 or from the prompt's end."""
    iteration, block = recipe.iteration, recipe.iteration.block
    if not block:
        return "prompt"
    return "position" if iteration.first_region(block + 1, 3 * block)[1] == 2 * block else "prompt"


def unit_of(recipe: Recipe) -> int:
    """Positions of whole blocks, of the iteration and of the model's attention."""
    return math.lcm(recipe.iteration.block or 1, recipe.model.spec.causal_block or 1)


def inexact(recipe: Recipe, options: Mapping[str, Any]) -> str:
    """Why a forward that is fed the tokens of a step computes other numbers than the step did; "": it does not."""
    spec, iteration, block = recipe.model.spec, recipe.iteration, recipe.iteration.block
    name = type(iteration).__name__
    if spec.mask_id is None:
        return f"{spec.family} feeds noise and drafts where nothing is decoded"
    if isinstance(iteration, Feeds):
        return f"{name} feeds more than tokens"
    if isinstance(iteration, Branches):
        return f"{name} takes tokens that the forward before proposed"
    if isinstance(recipe.decoder, Verifies):
        return f"{type(recipe.decoder).__name__} takes tokens that a second pass has seen in their order"
    if isinstance(recipe.decoder, Edits):
        return f"{type(recipe.decoder).__name__} changes tokens that earlier steps have seen"
    if options.get("guidance", 0) > 0:
        return "guidance mixes the logits of two forwards"
    if not exact(recipe.cache, spec.attention_layout, recipe.alignment):
        return f"{type(recipe.cache).__name__} keeps keys that a forward over all positions would compute anew"
    if spec.causal_block is not None:
        counted = "prompt" if spec.prompt_block else "position"
        whole = bool(block) and spec.causal_block % block == 0 and origin_of(recipe) == counted
        if iteration.blocks > 1 or not whole:
            return f"{name} decodes a block while masks stand in attention blocks that it sees"
    return ""


def planned(pipe: Any, prompts: Sequence[Any], asked: Asked, **more: Any) -> Round:
    """The requests of a rollout, all checked. Raises ValueError."""
    n, max_new_tokens, seed, record, whole = asked
    recipe: Recipe = pipe.recipe
    names = [name.partition(".")[2] for name in recipe.request_options]
    refuse_names("rollout", more, [*OWN, "options", *names])
    held = {name: more.pop(name) for name in OWN if name in more}
    form = needed("form_of", "a form", "structure")(held) if held else None
    if not isinstance(record, str) or record.upper() not in Record.__members__:
        raise unknown("record", record, [name.lower() for name in Record.__members__])
    level, count = Record[record.upper()], as_int(n, "n")
    if count < 1:
        raise ValueError(f"n={n} must be at least 1")
    given, origin = listed(prompts, "prompts"), origin_of(recipe)
    ids = [_ids(pipe, i, prompt) for i, prompt in enumerate(given)]
    seeds = _seeds(seed, len(ids), count)
    lengths = each(max_new_tokens, len(ids), "max_new_tokens")
    lengths = [
        _length(recipe, origin, i, len(prompt), a, whole)
        for i, (prompt, a) in enumerate(zip(ids, lengths, strict=True))
    ]
    options = [
        _options(i, one, more) for i, one in enumerate(each(more.pop("options", None) or {}, len(ids), "options"))
    ]
    language = None if form is None else form.language(pipe.compiler)
    seeded = SEED.partition(".")[2] in names
    many = [one for prompt in ids for one in [prompt] * count]
    rows = [options[at // count] | ({SEED: one} if seeded else {}) for at, one in enumerate(seeds)]
    asks: tuple[Ask, ...] = (RecordAsk(int(level)),) if level else ()
    if count > 1 and not pipe.engine.runtime.deterministic:  # which has a row compute the same beside any others
        asks = *asks, OneOfSeveral()
    found = pipe.requests(many, [lengths[at // count] for at in range(len(many))], rows, language, asks=asks)
    found = [replace(one, padding=0) for one in found]
    drawn = [recipe.sampling_of(one.options) for one in found]
    if count > 1 and not all(one.get("temperature", 0) > 0 for one in drawn):
        warn(ALIKE, stacklevel=2)  # which Python tells once
    reasons = [inexact(recipe, one) for one in drawn]
    return Round(recipe, found, seeds if seeded else [-1] * len(seeds), level, origin, reasons)


def _ids(pipe: Any, index: int, prompt: Any) -> list[int]:
    """Token ids of a prompt."""
    text = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping))
    with named(f"prompt {index}"):
        return pipe.encode(prompt) if text else listed(prompt, "a prompt")


def _options(index: int, given: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a prompt. Raises ValueError for a seed, of which a rollout gives each sample its own."""
    if not isinstance(given, Mapping):
        raise ValueError(f"prompt {index}: options must be a mapping of names to values, not {given!r:.80}")
    if twice := given.keys() & more.keys():
        raise ValueError(f"{min(twice)} is given by keyword and in options: give it once")
    found = {**given, **more}
    if found.keys() & {"seed", SEED}:
        raise ValueError(f"prompt {index}: options hold a seed, which all samples would share: use seed= of rollout")
    return found


def _seeds(seed: Any, prompts: int, n: int) -> list[int]:
    """The seed of each sample. Raises ValueError if two of a prompt are the same."""
    if not isinstance(seed, (list, tuple, Tensor)):
        whole = as_int(seed, "seed")
        return [seed_of(whole, i, j) for i in range(prompts) for j in range(n)]
    found = [as_int(one, "seed") for one in listed(seed, "seed")]
    if len(found) != prompts * n:
        raise ValueError(
            f"seed has {len(found)} values for {prompts} prompts x {n} samples: give {prompts * n}, or one"
        )
    for i in range(prompts):
        own = found[i * n : (i + 1) * n]
        if len({*own}) < n:
            again = next(one for one in own if own.count(one) > 1)
            raise ValueError(f"prompt {i}: two of its samples have the seed {again}, and would be the same")
    return found


def _length(recipe: Recipe, origin: str, index: int, prompt: int, asked: Any, whole: bool) -> int:
    """How many positions to decode. Raises ValueError."""
    tokens = as_int(asked, f"prompt {index}: max_new_tokens")
    unit = unit_of(recipe)
    before = prompt if origin == "position" else 0
    full = -(-(before + tokens) // unit) * unit - before
    if full == tokens or tokens < 1:
        return tokens
    if not whole:
        raise ValueError(
            f"prompt {index}: max_new_tokens={tokens} behind {prompt} prompt tokens ends within a block of {unit}: use "
            f"{full}, or whole_blocks=True"
        )
    most = recipe.model.spec.max_length
    if prompt + full > most:
        raise ValueError(
            f"prompt {index}: {prompt} prompt tokens and {full} new ones, to the end of a block, exceed the model's "
            f"{most} positions: use max_new_tokens={full - unit}"
        )
    return full


def _events(events: Tensor, start: int) -> Tensor:
    """Events with positions in the answer, and -1 for masks. int32 [E, 4]"""
    step_E, pos_E, old_E, new_E = events.unbind(1)
    return torch.stack((step_E, pos_E - start, old_E.clamp_min(-1), new_E.clamp_min(-1)), 1)
