"""Reads a task's `generation_kwargs`: stop strings, a length, and per-request options of the recipe."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from dinfer.recipe.recipe import Recipe
from dinfer.recipe.registry import unknown

DEFAULT_LENGTH = 128
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
OURS = ("until", "do_sample", "temperature", "infill", *LENGTHS)


@dataclass(frozen=True, slots=True)
class GenKwargs:
    """A task's settings of generation, which all its requests share."""

    until: list[str]  # stop strings
    new_tokens: int
    infill: bool = False  # fill a gap of `new_tokens`, or of the document's `gap`, before its `suffix`
    sampled: bool = False  # repeats of a request differ
    options: dict[str, Any] = field(default_factory=dict)  # per-request options of the recipe


def parse(kwargs: Mapping[str, Any], recipe: Recipe, new_tokens: int | None) -> GenKwargs:
    """Reads `generation_kwargs`. `new_tokens` replaces the task's length; None: it does not.

    Raises ValueError for a wrong value, or a name that is neither lm-eval's nor a per-request option.
    """
    known = [name for option in recipe.request_options for name in (option.name, f"{option.kind}.{option.name}")]
    for name in kwargs:
        if name not in (*OURS, *known):
            raise unknown("name in gen_kwargs:", name, sorted({*OURS, *known}))
    for name in LENGTHS:
        if name in kwargs and (type(kwargs[name]) is not int or kwargs[name] < 1):
            raise ValueError(f"gen_kwargs: {name}={kwargs[name]!r} must be an integer, at least 1")
    until = kwargs.get("until") or []
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list) or not all(isinstance(text, str) for text in until):
        raise ValueError(f"gen_kwargs: until={until!r} must be a text or a list of texts")
    for name in ("do_sample", "infill"):
        if type(kwargs.get(name, False)) is not bool:
            raise ValueError(f"gen_kwargs: {name}={kwargs[name]!r} must be true or false")
    if type(kwargs.get("temperature", 0.0)) not in (int, float):
        raise ValueError(f"gen_kwargs: temperature={kwargs['temperature']!r} must be a number")
    normal = normalize_gen_kwargs(dict(kwargs), DEFAULT_LENGTH)
    options = {name: value for name, value in kwargs.items() if name not in OURS}
    temperature = recipe.sampling_of([]).get("temperature", 0.0)
    if normal["do_sample"] and "temperature" in kwargs:
        options["sampling.temperature"] = temperature = float(kwargs["temperature"])
    elif not normal["do_sample"] and temperature > 0 and ("do_sample" in kwargs or "temperature" in kwargs):
        raise ValueError(
            f"the task asks for greedy decoding, but sampling.temperature={temperature}. Leave that at 0, or give the "
            f"temperature to the task: gen_kwargs={{do_sample: true, temperature: {temperature}}}"
        )
    return GenKwargs(
        until=[text for text in until if text],
        new_tokens=new_tokens or normal["max_gen_toks"],
        infill=kwargs.get("infill", False),
        sampled=temperature > 0,
        options=options,
    )


def cut(tokenizer: Any, ids: list[int], until: list[str]) -> tuple[str, int, bool]:
    """The text before the first stop string, the number of tokens wholly in it, and whether there was a stop string.

    Stop strings may name special tokens, but the text has none.
    """
    raw = tokenizer.decode(ids, skip_special_tokens=False)
    ends = [raw.find(text) for text in until if text in raw]
    if not ends:
        return str(tokenizer.decode(ids, skip_special_tokens=True)), len(ids), False
    text = raw[: min(ends)]
    kept = bisect_right(
        range(len(ids) + 1), len(text), key=lambda n: len(tokenizer.decode(ids[:n], skip_special_tokens=False))
    )
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text, kept - 1, True
