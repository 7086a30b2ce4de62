"""What callers give a pipeline, ValueError for anything else, and how a session of Python shows what they get."""

import difflib
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypedDict, TypeVar

import torch

from dinfer.core.engine.request import Counts


def is_conversation(prompt: Any) -> bool:
    """A list of messages, each with a role and a content: a text, or a list of parts."""
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    kinds = (("role", str), ("content", str | list))
    return all(isinstance(one, Mapping) and all(isinstance(one.get(k), kind) for k, kind in kinds) for one in prompt)


def encodable(text: str) -> str:
    """The text. Raises ValueError for half of a surrogate pair, which JSON can spell, but which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{text[error.start]!r}, half of a surrogate pair: take it out"  # not the text, which may be a prompt
        raise ValueError(f"must be text, and holds {what}") from error
    return text


class NoTools(ValueError):
    """The chat template would not show the model the tools, calls or results that it is given."""


DEEPEST = 100  # lists and objects in each other


def texts_in(value: Any, left: int = DEEPEST) -> Iterator[str]:
    """All texts in messages or tools, names of fields included. Raises ValueError for what nests too deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        if not left:
            raise ValueError(f"more than {DEEPEST} lists and objects are in each other")
        inside = (one for pair in value.items() for one in pair) if isinstance(value, Mapping) else value
        yield from (text for one in inside for text in texts_in(one, left - 1))


def listed(value: Any, name: str) -> list[Any]:
    """The items of a list, tuple, array or tensor."""
    if (items := _items(value)) is None:
        raise ValueError(f"{name} must be a list, not {value!r:.80}")
    return items


def each(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt: a list of them, or the same for all."""
    if (items := _items(value)) is None:
        return [value] * count
    if len(items) != count:
        raise ValueError(f"{name} has {len(items)} values for {count} prompts: give one, or one for each")
    return items


def _items(value: Any) -> list[Any] | None:
    """The items of what has any in an order; None: it has not."""
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping, Set)):
        return None
    try:
        return list(value)
    except TypeError:  # a tensor or array of one number
        return None


@contextmanager
def named(what: str) -> Iterator[None]:
    """Puts the name of one of several inputs in front of what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{what}: {error}") from error


@contextmanager
def unnumbered(what: str) -> Iterator[None]:
    """Takes the number of the only input from in front of what is wrong with it."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(f"{what} 0: "):
            raise
        raise type(error)(str(error).removeprefix(f"{what} 0: ")) from error


def as_int(value: Any, what: str) -> int:
    """An integer, also of numpy or torch."""
    try:
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what}={value!r} must be an integer") from None


def tokens_of(value: Any, what: str) -> list[int]:
    """Token ids as integers."""
    return [as_int(token, f"{what}: token") for token in listed(value, what)]


class FormKeywords(TypedDict, total=False):
    """What every answer is held to. One of them may be given, and `posterior` beside it."""

    schema: Any  # a pydantic model or another type that pydantic knows, a JSON Schema, or its text
    regex: str
    choice: Sequence[str]
    grammar: str  # Lark or EBNF
    constraint: Any  # of a function of `dinfer.structure`, for its options
    posterior: bool  # an option of every constraint


class Keywords(FormKeywords, total=False):
    """What `generate` takes by keyword, beside every per-request option of the recipe, such as temperature=0.7."""

    n: int  # answers to each prompt
    stop: str | Sequence[str]  # texts at the first of which an answer is cut
    tools: Sequence[Mapping[str, Any]]  # for the chat template, as OpenAI's clients write them
    progress: bool | None  # a bar on stderr; None: for a list, on a terminal


# What users of other libraries write, and what to write here.
REMEDIES = {
    **dict.fromkeys(("max_tokens", "max_length", "max_gen_toks", "max_completion_tokens"), "use max_new_tokens"),
    "num_return_sequences": "use n", "stop_strings": "use stop", "until": "use stop", "torch_dtype": "use dtype",
    "do_sample": "leave it out: temperature=0.7 draws, and temperature=0 does not", "device_map": "use device",
    "sampling_params": "give its fields by name, such as temperature=0.7", "streamer": "use pipe.stream(prompt)",
    "num_beams": "leave it out: there is no beam search", "load_in_8bit": "use quantize='int8'",
    "trust_remote_code": "leave it out: code of a checkpoint is never run", "load_in_4bit": "use quantize='int4'",
    "gen_length": "use max_new_tokens", "block_length": "give load iteration={'block': 8}", "cfg_scale": "use guidance",
    "revision": "use model={'name': NAME, 'revision': REVISION}",
    "tensor_parallel_size": "use runtime=dinfer.Runtime(tensor_parallel=2)",
    "images": "give them to generate, stream, updates, read or rollout, beside a text",
}  # fmt: skip


def refuse_names(function: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises TypeError for a keyword that a function does not take. It says what to write instead."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*known], 1, 0.6)
            usual = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            hint = "only generate does" if name in Keywords.__annotations__ else REMEDIES.get(name, usual)
            raise TypeError(f"{function} takes no {name}: {hint}")


def by_name(function: str, given: Mapping[str, Any], options: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `Keywords`, and per-request options, which may be keywords too. Raises TypeError for other names."""
    own = Keywords.__annotations__.keys()
    refuse_names(function, given, [*own, *options])
    return {k: v for k, v in given.items() if k in own}, {k: v for k, v in given.items() if k not in own}


F = TypeVar("F", bound=Callable[..., Any])


def short(text: str, most: int = 60) -> str:
    """The text as Python writes it, cut."""
    return repr(text if len(text) <= most else f"{text[: most - 1]}…")


def figures(counts: Counts) -> str:
    """What an answer cost, in a line."""
    return (
        f"{counts.tokens} tokens, {counts.forwards} forwards, {counts.tpf:.2f} tokens per forward (TPF), "
        f"{counts.positions_per_committed:.1f} positions per token, {counts.seconds:.2f} s"
    )


def user_errors(function: F) -> F:
    """Lets a ValueError, which bad input causes, begin where the user called. DINFER_DEBUG=1 shows all frames."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        __tracebackhide__ = True  # IPython and pytest leave this frame out
        try:
            return function(*args, **named)
        except ValueError as error:
            if os.environ.get("DINFER_DEBUG", "0") not in ("", "0"):
                raise
            raise error.with_traceback(None) from None

    return call  # type: ignore[return-value]
