"""/v1/messages and /v1/messages/count_tokens: conversations as Anthropic's API has them."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import Field, model_validator

from dinfer.serving.answers import Answer, Blocks, Part, id_of
from dinfer.serving.apis.chats import CappedRequest, canonical, placed
from dinfer.serving.errors import ApiError, anthropic, invalid, refused, spelled
from dinfer.serving.fields import Own, Stop, Text
from dinfer.serving.forms import Given, Returned, Schema, Strict
from dinfer.serving.generating import Shown, encoded, generated
from dinfer.serving.pictures import ImagePart, content_of, joined, objects_in, opened_in
from dinfer.serving.rows import Event
from dinfer.serving.served import Served
from dinfer.serving.server import Server

KEY = secrets.token_bytes(32)  # of the signatures of thoughts, for as long as this process lives
NO_STATE = "is not supported: this server keeps no state. Send all messages"
# Fields of a chat, and what they are called here.
NAMES = {
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema", r"tools\.(\d+)\.function": r"tools.\1",
    "response_format.json_schema.schema": "output_config.format.schema", "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}  # fmt: skip
BLOCKS = {
    "user": ("text", "tool_result", "image"), "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}  # fmt: skip


class TextBlock(Returned):
    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _uncited(cls, data: Any) -> Any:
        asked = data.get("citations") if isinstance(data, dict) else None
        if asked and asked != {"enabled": False}:
            raise invalid("citations", " is not supported: no text is cited")
        return data


class ToolUse(Returned):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[Text, Any]


class ToolResult(Returned):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[TextBlock] | None = None
    is_error: bool | None = None


class Thinking(Returned):
    type: Literal["thinking"]
    thinking: Text  # its signature may be missing or foreign: clients switch servers within a conversation


class Redacted(Returned):
    type: Literal["redacted_thinking"]


Content = (
    Text
    | list[Annotated[TextBlock | ImagePart | ToolUse | ToolResult | Thinking | Redacted, Field(discriminator="type")]]
)


def text_of(content: str | list[Any] | None, between: str = "") -> str:
    """The text in blocks."""
    blocks = [content] if isinstance(content, str) else [one.text for one in content or () if one.type == "text"]
    return between.join(blocks)


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(Strict):
    name: Annotated[Text, Field(min_length=1)]
    input_schema: dict[str, Any]
    description: Text | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: Any = None
    defer_loading: Literal[False] | None = None
    input_examples: Any = None
    allowed_callers: list[Literal["direct"]] | None = None
    cache_control: Any = None

    def plain(self) -> dict[str, Any]:
        """As chats have it."""
        function = {
            "name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict,
        }  # fmt: skip
        return {"type": "function", "function": {key: one for key, one in function.items() if one is not None}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class Thoughts(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted", "full"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    own: Schema = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # a hint
    task_budget: None = None


class CountRequest(Given):
    """Fields that say what the model reads."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Text | list[TextBlock] = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thoughts | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # an older place of output_config.format
    speed: Literal["standard"] | None = None
    dinfer: Own = Own()
    # Ignored: they ask for nothing that this server has.
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    inference_geo: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    diagnostics: Any = None

    @classmethod
    def checked(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "thread" in data:
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise ApiError(400, f"thread {NO_STATE}", "thread", "unsupported_value", details=details)
        for field in ("container", "mcp_servers", "skills"):
            if data.pop(field, None):
                raise invalid(field, " is not supported: this server keeps no state, and runs nothing")
        managed = data.pop("context_management", None)
        edits = managed.get("edits", []) if isinstance(managed, dict) else [] if managed is None else None
        if len(objects_in(edits)) != len(edits if isinstance(edits, list) else [None]):
            raise invalid("context_management", " must be an object whose edits are a list of objects")
        for i, edit in objects_in(edits):
            if not (str(edit.get("type")).startswith("clear_thinking") and edit.get("keep") == "all"):
                where = f"context_management.edits.{i}.type"
                raise refused(where, edit.get("type"), "is not supported: send the messages that the model shall read")
        for i, tool in objects_in(data.get("tools")):
            if tool.get("type") not in (None, "custom"):
                raise refused(f"tools.{i}.type", tool["type"], "is not supported: tools have an input_schema")
        _check_blocks(data.get("messages"))
        return data if "messages" not in data else {**data, "messages": opened_in(data["messages"])}

    def chat(self, served: Served) -> CappedRequest:
        """The same as a chat. Raises ApiError."""
        thinking, told = self.thinking, self.output_config
        if self.output_format and told.format:
            raise invalid("output_format", " and output_config.format are both given: leave one out")
        if thinking is not None and thinking.type == "enabled" and served.marks is None:
            raise refused("thinking", "enabled", "is not supported: this model has no thoughts. Leave it out")
        switch = {} if thinking is None else dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")
        form = told.format or self.output_format
        body: dict[str, Any] = {
            "model": self.model, "messages": [*self._messages()], "max_tokens": self.max_tokens, "stream": self.stream,
            "stop": self.stop_sequences, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "chat_template_kwargs": switch, "dinfer": self.dinfer, "reasoning_effort": told.effort,
            "continue_final_message": self.messages[-1].role == "assistant",
        }  # fmt: skip
        if form is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.own}}
        if self.tools:
            choice = {"any": "required", "tool": {"type": "function", "function": {"name": self.tool_choice.name}}}
            body["tools"] = [tool.plain() for tool in self.tools]
            body["tool_choice"] = choice.get(self.tool_choice.type, self.tool_choice.type)
            body["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        elif self.tool_choice.type not in ("auto", "none"):
            raise refused("tool_choice.type", self.tool_choice.type, "needs tools: say which there are")
        if body["continue_final_message"] and (form or self.tool_choice.type in ("any", "tool")):
            raise invalid("messages", " end with the assistant's: what continues it cannot be held to a form")
        return canonical(body)

    def _messages(self) -> Iterator[dict[str, Any]]:
        if system := text_of(self.system, "\n\n"):
            yield {"role": "system", "content": system}
        known, waiting = set[str](), dict[str, Any]()
        for n, turn in enumerate(self.messages):
            blocks = turn.content if isinstance(turn.content, list) else []
            results = []
            for m, block in enumerate(blocks):
                if isinstance(block, ToolUse):
                    known.add(block.id)
                if isinstance(block, ToolResult):
                    if block.tool_use_id not in known:
                        raise invalid(f"messages.{n}.content.{m}.tool_use_id", " is of no call before it")
                    said = text_of(block.content)
                    said = f"Error: {said}" if block.is_error else said
                    results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
            calls = [
                {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input, ensure_ascii=False)}}
                for one in blocks
                if isinstance(one, ToolUse)
            ]
            thought = "".join(one.thinking for one in blocks if isinstance(one, Thinking))
            shown = [one for one in blocks if one.type in ("text", "image")]
            content = content_of(shown, text_of(turn.content))
            more = dict[str, Any]({"tool_calls": calls} if calls else {})
            more |= {"reasoning_content": thought} if thought else {}
            if results or waiting.get("role") != turn.role or more:
                yield from [waiting] if waiting else []
                yield from results
                waiting = {"role": turn.role, "content": content, **more} if content or more or not results else {}
            else:  # neighbours of one role
                waiting["content"] = joined(waiting["content"], content)
        yield from [waiting] if waiting else []


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]


def _check_blocks(messages: Any) -> None:
    """Raises ApiError for a block that the model cannot read."""
    for n, message in objects_in(messages):
        allowed = BLOCKS.get(str(message.get("role")))
        for m, block in objects_in(message.get("content")) if allowed else ():
            where = f"messages.{n}.content.{m}"
            inner = [(f"{where}.content.{k}", one, ("text",)) for k, one in objects_in(block.get("content"))]
            for path, one, kinds in ((where, block, allowed), *inner):
                if isinstance(kind := one.get("type"), str) and kind not in (kinds or ()):
                    told = f"{path} type={kind!r:.80} is not supported: the model reads text alone"
                    raise ApiError(400, told, path, "unsupported_value")


class Message(Blocks):
    """Anthropic's message."""

    def __init__(self, body: CountRequest, answer: Answer, asked: CappedRequest, shown: Shown) -> None:
        super().__init__(answer)
        self.id = f"msg_{uuid.uuid4().hex}"
        self._hidden = body.thinking is not None and body.thinking.display == "omitted"

    def whole(self) -> dict[str, Any]:
        choice, content = self.choice, list[dict[str, Any]]()
        if choice.thought:
            shown = "" if self._hidden else choice.thought
            content.append({"type": "thinking", "thinking": shown, "signature": signature(choice.thought)})
        if choice.said:
            content.append({"type": "text", "text": choice.said})
        for i, (name, arguments) in enumerate(choice.calls):
            content.append(self._call(i, name) | {"input": json.loads(arguments)})
        return self._head() | {"content": content, **self._end(), "usage": self._usage()}

    def opening(self) -> list[dict[str, Any]]:
        start = self._head() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [{"type": "message_start", "message": start}, *self.pieces(Event(0))]

    def closing(self) -> list[dict[str, Any]]:
        last = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return [*self.end(), last, {"type": "message_stop"}]

    def failed(self, error: ApiError, request_id: str | None) -> list[dict[str, Any]]:
        return [anthropic(error, request_id)]

    def begun(self, part: Part) -> Iterator[dict[str, Any]]:
        empty: dict[str, Any] = {"type": "text", "text": ""}
        if part.kind == "thought":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        if part.kind == "call":
            empty = self._call(part.call, part.text) | {"input": {}}
        yield {"type": "content_block_start", "index": self.index, "content_block": empty}

    def added(self, part: Part) -> Iterator[dict[str, Any]]:
        delta: dict[str, Any] = {"type": "text_delta", "text": part.text}
        if part.kind == "thought":
            delta = {"type": "thinking_delta", "thinking": part.text}
        if part.kind == "arguments":
            delta = {"type": "input_json_delta", "partial_json": part.text}
        if part.kind != "thought" or not self._hidden:
            yield {"type": "content_block_delta", "index": self.index, "delta": delta}

    def ended(self, part: Part) -> Iterator[dict[str, Any]]:
        if part.kind == "thought":
            delta = {"type": "signature_delta", "signature": signature(self.choice.thought)}
            yield {"type": "content_block_delta", "index": self.index, "delta": delta}
        yield {"type": "content_block_stop", "index": self.index}

    def silent(self) -> list[dict[str, Any]]:
        return [{"type": "ping"}]

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.answer.model}

    def _call(self, index: int, name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": id_of("toolu", self.id, index), "name": name}

    def _end(self) -> dict[str, Any]:
        matched = None if self.choice.last is None else self.choice.last.matched
        reasons = {"calls": "tool_use", "length": "max_tokens", "stop": "end_turn", "abort": "pause_turn"}
        reason = reasons[self.answer.finish(0) or "stop"]
        if reason == "end_turn" and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        usage = self.answer.usage()
        thought = {"output_tokens_details": {"thinking_tokens": usage.thought}} if usage.thought else {}
        return {
            "input_tokens": max(usage.prompt - usage.cached, 1), "output_tokens": usage.answer,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached, "service_tier": "standard",
            **thought, "dinfer": usage.own | {"canvas": self.answer.canvas},
        }  # fmt: skip


def signature(thought: str) -> str:
    """Tells a thought that was changed."""
    return hmac.new(KEY, thought.encode(), hashlib.sha256).hexdigest()


async def read(server: Server, body: CountRequest) -> tuple[Served, CappedRequest, list[int]]:
    """What a request asks for, and its prompt. Raises ApiError."""
    served = server.catalogue.find(body.model, body.dinfer.decoder)
    asked = body.chat(served)
    turns: list[dict[str, Any]] = placed(served, asked)
    return served, asked, await encoded(server, served, turns, "messages", tools=asked.tools, **asked.ending)


def add(app: FastAPI, server: Server) -> None:
    @app.post("/v1/messages")
    async def messages(body: MessagesRequest) -> Response:
        """Answers a conversation, whole or as server-sent events, like Anthropic's API."""
        with spelled(NAMES):
            served, asked, prompt = await read(server, body)
            return await generated(server, served, asked, [prompt], partial(Message, body), None)

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        """The tokens of the prompt of a conversation."""
        with spelled(NAMES):
            return {"input_tokens": len((await read(server, body))[2])}
