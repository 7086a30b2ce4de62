"""/v1/responses: OpenAI's newer API, as far as a server can speak it that keeps nothing between two requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import AfterValidator, Field

from dinfer.serving.answers import Answer, Blocks, Part, id_of
from dinfer.serving.apis.chats import CappedRequest, canonical, placed
from dinfer.serving.errors import ApiError, invalid, refused, spelled
from dinfer.serving.fields import MAX_STOPS, MAX_TOP_LOGPROBS, Own, Stop, Text, readable
from dinfer.serving.forms import Given, Grammar, NamedSchema, Pattern, Returned, Strict
from dinfer.serving.generating import Shown, encoded, generated
from dinfer.serving.pictures import ImagePart, content_of, objects_in, opened_in
from dinfer.serving.rows import Event
from dinfer.serving.served import Served
from dinfer.serving.server import Server

NO_STATE = "is not supported: this server keeps no state. Send all items in input"
STATEFUL = (
    "previous_response_id", "conversation", "prompt", "context_management", "background", "background_options",
    "moderation", "access_programs", "image",
)  # fmt: skip
IGNORED = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "store",
    "include", "max_tool_calls", "client_metadata",
)  # fmt: skip
# Fields of a chat, and what they are called here.
NAMES = {
    "response_format.json_schema.schema": "text.format.schema", "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name", "messages": "input",
    r"tool_choice\.allowed_tools\.tools\.(\d+)\.function": r"tool_choice.tools.\1", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
}  # fmt: skip
TEXTS = ("input_text", "output_text", "text", "refusal")
CUT = {"length": "max_output_tokens", "abort": "aborted"}  # why an answer is incomplete


class TextPart(Returned):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text = ""
    refusal: Text = ""


Content = Text | list[TextPart | ImagePart]


class Turn(Returned):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(Returned):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    namespace: Text | None = None


class CallOutput(Returned):
    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ThoughtText(Returned):
    type: Literal["reasoning_text"]
    text: Text


class Reasoning(Returned):
    type: Literal["reasoning"]
    content: list[ThoughtText] | None = None


Items = list[Annotated[Turn | FunctionCall | CallOutput | Reasoning, Field(discriminator="type")]]


class FunctionTool(Strict):
    type: Literal["function"]
    name: Annotated[Text, Field(min_length=1)]
    parameters: Annotated[dict[str, Any] | None, AfterValidator(readable)] = None
    description: Text | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class Namespace(Strict):
    """Functions under one name, as Codex sends them."""

    type: Literal["namespace"]
    name: Annotated[Text, Field(min_length=1)]
    description: Text | None = None
    tools: list[FunctionTool]


class OfflineSearch(Returned):
    """A search that may not leave the server, as Codex offers it. The model is not told of it: nothing is there."""

    type: Literal["web_search"]


class Named(Strict):
    type: Literal["function"]
    name: Text


class Allowed(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Named], Field(min_length=1)]


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


TextFormat = Annotated[PlainFormat | SchemaFormat | Pattern | Grammar, Field(discriminator="type")]


class TextOptions(Strict):
    format: TextFormat = PlainFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class StreamOptions(Strict):
    include_obfuscation: bool | None = None  # no event has the field, either way


SAMPLING = {"top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens", "cache_salt"}


class ResponsesRequest(Given):
    model: str = ""
    input: Text | Items
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[Annotated[FunctionTool | Namespace | OfflineSearch, Field(discriminator="type")]] = []
    tool_choice: Annotated[Literal["auto", "none", "required"] | Named | Allowed, Field(union_mode="smart")] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[dict[Text, Text], Field(max_length=16)] = {}
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: dict[Text, Any] = {}
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    seed: int | None = None
    top_k: Any = None  # this and the next are vLLM's; the chat checks them
    min_p: Any = None
    repetition_penalty: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    min_tokens: Any = None
    cache_salt: Any = None
    dinfer: Own = Own()

    @classmethod
    def checked(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = {field: value for field, value in data.items() if field not in IGNORED}
        for field in STATEFUL:
            if data.pop(field, None):
                raise invalid(field, f" {NO_STATE}", "unsupported_value")
        for i, tool in objects_in(data.get("tools")):
            offline = tool.get("type") == "web_search" and tool.get("external_web_access") is False
            if tool.get("type") not in ("function", "namespace") and not offline:
                raise refused(f"tools.{i}.type", tool.get("type"), "is not supported: tools are functions")
        if isinstance(items := data.get("input"), list):
            checked = [_checked(f"input.{n}", item) for n, item in enumerate(items)]
            data["input"] = opened_in(checked, "input")
        return data

    def chat(self, dropped: int = 0) -> CappedRequest:
        """The same as a chat, without the first so many items. Raises ApiError."""
        form: Any = self.text.format.model_dump(by_alias=True, exclude_none=True)
        if form["type"] == "json_schema":
            form = {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
        body: dict[str, Any] = {
            "model": self.model, "messages": [*self._messages(dropped)], "max_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "stream": self.stream, "response_format": form,
            "reasoning_effort": self.reasoning.effort, "verbosity": self.text.verbosity, "seed": self.seed,
            "stop": self.stop, "chat_template_kwargs": self.chat_template_kwargs, "dinfer": self.dinfer,
            "logprobs": self.top_logprobs is not None, "top_logprobs": self.top_logprobs,
            **self.model_dump(include=SAMPLING),
        }  # fmt: skip
        if offered := [*self.functions()]:
            body["tools"] = [
                {"type": "function", "function": _bare(one) | {"name": _qualified(one.name, space)}}
                for _, one, space in offered
            ]
            body["parallel_tool_calls"] = self.parallel_tool_calls
        if offered or self.tool_choice not in ("auto", "none"):
            body["tool_choice"] = self._choice()
        return canonical(body)

    def functions(self) -> Iterator[tuple[str, FunctionTool, str | None]]:
        """Each function: the field that has it, itself, and its namespace."""
        for i, tool in enumerate(self.tools):
            if isinstance(tool, FunctionTool):
                yield f"tools.{i}", tool, None
            elif isinstance(tool, Namespace):
                yield from ((f"tools.{i}.tools.{n}", one, tool.name) for n, one in enumerate(tool.tools))

    def _choice(self) -> Any:
        chosen = self.tool_choice
        if isinstance(chosen, str):
            return chosen
        if isinstance(chosen, Named):
            return {"type": "function", "function": {"name": chosen.name}}
        names = [{"type": "function", "function": {"name": one.name}} for one in chosen.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": chosen.mode, "tools": names}}

    def _messages(self, dropped: int) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        known, spoken, thought = set[str](), dict[str, Any](), dict[str, str]()  # `spoken`: the assistant's message
        for n, item in enumerate(self.input):
            if isinstance(item, FunctionCall):
                known.add(item.call_id)
            if isinstance(item, CallOutput) and item.call_id not in known:
                raise invalid(f"input.{n}.call_id", " is of no call before it")
            if n < dropped:
                continue
            if isinstance(item, Reasoning):
                text = "".join(one.text for one in item.content or ())
                thought = {"reasoning_content": text} if text else {}
            elif isinstance(item, FunctionCall):
                spoken = spoken or {"role": "assistant", "content": "", **thought}
                name = _qualified(item.name, item.namespace)
                call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
                spoken["tool_calls"], thought = [*spoken.get("tool_calls", []), call], {}
            else:
                yield from [spoken] if spoken else []
                spoken = {}
                if isinstance(item, CallOutput):
                    yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                elif item.role == "assistant":
                    spoken, thought = {"role": "assistant", "content": _text(item.content), **thought}, {}
                else:
                    parts = item.content if isinstance(item.content, list) else []
                    yield {"role": item.role, "content": content_of(parts, _text(item.content))}
        yield from [spoken] if spoken else []


def _qualified(name: str, namespace: str | None) -> str:
    """The name that the model sees and calls. It holds what providers allow in names of functions."""
    return name if namespace is None else f"{namespace}__{name}"


def _bare(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(exclude={"type", "defer_loading"}, exclude_none=True)


def _text(content: str | list[TextPart | ImagePart]) -> str:
    texts = () if isinstance(content, str) else (one for one in content if isinstance(one, TextPart))
    return content if isinstance(content, str) else "".join(one.text or one.refusal for one in texts)


def _checked(where: str, item: Any) -> Any:
    """An item with its type. Raises ApiError for one that is not supported."""
    if not isinstance(item, dict):
        return item
    item = {"type": "message"} | {field: value for field, value in item.items() if value is not None}
    if item["type"] in ("item_reference", "compaction", "compaction_trigger"):
        raise refused(f"{where}.type", item["type"], NO_STATE)
    if item["type"] not in ("message", "function_call", "function_call_output", "reasoning"):
        raise refused(f"{where}.type", item["type"], "is not supported: tools are functions")
    for field in ("content", "output"):
        for m, part in objects_in(item.get(field)):
            kind = part.get("type")
            image = kind == "input_image" and item["type"] == "message" and field == "content"
            if isinstance(kind, str) and kind not in TEXTS and item["type"] != "reasoning" and not image:
                told = "is not supported: the model reads text alone"
                raise refused(f"{where}.{field}.{m}.type", kind, told)
    return item


class Output(Blocks):
    """OpenAI's response, whose blocks are items."""

    def __init__(
        self, body: ResponsesRequest, thinks: bool, answer: Answer, asked: CappedRequest, shown: Shown
    ) -> None:
        """`thinks`: whether the model has thoughts, so that an effort has an effect."""
        super().__init__(answer)
        self.body, self.asked, self.shown, self._thinks = body, asked, shown, thinks
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._names = {  # what clients call the functions
            _qualified(one.name, space): {"name": one.name} | ({} if space is None else {"namespace": space})
            for _, one, space in body.functions()
        }
        self._sent = 0  # events
        self._tokens = 0  # of the text whose log-probabilities are told

    def whole(self) -> dict[str, Any]:
        choice = self.choice
        items = [self._item(Part("thought", ""), choice.thought)] if choice.thought else []
        if choice.said or not (choice.calls or choice.thought):
            items.append(self._item(Part("text", ""), choice.said))
        items += [self._item(Part("call", name, i), text) for i, (name, text) in enumerate(choice.calls)]
        return self._response(items)

    def opening(self) -> list[dict[str, Any]]:
        return [self._started("created"), self._started("in_progress"), *self.pieces(Event(0))]

    def silent(self) -> list[dict[str, Any]]:
        if self.block is None:
            return [self._started("in_progress")]
        return [*self.added(Part("arguments" if self.block.kind == "call" else self.block.kind, ""))]

    def closing(self) -> list[dict[str, Any]]:
        last = [] if self.index >= 0 else [*self.part(Part("text", ""))]  # an answer of nothing is an empty text
        last += self.end()
        found = self.whole()
        return [*last, self._event(f"response.{found['status']}", response=found)]

    def failed(self, error: ApiError, request_id: str | None) -> list[dict[str, Any]]:
        told = {"code": "server_error", "message": error.body()["error"]["message"]}
        return [self._event("response.failed", response=self._response([], "failed") | {"error": told})]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _started(self, what: str) -> dict[str, Any]:
        return self._event(f"response.{what}", response=self._response([], "in_progress") | {"usage": None})

    def begun(self, part: Part) -> Iterator[dict[str, Any]]:
        item = self._item(part, "", "in_progress") | ({} if part.kind == "call" else {"content": []})
        yield self._event("response.output_item.added", output_index=self.index, item=item)
        if part.kind != "call":
            empty = self._content(part.kind, "")
            yield self._event("response.content_part.added", **self._place(part), content_index=0, part=empty)

    def added(self, part: Part) -> Iterator[dict[str, Any]]:
        assert self.block is not None
        place = self._place(self.block)
        if part.kind == "arguments":
            yield self._event("response.function_call_arguments.delta", **place, delta=part.text)
            return
        kind = "output_text" if part.kind == "text" else "reasoning_text"
        scores = {"logprobs": self._scores()} if part.kind == "text" else {}
        yield self._event(f"response.{kind}.delta", **place, content_index=0, delta=part.text, **scores)

    def ended(self, part: Part) -> Iterator[dict[str, Any]]:
        choice, place = self.choice, self._place(part)
        if part.kind == "call":
            name, text = choice.calls[part.call]
            name = self._names[name]["name"]
            yield self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
        else:
            text, kind = (choice.said, "output_text") if part.kind == "text" else (choice.thought, "reasoning_text")
            scores = {"logprobs": self._all_scores()} if part.kind == "text" else {}
            place["content_index"] = 0
            yield self._event(f"response.{kind}.done", **place, text=text, **scores)
            yield self._event("response.content_part.done", **place, part=self._content(part.kind, text))
        yield self._event("response.output_item.done", output_index=self.index, item=self._item(part, text))

    def _place(self, part: Part) -> dict[str, Any]:
        return {"item_id": self._item_id(part), "output_index": self.index}

    def _item_id(self, part: Part) -> str:
        prefix = {"thought": "rs", "text": "msg"}.get(part.kind, "fc")
        return id_of(prefix, self.id, part.kind, part.call)

    def _content(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "thought":
            return {"type": "reasoning_text", "text": text}
        scores = self._all_scores() if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    def _item(self, part: Part, text: str, status: str | None = None) -> dict[str, Any]:
        status = status or ("incomplete" if self.answer.finish(0) in CUT else "completed")
        item: dict[str, Any] = {"id": self._item_id(part)}
        if part.kind == "call":
            call = {"call_id": id_of("call", self.id, part.call), **self._names[part.text], "arguments": text}
            return item | {"type": "function_call", **call, "status": status}
        if part.kind == "thought":
            return item | {"type": "reasoning", "summary": [], "content": [self._content("thought", text)]}
        content = [self._content("text", text)]
        return item | {"type": "message", "status": status, "role": "assistant", "content": content}

    def _scores(self) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens since the last call of this."""
        since, self._tokens = self._tokens, len(self.choice.ids)
        return self._of(self.choice.ids[since:], self.choice.logprobs[since:])

    def _all_scores(self) -> list[dict[str, Any]]:
        return self._of(self.choice.ids, self.choice.logprobs)

    def _of(self, ids: Sequence[int], told: Any) -> list[dict[str, Any]]:
        made = [] if self.shown.logprobs is None else self.shown.logprobs.of_chat(ids, told)
        return [one | {"bytes": one["bytes"] or []} for one in made]

    def _tools(self) -> Iterator[dict[str, Any]]:
        """The tools that the model was told of."""
        plain: dict[str, Any] = {"type": "function", "parameters": None, "strict": None}
        for tool in self.body.tools:
            if isinstance(tool, FunctionTool):
                yield plain | _bare(tool)
            elif isinstance(tool, Namespace):
                functions = [plain | _bare(one) for one in tool.tools]
                yield tool.model_dump(exclude={"tools"}, exclude_none=True) | {"tools": functions}

    def _response(self, items: Sequence[dict[str, Any]], status: str | None = None) -> dict[str, Any]:
        body, reason = self.body, CUT.get(self.answer.finish(0) or "")
        status = status or ("completed" if reason is None else "incomplete")
        why = {"reason": reason} if status == "incomplete" else None
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        usage = self.answer.usage()
        chosen = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
        return {
            "id": self.id, "object": "response", "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None, "status": status, "error": None,
            "incomplete_details": why, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "model": self.answer.model, "output": items, "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None, "store": False, "temperature": body.temperature, "top_p": body.top_p,
            "reasoning": {"effort": body.reasoning.effort if self._thinks else None, "summary": None},
            "text": {"format": form} | ({"verbosity": body.text.verbosity} if body.text.verbosity else {}),
            "tool_choice": chosen, "tools": [*self._tools()],
            "truncation": body.truncation, "metadata": body.metadata,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.answer, "output_tokens_details": {"reasoning_tokens": usage.thought},
                "total_tokens": usage.prompt + usage.answer,
                "dinfer": usage.own | {"canvas": self.answer.canvas},
            },
        }  # fmt: skip


async def read(server: Server, served: Served, body: ResponsesRequest) -> tuple[CappedRequest, list[int]]:
    """What a request asks for, and its prompt; with truncation=auto, without the oldest items. Raises ApiError."""
    last = len(body.input) - 1 if isinstance(body.input, list) and body.truncation == "auto" else 0
    for dropped in range(last + 1):
        asked = body.chat(dropped)
        if not asked.messages:
            continue
        turns: list[dict[str, Any]] = placed(served, asked)
        prompt = await encoded(server, served, turns, "messages", tools=asked.tools, **asked.ending)
        if len(prompt) < served.max_length:
            break
    return asked, prompt


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest) -> Response:
        """Answers a list of items, whole or as server-sent events, like OpenAI's API. Nothing is kept."""
        functions = {rf"tools\.{n}\.function": field for n, (field, *_) in enumerate(body.functions())}
        with spelled(functions | NAMES):
            served = server.catalogue.find(body.model, body.dinfer.decoder)
            asked, prompt = await read(server, served, body)
            thinks = served.marks is not None
            return await generated(server, served, asked, [prompt], partial(Output, body, thinks), asked.top)
