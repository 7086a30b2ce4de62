"""What clients may send: OpenAI's fields, vLLM's and SGLang's where clients send them, and our own under `dinfer`.

The server refuses unknown fields, and known ones that a diffusion language model cannot honour. It accepts these if
their value asks for nothing (`use_beam_search: false`, `tools: []`, any null), since clients send it by default.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dinfer.core.pipeline.inputs import encodable, texts_in
from dinfer.core.pipeline.tokenizer import OWNED
from dinfer.serving.errors import SHOWN, ApiError, at_field, invalid, refused
from dinfer.structure import Compiler, Constraint, Language, choice, functions_of, grammar, json_schema, regex
from dinfer.structure import tools as calling
from dinfer.structure.abilities.reading import STEPS

Schema = dict[str, Any] | bool | str
ANY_OBJECT = {"type": "object"}
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
        "prompt_logprobs": (), "stream": (False,), "n": (1,),
    },
    "is not supported: answers are text.": {"modalities": (["text"],), "audio": ()},
    "is not supported.": {"prediction": (), "web_search_options": (), "documents": ([],)},
    "is not supported here: it is for chats and reads.": {"chat_template_kwargs": ({},)},
    "is not supported: all requests are served alike.": {"service_tier": ("auto", "default"), "priority": (0,)},
    "is not supported. Use n for several answers.": {"use_beam_search": (False,)},
    "is for beam search, which is not supported.": {"length_penalty": (1,)},
    "is not supported. Use n.": {"best_of": (1,)},
    "is not supported: use stop, or hold the whole answer to regex.": {"stop_regex": ([],)},
    "is not supported here. Use /v1/infill for text with gaps.": {"suffix": ("",)},
    "is not supported: answers are not divided.": {
        "include_reasoning": (True, False), "separate_reasoning": (True, False),
    },
    "is not supported: /v1/read tells the probabilities of options.": {"logprob_token_ids": ([],)},
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
SWITCHES, NO_THOUGHT = (
    ("enable_thinking", "thinking"),
    ("none", "instant"),
)  # of chat templates; efforts that ask for none
MAX_VARIABLES = 16_384  # characters of `chat_template_kwargs`
Text = Annotated[str, AfterValidator(encodable)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Strict(BaseModel):
    """Takes only its own fields, and converts no value to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PlainText(Strict):
    type: Literal["text"]  # no form


class JsonObject(Strict):
    type: Literal["json_object"]
    own: Schema | None = Field(None, alias="schema")  # Together's


class NamedSchema(Strict):
    own: Schema = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # guaranteed either way


class JsonSchema(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Pattern(Strict):
    type: Literal["regex"]
    pattern: str


class Grammar(Strict):
    type: Literal["grammar"]
    grammar: str
    syntax: Literal["lark", "ebnf"] | None = None


class StructuredOutputs(Strict):
    """vLLM's."""

    own: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Fields of vLLM that a client may send with their defaults.
    whitespace_pattern: None = None
    structural_tag: None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


Form = Annotated[PlainText | JsonObject | JsonSchema | Pattern | Grammar, Field(discriminator="type")]


class HeldFields(Strict):
    """Fields that hold an answer to a form. At most one may be given."""

    response_format: Form | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None  # vLLM's before 0.12
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # SGLang's
    ebnf: str | None = None
    json_schema: str | None = None

    @property
    def stops(self) -> list[str]:
        """Texts at which an answer ends."""
        return []

    @property
    def held(self) -> Held | None:
        """What the answer is held to. Raises ApiError."""
        return self.form()

    def form(self, path: str = "") -> Held | None:
        """What these fields hold an answer to. `path`: what errors put before their names. Raises ApiError."""
        form, outputs = self.response_format, self.structured_outputs or StructuredOutputs.model_validate({})
        found: list[tuple[str, Callable[[Any], Constraint], Any]] = [
            ("structured_outputs.json", json_schema, outputs.own),
            ("structured_outputs.regex", regex, outputs.regex),
            ("structured_outputs.choice", choice, outputs.choice),
            ("structured_outputs.grammar", grammar, outputs.grammar),
            ("structured_outputs.json_object", json_schema, ANY_OBJECT if outputs.json_object else None),
            ("guided_json", json_schema, self.guided_json),
            ("guided_regex", regex, self.guided_regex),
            ("guided_choice", choice, self.guided_choice),
            ("guided_grammar", grammar, self.guided_grammar),
            ("regex", regex, self.regex),
            ("ebnf", lambda text: grammar(text, "ebnf"), self.ebnf),
            ("json_schema", json_schema, self.json_schema),
        ]
        match form:
            case JsonObject():
                found.append(("response_format.schema", json_schema, ANY_OBJECT if form.own is None else form.own))
            case JsonSchema():
                found.append(("response_format.json_schema.schema", json_schema, form.json_schema.own))
            case Pattern():
                found.append(("response_format.pattern", regex, form.pattern))
            case Grammar():
                found.append(("response_format.grammar", lambda text: grammar(text, form.syntax), form.grammar))
        made = [(f"{path}{field}", make, value) for field, make, value in found if value is not None]
        if self.structured_outputs is not None and not any("structured_outputs" in field for field, _, _ in made):
            raise invalid(f"{path}structured_outputs", " says no form: give json, regex, choice or grammar")
        if len(made) > 1:
            told = " and ".join(field for field, _, _ in made)
            raise ApiError(400, f"{told} are both given: an answer is held to one form", made[1][0], "invalid_value")
        for field, make, value in made:
            with at_field(field):
                return Held(field, replace(make(value), stop=tuple(self.stops)))
        return None


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer is held to. `field`: the one that says it."""

    field: str
    constraint: Constraint

    async def language(self, compiler: Callable[[], Compiler], *, posterior: bool = False) -> Language:
        """Compiles it in a worker thread. If the caller is cancelled, so is this. Raises ApiError."""
        try:
            made = await asyncio.to_thread(compiler)
        except ValueError as error:  # of the recipe or the tokenizer
            raise refused(self.field, None, f"cannot be guaranteed: {error}") from error
        with at_field(self.field):
            work = made.submit(replace(self.constraint, posterior=posterior))
            try:
                return await asyncio.wrap_future(work.future)
            finally:
                work.cancel()


def _readable(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for text in texts_in(tools):
        encodable(text)
    return [{key: value for key, value in tool.items() if key != "cache_control"} for tool in tools]


Tools = Annotated[list[dict[str, Any]], AfterValidator(_readable)]


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


class ToolFields(HeldFields):
    """Fields of a chat whose answer may call functions."""

    tools: Tools | None = None  # the chat template gets them as they are
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
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
            raise invalid("tool_choice.function.name", f"={self.named!r:.80} is none of the functions: {known:.80}")
        if not functions:
            if self.tool_choice is not None:
                raise refused("tool_choice", choice, "needs tools: say which functions there are")
            return form
        if form is not None and (choice != "auto" or form.constraint.kind != "json_schema"):
            what = f"tool_choice={choice!r:.80}" if choice != "auto" else "tools"
            raise ApiError(400, f"{form.field} and {what} are both given: leave one out", form.field, "invalid_value")
        content = None if form is None else json.loads(form.constraint.text)
        # Text ends at a stop string; all else must be without one.
        stops: dict[str, Any] = {"ends" if choice == "auto" and content is None else "stop": tuple(self.stops)}
        with at_field("tools"):
            made = calling(functions, choice, parallel=self.parallel_tool_calls, content=content, **stops)
            return Held("tools", made)


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


class Neutral(Strict):
    """A request in which a field that is null, or asks for nothing, counts as absent."""

    model: str

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        """Drops fields that ask for nothing. Raises ApiError for fields that this server cannot honour."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for field, value in data.items():
            if value is None or (field == "tools" and data.get("tool_choice") == "none"):
                continue
            neutral, reason = NOT_SUPPORTED.get(field, ((), ""))
            same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
            if any(same):  # 0 and 0.0 are the same, 0 and False are not
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
    def asked(self) -> dict[str, Any]:
        """Options of the sampling, by name."""
        return self.model_dump(include=Sampled.model_fields.keys() - {"model", "user", "dinfer"}, exclude_none=True)


class Generation(Sampled, HeldFields):
    """Fields of completions and chats."""

    source: ClassVar[str]  # the field with what the model reads
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[Token] = []
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", " is only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs", self.prompt_logprobs, "is told with the whole answer: set stream=false")
        held = self.held  # what would change an answer after that was held to a form is refused
        for field in ("ignore_eos", "stop_token_ids", "allowed_token_ids", "bad_words", "min_tokens", "echo"):
            if held is not None and (value := getattr(self, field)):
                raise refused(field, value, f"contradicts {held.field}, to which the answer is held")
        return self

    @property
    def each_held(self) -> list[Held]:
        """What the answer is held to. Raises ApiError."""
        return [] if (held := self.held) is None else [held]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def length(self) -> tuple[str, int | None]:
        """The field that says how many tokens are wanted, and its value."""
        return "max_tokens", self.max_tokens


class TextPart(Strict):
    type: Literal["text"]
    text: Text
    cache_control: Any = None  # a hint of Anthropic's API that proxies pass on


class ChatMessage(BaseModel):
    """One message. Further fields that hold text, such as `tool_call_id`, go to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, Text]

    role: Annotated[Text, Field(min_length=1, max_length=SHOWN)]  # the chat template says which there are
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
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
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
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
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", " needs logprobs=true")
        return self

    @property
    def top(self) -> int | None:
        """Alternatives of each token; None: no scores."""
        return self.top_logprobs or 0 if self.logprobs else None


class ChatRequest(Conversation, ToolFields, Scored, Generation):
    source = "messages"

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


class TraceRequest(ChatRequest):
    """A chat with one answer, whose whole denoising is shown."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        kinds: list[type[BaseModel]] = [Conversation, Sampled, HeldFields]
        shown = {
            "max_tokens",
            "max_completion_tokens",
            "reasoning_effort",
            "verbosity",
            *(field for kind in kinds for field in kind.model_fields),
        }
        for field, value in self.model_dump(exclude=shown, exclude_defaults=True).items():
            if value is not False:
                raise refused(field, value, "is not supported here: a trace shows the whole denoising of one answer.")
        return self


class CompletionRequest(Generation):
    source = "prompt"

    prompt: Text | Annotated[list[Text], Field(min_length=1)] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "=0 needs echo=true, which scores the prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class InfillRequest(Scored, Sampled, HeldFields):
    """Text with gaps: the model fills in n tokens for `[MASK:n]`."""

    text: Text
    scope: Literal["answer", "gap"] = "answer"  # what a form holds: all text from the first gap on, or each gap
    forms: Annotated[list[HeldFields], Field(min_length=1, max_length=MAX_CHOICES)] | None = None  # each gap's own

    @property
    def each_held(self) -> list[Held]:
        """What all gaps are held to, or each of them. Raises ApiError."""
        own = [form.form(f"forms.{i}.") for i, form in enumerate(self.forms or ())]
        if None in own:
            raise invalid(f"forms.{own.index(None)}", " says no form: give one, such as response_format")
        return [held for held in (*own, self.held) if held is not None]

    @model_validator(mode="after")
    def _something_held(self) -> Self:
        held = self.each_held
        if self.scope == "gap" and not held:
            raise invalid("scope", "='gap' says what a form holds: give one too, such as response_format")
        if self.forms and self.scope != "gap":
            raise invalid("forms", " are of each gap by itself: set scope='gap', or give one form for all text")
        if self.forms and self.held:
            raise invalid("forms", f" and {self.held.field} are both given: a gap is held to one form")
        return self


class ReadFields(Strict):
    """vLLM's names for reads, as far as they mean the same."""

    diffusion_max_steps: Annotated[int, Field(ge=1, le=STEPS)] | None = None
    diffusion_read_only: Literal[True] | None = None  # a read writes nothing
    diffusion_constrained: bool | None = None  # probabilities are of the options alone either way

    @model_validator(mode="before")
    @classmethod
    def _ours(cls, data: Any) -> Any:
        for field in ("diffusion_seed_canvas", "diffusion_pinned"):
            if isinstance(data, dict) and data.get(field) is not None:
                raise refused(f"vllm_xargs.{field}", data[field], f"is not supported. {READS}")
        return data


class ReadRequest(Neutral, Conversation):
    """A conversation, and an answer with slots, of which the model says how probable their options are."""

    answer: Text | None = None  # null: one slot alone
    choice: list[Text] | None = None  # the options of a single slot
    slots: dict[str, list[Text]] | None = None  # those of each slot by name
    steps: Annotated[int, Field(ge=1, le=STEPS)] | None = None  # null: 1
    vllm_xargs: ReadFields = ReadFields()
    seeds: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=0, lt=SEEDS - MAX_CHOICES)] = 0
    user: str | None = None
    dinfer: Own = Own()

    @property
    def denoised(self) -> int:
        """The denoise steps of each block. Raises ApiError."""
        told = [count for count in (self.steps, self.vllm_xargs.diffusion_max_steps) if count is not None]
        if len({*told}) > 1:
            raise invalid("steps", f"={told[0]} and vllm_xargs.diffusion_max_steps={told[1]} contradict each other")
        return told[0] if told else 1

    @model_validator(mode="after")
    def _nothing_drawn(self) -> Self:
        if told := self.dinfer.model_dump(exclude={"decoder", "deadline"}, exclude_defaults=True):
            raise refused(f"dinfer.{min(told)}", told[min(told)], "has no effect here: nothing is drawn.")
        return self


class TokenizeRequest(Neutral, Conversation):
    """A text, or a conversation."""

    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None  # type: ignore[assignment]
    tools: Tools | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False  # as the tokenizer's vocabulary has them

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", ": give either prompt or messages")
        if self.messages is None and self.tools:
            raise refused("tools", self.tools, "is not supported here: it is for messages.")
        return self


class DetokenizeRequest(Neutral):
    tokens: list[int]
