"""An answer as it grows on a terminal, token by token in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable

from dinfer.engine.request import Completion, Counts, Update
from dinfer.pipeline import Pipeline


def write_answer(pipe: Pipeline, prompt: int, updates: Iterable[Update]) -> Completion:
    """Prints the answer while it is decoded; `prompt` is the length of the prompt in tokens."""
    printed = ""
    for update in updates:
        if update.completion is not None:
            text = pipe.decode(update.completion.output)
            print(text.removeprefix(printed) if text.startswith(printed) else f"\n{text}", flush=True)
            return update.completion
        # The last character may still lack bytes that are in tokens to come.
        text = pipe.decode(final_prefix(pipe, prompt, update)).rstrip("\N{REPLACEMENT CHARACTER}")
        if text.startswith(printed):
            print(text.removeprefix(printed), end="", flush=True)
            printed = text
    raise RuntimeError("the engine ended without a completion")


def final_prefix(pipe: Pipeline, prompt: int, update: Update) -> list[int]:
    """The generated tokens before the first mask or stop token; of a decoder that edits, only of finished blocks."""
    end = max(update.region[0] - prompt, 0) if pipe.recipe.decoder.edits else None
    tokens, masked = update.tokens or [], update.masked or []
    prefix: list[int] = []
    for token, open_ in zip(tokens[prompt:][:end], masked[prompt:][:end], strict=True):
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
