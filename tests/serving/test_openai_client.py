"""OpenAI's own client, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
import pydantic
from support.serving import QUESTION, listening, served, tiny

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as client, listening(client) as address:
        yield f"{address}v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def want() -> str:
    return tiny().generate([MESSAGES], max_new_tokens=32)[0].text


def test_an_answer_whole_and_in_pieces(client: openai.OpenAI, want: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=32)
    assert whole.choices[0].message.content == want
    pieces = list(client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=32, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == want
    assert pieces[-1].usage == whole.usage and whole.usage.total_tokens > whole.usage.completion_tokens > 0


def test_many_at_once(url: str, want: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one() -> str:
                with_pieces = await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=32, stream=True
                )
                return "".join([piece.choices[0].delta.content or "" async for piece in with_pieces])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(ask()) == [want] * 4


def test_options_of_ours_and_errors_that_it_knows(client: openai.OpenAI) -> None:
    ask = client.chat.completions.create
    few = ask(model="tiny", messages=MESSAGES, max_tokens=32, extra_body={"dinfer": {"threshold": 0.3}})
    many = ask(model="tiny", messages=MESSAGES, max_tokens=32, extra_body={"dinfer": {"threshold": 1.0}})
    assert few.usage.dinfer["forwards"] < many.usage.dinfer["forwards"]
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="tiny", messages=MESSAGES, prediction={"type": "content", "content": "a"})
    assert bad.value.param == "prediction" and bad.value.code == "unsupported_value"
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="gpt", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"


class Answer(pydantic.BaseModel):
    n: int
    kind: Literal["coins", "books"]


def test_an_answer_is_parsed_by_its_type(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="tiny", messages=MESSAGES, max_tokens=48, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, max_tokens=48, response_format=Answer
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_calls_are_parsed_by_their_types_whole_and_in_pieces(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Answer)]
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 96, "tools": tools, "tool_choice": "required"}
    (call,) = client.chat.completions.parse(**ask).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Answer)
    with client.chat.completions.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert [one.function for one in choice.message.tool_calls] == [call.function]
