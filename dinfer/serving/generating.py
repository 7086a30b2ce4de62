"""How APIs that generate text answer a request: its prompts in tokens, its rows, and what is told of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Response

from dinfer.core.engine.request import Request
from dinfer.core.pipeline.inputs import NoTools
from dinfer.core.provided import needed, provided
from dinfer.core.step.told import TokenLogprob
from dinfer.lab.bounds import left_to_right
from dinfer.serving.answers import Answer, CallReader, Choice, Rendering, ThoughtReader
from dinfer.serving.errors import ApiError, at_field, invalid, refused
from dinfer.serving.fields import Generation
from dinfer.serving.logprobs import Logprobs, prompt_logprobs
from dinfer.serving.pictures import pictures_in
from dinfer.serving.rows import Event, Wanted, endings_of, failure
from dinfer.serving.served import Served
from dinfer.serving.server import Server
from dinfer.structure.abilities.constraints import InLanguage

LOG = logging.getLogger("dinfer.serving")
LONG = 8192  # bytes from which a thread encodes a prompt, so that the event loop serves others meanwhile


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client is told beside the answer."""

    logprobs: Logprobs | None  # None: it wants none
    prompts: Sequence[list[Any]]  # `prompt_logprobs` of each prompt, if it wants them
    ids: bool  # the tokens of the answer


async def encoded(
    server: Server, served: Served, prompt: str | list[dict[str, Any]], field: str, *, images: bool = True, **how: Any
) -> list[int]:
    """Token ids; of conversations by the chat template. `images`: whether they may have any. Raises ApiError."""
    if not isinstance(prompt, str) and (pictures := [*pictures_in(prompt)]):
        if not images:
            raise invalid(pictures[0].where, " is an image, which a trace does not show: leave it out")
        return await _seen(server, served, prompt, pictures, **how)
    encode = partial(served.pipe.encode, prompt, chat=False if isinstance(prompt, str) else None, **how)
    with at_field(field):
        try:
            if served.check_size(prompt, field, **how) < LONG:
                return encode()
            return await asyncio.get_running_loop().run_in_executor(server.encoding, encode)
        except NoTools as error:
            raise refused("tools", how.get("tools", []), f"cannot be shown: {error}") from error


async def _seen(
    server: Server, served: Served, prompt: list[dict[str, Any]], pictures: Sequence[Any], **how: Any
) -> list[int]:
    """As `encoded`, with images: in a thread, which decodes and sees them, and counted as a row meanwhile."""
    own = needed("images", "an image", "families").eyes_of(served.pipe.model)
    encode = partial(served.pipe.encode, prompt, **how)
    counts = () if isinstance(own, str) else (own.soft_tokens(one, alone=len(pictures) == 1) for one in pictures)
    try:
        served.check_size(prompt, "messages", **how)
        with server.admission.admit([sum(counts)]):
            async with asyncio.timeout(server.settings.deadline):
                return await asyncio.get_running_loop().run_in_executor(server.encoding, encode)
    except ValueError as error:
        where = next((one.where for one in pictures if str(error).startswith(f"{one.where}:")), "messages")
        raise ApiError(400, str(error), where, "invalid_value") from error
    except TimeoutError as error:
        raise failure(error) from error


async def scored(
    server: Server, served: Served, ids: list[int], top: int, field: str
) -> list[tuple[TokenLogprob, int] | None]:
    """Log-probabilities and ranks of a prompt's tokens, computed beside the engine, as a trace. Raises ApiError."""
    score = partial(left_to_right, served.pipe.model, ids, top=max(top, 1))
    try:
        async with asyncio.timeout(server.settings.deadline):
            with at_field(field):
                return [None, *await server.recording.run(score)]
    except ApiError:
        raise
    except Exception as error:
        raise failure(error) from error


async def generated(
    server: Server, served: Served, asked: Generation, prompts: list[list[int]],
    rendering: Callable[[Answer, Any, Shown], Rendering], top: int | None, echoes: Sequence[Event] = (),
    rows: Sequence[Request] | None = None,
) -> Response:  # fmt: skip
    """Runs the rows of a request, and answers. `top`: alternatives of each token; None: no log-probabilities.

    `rows`: None: those that continue the prompts. Raises ApiError.
    """
    prompts = [served.truncated(prompt, asked) for prompt in prompts]
    if server.settings.log_prompts:
        for prompt in prompts:
            LOG.info("prompt", extra={"model": served.name, "prompt": served.pipe.decode(prompt)})
    endings = await endings_of("stop_regex", asked.endings)
    rows = await served.rows(prompts, asked) if rows is None else rows
    scores: list[list[Any]] = []
    if (best := asked.prompt_logprobs) is not None:
        if (asks_of := provided("asks_of")) is not None and any(map(asks_of, prompts)):
            raise refused("prompt_logprobs", best, "is not supported with images: leave it out")
        told = [await scored(server, served, prompt, best, "prompt_logprobs") for prompt in prompts]
        scores = [prompt_logprobs(served.pieces, *one, best) for one in zip(prompts, told, strict=True)]
    logprobs = _logprobs(served, asked, top, echoes)
    answer = Answer(
        model=served.name, prompts=prompts, choices=[_begun(served, asked, p) for p in prompts for _ in range(asked.n)],
        decode=served.pipe.decode, echoes=echoes, held=rows[0].ask(InLanguage) if rows else None,
        free=asked.free, canvas=rows[0].length - len(prompts[0]) if rows else 0,
    )  # fmt: skip
    shown = rendering(answer, asked, Shown(logprobs, scores, asked.return_token_ids or top is not None))
    wanted = Wanted(
        asked.stops, frozenset(asked.stop_token_ids), keep_stop=asked.include_stop_str_in_output,
        endings=endings, least=asked.min_tokens or 0, named=(*asked.logprob_token_ids,),
        drafts=asked.dinfer.drafts, logprobs=top is not None,
        ids=asked.return_token_ids or top is not None or answer.choices[0].thoughts is not None,
        ends=asked.return_token_ids,
        usage=(asked.stream_options is not None and asked.stream_options.continuous_usage_stats),
    )  # fmt: skip
    return await server.answer(served, rows, wanted, shown, asked)


def _logprobs(served: Served, asked: Generation, top: int | None, echoes: Sequence[Event]) -> Logprobs | None:
    """How log-probabilities are told; None: they are not. Raises ApiError."""
    named = asked.logprob_token_ids
    served.check_tokens("logprob_token_ids", named)
    if named and top is None:
        raise invalid("logprob_token_ids", " needs logprobs")
    if named and any(echo.logprobs for echo in echoes):
        raise invalid("logprob_token_ids", " is of new tokens: set echo=false")
    by_number = asked.return_tokens_as_token_ids
    return None if top is None else Logprobs(served.pieces, len(named) or top, by_number, bool(named))


def _begun(served: Served, asked: Generation, prompt: Sequence[int]) -> Choice:
    """A choice of which nothing is said yet."""
    names, thoughts = asked.callable, None
    if asked.divided and served.marks is not None:
        thoughts = ThoughtReader(served.marks, "thought" if served.thinks(prompt) else "before")
    return Choice(thoughts, CallReader(names, "text" if asked.choice == "auto" else "head") if names else None)
