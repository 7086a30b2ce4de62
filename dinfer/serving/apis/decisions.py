"""/v1/decisions (OpenAI) and /v1/systemone: how probable the answers to questions are, read and not written.

Each question is one structured read: the conversation, the question with a label before each option, and a slot for
the label; or a slot behind the question's name, or in a text of the client's. The two APIs differ in their words alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from string import ascii_uppercase
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import FastAPI
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from dinfer.core.engine.request import Completion, Counts, Request
from dinfer.lab.calibration import tempered
from dinfer.serving.answers import cost
from dinfer.serving.errors import at_field, invalid, refused
from dinfer.serving.fields import MAX_CHOICES, SEEDS, SWITCHES, Own, Text, readable
from dinfer.serving.forms import Given, Strict
from dinfer.serving.generating import encoded
from dinfer.serving.served import Served
from dinfer.serving.server import Server
from dinfer.serving.settings import Labels
from dinfer.structure.abilities.reading import STEPS
from dinfer.structure.infilling import escaped
from dinfer.structure.questions import MARKER, averaged

PROMPT = 1  # the version of the wording of questions, on which thresholds depend
IGNORED = {"prompt_cache_key", "prompt_cache_options", "safety_identifier"}
Plain = Annotated[Any, AfterValidator(readable)]  # any JSON
Kind = Literal["predicate", "choice", "score"]
KINDS: dict[Kind, str] = {"predicate": "noul", "choice": "choice", "score": "score"}  # System One's names


@dataclass(frozen=True, slots=True)
class Question:
    """A question, whichever API asks it."""

    where: str  # its field
    name: str | None
    kind: Kind
    text: str
    options: Sequence[tuple[str, str]]  # the text and the description of each
    values: bool = False  # an option itself stands in the slot, and not its label

    @property
    def lettered(self) -> bool:
        """Whether a label belongs to a place, and not to an option."""
        return self.kind == "choice" and not self.values

    @property
    def labels(self) -> list[str]:
        """What may stand in the slot."""
        if self.values:
            return [text for text, _ in self.options]
        if self.kind == "predicate":
            return ["yes", "no"]
        if self.kind == "score":
            return [str(i) for i in range(len(self.options))]
        letters = [*ascii_uppercase] if len(self.options) <= 26 else [*map("".join, product(ascii_uppercase, repeat=2))]
        return letters[: len(self.options)]

    @property
    def reply(self) -> str:
        """What the model is to write."""
        if self.values:
            return "one of these"
        if len(self.options) > 26:
            return "the letters of one"
        return {"predicate": "yes or no", "score": "one number"}.get(self.kind, "one letter")

    def written(self, shift: int = 0) -> str:
        """The question and its options. `shift`: of how many the first stand last."""
        lines, count = [self.text] if self.text else [], len(self.options)
        for place in range(count):
            option = (place + shift) % count
            label, (text, about) = self.labels[place if self.lettered else option], self.options[option]
            told = [about] if self.values or self.kind == "predicate" else [text, about]
            if shown := ": ".join(filter(None, told)):
                lines.append(f"{label}) {shown}")
            elif self.values:
                lines.append(label)
        return "\n".join(lines)

    def shares(self, probabilities: Mapping[str, float], shift: int) -> list[float]:
        """The probability of each option, of those of the labels."""
        told = [probabilities[label] for label in self.labels]
        return [told[(i - shift) % len(told)] for i in range(len(told))] if self.lettered else told


class Reads(Own):
    """Our fields, under `dinfer`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    steps: Annotated[int, Field(ge=1, le=STEPS)] = 1
    seeds: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=0, lt=SEEDS - MAX_CHOICES)] = 0
    # Below it, the other seeds are read too; null: all are.
    sure: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    joint: bool | None = None  # all questions in one prompt, all slots in one answer; null: as the server has it
    answer: Text | None = None  # the text around the slots, as [SLOT:name]; nothing is written behind the input then
    # Of a calibration; null: the server's.
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # What stands in a slot. Names: a value, behind the question's name and nothing else. Null: letters, unless the
    # server's calibration says another; values where `answer` has the slots.
    labels: Labels | None = None

    @model_validator(mode="after")
    def _nothing_written(self) -> Self:
        if told := self.model_dump(include={"drafts", "posterior"}, exclude_defaults=True):
            raise refused(f"dinfer.{min(told)}", True, "has no effect here: nothing is written")
        if self.sure is not None and self.seeds == 1:
            raise refused("dinfer.sure", self.sure, "says when no further seed is read: give seeds, too")
        if self.answer is not None and self.labels == "names":
            raise refused("dinfer.labels", self.labels, "is a text around slots, as dinfer.answer is: give one of them")
        return self

    def settled(self, calibration: Mapping[str, Any]) -> Reads:
        """With a server's own form, as far as the request says nothing of its form."""
        if self.answer is not None:
            return self.model_copy(update={"labels": self.labels or "values", "joint": True})
        own = calibration if self.labels is None else {}  # the two belong together
        joint = own.get("joint", False) if self.joint is None else self.joint
        return self.model_copy(update={"labels": self.labels or own.get("labels", "letters"), "joint": joint})


class QuestionText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    prompt_cache_breakpoint: Any = None


class JsonPart(Strict):
    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]
    prompt_cache_breakpoint: Any = None


QuestionContent = Text | list[Annotated[QuestionText | JsonPart, Field(discriminator="type")]]


class QuestionTurn(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: QuestionContent
    phase: Any = None


def _plain(value: Any) -> str:
    """A text as it is, other values as compact JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(one.text if isinstance(one, QuestionText) else _plain(one.data) for one in content)


class Asked(Strict):
    """A question. It tells its options, and what is found of them."""

    instructions: QuestionContent
    name: Text | None = None


class Predicate(Asked):
    type: Literal["predicate"]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [("yes", ""), ("no", "")]

    def told(self, found: Decided) -> dict[str, Any]:
        return {"probability": found.probabilities[0]}


class Option(Strict):
    value: Text | bool
    description: Text | None = None


def _distinct(options: list[Option]) -> list[Option]:
    values = [(type(option.value), option.value) for option in options]
    if repeated := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"{repeated[1]!r:.80} is given twice")
    return options


class Choice(Asked):
    type: Literal["choice"]
    choices: Annotated[list[Option], Field(min_length=2, max_length=255), AfterValidator(_distinct)]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(_plain(one.value), one.description or "") for one in self.choices]

    def told(self, found: Decided) -> dict[str, Any]:
        pairs = zip(self.choices, found.probabilities, strict=True)
        return {
            "confidence": found.confidence("choice"), "choice": self.choices[found.best].value,
            "probabilities": [{"value": one.value, "probability": share} for one, share in pairs],
        }  # fmt: skip


class Level(Strict):
    label: Text
    description: Text | None = None


class Score(Asked):
    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=255)]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(one.label, one.description or "") for one in self.levels]

    def told(self, found: Decided) -> dict[str, Any]:
        levels = enumerate(zip(self.levels, found.probabilities, strict=True))
        return {
            "confidence": found.confidence("score"), "score": found.score,
            "probabilities": [{"value": i, "label": one.label, "probability": share} for i, (one, share) in levels],
        }  # fmt: skip


class DecisionRequest(Given):
    model: str = ""
    input: Text | list[QuestionTurn]
    questions: Annotated[
        list[Annotated[Predicate | Choice | Score, Field(discriminator="type")]], Field(min_length=1, max_length=400)
    ]
    dinfer: Reads = Reads()

    @classmethod
    def checked(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "state" in data:
            raise invalid("state", " is System One's: send this to /v1/systemone", "unsupported_value")
        return {field: value for field, value in data.items() if field not in IGNORED}

    @property
    def conversation(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        roles = {"developer": "system"}
        return [{"role": roles.get(turn.role, turn.role), "content": _text(turn.content)} for turn in self.input]

    @property
    def asked(self) -> list[Question]:
        return [
            Question(f"questions.{i}", one.name, one.type, _text(one.instructions), one.options)
            for i, one in enumerate(self.questions)
        ]


class Judged(Strict):
    """As `Asked`, of System One."""

    kind: ClassVar[Kind]
    instructions: Plain = None

    @property
    def text(self) -> str:
        return _plain(self.instructions)


class Noul(Judged):
    """Whether a statement holds."""

    kind = "predicate"
    type: Literal["noul"]
    criteria: Plain = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.instructions is None and self.criteria is None:
            raise ValueError("needs instructions or criteria: say what is asked")
        return self

    @property
    def text(self) -> str:
        sided = isinstance(self.criteria, dict | None)
        return "\n".join(filter(None, [_plain(self.instructions), "" if sided else _plain(self.criteria)]))

    @property
    def options(self) -> list[tuple[str, str]]:
        sides = self.criteria if isinstance(self.criteria, dict) else {}
        return [("yes", _plain(sides.get("true"))), ("no", _plain(sides.get("false")))]

    def told(self, found: Decided) -> dict[str, Any]:
        return {"noul": found.probabilities[0]}


class SystemChoice(Judged):
    kind = "choice"
    type: Literal["choice"]
    criteria: Annotated[dict[Text, Plain], Field(min_length=1, max_length=255)]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(option, _plain(about)) for option, about in self.criteria.items()]

    def told(self, found: Decided) -> dict[str, Any]:
        options = [*self.criteria]
        return {
            "confidence": found.confidence("choice"), "choice": options[found.best],
            "probabilities": dict(zip(options, found.probabilities, strict=True)),
        }  # fmt: skip


class SystemScore(Judged):
    kind = "score"
    type: Literal["score"]
    criteria: Annotated[list[Plain], Field(min_length=1, max_length=10)]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(_plain(level), "") for level in self.criteria]

    def told(self, found: Decided) -> dict[str, Any]:
        return {
            "confidence": found.confidence("score"), "score": found.score,
            "probabilities": {str(i): share for i, share in enumerate(found.probabilities)},
            "legend": {str(i): level for i, level in enumerate(self.criteria)},
        }  # fmt: skip


class SystemOneRequest(Given):
    """As other servers do, it ignores fields that it does not know."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = ""
    state: Plain
    questions: Annotated[
        dict[Text, Annotated[Noul | SystemChoice | SystemScore, Field(discriminator="type")]], Field(min_length=1)
    ]
    instructions: Text | None = None
    dinfer: Reads = Reads()

    @classmethod
    def checked(cls, data: dict[str, Any]) -> dict[str, Any]:
        for field in ("assets", "images"):
            if data.get(field):
                raise invalid(field, " is not supported: the model reads text alone", "unsupported_value")
        if not isinstance(data.get("state", ""), str | dict | list):
            raise invalid("state", " must be a text, an object or a list")
        own, told = {name: data[name] for name in ("seed", "temperature") if name in data}, data.get("dinfer", {})
        return data | {"dinfer": own | told} if own and isinstance(told, dict) else data

    @property
    def conversation(self) -> list[dict[str, Any]]:
        before = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*before, {"role": "user", "content": _plain(self.state)}]

    @property
    def asked(self) -> list[Question]:
        return [
            Question(f"questions.{name:.60}", name, one.kind, one.text, one.options)
            for name, one in self.questions.items()
        ]


@dataclass(frozen=True, slots=True)
class Decided:
    """What is known of one question."""

    probabilities: list[float]  # of its options, in the order asked
    mass: float = 1.0  # what the model gave the labels together
    errors: list[float] | None = None  # standard errors of the probabilities, over several seeds
    seeds: int = 0  # that were read; 0: there is one option

    @classmethod
    def over(cls, reads: Sequence[tuple[list[float], float]]) -> Decided:
        """The mean of reads, each probabilities and mass."""
        means, errors = averaged([shares for shares, _ in reads])
        return cls(means, statistics.fmean(mass for _, mass in reads), errors, len(reads))

    @property
    def best(self) -> int:
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def score(self) -> float:
        """The mean index."""
        return sum(i * p for i, p in enumerate(self.probabilities))

    def confidence(self, kind: Kind) -> float:
        """0 for options that are alike, 1 for certainty; of a score, how near the others are to the best level."""
        n = len(self.probabilities)
        if n == 1:
            return 1.0
        if kind != "score":
            return (self.probabilities[self.best] - 1 / n) / (1 - 1 / n)
        spread = sum(p * abs(i - self.best) for i, p in enumerate(self.probabilities))
        return max(0.0, 1 - spread / (sum(abs(i - (n - 1) / 2) for i in range(n)) / n))


@dataclass(frozen=True, slots=True)
class Sheet:
    """Questions that are read from one canvas, and the request that reads them."""

    asked: Mapping[int, str]  # numbers of the questions, and the slot of each
    shift: int  # of how many options the first stand last
    prompt: list[int]
    layout: Any
    row: Request

    def shares(self, questions: Sequence[Question], done: Completion) -> dict[int, tuple[list[float], float]]:
        """Probabilities and mass of each question."""
        with at_field(questions[min(self.asked)].where):
            slots = self.layout.reading(self.prompt, [done]).slots
        return {
            number: (questions[number].shares(slots[slot].probabilities, self.shift), slots[slot].mass)
            for number, slot in self.asked.items()
        }


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the questions of one request."""

    server: Server
    served: Served
    turns: list[dict[str, Any]]
    questions: Sequence[Question]
    own: Reads

    @property
    def masked(self) -> bool:
        """Whether the model has a mask token; else every seed is other noise."""
        return self.served.pipe.model.spec.mask_id is not None

    @property
    def asks(self) -> bool:
        """Whether questions are written behind the input."""
        return self.own.answer is None and self.own.labels != "names"

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""
        slots = [self.slot(number) for number in range(len(self.questions))]
        if twice := next((slot for slot in slots if slots.count(slot) > 1), None):
            raise invalid("dinfer.answer", f" needs other names: two questions have the slot {twice!r:.80}")
        if self.own.seeds > 1 and self.masked and not self.asks:
            why = "turns the options that are written; with dinfer.answer and labels=names none are"
            raise refused("dinfer.seeds", self.own.seeds, why)

    def slot(self, number: int) -> str:
        """The name of a question's slot: in an answer of the client's, its own if it has one."""
        own = self.questions[number].name if self.own.answer is not None else None
        return f"{number + 1}" if own is None else own

    def around(self, asked: Sequence[int]) -> str | None:
        """The text around the slots; None: there is one slot alone."""
        if (answer := self.own.answer) is not None:
            for number in {*range(len(self.questions))}.difference(asked):  # it has one option
                answer = answer.replace(
                    f"[SLOT:{self.slot(number)}]", escaped(self.questions[number].labels[0], MARKER)
                )
            return answer
        if self.asks:
            lines = [f"{i}: [SLOT:{self.slot(number)}]" for i, number in enumerate(asked, 1)]
            return "\n".join(lines) if self.own.joint else None
        named = [(self.questions[number].name or self.questions[number].text, self.slot(number)) for number in asked]
        return "\n".join(f"{escaped(name or slot, MARKER)}: [SLOT:{slot}]" for name, slot in named)

    def written(self, asked: Sequence[int], shift: int) -> str:
        """What is asked of the model behind the input."""
        several = [self.questions[number] for number in asked]
        if not self.own.joint:
            return f"{several[0].written(shift)}\nReply with {several[0].reply}.".lstrip("\n")
        told = [f"{i}. {one.written(shift)}" for i, one in enumerate(several, 1)]
        return "\n".join(
            [*told, "Reply with a line for each:", *(f"{i}: {one.reply}" for i, one in enumerate(several, 1))]
        )

    async def sheet(self, asked: Sequence[int], seed: int) -> Sheet:
        """The questions of these numbers. Raises ApiError."""
        turns, where, shift = self.turns, self.questions[asked[0]].where, seed if self.masked and self.asks else 0
        if self.asks:
            said = turns if turns and turns[-1]["role"] == "user" else [*turns, {"role": "user", "content": ""}]
            text = "\n\n".join(filter(None, [said[-1]["content"], self.written(asked, shift)]))
            turns = [*said[:-1], {"role": "user", "content": text}]
        off: dict[str, Any] = dict.fromkeys(SWITCHES, False)
        prompt = await encoded(self.server, self.served, turns, where, variables=off)
        if self.served.thinks(prompt):
            raise refused("model", self.served.name, "begins with a thought that its template cannot leave out")
        named = {number: self.slot(number) for number in asked}
        with at_field(where if self.own.answer is None else "dinfer.answer"):
            slots = {slot: self.questions[number].labels for number, slot in named.items()}
            layout = await asyncio.to_thread(self.served.pipe.layout, self.around(asked), slots, None)
            (row,) = layout.requests(self.served.pipe.engine, prompt, self.own.steps, 1, 0 if self.masked else seed)
        return Sheet(named, shift, prompt, layout, row)

    async def read(self, numbers: Sequence[int], seeds: Sequence[int]) -> tuple[list[Sheet], list[Completion]]:
        """So many reads of these questions. Raises ApiError."""
        groups = [numbers] if self.own.joint else [[number] for number in numbers]
        sheets = [await self.sheet(asked, self.own.seed + seed) for seed in seeds for asked in groups]
        tokens = sum(len(one.prompt) for one in sheets)
        return sheets, await self.server.completions(self.served, [one.row for one in sheets], self.own, tokens)

    def tempered(self, number: int, shares: Sequence[float]) -> list[float]:
        logps = [math.log(share) if share > 0 else -math.inf for share in shares]
        return tempered(logps, self.temperature(self.questions[number].kind))

    def temperature(self, kind: Kind) -> float:
        known = self.server.settings.calibration or {}
        return self.own.temperature or known.get(KINDS[kind], 1.0)


async def decided(
    server: Server, served: Served, body: DecisionRequest | SystemOneRequest
) -> tuple[list[Decided], dict[str, Any], int]:
    """The answers in order, what usage tells under `dinfer`, and the tokens of the prompts. Raises ApiError."""
    own = body.dinfer.settled(server.settings.calibration or {})
    questions = [replace(one, values=own.labels != "letters") for one in body.asked]
    reader = Reader(server, served, body.conversation, questions, own)
    reader.check()
    left = [number for number, one in enumerate(questions) if len(one.options) > 1]
    server.admission.check((1 if own.joint else len(left)) * own.seeds)  # before any of them is encoded
    reads: dict[int, list[tuple[list[float], float]]] = {number: [] for number in left}
    first = 1 if own.sure is not None else own.seeds
    tokens, counts = 0, list[Counts]()
    for seeds in (range(first), range(first, own.seeds)):
        if own.sure is not None and seeds:
            unsure = [number for number in left if not reads[number] or max(reads[number][0][0]) < own.sure]
            left = left if own.joint and unsure else unsure  # of one canvas, all are read
        if not left or not seeds:
            continue
        sheets, done = await reader.read(left, seeds)
        for sheet, completion in zip(sheets, done, strict=True):
            for number, (shares, mass) in sheet.shares(questions, completion).items():
                reads[number].append((reader.tempered(number, shares), mass))
            counts.append(replace(completion.counts, told=()))
        tokens += sum(len(one.prompt) for one in sheets)
    answers = [Decided.over(reads[i]) if i in reads else Decided([1.0]) for i in range(len(questions))]
    told = {
        "mass": [one.mass for one in answers], "seeds": [one.seeds for one in answers],
        "standard_errors": [one.errors for one in answers],
        "temperature": [reader.temperature(one.kind) for one in questions], "prompt_version": PROMPT,
    }  # fmt: skip
    return answers, cost(0, counts) | told, tokens


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/decisions")
    async def decisions(body: DecisionRequest) -> dict[str, Any]:
        """How probable the answers to questions are, like OpenAI's API."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        answers, told, tokens = await decided(server, served, body)
        pairs = zip(body.questions, answers, strict=True)
        shown = [{"type": one.type, "name": one.name, **one.told(found)} for one, found in pairs]
        details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
        return {
            "model": served.name, "answers": shown,
            "usage": {
                "input_tokens": tokens, **details, "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": tokens, "dinfer": told,
            },
        }  # fmt: skip

    @app.post("/v1/systemone")
    async def systemone(body: SystemOneRequest) -> dict[str, Any]:
        """How probable the answers to questions about a state are, as System One's protocol has it."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        answers, told, tokens = await decided(server, served, body)
        found = dict(zip(body.questions, answers, strict=True))
        return {
            "model": served.name,
            "answers": {name: {"type": one.type, **one.told(found[name])} for name, one in body.questions.items()},
            "usage": {"input_tokens": tokens, "output_tokens": 0, "dinfer": told},
            "diagnostics": {name: {"label_mass": one.mass} for name, one in found.items()},
        }  # fmt: skip
