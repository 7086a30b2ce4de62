"""What clients may send: OpenAI's fields, and our own under `dinfer`.

The server refuses unknown fields, and known ones that a diffusion language model cannot honour. It accepts these if
their value asks for nothing (`frequency_penalty: 0`, `tools: []`), since clients send it by default.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from dinfer.pipeline.inputs import encodable
from dinfer.serving.errors import refused

MAX_CHOICES, MAX_STOPS, MAX_STOP_LENGTH, MAX_TOP_LOGPROBS = 16, 4, 256, 20

# Fields that this server cannot honour: the values that ask for nothing, and why it refuses others.
NOT_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0,), "is not supported: tokens are not written one after the other. Use "
                          'dinfer={"repetition_penalty": 1.1}.'),
    "presence_penalty": ((0,), 'is not supported. Use dinfer={"repetition_penalty": 1.1}.'),
    "logit_bias": (({},), "is not supported."),
    "tools": (([],), "is not supported: this server calls no functions."),
    "tool_choice": (("none", "auto"), "is not supported: this server calls no functions."),
    "functions": (([],), "is not supported: this server calls no functions."),
    "function_call": (("none", "auto"), "is not supported: this server calls no functions."),
    "parallel_tool_calls": ((True, False), "is not supported."),
    "response_format": (({"type": "text"},), "is not supported: answers are plain text."),
    "modalities": ((["text"],), "is not supported: answers are text."),
    "audio": ((), "is not supported: answers are text."),
    "prediction": ((), "is not supported."),
    "reasoning_effort": (("none",), "is not supported."),
    "verbosity": (("medium",), "is not supported."),
    "web_search_options": ((), "is not supported."),
    "service_tier": (("auto", "default"), "is not supported: all requests are served alike."),
    "store": ((False,), "is not supported: this server keeps no requests."),
    "metadata": (({},), "is not supported: this server keeps no requests."),
    "top_k": ((), 'belongs under dinfer, as in "dinfer": {"top_k": 20}.'),
    "repetition_penalty": ((1,), 'belongs under dinfer, as in "dinfer": {"repetition_penalty": 1.1}.'),
    "min_p": ((0,), "is not supported. Use top_p."),
    "regex": ((), "is not supported: answers are plain text."),
    "ebnf": ((), "is not supported: answers are plain text."),
    "json_schema": ((), "is not supported: answers are plain text."),
    "suffix": (("",), "is not supported here. Use /v1/infill for text with gaps."),
    "best_of": ((1,), "is not supported. Use n."),
    "echo": ((False,), "is not supported."),
}  # fmt: skip
IGNORABLE = {"prompt_cache_key", "safety_identifier", "prompt_cache_retention"}  # hints with no effect on the answer


Text = Annotated[str, AfterValidator(encodable)]


class Strict(BaseModel):
    """Takes only its own fields, and converts no value to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Own(Strict):
    """Our fields, under `dinfer`. All other keys are per-request options of the decoder and the sampling."""

    model_config = ConfigDict(extra="allow", strict=True)

    drafts: bool = False  # the stream carries the canvas as well
    decoder: str | None = None  # the recipe of the same model that has this decoder
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # seconds the request may take

    @property
    def options(self) -> dict[str, Any]:
        return self.model_extra or {}


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: every piece has the usage so far
    include_obfuscation: Literal[False] = False


class Sampled(Strict):
    """Fields of all requests that sample."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: int | None = None
    user: str | None = None
    dinfer: Own = Own()


class Generation(Sampled):
    """Fields of completions and chats."""

    source: ClassVar[str]  # the field with what the model reads
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None  # vLLM's, for load generators: a stop token does not end the answer

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        """Drops fields that ask for nothing. Raises ApiError for fields that this server cannot honour."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for field, value in data.items():
            if field in NOT_SUPPORTED and field not in cls.model_fields:
                neutral, reason = NOT_SUPPORTED[field]
                same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
                if value is not None and not any(same):  # 0 and 0.0 are the same, 0 and False are not
                    raise refused(field, value, reason)
            elif field not in IGNORABLE:
                kept[field] = value
        return kept

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, not {len(stops)}")
        for text in stops:
            if not text or len(text) > MAX_STOP_LENGTH:
                raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
        return value

    @model_validator(mode="after")
    def _stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def length(self) -> tuple[str, int | None]:
        """The field that says how many tokens are wanted, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def choices(self) -> int:
        return self.n or 1


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, data: Any) -> Any:
        """Drops empty fields, since clients send an assistant's message back as they got it."""
        if isinstance(data, dict) and data.get("role") == "assistant":
            empty = {"refusal", "tool_calls", "function_call", "audio", "annotations"}
            return {key: value for key, value in data.items() if not (key in empty and not value)}
        return data

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Generation):
    source = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} contradict each "
                "other: give one"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def length(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().length
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def conversation(self) -> list[dict[str, str]]:
        return [message.plain() for message in self.messages]


class TraceRequest(ChatRequest):
    """A chat with one answer, whose whole denoising is shown."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        for field in ("stream", "stop", "logprobs", "ignore_eos", "n"):
            value = getattr(self, field)
            if value and (field, value) != ("n", 1):
                raise refused(field, value, "is not supported here: a trace shows the whole denoising of one answer.")
        return self


class CompletionRequest(Generation):
    source = "prompt"

    prompt: Text | Annotated[list[Text], Field(min_length=1)] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class InfillRequest(Sampled):
    """Text with gaps: the model fills in n tokens for `[MASK:n]`."""

    text: Text


class TokenizeRequest(Strict):
    model: str
    text: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        return self


class DetokenizeRequest(Strict):
    model: str
    tokens: list[int]
