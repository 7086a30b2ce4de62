"""The models that a server offers by name, and how a client's request becomes rows, and their warm-up."""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Ask, Request, Resolved, Wants
from dinfer.core.pipeline import Pipeline
from dinfer.core.pipeline.inputs import texts_in
from dinfer.core.pipeline.pipeline import samples
from dinfer.core.provided import provided
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import DECODERS, options_of, values_of
from dinfer.lab.trace.record import Pieces
from dinfer.serving.abilities.salting import Salt
from dinfer.serving.async_engine import AsyncEngine, EngineThread
from dinfer.serving.errors import SHOWN, ApiError, at_field, invalid, refused
from dinfer.serving.fields import SEEDS, Generation, Sampled
from dinfer.serving.settings import check_aliases
from dinfer.structure import Language
from dinfer.structure.abilities.bias import TokenBias
from dinfer.structure.infilling import escaped, infill_request

LOG = logging.getLogger("dinfer.serving")
PARTS = 16  # lengths of answers; rows then enter and leave one by one, so that all numbers of rows come up
# What chat templates write around thoughts.
THOUGHTS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"),
    ("<|channel>thought", "<channel|>"),
)  # fmt: skip
TAIL = 16  # tokens at the end of a prompt that may open a thought
GAP = 64  # positions between a prompt and a suffix, if the request does not say how many
PAUSES = 2.0, 10.0  # rounds of steps that a client waits on average before it asks again


@dataclass(frozen=True)
class Served:
    """A recipe over a model, under the name that clients ask for."""

    name: str
    pipe: Pipeline
    engine: AsyncEngine
    recipe: Recipe  # equals `pipe.recipe`, except for defaults of per-request options
    max_new_tokens: int  # the default of a request
    created: int
    told: dict[str, Callable[[], Any]] = field(default_factory=dict)  # more for its entry in /v1/models
    root: str | None = None  # where it is from; None: its name says it
    parent: str | None = None  # the model that it is made of

    @property
    def decoder(self) -> str:
        return DECODERS.name_of(self.recipe.decoder)

    @property
    def max_length(self) -> int:
        """Positions of the longest canvas that this server takes."""
        return self.pipe.engine.max_length

    @cached_property
    def pieces(self) -> Pieces:
        """The text of each token."""
        return Pieces(self.pipe)

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        return max(len(token.encode()) for token in self.pipe.tokenizer.get_vocab())  # type: ignore[union-attr]

    def check_size(self, prompt: str | Sequence[Mapping[str, Any]], field: str, **how: Any) -> int:
        """The bytes of a prompt. Raises ApiError for more than its tokens can have, before anything encodes them.

        `how`: as `Pipeline.encode` takes it. A chat template may leave messages out.
        """
        size = sum(len(text.encode(errors="surrogatepass")) for text in texts_in([prompt, how.get("tools")]))
        most = self.max_length * self._longest
        if size > most and not isinstance(prompt, str):
            size = len(self.pipe.written(prompt, **how).encode())
        if size > most:
            raise self._too_long(field, f" has {size} bytes, and a token at most {self._longest}")
        return size

    def _too_long(self, field: str, what: str) -> ApiError:
        """The error in words that clients know."""
        most = f"This model's maximum context length is {self.max_length} tokens, prompt and answer"
        return invalid(field, f"{what}. {most}.", "context_length_exceeded")

    def _asks(self, asked: Generation) -> tuple[Ask, ...]:
        """What the fields of a request ask of abilities. Raises ApiError."""
        return *self._bias(asked), *([] if asked.cache_salt is None else [Salt.of(asked.cache_salt)])

    def _bias(self, asked: Generation) -> tuple[TokenBias, ...]:
        """What is added to the logits of single tokens, if anything is. Raises ApiError."""
        if wrong := [key for key in asked.logit_bias if not key.isdecimal() or len(key) > SHOWN]:
            raise invalid("logit_bias", f": {', '.join(wrong):.{SHOWN}} must be token ids")
        add = {int(key): value for key, value in asked.logit_bias.items()}
        self.check_tokens("logit_bias", add)
        self.check_tokens("allowed_token_ids", only := asked.allowed_token_ids)
        for word in asked.bad_words:
            ids = [self.pipe.encode(text, chat=False, add_special_tokens=False) for text in (word, f" {word}")]
            if not (single := {one[0] for one in ids if len(one) == 1}):
                raise refused("bad_words", word, "has several tokens, which a canvas may get at once: give one of them")
            add |= dict.fromkeys(single, float("-inf"))
        return (TokenBias((*add.items(),), (*only,)),) if add or only else ()

    def check_tokens(self, field: str, tokens: Iterable[int]) -> None:
        """Raises ApiError for one that the vocabulary lacks."""
        vocab = self.pipe.model.spec.vocab
        if (outside := next((token for token in tokens if not 0 <= token < vocab), None)) is not None:
            raise invalid(field, f": {outside!r:.{SHOWN}} is outside the vocabulary of {vocab}")

    def check_length(self, tokens: int, field: str) -> None:
        """Raises ApiError for more tokens than the model has positions."""
        if tokens > self.max_length:
            raise self._too_long(field, f" needs {tokens} tokens and is longer than the model's context length")

    def truncated(self, prompt: list[int], asked: Generation) -> list[int]:
        """The last or first tokens of a prompt, if the request limits them."""
        if (most := asked.truncate_prompt_tokens) is None:
            return prompt
        if most == -1:
            most = max(self.max_length - (asked.length[1] or self.max_new_tokens), 1)
        return prompt[:most] if asked.truncation_side == "right" else prompt[max(len(prompt) - most, 0) :]

    def options(self, asked: Sampled) -> Resolved:
        """Per-request options, from OpenAI's fields and those under `dinfer`. Raises ApiError."""
        known, chosen, values = [*self.recipe.request_options], dict[str, str](), dict[str, Any]()
        given = [(name, name, value) for name, value in asked.asked.items()]
        given += [(f"dinfer.{name}", name, value) for name, value in (asked.dinfer.model_extra or {}).items()]
        for where, name, value in given:
            full = next((full for full in known if name in (full, full.partition(".")[2])), None)
            if full is None:
                has = [one for one in known if one.partition(".")[2] not in self.recipe.decoder.refuses]
                why = f"is not an option of {self.name!r}. It has {', '.join(has)}, drafts, decoder, deadline."
                raise refused(where, value, why)
            if full in chosen:
                raise invalid(where, f" and {chosen[full]} say the same: give one")
            chosen[full], values[full] = where, value
        try:
            options = self.recipe.resolve(values)
        except ValueError as error:
            for full, where in chosen.items():  # which of them it is
                with at_field(where):
                    self.recipe.resolve({full: values[full]})
            raise invalid("dinfer", f": {error}") from error
        own = self.recipe.sampling_of(options)
        draws = own.get("temperature", 0) and own.get("seed", 0) < 0
        return self.recipe.seeded(options, secrets.randbelow(SEEDS)) if draws else options

    @cached_property
    def marks(self) -> tuple[str, str] | None:
        """What stands around the thoughts of this model, as its chat template tells; None: it has none."""
        template = str(self.pipe.tokenizer.chat_template)  # type: ignore[union-attr]
        return next((marks for marks in THOUGHTS if marks[1] in template), None)

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends within a thought."""
        if self.marks is None:
            return False
        end = str(self.pipe.tokenizer.decode([*prompt[-TAIL:]]))  # type: ignore[union-attr]
        return end.rstrip().endswith(self.marks[0])

    async def languages(self, asked: Sampled, **options: Any) -> list[Language]:
        """What the answers are held to, or each gap. `options`: of `Constraint`. Raises ApiError."""
        if not (each := asked.each_held) and asked.dinfer.posterior:
            raise refused("dinfer.posterior", True, "says how a form is met: give one too, such as response_format")
        options |= {"posterior": asked.dinfer.posterior}
        return [await held.language(lambda: self.pipe.compiler, **options) for held in each]

    async def rows(self, prompts: Sequence[Sequence[int]], asked: Generation) -> list[Request]:
        """A row, of its own seed, for each choice of each prompt; none if no token is wanted. Raises ApiError."""
        # A form is of what stands behind a thought.
        behind = {"after": self.marks[1]} if self.marks and self.thinks(next(iter(prompts), [])) else {}
        options, language = self.options(asked), next(iter(await self.languages(asked, **behind)), None)
        rows: list[Request] = []
        fields: dict[str, Any] = {"asks": self._asks(asked), "stops": not asked.ignore_eos}
        (field, new_tokens), source = asked.length, asked.source
        for prompt in prompts if new_tokens != 0 else ():
            self.check_length(len(prompt) + 1, source)
            room = self.max_length - len(prompt)
            if asked.cap:
                new_tokens = min(new_tokens or room, self.max_new_tokens, room)
            if new_tokens is not None and new_tokens > room:
                what = f"={new_tokens} and {len(prompt)} tokens of {source} are too many: ask for at most {room}"
                raise self._too_long(field, what)
            length = min(self.max_new_tokens, room) if new_tokens is None else new_tokens
            if language is not None and length < language.shortest:
                told = f"={length} is too few: the shortest answer that is accepted has {language.shortest} tokens"
                raise invalid(field, told)
            values = samples(self.recipe, options, asked.n)
            try:
                rows += self.pipe.requests([prompt] * asked.n, length, values, language, **fields)
            except ValueError as error:
                what = str(error).removeprefix("prompt 0").lstrip(": ")
                raise invalid(source, f": {what}") from error
        return rows

    async def gap_rows(
        self, before: str, behind: str, asked: Generation, gap: int | None
    ) -> tuple[list[int], list[Request]]:
        """The tokens around a gap between two texts, and one row for each choice of what stands there.

        `gap`: its positions; None: as many as may be. Raises ApiError.
        """
        if self.pipe.model.spec.attention_block:
            why = "is not supported by this model: it would fill the gap without having seen the text behind it"
            raise ApiError(400, f"suffix {why}", "suffix", "unsupported_value")
        options, languages = self.options(asked), await self.languages(asked)
        each, asks, most = samples(self.recipe, options, asked.n), self._asks(asked), asked.length[1] or GAP
        self.check_size(before + behind, "prompt")

        def made(positions: int, number: int = 0, held: Sequence[Language] = ()) -> Request:
            text = f"{escaped(before)}[MASK:{positions}]{escaped(behind)}"
            return infill_request(self.pipe, text, each[number], held, "gap", asks=asks, stop=not asked.ignore_eos)

        with at_field("suffix"):
            given = (await asyncio.to_thread(made, 1)).length - 1
            self.check_length(given + (gap or 1), "prompt")
            size = gap or min(most, self.max_length - given)
            rows = [await asyncio.to_thread(made, size, number, languages) for number in range(asked.n)]
        return [token for token, open in zip(rows[0].tokens, rows[0].open, strict=True) if not open], rows

    def card(self) -> dict[str, Any]:
        """The entry in /v1/models."""
        recipe = self.recipe
        parts = {"iteration": recipe.iteration, "decoder": recipe.decoder, "cache": recipe.cache}
        offered = {
            info.name: {
                "component": kind,
                "default": (default := values_of(part)[info.name]),
                "integer": isinstance(default, int),
                "help": info.help,
            }
            for kind, part in (("decoder", recipe.decoder), ("sampling", recipe.sampling))
            for info in options_of(part)
            if info.per_request and info.name not in recipe.decoder.refuses
        }
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "dinfer",
            "root": self.root or self.name, "parent": self.parent, "max_model_len": self.max_length,
            "type": "model", "display_name": self.name, "lifecycle": "active",  # Anthropic's, and the next
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created)),
            "dinfer": {
                "max_length": self.max_length,
                "max_new_tokens": self.max_new_tokens,
                "recipe": {kind: str(part) for kind, part in parts.items()},
                "options": offered,
                **{name: value() for name, value in self.told.items()},
            },
        }  # fmt: skip


class Catalogue(dict[str, Served]):
    """The served models by name."""

    def __init__(self) -> None:
        super().__init__()
        self.aliases: Mapping[str, str] = {}  # other names of served models
        self.variants: dict[str, Callable[[Served], Served]] = {}  # of all of them, asked for as MODEL:VARIANT

    def call(self, aliases: Mapping[str, str]) -> None:
        """Gives models other names. Raises ValueError."""
        check_aliases(aliases, self)
        self.aliases = aliases

    @property
    def cards(self) -> list[dict[str, Any]]:
        """The entries in /v1/models."""
        others = [self[name].card() | {"id": alias} for alias, name in self.aliases.items()]
        first = next(iter(self.values()))
        return [
            *(model.card() for model in self.values()),
            *others,
            *(of(first).card() for of in self.variants.values()),
        ]

    @property
    def engines(self) -> dict[str, AsyncEngine]:
        """Each engine once, by the name of its first model."""
        found: dict[str, AsyncEngine] = {}
        for name, model in self.items():
            if model.engine not in found.values():
                found[name] = model.engine
        return found

    def find(self, name: str, decoder: Any = None) -> Served:
        """The model of that name, with `decoder` the recipe of it that has this decoder. Raises ApiError.

        No name is that of the first model, as other servers have it; the answer tells it.
        """
        name = self.aliases.get(name, name) or next(iter(self))
        model, _, variant = name.rpartition(":")
        if name not in self and variant in self.variants and model in {"", *self}:
            return self.variants[variant](self.find(model, decoder))
        if name not in self:
            known = ", ".join([*self, *(f"{next(iter(self))}:{variant}" for variant in self.variants)])
            raise ApiError(404, f"model={name!r:.80} is not served. Served: {known}", "model", "model_not_found")
        family = name.partition(":")[0]
        same = [self[name], *(model for model in self.values() if model.name.partition(":")[0] == family)]
        for served in same:
            if decoder is None or served.decoder == decoder:
                return served
        loaded = ", ".join(dict.fromkeys(model.decoder for model in same))
        raise refused("dinfer.decoder", decoder, f"is not loaded for this model. Loaded: {loaded}")


def catalogue(pipe: Pipeline, recipes: Mapping[str, Recipe], *, max_new_tokens: int, created: int) -> Catalogue:
    """Recipes over the model of one pipeline, by name. They share its weights.

    Recipes that differ only in the defaults of per-request options share an engine, and so its steps. One thread runs
    the rounds of all engines, since they share a device. Raises ValueError for a checkpoint without a tokenizer.
    """
    if pipe.tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer, and clients send text: put a tokenizer.json beside its weights"
        )
    thread = EngineThread()
    made: list[tuple[Any, Pipeline, AsyncEngine]] = []
    served = Catalogue()
    for name, recipe in recipes.items():
        kind: list[Any] = [recipe.iteration, recipe.cache]
        decoding: tuple[Any, ...] = (recipe.decoder, recipe.sampling)
        for part in decoding:
            kind.append(replace(part, **{info.name: info.default for info in options_of(part) if info.per_request}))
        found = next(((own, engine) for other, own, engine in made if other == kind), None)
        if found is None:
            own = pipe if recipe is pipe.recipe else Pipeline(recipe, pipe.tokenizer, pipe.engine.runtime, pipe.origin)
            found = own, AsyncEngine(own.engine, thread)
            made.append((kind, *found))
        served[name] = Served(name, *found, recipe, max_new_tokens, created)
    return served


def warm_up(catalogue: Catalogue, prompt_tokens: int) -> None:
    """Runs requests in every engine, so that memory is allocated, kernels are compiled and graphs captured.

    Prompts are `prompt_tokens` random tokens, or fewer if the model has less room. Their graphs tell drafts, so that
    they serve requests with and without. Requests for log-probabilities or a temperature have graphs of their own,
    which are captured when one comes.
    """
    for served in (catalogue[name] for name in catalogue.engines):
        began = time.perf_counter()
        meet_shapes(served, prompt_tokens, times=2 if served.pipe.engine.runtime.graphs else 1)
        LOG.info("%s: warm after %.1f s", served.name, time.perf_counter() - began)


def tell_memory(catalogue: Catalogue) -> None:
    """Says what the engines take of their card."""
    if (told := provided("memory_told")) is not None:
        for served in (catalogue[name] for name in catalogue.engines):
            LOG.info("%s: %s", served.name, told(served.pipe.engine.loop.worker))


def meet_shapes(served: Served, prompt_tokens: int, *, times: int) -> None:
    """Runs clients that ask at once, that want answers of different lengths, and that ask at random times.

    Rows that enter a block together take other steps than rows that enter one by one. `times`: repetitions, since a
    graph is captured when its shape comes up the second time. No prompt comes twice, since it would share keys.
    """
    pipe, draw = served.pipe, random.Random(0)
    vocab, mask, rows = pipe.model.spec.vocab, pipe.model.spec.mask_id or 0, pipe.engine.runtime.rows
    most = min(served.max_new_tokens, served.max_length - 1)
    size = min(prompt_tokens, served.max_length - most)
    whole, parts = [most] * rows * 2, [max(most * (1 + i % PARTS) // PARTS, 1) for i in range(rows * 2)]
    for lengths, pause in times * [(whole, 0.0), (parts, 0.0), *((whole, pause) for pause in PAUSES)]:
        drawn = (draw.choices(range(1, vocab), k=size) for _ in lengths)
        prompts = [[(mask + token) % vocab for token in tokens] for tokens in drawn]  # without the mask token
        requests = pipe.requests(prompts, lengths, None, stops=False)
        _ask(pipe.engine, requests, rows, pause)


def _ask(engine: Engine, requests: list[Request], clients: int, pause: float) -> None:
    """Each client asks again after its answer and `pause` rounds on average. Raises the error of a request."""
    draw, now, waiting = random.Random(0), 0, requests[::-1]

    def later() -> int:
        return now + (int(draw.expovariate(1 / pause)) if pause else 0)

    due = [later() for _ in range(clients)]
    while waiting or engine.busy:
        while waiting and due and min(due) <= now:
            due.remove(min(due))
            engine.add(waiting.pop(), Wants(deltas="commit", drafts=True))
        now += 1
        for update in engine.step() if engine.busy else ():
            if update.error is not None:
                raise update.error
            if update.completion is not None:
                due.append(later())
