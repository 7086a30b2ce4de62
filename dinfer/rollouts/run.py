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
from dinfer.core.kernels.canvas import host_rows
from dinfer.core.pipeline.inputs import FormKeywords, as_int, each, listed, named, refuse_names
from dinfer.core.provided import needed
from dinfer.core.recipe.recipe import SEEDS, Recipe
from dinfer.core.registry import unknown
from dinfer.core.step.ability import Ask
from dinfer.core.step.mixins import Branches, Edits, Feeds, Verifies
from dinfer.core.step.window import exact
from dinfer.rollouts.abilities.beginnings import Several
from dinfer.rollouts.abilities.recording import Record, RecordAsk, RecordRead, rows_of_all
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
    prompt; images= and what each answer is held to, as `Pipeline.generate` takes them. Raises ValueError before any
    work, and the error of a request that fails.
    """
    asked = Asked(n, max_new_tokens, seed, record, whole_blocks)
    made, done = planned(pipe, prompts, asked, **more), dict[int, Completion]()
    for update in pipe.engine.run(made.requests):
        if update.completion is not None:
            done[update.index] = update.completion
            if on_finish is not None:
                on_finish(update.index, made.read({update.index: update.completion}))
    return made.read(done)


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

    def read(self, done: Mapping[int, Completion]) -> Rollouts:
        """Samples by their numbers, in this order; all at once, since each call of torch takes a CPU's microseconds.

        Raises ValueError for one with more events than there is room for.
        """
        numbers, spec = sorted(done), self.recipe.model.spec
        asked, ends = [self.requests[n] for n in numbers], [done[n] for n in numbers]
        starts, widths = [len(one.prompt) for one in asked], [one.new_tokens for one in asked]
        start_N, width_N, most = torch.tensor(starts), torch.tensor(widths), max(widths)
        of_canvas: list[tuple[list[Any], int]] = [
            ([e.canvas for e in ends], spec.eos_id),
            ([e.decoded for e in ends], 0),
        ]
        answer_NA, decoded_NA = (
            host_rows([row[start:] for row, start in zip(rows, starts, strict=True)], most, fill)
            for rows, fill in of_canvas
        )
        told = [end.counts.tells(RecordRead) for end in ends]
        last_NA, first_NA, *chances = self._recorded(told, start_N, width_N)
        event_E5, counts = self._events(told)
        decoded_NA = decoded_NA > 0 if last_NA is None else (decoded_NA > 0) | (last_NA >= 0)
        before_N, unit = start_N if self.origin == "position" else 0, unit_of(self.recipe)
        length_N = (decoded_NA * torch.arange(1, most + 1)).amax(1)
        length_N = torch.minimum(-(-(length_N + before_N) // unit) * unit - before_N, width_N)
        stop_NA = torch.isin(answer_NA, torch.tensor(spec.stop_ids)) & decoded_NA
        stopped_N = stop_NA.any(1) & torch.tensor([one.stops for one in asked])
        return Rollouts(
            prompt_ids=host_rows([one.prompt for one in asked], max(starts), spec.eos_id), prompt_lengths=start_N,
            answer_ids=answer_NA, lengths=length_N, widths=width_N,
            stops=torch.where(stopped_N, stop_NA.int().argmax(1) + 1, length_N), stopped=stopped_N,
            aborted=torch.tensor([end.counts.tells(Aborted) is not None for end in ends]),
            forwards=torch.tensor([end.counts.forwards for end in ends]),
            seeds=torch.tensor([self.seeds[n] for n in numbers]),
            versions=versions_of([end.counts.tells(MadeWith) for end in ends], last_NA, widths),
            steps=last_NA, first_steps=first_NA, logps=chances[0] if chances else None,
            sampled_logps=chances[1] if chances else None,
            events=None if event_E5 is None else _events(event_E5, start_N, counts),
            event_logps=None if event_E5 is None else [*event_E5[:, 4].contiguous().view(torch.float32).split(counts)],
            block=self.recipe.iteration.block or None, origin=self.origin, eos_id=spec.eos_id,
            attention=spec.causal_block, inexact=next(filter(None, (self.inexact[n] for n in numbers)), ""),
        )  # fmt: skip

    def _recorded(
        self, told: Sequence[RecordRead | None], start_N: Tensor, width_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The steps that wrote each position last and first, and two log-probabilities, as far as they are recorded."""
        if not self.level:
            return None, None
        fields, row_N4S = 2 if self.level < Record.LOGPS else 4, rows_of_all(told)
        column_A = torch.arange(int(width_N.max()))
        place_N1A = (start_N[:, None] + column_A).clamp_max(row_N4S.shape[2] - 1)[:, None]
        row_NFA = row_N4S[:, :fields].gather(2, place_N1A.expand(-1, fields, -1))
        row_NFA.masked_fill_((column_A >= width_N[:, None])[:, None], -1)
        last_NA, first_NA, *bits = row_NFA.transpose(0, 1).contiguous()
        return last_NA, first_NA, *(one.view(torch.float32).masked_fill_(last_NA < 0, 0) for one in bits)

    def _events(self, told: Sequence[RecordRead | None]) -> tuple[Tensor | None, list[int]]:
        """All events, and how many of each sample. Raises ValueError for a sample with more than there is room for."""
        if self.level < Record.EVENTS:
            return None, []
        held, counts, together = bytearray(), list[int](), dict[int, tuple[Any, list[int]]]()
        for one in told:
            count = 0
            if one is not None and one.event_BE5 is not None and one.count_B is not None:
                if id(one.count_B) not in together:  # by numpy, since each call of torch takes a CPU's microseconds
                    together[id(one.count_B)] = one.event_BE5.numpy(), one.count_B.tolist()
                event_BE5, count_B = together[id(one.count_B)]
                count = count_B[one.at]
                if (room := event_BE5.shape[1]) < count:
                    raise ValueError(
                        f"a sample has {count - room} events more than there is room for: record='logps' has room"
                    )
                held += event_BE5[one.at, :count].tobytes()
            counts.append(count)
        events = torch.frombuffer(held, dtype=torch.int32) if held else torch.empty(0, dtype=torch.int32)
        return events.view(-1, 5), counts


def versions_of(made: Sequence[MadeWith | None], steps_NA: Tensor | None, widths: Sequence[int]) -> Tensor:
    """The version of the weights that wrote each position; without steps, the last one. int64 [N, A]"""
    spans = [((0, 0),) if one is None else one.versions for one in made]
    first_N = torch.tensor([own[0 if steps_NA is not None else -1][0] for own in spans])
    found_NA = first_N[:, None].where(torch.arange(max(widths)) < torch.tensor(widths)[:, None], 0)
    for n, own in enumerate(spans):
        for version, step in own[1:] if steps_NA is not None else ():
            found_NA[n, steps_NA[n] >= step] = version  # type: ignore[index]
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
    if not (given := listed(prompts, "prompts")):
        raise ValueError("prompts are empty: give at least one")
    prompts = pipe.seeing(given, more, single=False)
    refuse_names("rollout", more, [*OWN, "options", *names])
    held = {name: more.pop(name) for name in OWN if name in more}
    form = needed("form_of", "a form", "structure")(held) if held else None
    if not isinstance(record, str) or record.upper() not in Record.__members__:
        raise unknown("record", record, [name.lower() for name in Record.__members__])
    level, count = Record[record.upper()], as_int(n, "n")
    if count < 1:
        raise ValueError(f"n={n} must be at least 1")
    origin, ids = origin_of(recipe), [_ids(pipe, i, prompt) for i, prompt in enumerate(prompts)]
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
    rows = _rows(recipe, options, seeds if seeded else [], count)
    asks: tuple[Ask, ...] = (RecordAsk(int(level)),) if level else ()
    if count > 1 and not pipe.engine.runtime.deterministic:  # which has a row compute the same beside any others
        asks = *asks, Several()
    found = pipe.requests(many, [lengths[at // count] for at in range(len(many))], rows, language, asks=asks)
    found = [replace(one, padding=0) if one.padding else one for one in found]  # another would be checked again
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


def _rows(recipe: Recipe, options: Sequence[Mapping[str, Any]], seeds: Sequence[int], n: int) -> list[Any]:
    """The options of each sample. They are checked once for all that differ in nothing but a seed in its range."""
    if any(not 0 <= seed < SEEDS for seed in seeds):
        return [{**options[at // n], SEED: seed} for at, seed in enumerate(seeds)]
    found = list[Any]()
    for index, own in enumerate(options):
        if index and own == options[index - 1]:
            found.append(found[-1])
            continue
        with named(f"prompt {index}"):
            found.append(recipe.resolve(own))
    if not seeds:
        return [one for one in found for _ in range(n)]
    return [recipe.seeded(found[at // n], seed) for at, seed in enumerate(seeds)]


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


def _events(event_E5: Tensor, start_N: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Events of each sample, with positions in the answer, and -1 for masks. int32 [E, 4] each"""
    step_E, pos_E, old_E, new_E, _ = event_E5.unbind(1)
    start_E = start_N.to(torch.int32).repeat_interleave(torch.tensor(counts))
    event_E4 = torch.stack((step_E, pos_E - start_E, old_E.clamp_min(-1), new_E.clamp_min(-1)), 1)
    return [*event_E4.split([*counts])]
