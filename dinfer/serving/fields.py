"""Fields that several APIs share, and why this server refuses what a diffusion language model cannot honour.

The server refuses unknown fields, and known ones that it cannot honour. It accepts these if their value asks for
nothing (`use_beam_search: false`, `tools: []`, any null), since clients send it by default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dinfer.core.pipeline.inputs import encodable, texts_in
from dinfer.core.pipeline.tokenizer import OWNED
from dinfer.serving.errors import SHOWN, invalid, refused
from dinfer.serving.forms import Given, Held, HeldFields, Strict
from dinfer.serving.pictures import ImagePart, content_of, opened_in

SEEDS = 2**53  # others are taken modulo this, so that a float64 holds them
MAX_CHOICES, MAX_STOPS, MAX_STOP_LENGTH, MAX_TOP_LOGPROBS, MAX_BIASES = 128, 4, 256, 20, 1024
NO_FUNCTIONS = "is not supported: use tools and tool_choice in a chat."
READS = "For structured reads, POST /v1/read takes answer, with [SLOT:name] where it is open, and slots or choice."
# Why this server refuses fields that it cannot honour, and their values that ask for nothing.
REASONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "is not supported here: it is for chats.": {
        "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True,),
    },
    NO_FUNCTIONS: {"functions": ([],), "function_call": ("none", "auto")},
    "is not supported here: it is for chats and completions.": {
        "response_format": ({"type": "text"},), "structured_outputs": (), "regex": (), "ebnf": (), "json_schema": (),
        "prompt_logprobs": (), "stream": (False,), "n": (1,), "stop_regex": ([],), "logprob_token_ids": ([],),
        "cache_salt": (),
    },
    "is not supported: answers are text.": {"modalities": (["text"],), "audio": ()},
    "is not supported.": {"prediction": (), "web_search_options": (), "documents": ([],), "safe_prompt": (False,)},
    "is not supported here: it is for chats and reads.": {"chat_template_kwargs": ({},)},
    'is not supported here. Use chat_template_kwargs, such as {"enable_thinking": false}, or reasoning_effort.': {
        "enable_thinking": (), "thinking": (), "reasoning": (),
    },
    "is not supported here. The server is started with its length (runtime.max_length), and keeps its model.": {
        "options": ({},), "keep_alive": (), "num_ctx": (),
    },
    "is not supported: all requests are served alike.": {"service_tier": ("auto", "default"), "priority": (0,)},
    "is not supported. Use n for several answers.": {"use_beam_search": (False,)},
    "is for beam search, which is not supported.": {"length_penalty": (1,)},
    "is not supported. Use n.": {"best_of": (1,)},
    "is not supported here. Use /v1/infill for text with gaps.": {"suffix": ("",)},
    "is not supported here: the answers of chats are divided.": {
        "include_reasoning": (True, False), "separate_reasoning": (True, False), "stream_reasoning": (True,),
    },
    "is not supported: a canvas ends at its first special token.": {"skip_special_tokens": (True,)},
    "is not supported: answers hold no special tokens.": {"spaces_between_special_tokens": (True,)},
    "is not supported: the checkpoint's own is used.": {"chat_template": ()},
    f"is not supported here. {READS}": {"vllm_xargs": ({},)},
}  # fmt: skip
NOT_SUPPORTED = {field: (neutral, why) for why, fields in REASONS.items() for field, neutral in fields.items()}
# Hints with no effect on the answer. This server keeps no requests, whatever `store` says.
IGNORABLE = {
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "metadata", "request_id",
    "store", "cache_control", "reasoning_effort", "verbosity",
}  # fmt: skip
SWITCHES = "enable_thinking", "thinking"  # of chat templates
NO_THOUGHT = "none", "instant"  # efforts
MAX_VARIABLES = 16_384  # characters of `chat_template_kwargs`


def readable(value: Any) -> Any:
    """A value of JSON. Raises ValueError for a text in it that is none."""
    for text in texts_in(value):
        encodable(text)
    return value


Text = Annotated[str, AfterValidator(encodable)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Own(Strict):
    """Our fields, under `dinfer`. All other keys are per-request options of the decoder and the sampling."""

    model_config = ConfigDict(extra="allow", strict=True)

    drafts: bool = False  # the stream carries the canvas as well
    decoder: str | None = None  # the recipe of the same model that has this decoder
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # seconds the request may take
    posterior: bool = False  # of what the answer is held to, as in Python


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: every piece has the usage so far
    include_obfuscation: Literal[False] = False


class Neutral(Given):
    """A request in which a field that asks for nothing counts as absent, too."""

    aliases: ClassVar[Mapping[str, str]] = {}  # other names of fields

    model: str = ""  # empty: the first that is served

    @classmethod
    def checked(cls, data: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for alias, field in cls.aliases.items():
            if alias in data and data.get(field, data[alias]) != data[alias]:
                raise invalid(alias, f" and {field} contradict each other: give one")
        for field, value in {cls.aliases.get(field, field): value for field, value in data.items()}.items():
            if field == "tools" and data.get("tool_choice") == "none":
                continue
            neutral, reason = NOT_SUPPORTED.get(field, ((), ""))
            # 0 and 0.0 are the same, 0 and False are not.
            same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
            own = cls.model_fields.get(field)  # whose default may ask for something else
            if any(same) and (own is None or own.default in (None, value)):
                continue
            if field in NOT_SUPPORTED and field not in cls.model_fields:
                raise refused(field, value, reason)
            if field in cls.model_fields or field not in IGNORABLE:
                kept[field] = value
        return kept


class Sampled(Neutral):
    """Fields of all requests that sample."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda count: max(count, 0))] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % SEEDS)] | None = None
    user: str | None = None
    dinfer: Own = Own()

    @property
    def each_held(self) -> list[Held]:
        """What the answer is held to. Raises ApiError."""
        return []

    @property
    def asked(self) -> dict[str, Any]:
        """Options of the sampling, by name."""
        return self.model_dump(include=Sampled.model_fields.keys() - {"model", "user", "dinfer"}, exclude_none=True)


class Generation(Sampled, HeldFields):
    """Fields of completions and chats."""

    source: ClassVar[str]  # the field with what the model reads
    cap: ClassVar[bool] = False  # the length is the most that is wanted, also if there is room for less
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[Token] = []
    stop_regex: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []  # SGLang's: an answer ends with a match
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] = {}
    allowed_token_ids: Annotated[list[Token], Field(min_length=1)] = []  # empty: all are
    bad_words: Annotated[list[Text], Field(max_length=MAX_BIASES)] = []
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False  # vLLM's, for load generators: a stop token does not end the answer
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: leave room for the answer
    truncation_side: Literal["left", "right"] = "left"  # where tokens are taken away
    echo: bool = False  # the answer begins with the prompt, in a chat with the assistant's last message
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # log-probabilities name tokens by number
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # vLLM's: of each token, the best
    # vLLM's: what log-probabilities are told of, in place of the most likely tokens
    logprob_token_ids: Annotated[
        list[Token], Field(max_length=MAX_TOP_LOGPROBS), AfterValidator(lambda tokens: [*dict.fromkeys(tokens)])
    ] = []
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None  # vLLM's: others share no keys

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", " is only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs", self.prompt_logprobs, "is told with the whole answer: set stream=false")
        held = self.held  # what would change an answer after that was held to a form is refused
        others = "ignore_eos", "stop_token_ids", "stop_regex", "allowed_token_ids", "bad_words", "min_tokens", "echo"
        for field in others:
            if held is not None and (value := getattr(self, field)):
                raise refused(field, value, f"contradicts {held.field}, to which the answer is held")
        return self

    @property
    def each_held(self) -> list[Held]:
        """What the answer is held to. Raises ApiError."""
        return [] if (held := self.held) is None else [held]

    @property
    def divided(self) -> bool:
        """Whether the thoughts of a model are told apart from its answer."""
        return False

    @property
    def callable(self) -> list[str]:
        """The functions that the answer may call."""
        return []

    @property
    def choice(self) -> str:
        """How they are called: auto, required, or the name of one."""
        return "auto"

    @property
    def free(self) -> bool:
        """Whether text beside calls is held to nothing."""
        return False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def endings(self) -> list[str]:
        """Expressions with whose first match the answer ends."""
        return [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex

    @property
    def length(self) -> tuple[str, int | None]:
        """The field that says how many tokens are wanted, and its value."""
        return "max_tokens", self.max_tokens


class TextPart(Strict):
    type: Literal["text"]
    text: Text
    cache_control: Any = None  # a hint of Anthropic's API that proxies pass on


def _object(text: str) -> str:
    try:
        value = json.loads(encodable(text) or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be the text of a JSON object")
    return text


class CalledFunction(Strict):
    name: Text
    arguments: Annotated[str, AfterValidator(_object)]


class ToolCall(Strict):
    """A call in a message of the assistant."""

    type: Literal["function"] = "function"
    function: CalledFunction
    id: Text | None = None
    index: int | None = None  # of streams, whose pieces some clients send back

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: `arguments` is the object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        return {"type": self.type, "id": self.id, "function": function}


class ChatMessage(BaseModel):
    """One message. Further fields that hold text, such as `tool_call_id`, go to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, Text]

    role: Annotated[Text, Field(min_length=1, max_length=SHOWN)]  # the chat template says which there are
    content: Text | Annotated[list[TextPart | ImagePart], Field(min_length=1)]
    tool_calls: list[ToolCall] | None = None  # of the assistant

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, data: Any) -> Any:
        """Drops empty fields, since clients send an assistant's message back as they got it."""
        if not isinstance(data, dict):
            return data
        for field, reason in (("function_call", NO_FUNCTIONS), ("audio", "is not text.")):
            if data.get(field):
                raise refused(f"messages.{field}", data[field], reason)
        if data.get("tool_calls") and data.get("role") != "assistant":
            raise invalid("messages.tool_calls", " are the assistant's: another role calls nothing")
        empty = {"content": ""} if "content" in data or data.get("role") == "assistant" else {}
        return empty | {
            key: value
            for key, value in data.items()
            if key != "cache_control" and (value or (key in cls.model_fields and value == ""))
        }

    def plain(self) -> dict[str, Any]:
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in parts if p.type == "text")
        content = content_of(parts, text)
        role = "system" if self.role == "developer" else self.role
        calls = {"tool_calls": [call.plain() for call in self.tool_calls]} if self.tool_calls else {}
        return (self.model_extra or {}) | {"role": role, "content": content} | calls


def _variables(values: dict[str, Any]) -> dict[str, Any]:
    if owned := sorted(OWNED & values.keys()):
        raise ValueError(f"{owned[0]} is the server's own to give: leave it out")
    if (size := sum(map(len, texts_in(values)))) > MAX_VARIABLES:
        raise ValueError(f"has {size} characters, at most {MAX_VARIABLES} are taken")
    return values


class Conversation(Strict):
    """What a chat template reads, and how it ends."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = None  # null: unless the last message is to be continued
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[Text, Any], AfterValidator(_variables)] = {}

    @model_validator(mode="before")
    @classmethod
    def _opened(cls, data: Any) -> Any:
        """With images as they are read. Mistral's and DeepSeek's clients mark a last message that is continued."""
        if not isinstance(data, dict) or "messages" not in data:
            return data
        data = {**data, "messages": opened_in(data["messages"])}
        match data["messages"]:
            case [*before, {"role": "assistant" as role, "prefix": True, **rest}]:
                data |= {"messages": [*before, {"role": role, **rest}], "continue_final_message": True}
        return data

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [message.plain() for message in self.messages]

    @property
    def ending(self) -> dict[str, Any]:
        """As the template takes it. Raises ApiError."""
        begins = self.add_generation_prompt
        if begins and self.continue_final_message:
            raise invalid("continue_final_message", "=true and add_generation_prompt=true contradict each other")
        begins = not self.continue_final_message if begins is None else begins
        ending = {"add_generation_prompt": begins, "continue_final_message": self.continue_final_message}
        return ending | {"variables": self.variables}

    @property
    def variables(self) -> Mapping[str, Any]:
        """What the template is given beside messages and tools, if it reads it."""
        return self.chat_template_kwargs


class Scored(Strict):
    """Log-probabilities of tokens, as chats give them."""

    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", " needs logprobs=true")
        return self

    @property
    def top(self) -> int | None:
        """Alternatives of each token; None: no scores."""
        return self.top_logprobs or 0 if self.logprobs else None
