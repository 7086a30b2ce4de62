"""The facade: load a model with a recipe, give it text, messages or token ids, get results with their counts."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, Unpack

import torch

import dinfer.core.recipe.presets as presets
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Ask, Completion, Counts, Request, Resolved, Update, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.loading.checkpoint import family_of, load_network, read_config, spec_of
from dinfer.core.loading.files import local, locate
from dinfer.core.models.family import ModelFamily
from dinfer.core.pipeline.inputs import (
    FormKeywords,
    as_int,
    by_name,
    each,
    encodable,
    figures,
    is_conversation,
    listed,
    named,
    refuse_names,
    short,
    tokens_of,
    unnumbered,
    user_errors,
)
from dinfer.core.pipeline.tokenizer import ChatTemplate, TextStream, cut, read_tokenizer
from dinfer.core.provided import needed, provided
from dinfer.core.recipe.recipe import SEEDS, Recipe, compose
from dinfer.core.registry import CACHES, MODELS
from dinfer.core.step.contracts import CachePolicy
from dinfer.core.step.mixins import Pads
from dinfer.core.step.told import TokenLogprob
from dinfer.core.step.window import exact
from dinfer.core.terms.spec import AttentionLayout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_of_forms = partial(needed, what="infill, read, schema, regex, choice, grammar or constraint", layer="structure")
Options = Mapping[str, Any] | Resolved | Sequence[Mapping[str, Any] | Resolved] | None
"""Per-request options by name, or resolved: the same for all prompts, or for each its own."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """One answer.

    `ids` are the generated tokens before the first stop token; `canvas` is prompt and generation as a whole;
    `trace`, if asked for, is the canvas after every step, the mask id (or a draft, or noise) where it was still masked.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    canvas: list[int]
    stopped: bool  # at a stop token; else max_new_tokens ran out
    counts: Counts
    trace: list[list[int]] | None = None
    read: Callable[[str], Any] | None = field(default=None, compare=False, repr=False)  # how `value` is read

    @property
    def value(self) -> Any:
        """What an answer that was held to a constraint says: an instance of the type, the value of its JSON, else the
        text; None: it was not. Raises ValueError if validators of the type's own refuse it."""
        return None if self.read is None else self.read(self.text)

    def __repr__(self) -> str:
        return f"Result({short(self.text)}, {figures(self.counts)})"

    def _repr_html_(self) -> str | None:
        show = provided("as_html")
        return show and show(self.text, self.counts, self.canvas, len(self.prompt_ids), self.trace)


class Pipeline:
    """A model, a recipe and a tokenizer, ready to generate."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None, runtime: Runtime,
        origin: tuple[ModelFamily, Path] | None = None,
    ) -> None:  # fmt: skip
        """`origin`: the family of the checkpoint, and its folder or file, which `save` needs."""
        self.recipe, self.tokenizer, self.origin = recipe, tokenizer, origin
        self.asks: tuple[Ask, ...] = ()  # of every request
        spec = recipe.model.spec
        self.engine = Engine(recipe, runtime)
        _tell_if_inexact(spec.family, spec.attention_layout, recipe.cache, recipe.alignment)

    @property
    def model(self) -> Any:
        return self.recipe.model

    @cached_property
    def weights(self) -> Any:
        """The weights under all engines that run this model, to be changed: `dinfer.rollouts.weights.Weights`."""
        return needed("weights_of", "a change of weights", "rollouts")(self)

    @property
    def updating(self) -> Any:
        """`with pipe.updating(version) as into: into.load(name, tensor)`, see `Weights.updating`."""
        return self.weights.updating

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline cannot be pickled: it has threads and memory of a device. In another process call dinfer.load "
            "there, with the same arguments"
        )

    @user_errors
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model as it is now, trained perhaps, and its tokenizer to a new folder, which `load` takes.

        Adapters must be merged into the weights. Raises ValueError if there is what a checkpoint cannot hold.
        """
        if self.origin is None or self.recipe.ranks.size > 1:
            raise ValueError(
                "save needs a model that dinfer.load read on one card; for one composed in Python use "
                "dinfer.formats.saving.save_network(network, family, folder, config)"
            )
        save = needed("save_checkpoint", "save", "formats")
        save(self.model, *self.origin, self.tokenizer, Path(folder))

    @cached_property
    def compiler(self) -> Any:
        """Compiles what answers are held to. Raises ValueError if no constraint can be guaranteed here."""
        return _of_forms("compiler_of")(self.recipe, self.need_tokenizer())

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self.need_tokenizer())

    def __repr__(self) -> str:
        spec, runtime = self.model.spec, self.engine.runtime
        return (
            f"Pipeline({spec.family} of {spec.layers} layers, {spec.hidden} wide, {self.model.dtype} on "
            f"{self.model.device}; {self.recipe.parts}; {runtime.rows} requests at a time)"
        )

    @user_errors
    def generate(
        self, prompts: Any, *, max_new_tokens: int | Sequence[int] = 128, options: Options = None,
        chat: bool | None = None, trace: bool = False, **more: Any,
    ) -> Any:  # fmt: skip
        """Answers one prompt (returns a Result) or a list of them (returns a list, in order).

        A prompt is a text or a conversation (a list of {"role", "content"}). `chat`: put texts through the
        tokenizer's chat template; None: if it has one. `options`: per-request options, one mapping for all or one
        for each prompt, such as {"threshold": 0.8}. `max_new_tokens`: one number for all, or one for each.

        `more`: per-request options by name, such as temperature=0.7 and seed=1; n=, answers to each prompt, which
        gives lists of n; stop=, texts at the first of which an answer is cut; tools=, for the chat template; images=, a
        path, bytes, a data: URL, an image of Pillow's or a list of them beside a text, and an entry for each of several
        texts; progress=, a bar, by default for lists on a terminal. Without a seed, answers that are drawn differ. With
        seed=s they repeat, and of n the i-th has the seed s + i.

        And what every answer is held to, whatever the model says: schema=, a pydantic model, a JSON Schema or its text;
        regex=; choice=, a list of texts; grammar=, Lark or EBNF; or constraint=, of `dinfer.structure`. With
        posterior=True, tokens are weighed by how probable an accepted answer with them is. The result's `value` is
        then the parsed answer. The model does not see it: say in the prompt what is wanted.

        Raises ValueError for bad input, and NonFiniteLogits or StalledRow for a request that fails.
        """
        single = isinstance(prompts, str) or is_conversation(prompts)
        how: dict[str, Any] = {} if (tools := more.pop("tools", None)) is None else {"tools": tools}
        encode: Callable[[Any], list[int]] = partial(self.encode, chat=True if how else chat, **how)
        if not single and (isinstance(prompts, Mapping) or not isinstance(prompts, Iterable)):
            raise ValueError(f"a prompt is a text, a list of messages, or a list of such prompts, not {prompts!r:.80}")
        prompts = self.seeing(prompts, more, single=single, chat=chat)
        ids = [encode(prompts)] if single else self._each(encode, prompts, "prompt")
        with unnumbered("prompt") if single else nullcontext():
            results = self.generate_ids(ids, max_new_tokens=max_new_tokens, options=options, trace=trace, **more)
        return results[0] if single else results

    @user_errors
    def generate_ids(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int] = 128,
        options: Options = None, trace: bool = False, **more: Any,
    ) -> list[Any]:  # fmt: skip
        """Like `generate`, for prompts that are token ids. Texts are decoded if there is a tokenizer."""
        asked, chosen = self._by_name("generate_ids" if "images" in more else "generate", more)
        n, until, progress = asked.pop("n", None), texts_of(asked.pop("stop", None)), asked.pop("progress", None)
        form = _of_forms("form_of")(asked) if asked else None
        if form is not None and until:
            form = replace(form, constraint=replace(form.constraint, stop=until))
        language = None if form is None else form.language(self.compiler)
        options = joined(options, chosen)
        requests = self.requests(prompts, max_new_tokens, options, language)
        if n is not None:
            count = as_int(n, "n")
            if count < 1:
                raise ValueError(f"n={n} must be at least 1")
            requests = [replace(one, options=o) for one in requests for o in samples(self.recipe, one.options, count)]
        read, results = None if form is None else form.read, list[Result]()
        shown = len(requests) > 1 and sys.stderr.isatty() if progress is None else progress
        bar = (needed("answers_bar", "progress", "cli") if progress else provided("answers_bar")) if shown else None
        for request, (done, snapshots, _) in zip(requests, self.completed(requests, trace, bar=bar), strict=True):
            text, ids, stopped = "" if self.tokenizer is None else self.decode(done.output), done.output, done.stopped
            if until:
                text, kept, found = cut(self.need_tokenizer(), ids, until)
                ids, stopped = ids[:kept], stopped or found
            results.append(Result(text, ids, request.prompt, done.canvas, stopped, done.counts, snapshots, read))
        return results if n is None else [results[i : i + count] for i in range(0, len(results), count)]

    @user_errors
    def rollout(self, prompts: Sequence[Any], **how: Any) -> Any:
        """Samples for a trainer, with what every step did: `dinfer.rollouts.run.rollout` says what it takes."""
        return needed("rollout", "rollout", "rollouts")(self, prompts, **how)

    def _by_name(self, function: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return by_name(function, given, [name.partition(".")[2] for name in self.recipe.request_options])

    @user_errors
    def infill(self, texts: Any, **how: Any) -> Any:
        """Fills the gaps of one text (returns an `Infilled`) or of a list of them (returns a list, in order).

        `[MASK:n]` is a gap of n tokens: `dinfer.structure.infilling.infill` says what it takes. Raises ValueError.
        """
        return _of_forms("infill")(self, texts, **how)

    @user_errors
    def infill_ids(self, canvases: Sequence[Sequence[int]], **how: Any) -> list[Any]:
        """Like `infill`, for canvases of token ids in which the model's mask token stands at every open position."""
        return _of_forms("infill_ids")(self, canvases, **how)

    @user_errors
    def read(self, prompts: Any, answer: str | None = None, **how: Any) -> Any:
        """What the model says in the slots of an answer: `dinfer.structure.questions.read` says what it takes."""
        return _of_forms("read")(self, prompts, answer, **how)

    def layout(self, answer: Any, slots: Any, choice: Any) -> Any:
        """The answer that `read` seeds, in tokens. Raises ValueError if its slots cannot be read."""
        return _of_forms("layout")(self, answer, slots, choice)

    def completed(
        self, requests: list[Request], trace: bool, logprobs: bool = False, bar: Any = None
    ) -> list[tuple[Completion, list[list[int]] | None, list[TokenLogprob] | None]]:
        """The completions in order, and what is asked for: the canvas after every step, logprobs of the output."""
        done: dict[int, Completion] = {}
        traces, heard = ([list[Any]() for _ in requests] for _ in range(2))
        wants = Wants(snapshots=trace, deltas="commit" if logprobs else None, logprobs=logprobs)
        with bar(len(requests)) if bar else nullcontext(lambda: None) as count:
            for update in self.engine.run(requests, wants):
                if update.tokens is not None:
                    traces[update.index].append(update.tokens)
                heard[update.index] += update.logprobs or []
                if update.completion is not None:
                    done[update.index] = update.completion
                    count()
        return [(done[i], traces[i] if trace else None, heard[i] if logprobs else None) for i in range(len(requests))]

    def _one(self, function: str, ids: list[int], new: int, options: Any, more: Mapping[str, Any]) -> list[Request]:
        """One request whose answer is shown as it grows."""
        held, chosen = self._by_name(function, more)
        refuse_names(function, held, [*FormKeywords.__annotations__, *chosen])
        form = _of_forms("form_of")(held) if held else None
        return self.requests([ids], new, joined(options, chosen), form and form.language(self.compiler))

    @user_errors
    def updates(
        self, prompt: Any, *, max_new_tokens: int = 128, options: Mapping[str, Any] | None = None,
        chat: bool | None = None, **more: Any,
    ) -> Generator[Update]:  # fmt: skip
        """The canvas of one prompt after every step. Raises as `generate` does."""
        ids = self.encode(self.seeing(prompt, more, chat=chat), chat=chat)
        requests = self._one("updates", ids, max_new_tokens, options, more)
        return self.engine.run(requests, Wants(snapshots=True))

    @user_errors
    def stream(
        self, prompt: Any, *, max_new_tokens: int = 128, options: Mapping[str, Any] | None = None,
        chat: bool | None = None, **more: Any,
    ) -> TextStream:  # fmt: skip
        """The answer to one prompt as pieces of text, in order, each as soon as no later step can change it.

        Joined, they are the text that `generate` returns. A decoder that edits gives the text of finished blocks.
        Raises as `generate` does.
        """
        ids = self.encode(self.seeing(prompt, more, chat=chat), chat=chat)
        requests = self._one("stream", ids, max_new_tokens, options, more)
        return TextStream(self.engine.run(requests, Wants(deltas="commit")), self.decode)

    @staticmethod
    def seeing(prompts: Any, more: dict[str, Any], *, single: bool = True, chat: bool | None = None) -> Any:
        """One prompt, or several, with their `images`, which it takes out of the keywords. Raises ValueError."""
        images = more.pop("images", None)
        how: dict[str, Any] = {"single": single, "chat": chat}
        return prompts if images is None else needed("images", "images", "families").beside(prompts, images, **how)

    @user_errors
    def encode(self, prompt: Any, *, chat: bool | None = None, **how: Any) -> list[int]:
        """Token ids of a text or of a conversation. Messages are text, even where they spell a special token.

        `how`: `add_special_tokens` for texts; `tools` as OpenAI's clients write them, `add_generation_prompt`,
        `continue_final_message`, and `variables` of the chat template, such as {"enable_thinking": False}, for
        conversations; `images` as for `generate`.
        """
        tokenizer, prompt = self.need_tokenizer(), self.seeing(prompt, how, chat=chat)
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError("the prompt is empty")
            if chat is False or (chat is None and tokenizer.chat_template is None):
                return list(tokenizer(encodable(prompt), **how)["input_ids"])
            prompt = [{"role": "user", "content": prompt}]
        elif not is_conversation(prompt):
            raise ValueError(f"a prompt is a text or a list of messages with 'role' and 'content', not {prompt!r:.80}")
        if tokenizer.chat_template is None:
            raise ValueError("the checkpoint's tokenizer has no chat template: give texts, with chat=None or False")
        if any(not isinstance(message["content"], str) for message in prompt):
            ids: list[int] = needed("encode_parts", "content of parts", "families")(self, self._chat, prompt, **how)
            return ids
        return self._chat.encode(prompt, **how)

    def written(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """The text that the chat template makes of a conversation. Raises ValueError."""
        return self._chat.write(messages, **how)

    def requests(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], options: Options,
        language: Any | None = None, **fields: Any,
    ) -> list[Request]:  # fmt: skip
        """Validated requests, their answers in `language`; every error names the prompt and the field.

        `fields`: of `Request`.
        """
        prompts = listed(prompts, "prompts")
        lengths = each(max_new_tokens, len(prompts), "max_new_tokens")
        values = each({} if options is None else options, len(prompts), "options")
        if all(one is values[0] for one in values[1:]):  # resolved once for all
            values = [self._resolved("prompt 0", one) for one in values[:1]] * len(values)
        triples = zip(prompts, lengths, values, strict=True)
        return [self._request(i, *given, language, **fields) for i, given in enumerate(triples)]

    def _request(
        self, index: int, prompt: Sequence[int], new_tokens: Any, options: Any, language: Any | None,
        asks: tuple[Ask, ...] = (), stops: bool = True,
    ) -> Request:  # fmt: skip
        ids, new_tokens = tokens_of(prompt, f"prompt {index}"), as_int(new_tokens, f"prompt {index}: max_new_tokens")
        if new_tokens < 1:
            raise ValueError(f"prompt {index}: max_new_tokens={new_tokens} must be at least 1")
        if not ids:
            raise ValueError(f"prompt {index}: the prompt is empty: give at least one token")
        room = max(self.engine.max_length - len(ids) - new_tokens, 0)
        iteration = self.recipe.iteration
        padding = min(iteration.padding(new_tokens) if isinstance(iteration, Pads) else 0, room)
        asks += () if (own := provided("asks_of")) is None else own(prompt)
        asks += () if language is None else (_of_forms("answer_in")(language, len(ids), new_tokens),)
        request = Request.behind(ids, new_tokens, padding=padding, asks=asks, stops=stops)
        return self.checked(f"prompt {index}", options, request)

    @staticmethod
    def _each(encode: Callable[[Any], list[int]], values: Any, what: str) -> list[list[int]]:
        """Token ids of each of a list. An error names the one that is wrong."""
        found = []
        for index, value in enumerate(listed(values, f"{what}s")):
            with named(f"{what} {index}"):
                found.append(encode(value))
        return found

    def _resolved(self, what: str, options: Any) -> Resolved:
        """Options as a request takes them. Raises a ValueError that begins with `what`."""
        if isinstance(options, Resolved):
            return options
        if not isinstance(options, Mapping):
            raise ValueError(f"{what}: options must be a mapping of names to values, not {options!r}")
        with named(what):
            return self.recipe.resolve(options)

    def checked(self, what: str, options: Any, request: Request) -> Request:
        """The request with its options. Raises a ValueError that begins with `what` if it can never run."""
        own = seeded(self.recipe, self._resolved(what, options))
        with named(what):
            self.engine.check(request := replace(request, options=own, asks=request.asks + self.asks))
        return request

    def decode(self, ids: list[int]) -> str:
        return str(self.need_tokenizer().decode(ids, skip_special_tokens=True))

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: add its tokenizer.json, or use generate_ids")
        return self.tokenizer


def seeded(recipe: Recipe, options: Resolved, index: int | None = None) -> Resolved:
    """A request's options, with a seed if it draws and nobody has chosen one.

    `index`: of a request in a run that can be repeated, whose seeds are the recipe's and those after it.
    """
    values = recipe.sampling_of(options)
    if values.get("temperature", 0) == 0 or (index is None and values.get("seed", 0) >= 0):
        return options
    return recipe.seeded(options, secrets.randbelow(SEEDS) if index is None else int(max(values["seed"], 0)) + index)


def samples(recipe: Recipe, options: Resolved, count: int) -> list[Resolved]:
    """Options of several answers, which differ by their seeds."""
    seed = max(int(recipe.sampling_of(options).get("seed", 0)), 0)
    return [options, *(recipe.seeded(options, seed + i) for i in range(1, count))]


class RecipeParts(TypedDict, total=False):
    """The components of a recipe but the model."""

    iteration: Any
    decoder: Any
    cache: Any
    sampling: Any


def texts_of(stop: str | Sequence[str] | None) -> list[str]:
    """Stop strings. Raises ValueError."""
    texts = [stop] if isinstance(stop, str) else [] if stop is None else listed(stop, "stop")
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop={stop!r:.80} must be a text or a list of texts, none of them empty")
    return texts


def joined(options: Options, chosen: Mapping[str, Any]) -> Options:
    """Options, and those that were given by keyword, for every prompt. Raises ValueError for what is given twice."""
    if not chosen:
        return options
    if options is not None and not isinstance(options, Mapping):
        return [joined(one, chosen) for one in listed(options, "options")]  # type: ignore[misc]
    if twice := (options or {}).keys() & chosen.keys():
        raise ValueError(f"{min(twice)} is given by keyword and in options: give it once")
    return {**(options or {}), **chosen}


@user_errors
def load(
    model: Any = None,
    *,
    preset: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    runtime: Runtime | None = None,
    **parts: Unpack[RecipeParts],
) -> Pipeline:
    """Loads a model and composes a pipeline.

    Give each component as a name ("threshold"), as a mapping with a `name` and options, or as options alone, which then
    change the usual component of the model.

    `model`: a preset, a hub name, a folder or a GGUF file; with options of its family {"name": FOLDER, "block": 16}, or
    {"name": family, "checkpoint": FOLDER}; None: that of `preset`, or "tiny". `preset`: a name of `dinfer.presets()`,
    whose recipe and options of the family are used. Parts that are not given are those of the preset, of the preset for
    this hub name or folder, or of the family's published recipe, as on the command line. `device`: None takes CUDA if
    there is any. `dtype`: None takes float32 on a CPU and the checkpoint's own elsewhere. `quantize`: "fp8", "int8" or
    "int4" rounds the weights of linear layers and experts (`dinfer.formats.rounding`). `runtime`: None runs up to 32
    requests at a time, as CUDA graphs where the device is CUDA. Raises ValueError for parts or settings that do not
    fit, and CheckpointError, also one, for a checkpoint that cannot be had or read.
    """
    refuse_names("load", parts, [*RecipeParts.__annotations__])
    if runtime is not None and not isinstance(runtime, Runtime):
        raise ValueError(f"runtime={runtime!r:.80} must be a dinfer.Runtime, such as runtime=dinfer.Runtime(rows=8)")
    where = device_of(device)
    if isinstance(dtype, str):
        dtype = dtype_of(dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be a float type, one of {', '.join(DTYPES)}")
    if dtype is None and where.type == "cpu":
        dtype = torch.float32
    family, recipe = _chosen(model, preset)
    folder = locate(family.checkpoint, family.revision)
    run = runtime or Runtime(graphs=where.type == "cuda")
    recipe |= {kind: _part(kind, part, recipe.get(kind)) for kind, part in parts.items()}
    described: Any = SimpleNamespace(spec=spec_of(family, folder))
    composed = compose(described, **recipe)  # parts that do not fit are known before the weights are read
    if run.tensor_parallel > 1:
        divided = needed("divided_network", f"runtime.tensor_parallel={run.tensor_parallel}", "scale")
        network = divided(family, folder, dtype, quantize, run, where)
    else:
        if (where.type == "cuda" or run.memory is not None) and (fits := provided("fits_memory")) is not None:
            fits(family, folder, dtype, quantize, run, where)
        network = load_network(folder, family, dtype=dtype, device=where, quantize=quantize)
    tokenizer = read_tokenizer(folder, family.tokenizer, family.template)
    return Pipeline(composed.over(network), tokenizer, run, (family, folder))


def _part(kind: str, part: Any, usual: Any) -> Any:
    """A part as given. Without a name its options are those of `usual`, that of the preset."""
    if isinstance(part, str):
        return presets.component(kind, part)
    return {**usual, **part} if isinstance(part, Mapping) and "name" not in part and usual else part


def _chosen(model: Any, preset: str | None) -> tuple[Any, dict[str, Any]]:
    """The family of a model, and the components that it is decoded with by default."""
    wanted, more = None if preset is None else presets.preset(preset), dict[str, Any]()
    given = model.get("name") if isinstance(model, Mapping) and "checkpoint" not in model else None
    given = given if isinstance(given, str) and given not in MODELS.names() else ""
    if given in presets.presets() or "/" in given or (given and local(given).exists()):
        more, model = {option: value for option, value in model.items() if option != "name"}, given
    if model is None:
        found = wanted or presets.preset("tiny")
    elif isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        found = presets.named(name) or presets.chosen(name, family_of(read_config(locate(name, more.get("revision")))))
        if wanted is not None:
            found = replace(wanted, model=wanted.model | {"checkpoint": found.model["checkpoint"]})
    else:
        family = MODELS.build(model)
        return family, (wanted or presets.chosen(family.checkpoint, MODELS.name_of(family))).parts()
    return MODELS.build({**found.model, **more}), found.parts()


@cache
def _tell_if_inexact(family: str, layout: AttentionLayout, cache: CachePolicy, alignment: int) -> None:
    """Warns, once, of a cache that changes what a model with an exact one sees."""
    if layout.block and not exact(cache, layout, alignment):
        logging.getLogger(__name__).warning(
            "%s keeps keys that this model (%s) would compute anew, so answers may differ. Exact are cache=none, and "
            "cache=block with iteration=%s, or with blocks that end where the model's attention blocks do",
            CACHES.called(cache), family, "multi_block" if layout.prompt else "block_diffusion",
        )  # fmt: skip


def dtype_of(name: str) -> torch.dtype:
    """The type with this name. Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not known; use one of {', '.join(DTYPES)}, or quantize= to round")
    return DTYPES[name]


def device_of(device: str | torch.device | None) -> torch.device:
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not known; use cpu, cuda or cuda:0") from error
    if where.type not in ("cpu", "cuda") or (where.type == "cpu" and where.index):
        why = " (steps need float64, which Metal lacks)" if where.type == "mps" else ""
        raise ValueError(f"device={str(where)!r} cannot be used{why}; use cpu, cuda or cuda:0")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(where)!r}: torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices"
        )
    return where
