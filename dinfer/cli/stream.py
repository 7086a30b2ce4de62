"""Prints an answer on a terminal while it is decoded, in the order of the text."""

from dinfer.engine.request import Completion, Counts
from dinfer.pipeline import TextStream


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
