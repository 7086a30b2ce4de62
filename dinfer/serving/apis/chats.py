"""/v1/chat/completions: answers to conversations, as OpenAI's API gives them, and /v1/trace, which shows one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import FastAPI, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dinfer.lab.trace.record import document, page, record_request
from dinfer.serving.answers import Part, id_of
from dinfer.serving.apis.completions import Completion
from dinfer.serving.errors import ApiError, at_field, invalid, of_deadline, refused, spelled, validated
from dinfer.serving.fields import (
    MAX_CHOICES,
    NO_THOUGHT,
    SWITCHES,
    Conversation,
    Generation,
    Sampled,
    Scored,
    Stop,
    readable,
)
from dinfer.serving.forms import Held, HeldFields, Strict
from dinfer.serving.generating import encoded, generated
from dinfer.serving.pictures import joined
from dinfer.serving.rows import Event, failure
from dinfer.serving.served import Served
from dinfer.serving.server import Server
from dinfer.structure import functions_of
from dinfer.structure import tools as calling


def _shown(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    readable(tools)
    return [{key: value for key, value in tool.items() if key != "cache_control"} for tool in tools]


Tools = Annotated[list[dict[str, Any]], AfterValidator(_shown)]


class FunctionName(Strict):
    name: str


class NamedFunction(Strict):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)]


class AllowedTools(Strict):
    """A `tool_choice` of some functions. The model is shown the others too, and cannot call them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class ToolFields(HeldFields):
    """Fields of a chat whose answer may call functions."""

    tools: Tools | None = None  # the chat template gets them as they are
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None,
        BeforeValidator(lambda choice: "required" if choice == "any" else choice),  # Mistral's clients say any
    ] = None
    parallel_tool_calls: bool = True

    @property
    def named(self) -> str | None:
        """The function that the answer must call."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedFunction) else None

    @property
    def choice(self) -> str:
        """auto, required, or the name of a function."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice if isinstance(self.tool_choice, str) else self.named or "auto"

    @property
    def functions(self) -> Mapping[str, dict[str, Any] | None]:
        """The parameters of each function that may be called. Raises ApiError."""
        with at_field("tools"):
            known = functions_of(self.tools or [])
        if not isinstance(self.tool_choice, AllowedTools):
            return known
        names = [one.function.name for one in self.tool_choice.allowed_tools.tools]
        for i, name in enumerate(names):
            if known and name not in known:
                where = f"tool_choice.allowed_tools.tools.{i}.function.name"
                raise invalid(where, f"={name!r:.80} is none of the functions: {', '.join(known):.80}")
        return {name: known[name] for name in names if known}

    @property
    def held(self) -> Held | None:
        """Calls, or what an answer without calls is held to. Raises ApiError."""
        form, choice, functions = self.form(), self.choice, self.functions
        if self.named is not None and self.named not in functions:
            known = ", ".join(functions) or "no tools"
            raise invalid(
                "tool_choice.function.name",
                f"={self.named!r:.80}: Tool {self.named!r:.80} not found in tools list: {known:.80}",
            )
        if not functions:
            if self.tool_choice is not None:
                raise refused("tool_choice", choice, "needs tools: say which functions there are")
            return form
        if form is not None and form.constraint.kind != "json_schema":
            what = f"tool_choice={choice!r:.80}" if choice != "auto" else "tools"
            raise ApiError(400, f"{form.field} and {what} are both given: leave one out", form.field, "invalid_value")
        # A form is of the text beside calls, and an answer that must call has none.
        content = None if form is None or choice != "auto" else json.loads(form.constraint.text)
        # Text ends at a stop string; all else must be without one.
        stops: dict[str, Any] = {"ends" if choice == "auto" and content is None else "stop": tuple(self.stops)}
        with at_field("tools"):
            made = calling(functions, choice, parallel=self.parallel_tool_calls, content=content, **stops)
            return Held("tools", made)


class ChatRequest(Conversation, ToolFields, Scored, Generation):
    source = "messages"
    aliases: ClassVar = {"random_seed": "seed"}  # Mistral's

    include_reasoning: bool = True  # a thought is told apart from the answer; False: the text is left whole
    separate_reasoning: bool = True  # the same
    reasoning_effort: Literal["none", "instant", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid(
                "max_completion_tokens",
                f"={self.max_completion_tokens} and max_tokens={self.max_tokens} contradict each other: give one",
            )
        return self

    @property
    def divided(self) -> bool:
        return self.include_reasoning and self.separate_reasoning

    @property
    def callable(self) -> list[str]:
        return [*self.functions] if self.named is None else [self.named]

    @property
    def free(self) -> bool:
        return bool(self.tools) and self.choice == "auto" and self.form() is None

    @property
    def echoed(self) -> str:
        """What each answer begins with: the last message if it is the assistant's and `echo` asks for it."""
        last = self.messages[-1].plain()
        return last["content"] if self.echo and last["role"] == "assistant" else ""

    @property
    def variables(self) -> Mapping[str, Any]:
        """Effort and verbosity are hints: they have an effect where the template reads them."""
        effort, told = self.reasoning_effort, dict[str, Any]()
        if effort is not None:
            told = dict.fromkeys(SWITCHES, effort not in NO_THOUGHT) | {"reasoning_effort": effort}
        return told | ({"verbosity": self.verbosity} if self.verbosity else {}) | self.chat_template_kwargs

    @property
    def length(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().length
        return "max_completion_tokens", self.max_completion_tokens


class CappedRequest(ChatRequest):
    """What other APIs make of their requests. `max_tokens` is the most that the answer may have, not its length."""

    cap = True
    stop: Annotated[list[Stop], Field(max_length=16)] = []


def canonical(body: dict[str, Any]) -> CappedRequest:
    """The chat of a body whose fields are those of a chat. Raises ApiError."""
    body = {field: value for field, value in body.items() if value is not None}
    own = body.pop("dinfer")
    return validated(CappedRequest, body).model_copy(update={"dinfer": own})


class ChatBatch(BaseModel):
    """vLLM's: several conversations, and one set of the other fields of a chat."""

    model_config = ConfigDict(extra="allow")
    model: str = ""
    messages: Annotated[list[list[Any]], Field(min_length=1, max_length=MAX_CHOICES)]

    @property
    def each(self) -> list[ChatRequest]:
        """A chat for each conversation. Raises ApiError."""
        shared = {"model": self.model} | (self.model_extra or {})
        for field, most in (("stream", False), ("n", 1)):
            if shared.get(field) not in (None, most):
                raise refused(field, shared[field], "is not supported here: a choice is the answer to a conversation.")
        made = []
        for number, one in enumerate(self.messages):
            with spelled({"messages": f"messages.{number}"}):
                made.append(validated(ChatRequest, shared | {"messages": one}))
        return made


def placed(served: Served, asked: ChatRequest) -> list[dict[str, Any]]:
    """The conversation, with system messages where the chat template takes them.

    Clients put them anywhere. A template that refuses one at its place finds its text in the message before it.
    """
    told = asked.conversation

    def taken(turns: list[dict[str, Any]]) -> bool:
        try:
            return bool(served.pipe.written(turns, tools=asked.tools, **asked.ending))
        except ValueError:
            return False

    return next(filter(taken, (told, _folded(told, 1), _folded(told, 0))), told)


def _folded(turns: Sequence[dict[str, Any]], since: int) -> list[dict[str, Any]]:
    """The messages with system messages, from number `since` on, as text of the user's before them, or else after."""
    made, early = list[dict[str, Any]](), list[str]()
    for i, turn in enumerate(turns):
        before = next((one for one in reversed(made) if one["role"] == "user"), None)
        if turn["role"] == "system" and i >= since:
            if before is None:
                early.append(turn["content"])
            else:
                before["content"] = joined(before["content"], turn["content"])
            continue
        turn = dict(turn)
        if early and turn["role"] == "user":
            turn["content"], early = joined("\n\n".join(early), turn["content"]), []
        made.append(turn)
    return made


HINTS = "include_reasoning", "separate_reasoning", "reasoning_effort", "verbosity"


class TraceRequest(ChatRequest):
    """A chat with one answer, whose whole denoising is shown."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        kinds: list[type[BaseModel]] = [Conversation, Sampled, HeldFields]
        shown = {
            "max_tokens",
            "max_completion_tokens",
            *HINTS,
            *(field for kind in kinds for field in kind.model_fields),
        }
        for field, value in self.model_dump(exclude=shown, exclude_defaults=True).items():
            if value is not False:
                raise refused(field, value, "is not supported here: a trace shows the whole denoising of one answer.")
        return self


THOUGHTS = "reasoning_content", "reasoning"  # clients read one or the other


class Chat(Completion):
    """OpenAI's objects of a chat."""

    asked: ChatRequest
    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    empty = {"delta": {}}
    no_ids: dict[str, Any] = {}

    @property
    def blank(self) -> str | None:
        """The content of a message that has none yet."""
        return None if self.asked.tools else ""

    def whole(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": self.answer.prompts[0]} if self.asked.return_token_ids else {}
        return super().whole() | self.of_prompt(0) | ids

    def said(self, row: int) -> dict[str, Any]:
        choice = self.answer.choices[row]
        calls = [
            {"id": self._call_id(row, i), "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(choice.calls)
        ]
        thought = {name: choice.thought for name in THOUGHTS} if choice.thought else {}
        message = {"role": "assistant", "content": choice.said or self.blank, **thought}
        return {"message": message | ({"tool_calls": calls} if calls else {}) | {"refusal": None}}

    def scores(self, ids: Sequence[int], told: Any, offset: int) -> dict[str, Any] | None:
        shown = self.shown.logprobs
        return None if shown is None else {"content": shown.of_chat(ids, told), "refusal": None}

    def body(self, row: int, part: Part) -> dict[str, Any] | None:
        call: dict[str, Any]
        match part.kind:
            case "thought":
                return {"delta": {name: part.text for name in THOUGHTS}}
            case "text":
                return {"delta": {"content": part.text}}
            case "call":
                function = {"name": part.text, "arguments": ""}
                call = {"id": self._call_id(row, part.call), "type": "function", "function": function}
            case "arguments":
                call = {"function": {"arguments": part.text}}
        return {"delta": {"tool_calls": [{"index": part.call, **call}]}}

    def finish(self, row: int) -> str | None:
        found = super().finish(row)
        return found if found != "calls" else "stop" if self.asked.named else "tool_calls"

    def opening(self) -> list[dict[str, Any]]:
        """The role, what is certain already, and what is echoed."""
        made = []
        for row in range(len(self.answer.choices)):
            made.append(self.piece(row, {"delta": {"role": "assistant", "content": self.blank}}))
            certain = (self.body(row, part) for part in self.answer.take(Event(row)))
            made += [self.piece(row, body) for body in certain if body is not None]
        return made + super().opening()

    def _call_id(self, row: int, index: int) -> str:
        return id_of("call", self.id, row, index)


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        """Answers a conversation, whole or as server-sent events, like OpenAI's API."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        prompt = await encoded(server, served, body.conversation, "messages", tools=body.tools, **body.ending)
        echoes = [Event(row, body.echoed) for row in range(body.n)] if body.echoed else []
        return await generated(server, served, body, [prompt], Chat, body.top, echoes)

    @app.post("/v1/chat/completions/batch")
    async def batch(body: ChatBatch) -> Response:
        """Answers several conversations, a choice for each, like vLLM."""
        each = body.each
        served = server.catalogue.find(body.model, each[0].dinfer.decoder)
        server.admission.check(len(each))  # before any of them is encoded
        prompts = [
            await encoded(server, served, one.conversation, f"messages.{i}", tools=one.tools, **one.ending)
            for i, one in enumerate(each)
        ]
        echoes = [Event(row, one.echoed) for row, one in enumerate(each)] if any(one.echoed for one in each) else []
        return await generated(server, served, each[0], prompts, Chat, each[0].top, echoes)

    @app.post("/v1/trace")
    async def trace(body: TraceRequest) -> Response:
        """Denoises an answer step by step and returns the page that plays it, like `dinfer trace`."""
        served = server.catalogue.find(body.model, body.dinfer.decoder)
        server.check()
        prompt = await encoded(server, served, body.conversation, "messages", images=False, **body.ending)
        rows, unwanted = await served.rows([prompt], body), threading.Event()
        seconds = server.seconds(body.dinfer)
        record = partial(record_request, served.pipe, rows[0], model=served.name, unwanted=unwanted)
        with of_deadline(body.dinfer), server.admission.admit([rows[0].length]):
            try:  # one trace at a time, since it runs beside the engine
                async with asyncio.timeout(seconds):
                    found = await server.recording.run(record)
            except Exception as error:
                raise failure(error) from error
            finally:
                unwanted.set()
        return Response(page(document(body.conversation[-1]["content"], [found])), media_type="text/html")
