"""The canvas after a step, for viewers: the text of every position, and where it came from."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from dinfer.analysis.trace.pieces import Pieces
from dinfer.engine.request import Completion, Update
from dinfer.pipeline import Pipeline
from dinfer.step.contracts import Phase


class Origin(Enum):
    """Where a position's token came from."""

    PROMPT = "prompt"
    MASK = "masked"
    FRESH = "decoded in this step"
    OLD = "decoded before"
    STOP = "stop token"


@dataclass(frozen=True, slots=True)
class Cell:
    """One position of the generation, or the text of the prompt."""

    origin: Origin
    text: str
    active: bool = False  # in the block that the step worked on


@dataclass(frozen=True, slots=True)
class Frame:
    """The canvas after one step."""

    cells: list[Cell]
    step: int
    phase: Phase  # what the step computed
    block: tuple[int, int]  # [start, end) of the active block, counted from the first generated token
    fresh: int  # tokens that the step decoded
    decoded: int  # tokens decoded so far
    length: int  # of the generation
    completion: Completion | None


def frames(pipe: Pipeline, prompt_ids: list[int], updates: Iterable[Update]) -> Iterator[Frame]:
    """One frame for each step."""
    prompt, stop_ids = len(prompt_ids), pipe.model.spec.stop_ids
    pieces = Pieces(pipe)
    before: list[bool] | None = None
    for update in updates:
        tokens, masked = update.tokens or [], update.masked or []
        before = before or [True] * len(masked)
        cells = [Cell(Origin.PROMPT, pipe.decode(prompt_ids))]
        for position in range(prompt, len(tokens)):
            token = tokens[position]
            fresh = before[position] and not masked[position]
            origin = Origin.FRESH if fresh else Origin.OLD
            if masked[position]:
                origin = Origin.MASK
            elif token in stop_ids:
                origin = Origin.STOP
            text = "" if masked[position] else pieces.of(token)
            cells.append(Cell(origin, text, update.region[0] <= position < update.region[1]))
        left = sum(masked[prompt:])
        yield Frame(
            cells=cells,
            step=update.forwards,
            phase=update.phase,
            block=(max(update.region[0] - prompt, 0), update.region[1] - prompt),
            fresh=sum(before[prompt:]) - left,
            decoded=len(tokens) - prompt - left,
            length=len(tokens) - prompt,
            completion=update.completion,
        )
        before = masked
