"""An answer as it grows: the longest prefix of the generation in which no mask is left."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from dinfer.engine.request import Completion, Counts, Update
from dinfer.pipeline import Pipeline


def write_answer(pipe: Pipeline, prompt: int, updates: Iterable[Update]) -> Completion:
    """Prints the answer while it is decoded; `prompt` is the length of the prompt in tokens."""
    printed = ""
    for update in updates:
        if update.completion is not None:
            text = pipe.decode(update.completion.output)
            # An editing decoder may have changed what is on the screen already.
            sys.stdout.write(text[len(printed) :] if text.startswith(printed) else f"\n{text}")
            sys.stdout.write("\n")
            sys.stdout.flush()
            return update.completion
        # The last character may still lack bytes that are in tokens to come.
        text = pipe.decode(decoded_prefix(pipe, prompt, update)).rstrip("\N{REPLACEMENT CHARACTER}")
        if text.startswith(printed):
            sys.stdout.write(text[len(printed) :])
            sys.stdout.flush()
            printed = text
    raise RuntimeError("the engine ended without a completion")


def decoded_prefix(pipe: Pipeline, prompt: int, update: Update) -> list[int]:
    """The generated tokens before the first mask or stop token."""
    prefix: list[int] = []
    tokens, masked = update.tokens or [], update.masked or []
    for token, open_ in zip(tokens[prompt:], masked[prompt:], strict=True):
        if open_ or token in pipe.model.spec.stop_ids:
            break
        prefix.append(token)
    return prefix


def summary(counts: Counts) -> str:
    """One line about what an answer cost."""
    return (
        f"{counts.tokens} tokens, {counts.forwards} forwards, {counts.tpf:.2f} tokens per forward (TPF), "
        f"{counts.seconds:.2f} s"
    )
