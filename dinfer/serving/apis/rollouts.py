"""/generate as SGLang's clients send it, with the step that wrote each token; /score: likelihoods of answers.

For trainers: served with `rollouts=true` alone.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI
from pydantic import Field

from dinfer.core.engine.request import Completion
from dinfer.lab.likelihood import Passes, Samples, combine, logps, passes
from dinfer.rollouts.run import Asked, Round, planned
from dinfer.serving.errors import ApiError, at_field, of_deadline, refused
from dinfer.serving.fields import MAX_CHOICES, SEEDS, Own
from dinfer.serving.forms import Strict
from dinfer.serving.rows import failure
from dinfer.serving.served import Served
from dinfer.serving.server import Server

PENALTIES = {"min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
Ids = Annotated[list[int], Field(min_length=1)]


class Sampling(Strict):
    """SGLang's `sampling_params`, as far as they mean something here."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    sampling_seed: Annotated[int, Field(ge=0, lt=SEEDS - MAX_CHOICES)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop: Annotated[list[str], Field(max_length=0)] | None = None  # a rollout ends at tokens alone
    no_stop_trim: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Those of the recipe. What changes nothing is left out: some decoders take no penalties."""
        fixed = {"temperature": self.temperature, "top_p": self.top_p, "top_k": max(self.top_k, 0)}
        least = {"min_tokens": self.min_new_tokens} if self.min_new_tokens else {}
        return fixed | least | self.model_dump(include=PENALTIES, exclude_defaults=True)


class GenerateRequest(Strict):
    """SGLang's fields for one prompt, or for several."""

    model: str | None = None
    input_ids: Ids | list[Ids] | None = None
    text: str | list[str] | None = None
    sampling_params: Sampling = Sampling()
    rid: str | None = None
    stream: Literal[False] = False
    return_logprob: bool = False
    return_step_maps: bool = False
    logprob_start_len: Literal[-1] = -1  # those of the prompt are not computed
    top_logprobs_num: Literal[0] | None = None
    return_text_in_logprobs: Literal[False] = False
    return_routed_experts: Literal[False] = False
    image_data: Annotated[list[Any], Field(max_length=0)] | None = None  # AReaL sends it always
    lora_path: str | None = None  # the name of a loaded adapter
    dinfer: Own = Own()


class AbortRequest(Strict):
    rid: str | None = None
    abort_all: bool = False


class Sequence(Strict):
    """An answer to a prompt."""

    prompt_ids: list[int]
    answer_ids: list[int]
    steps: list[int] | None = None  # of each token of the answer, the step that wrote it; -1: none did


class ScoreRequest(Strict):
    """Answers, and how their likelihood is estimated."""

    model: str | None = None
    sequences: Annotated[list[Sequence], Field(min_length=1)]
    estimator: str = "elbo"
    options: dict[str, Any] = {}
    seed: int = 0
    passes: dict[str, Any] | None = None  # of an earlier answer, to be used again
    return_passes: bool = False
    block: Annotated[int, Field(ge=1)] | None = None  # of the run that wrote the answers
    origin: Literal["position", "prompt"] = "position"


def add(app: FastAPI, server: Server) -> None:
    running: dict[str, set[asyncio.Task[Any]]] = defaultdict(set)

    @app.post("/generate")
    async def generate(body: GenerateRequest) -> Any:
        """Samples with what every step did. A list if there are several prompts, or n > 1."""
        served, asked = server.catalogue.find(body.model or body.lora_path or ""), body.sampling_params
        several, prompts = prompts_of(served, body)
        made = rounds(served, body, prompts)
        rid = body.rid or uuid.uuid4().hex
        with of_deadline(body.dinfer):
            found = await run(server, served, made, running[rid], server.seconds(body.dinfer))
        if not running[rid]:
            running.pop(rid, None)
        answers = [told(served, made, place, rid, body, done) for place, done in enumerate(found)]
        return answers if several or asked.n > 1 else answers[0]

    @app.post("/abort_request")
    async def abort(body: AbortRequest) -> dict[str, Any]:
        """Ends requests; each is answered with the finish reason "abort"."""
        chosen = [*running] if body.abort_all else [body.rid] if body.rid in running else []
        tasks = [task for rid in chosen for task in running[rid]]
        for task in tasks:
            task.cancel()
        return {"success": True, "message": f"{len(tasks)} samples were ended"}

    @app.get("/health_generate")
    async def health() -> dict[str, str]:
        """200 while the server takes requests."""
        server.check()
        return {"status": "ok"}

    @app.post("/score")
    async def score(body: ScoreRequest) -> dict[str, Any]:
        """Likelihoods of answers, in nats. The masks may be had, and used again for another policy."""
        served = server.catalogue.find(body.model or "")
        if served.pipe.recipe.ranks.size > 1:
            raise ApiError(400, "likelihoods are of a model on one card", code="unsupported_value")
        return await server.recording.run(partial(scored, served, body))


def prompts_of(served: Served, body: GenerateRequest) -> tuple[bool, list[list[int]]]:
    """Whether a list was given, and the token ids of each prompt. Raises ApiError."""
    if (body.input_ids is None) == (body.text is None):
        raise ApiError(400, "give either input_ids or text", "input_ids", "invalid_value")
    if body.input_ids is None:
        texts = [body.text] if isinstance(body.text, str) else body.text or []
        with at_field("text"):
            for text in texts:
                served.check_size(text, "text")
            return isinstance(body.text, list), [served.pipe.encode(text, chat=False) for text in texts]
    several = isinstance(body.input_ids[0], list)
    prompts: Any = body.input_ids if several else [body.input_ids]
    for prompt in prompts:
        served.check_tokens("input_ids", prompt)
    return several, prompts


def rounds(served: Served, body: GenerateRequest, prompts: list[list[int]]) -> Round:
    """The samples of a request. Raises ApiError."""
    asked, stops = body.sampling_params, set(served.pipe.model.spec.stop_ids)
    if other := [token for token in asked.stop_token_ids or [] if token not in stops]:
        raise refused("sampling_params.stop_token_ids", other, f"must be among those of the model: {sorted(stops)}.")
    seed = secrets.randbelow(SEEDS - MAX_CHOICES) if asked.sampling_seed is None else asked.sampling_seed
    seeds = [seed + j for _ in prompts for j in range(asked.n)]
    options = asked.options | (body.dinfer.model_extra or {})
    record = "logps" if body.return_logprob else "steps" if body.return_step_maps else "none"
    with at_field("sampling_params"):
        made = planned(served.pipe, prompts, Asked(asked.n, asked.max_new_tokens, seeds, record), options=options)
    if asked.ignore_eos:
        made = replace(made, requests=[replace(request, stops=False) for request in made.requests])
    return made


async def run(
    server: Server, served: Served, made: Round, tasks: set[asyncio.Task[Any]], seconds: float
) -> list[Completion | None]:
    """Each sample's completion; None: it was aborted. Raises ApiError."""
    server.check()
    end = asyncio.get_running_loop().time() + seconds

    async def one(request: Any) -> Completion | None:
        async for update in served.engine.stream(request, deadline=end):
            if update.completion is not None:
                return update.completion
        return None

    with server.admission.admit([request.length for request in made.requests]):
        own = [asyncio.create_task(one(request)) for request in made.requests]
        tasks |= {*own}
        try:
            found = await asyncio.gather(*own, return_exceptions=True)
        finally:
            for task in own:
                task.cancel()
            tasks.difference_update(own)
    for error in found:
        if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            raise failure(error) from error
    return [None if isinstance(done, BaseException) else done for done in found]


def told(
    served: Served, made: Round, place: int, rid: str, body: GenerateRequest, done: Completion | None
) -> dict[str, Any]:  # fmt: skip
    """A sample as SGLang's server answers it."""
    version = str(served.pipe.weights.version)
    if done is None:
        reason = {"type": "abort", "message": "the request was aborted"}
        meta: dict[str, Any] = {"id": rid, "finish_reason": reason, "completion_tokens": 0, "weight_version": version}
        meta |= {"output_token_logprobs": []} if body.return_logprob else {}
        return {"text": "", "output_ids": [], "meta_info": meta}
    sample = made.read({place: done})
    (answer,) = sample.to_sglang()
    answer["meta_info"] |= {"id": rid, "cached_tokens": 0, "seed": int(sample.seeds[0]), "exact": sample.exact}
    if not body.return_step_maps:
        for name in [key for key in answer["meta_info"] if key == "step_maps" or key.startswith("dllm_")]:
            del answer["meta_info"][name]
    text = "" if served.pipe.tokenizer is None else served.pipe.decode(answer["output_ids"])
    return {"text": text, **answer}


def scored(served: Served, body: ScoreRequest) -> dict[str, Any]:
    """The answer to /score. Raises ApiError."""
    pairs = [(one.prompt_ids, one.answer_ids) for one in body.sequences]
    steps = [one.steps for one in body.sequences]
    if any(step is None for step in steps) and any(step is not None for step in steps):
        raise ApiError(400, "sequences: give steps of all, or of none", "sequences", "invalid_value")
    given: Any = None if steps[0] is None else steps
    with at_field("sequences"):
        samples = Samples.of(pairs, steps=given, block=body.block, origin=body.origin)
    if own := {"name", "seed", "masks"} & body.options.keys():
        raise refused("options", min(own), "is no option of an estimator")
    with at_field("estimator"):
        spec = served.pipe.model.spec
        drawn = passes(body.estimator, spec, samples, seed=body.seed, **body.options)
    if body.passes is not None:
        with at_field("passes"):
            drawn = of_json(body.passes, drawn)
    found = combine(drawn, logps(served.pipe.model, drawn, grad=False))
    token_NA = (found.per_token.sum(0).cpu() / drawn.samples_N.clamp_min(1)[:, None]).tolist()
    scores = []
    for n, (_, answer) in enumerate(pairs):
        error = float(found.error[n])
        scores.append({
            "sequence": float(found.sequence[n]), "error": error if error < float("inf") else None,
            "per_token": token_NA[n][: len(answer)], "tokens": len(answer),
        })  # fmt: skip
    told = {"model": served.name, "weight_version": str(served.pipe.weights.version), "scores": scores}
    return told | ({"passes": as_json(drawn)} if body.return_passes else {})


def as_json(drawn: Passes) -> dict[str, Any]:
    """Passes in plain values: rows of masks as texts of 0 and 1."""
    found = {}
    for name, value in drawn.state().items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 2:
            value = ["".join(map(str, row)) for row in value.int().tolist()]
        found[name] = value.tolist() if isinstance(value, torch.Tensor) else value
    return found


def of_json(given: dict[str, Any], like: Passes) -> Passes:
    """The passes of `as_json`. Raises ValueError unless they are of the same texts and estimator as `like`."""
    state, found = like.state(), dict[str, Any]()
    if given.keys() != state.keys():
        raise ValueError(f"they must have the fields {', '.join(sorted(state))}")
    for name, own in state.items():
        try:
            found[name] = tensor_of(given[name], own) if isinstance(own, torch.Tensor) else given[name]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} is not as /score gave it: {error}") from error
    for name in OF_TEXTS:
        own, value = state[name], found[name]
        if not (own.equal(value) if isinstance(own, torch.Tensor) else own == value):
            raise ValueError(f"{name} is not that of these sequences and this estimator")
    made, samples_N = Passes.of(found), found["samples_N"]
    for letter in "MX":  # names end in the shape
        rows = {name: len(value) for name, value in found.items() if name.partition("_")[2].startswith(letter)}
        if len({*rows.values()}) > 1:
            raise ValueError(f"{', '.join(rows)} have different lengths")
    if samples_N.shape != like.samples_N.shape or made.masked_MT.shape[1] != like.masked_MT.shape[1]:
        raise ValueError("samples_N or masked_MT has not the shape of these sequences")
    below("sequence_M", made.sequence_M, len(made.length_N))
    below("sample_M", made.sample_M, samples_N[made.sequence_M])
    below("pass_X", made.pass_X, len(made.sequence_M))
    below("place_X", made.place_X, made.length_N[made.sequence_M[made.pass_X]])
    if bool((made.pass_X.diff() < 0).any()) or not bool(made.weight_X.isfinite().all()):
        raise ValueError("pass_X must ascend, and weight_X be finite")
    return made


OF_TEXTS = (
    "estimator", "options", "mask_id", "shift", "ids_NT", "prompt_N", "length_N", "counted_NA", "block_NT",
)  # fmt: skip


def tensor_of(value: Any, own: torch.Tensor) -> torch.Tensor:
    """A tensor that plain values tell, like one that is known. Raises ValueError, TypeError or RuntimeError."""
    if own.dtype == torch.bool and value and all(isinstance(row, str) for row in value):
        value = [[character == "1" for character in row] for row in value]
    found = torch.tensor(value, dtype=own.dtype)
    found = found.view(-1, own.shape[1]) if own.dim() == 2 and not found.numel() else found
    if found.dim() != own.dim():
        raise ValueError(f"it has {found.dim()} dimensions, not {own.dim()}")
    return found


def below(name: str, index: torch.Tensor, most: Any) -> None:
    """Raises ValueError for indices outside."""
    if bool(((index < 0) | (index >= most)).any()):
        raise ValueError(f"{name} has numbers out of range")
