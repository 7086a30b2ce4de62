"""Temperatures of decisions, from a file of decisions whose answers are known.

A line is the body of a request to /v1/decisions, and `answers` beside its `questions`: true or false, the value of a
choice, the number of a level.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from dinfer.lab.calibration import Calibrated, fit
from dinfer.serving.apis.decisions import KINDS, Choice, DecisionRequest, Predicate, Score, decided
from dinfer.serving.errors import ApiError, of_validation
from dinfer.serving.server import Server

LEAST = 20  # labelled questions of a kind: half are fitted, half held out
FLOOR = 1e-30  # of a probability, so that it has a logarithm


@dataclass
class Labelled:
    """Questions of one kind, as the model reads them."""

    logps: list[list[float]] = field(default_factory=list)
    right: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A temperature, and what it does to the questions that it was not fitted on."""

    kind: str
    fitted: int  # questions
    before: Calibrated
    after: Calibrated


def parsed(lines: Iterable[bytes]) -> list[tuple[DecisionRequest, list[int]]]:
    """The requests of a file, and the number of the right option of each question. Raises ValueError."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            answers = body.pop("answers", None)
            asked = DecisionRequest.model_validate(body)
            if not isinstance(answers, list) or len(answers) != len(asked.questions):
                raise ValueError(f"answers must be a list of {len(asked.questions)}, one for each question")
            right = [_number(i, *one) for i, one in enumerate(zip(asked.questions, answers, strict=True))]
        except ValidationError as error:
            errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise ValueError(
                f"line {number}: {of_validation(RequestValidationError(errors, body=body)).message}"
            ) from error
        except ApiError as error:
            raise ValueError(f"line {number}: {error.message}") from error
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        found.append((asked, right))
    return found


def _number(place: int, question: Predicate | Choice | Score, answer: object) -> int:
    """The number of the option that is the answer. Raises ValueError."""
    options: list[object] = [True, False]
    if isinstance(question, Choice):
        options = [one.value for one in question.choices]
    if isinstance(question, Score):
        options = [*range(len(question.levels))]
    for i, option in enumerate(options):
        if type(option) is type(answer) and option == answer:
            return i
    raise ValueError(f"answers.{place}={answer!r:.80} is none of {options!r:.200}")


def calibrated(server: Server, asked: list[tuple[DecisionRequest, list[int]]]) -> list[Fitted]:
    """A temperature for each kind, fitted on every second question; 1 if it loses on the others.

    Raises ValueError and ApiError.
    """
    served, kinds = server.catalogue.find(""), dict[str, Labelled]()

    async def read(request: DecisionRequest) -> list[list[float]]:
        own = request.dinfer.model_copy(update={"temperature": 1.0})
        answers, _, _ = await decided(server, served, request.conversation, request.asked, own)
        return [one.probabilities for one in answers]

    async def each() -> list[list[list[float]]]:
        return await asyncio.gather(*(read(request) for request, _ in asked))

    for (request, right), shares in zip(asked, asyncio.run(each()), strict=True):
        for question, number, row in zip(request.questions, right, shares, strict=True):
            known = kinds.setdefault(KINDS[question.type], Labelled())
            known.logps.append([math.log(max(share, FLOOR)) for share in row])
            known.right.append(number)
    made = []
    for kind, known in sorted(kinds.items()):
        if len(known.right) < LEAST:
            raise ValueError(f"there are {len(known.right)} labelled questions of kind {kind}: give {LEAST} or more")
        temperature = fit(known.logps[::2], known.right[::2])
        held = known.logps[1::2], known.right[1::2]
        made.append(Fitted(kind, len(known.right[::2]), Calibrated.of(*held, 1.0), Calibrated.of(*held, temperature)))
    return made
