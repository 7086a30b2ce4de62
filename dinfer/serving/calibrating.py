"""The form and the temperatures of decisions, from a file of decisions whose answers are known.

A line is the body of a request to /v1/decisions, and `answers` beside its `questions`: true or false, the value of a
choice, the number of a level.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from dinfer.lab.calibration import Calibrated, fit
from dinfer.serving.apis.decisions import KINDS, Choice, DecisionRequest, Predicate, Score, decided
from dinfer.serving.errors import ApiError, validated
from dinfer.serving.server import Server
from dinfer.serving.settings import FORMS

LEAST = 20  # labelled questions of a kind: half are fitted, half held out
FLOOR = 1e-30  # of a probability, so that it has a logarithm


@dataclass
class Labelled:
    """Questions of one kind, as the model reads them."""

    logps: list[list[float]] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def hit(self, number: int) -> bool:
        """Whether the most probable option is right."""
        row = self.logps[number]
        return max(range(len(row)), key=row.__getitem__) == self.right[number]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A temperature, and what it does to the questions that it was not fitted on."""

    kind: str
    fitted: int  # questions
    before: Calibrated
    after: Calibrated


@dataclass(frozen=True, slots=True)
class Found:
    """What a server's `calibration` is to say."""

    form: dict[str, Any]  # empty: the requests say one
    tried: Sequence[tuple[float | str, dict[str, Any]]]  # how often each form is right where it is fitted; or why not
    temperatures: Sequence[Fitted]


def parsed(lines: Iterable[bytes]) -> list[tuple[DecisionRequest, list[int]]]:
    """The requests of a file, and the number of the right option of each question. Raises ValueError."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            answers = body.pop("answers", None)
            asked = validated(DecisionRequest, body)
            if not isinstance(answers, list) or len(answers) != len(asked.questions):
                raise ValueError(f"answers must be a list of {len(asked.questions)}, one for each question")
            right = [_number(i, *one) for i, one in enumerate(zip(asked.questions, answers, strict=True))]
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


def forms(asked: Sequence[DecisionRequest]) -> list[dict[str, Any]]:
    """The forms that are tried: of requests that say none themselves, each there is."""
    if any(request.dinfer.model_fields_set & {*FORMS, "answer"} for request in asked):
        return [{}]
    several = (False, True) if any(len(request.questions) > 1 for request in asked) else (False,)
    return [{"labels": labels, "joint": joint} for labels, joint in product(FORMS["labels"], several)]


def calibrated(server: Server, asked: list[tuple[DecisionRequest, list[int]]]) -> Found:
    """The form that is right most often on every second question, the faster of two alike, and a temperature for
    each kind, fitted on the same questions; 1 if it loses on the others.

    Raises ValueError and ApiError.
    """
    served, failed = server.catalogue.find(""), list[tuple[ApiError, dict[str, Any]]]()
    tried = list[tuple[float, dict[str, Any], dict[str, Labelled]]]()
    counts = Counter(KINDS[question.type] for request, _ in asked for question in request.questions)
    for kind, count in sorted(counts.items()):
        if count < LEAST:
            raise ValueError(f"there are {count} labelled questions of kind {kind}: give {LEAST} or more")

    async def read(request: DecisionRequest, form: dict[str, Any]) -> list[list[float]]:
        own = request.dinfer.model_copy(update={"temperature": 1.0, **form})
        answers, _, _ = await decided(server, served, request.model_copy(update={"dinfer": own}))
        return [one.probabilities for one in answers]

    async def each(form: dict[str, Any]) -> list[list[list[float]]]:
        return await asyncio.gather(*(read(request, form) for request, _ in asked))

    for form in forms([request for request, _ in asked]):
        kinds = defaultdict[str, Labelled](Labelled)
        try:
            found = asyncio.run(each(form))
        except ApiError as error:  # such as options that this form cannot hold
            failed.append((error, form))
            continue
        for (request, right), shares in zip(asked, found, strict=True):
            for question, number, row in zip(request.questions, right, shares, strict=True):
                kinds[KINDS[question.type]].logps.append([math.log(max(share, FLOOR)) for share in row])
                kinds[KINDS[question.type]].right.append(number)
        hits = [one.hit(i) for one in kinds.values() for i in range(0, len(one.right), 2)]
        tried.append((sum(hits) / len(hits), form, kinds))
    if not tried:
        raise failed[0][0]
    _, form, best = max(tried, key=lambda one: (one[0], one[1].get("joint", False)))
    made = []
    for kind, known in sorted(best.items()):
        held = known.logps[1::2], known.right[1::2]
        before, after = (Calibrated.of(*held, t) for t in (1.0, fit(known.logps[::2], known.right[::2])))
        made.append(Fitted(kind, len(known.right[::2]), before, min(before, after, key=lambda one: one.log_loss)))
    told: list[tuple[float | str, dict[str, Any]]] = [(share, one) for share, one, _ in tried]
    told += [(error.message, one) for error, one in failed]
    return Found(form, told, made)
