"""Prints an answer on a terminal while it is decoded, in the order of the text."""

from pathlib import Path

from dinfer.cli.terminal import say
from dinfer.engine.request import Completion, Counts
from dinfer.loading.hub import datasets_of
from dinfer.pipeline import Pipeline, TextStream


def write_answer(pieces: TextStream) -> Completion:
    """Prints the answer while it is decoded."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
    if pieces.completion is None:
        raise RuntimeError("the engine ended without a completion")
    return pieces.completion


def summary(counts: Counts) -> str:
    """One line about what an answer cost."""
    return (
        f"{counts.tokens} tokens, {counts.forwards} forwards, {counts.tpf:.2f} tokens per forward (TPF), "
        f"{counts.seconds:.2f} s"
    )


def explain_empty(pipe: Pipeline, counts: Counts) -> None:
    """Says so on stderr if the model ended its answer at once. Else a user may take the empty answer for a failure."""
    if counts.tokens or pipe.tokenizer is None:
        return
    trained = ", ".join(datasets_of(Path(pipe.tokenizer.name_or_path)))
    known = f" Its card says that it was trained on: {trained}." if trained else ""
    say(f"The answer is empty: the model ended it at once, with a stop token.{known}")
