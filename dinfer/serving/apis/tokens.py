"""/tokenize and /detokenize: texts and conversations as token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import FastAPI
from pydantic import Field, model_validator

from dinfer.serving.apis.chats import Tools
from dinfer.serving.errors import invalid, refused
from dinfer.serving.fields import ChatMessage, Conversation, Neutral, Text
from dinfer.serving.generating import encoded
from dinfer.serving.server import Server

# What is told of a tokenizer. Its configuration also has paths of this machine.
TOLD = (
    "chat_template", "bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_prefix_space",
    "clean_up_tokenization_spaces", "split_special_tokens",
)  # fmt: skip


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


def add(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text or a conversation."""
        served = server.catalogue.find(body.model)
        if body.prompt is not None:
            special = body.add_special_tokens
            tokens = await encoded(server, served, body.prompt, "prompt", add_special_tokens=special)
        else:
            tokens = await encoded(server, served, body.conversation, "messages", tools=body.tools, **body.ending)
        known = served.pipe.tokenizer if body.return_token_strs else None
        return {
            "model": served.name, "tokens": tokens, "count": len(tokens), "max_model_len": served.max_length,
            "token_strs": known and known.convert_ids_to_tokens(tokens),
        }  # fmt: skip

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """The first model's tokenizer, as its configuration has it. lm-eval asks for it."""
        served = server.catalogue.find("")
        known: Any = served.pipe.tokenizer
        given = {**known.init_kwargs, **known.special_tokens_map, "chat_template": known.chat_template}
        told = {name: value for name, value in given.items() if name in TOLD and isinstance(value, str | bool)}
        return told | {"tokenizer_class": type(known).__name__, "model_max_length": served.max_length}

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids; vLLM calls it a prompt."""
        served = server.catalogue.find(body.model)
        served.check_tokens("tokens", body.tokens)
        text = served.pipe.decode(body.tokens)
        return {"model": served.name, "text": text, "prompt": text}
