"""dinfer as a model of lm-eval. The engine generates in batches; likelihoods are Monte-Carlo bounds."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from dinfer.core.engine.runtime import Runtime
from dinfer.core.pipeline import Pipeline, load
from dinfer.core.pipeline.inputs import named
from dinfer.core.pipeline.tokenizer import cut
from dinfer.core.recipe.recipe import Recipe
from dinfer.core.registry import REGISTRIES, unknown
from dinfer.lab.bounds import Bound, Pair, estimator, greedy, log_likelihoods
from dinfer.lab.metrics import Sample
from dinfer.scale.parallel.divided_model import everywhere
from dinfer.structure.form import Form, form_of
from evaluations.replicas import Replicas, replicas
from evaluations.report import Ledger, key_of
from evaluations.settings import FORMS, OURS, Likelihood, check_kwargs

DEFAULT_LENGTH = 128
SETTINGS = ("dtype", "quantize", "preset", "rows", "max_new_tokens")  # of `--model_args`, beside components


@dataclass(frozen=True, slots=True)
class GenKwargs:
    """A task's settings of generation, which all its requests share."""

    until: list[str]  # stop strings
    new_tokens: int
    infill: bool = False  # fill a gap of `new_tokens`, or of the document's `gap`, before its `suffix`
    sampled: bool = False  # repeats of a request differ
    options: dict[str, Any] = field(default_factory=dict)  # per-request options of the recipe
    form: Form | None = None  # what answers are held to


def parse(kwargs: Mapping[str, Any], recipe: Recipe, new_tokens: int | None) -> GenKwargs:
    """Reads `generation_kwargs`. `new_tokens` replaces the task's length; None: it does not.

    Raises ValueError for a wrong value, or a name that is neither lm-eval's nor a per-request option.
    """
    check_kwargs(kwargs, recipe.request_options)
    normal = normalize_gen_kwargs(dict(kwargs), DEFAULT_LENGTH)
    options = {name: value for name, value in kwargs.items() if name not in OURS}
    temperature = recipe.sampling_of().get("temperature", 0.0)
    if normal["do_sample"] and "temperature" in kwargs:
        options["sampling.temperature"] = temperature = float(kwargs["temperature"])
    elif not normal["do_sample"] and temperature > 0 and ("do_sample" in kwargs or "temperature" in kwargs):
        raise ValueError(
            f"the task asks for greedy decoding, but sampling.temperature={temperature}. Leave that at 0, or give the "
            f"temperature to the task: gen_kwargs={{do_sample: true, temperature: {temperature}}}"
        )
    until = kwargs.get("until") or []
    until = [text for text in ([until] if isinstance(until, str) else until) if text]
    form = form_of({name: kwargs.get(name) for name in FORMS})
    if form is not None:  # an answer that is cut would not be what it is held to
        form = replace(form, constraint=replace(form.constraint, stop=tuple(until)))
    return GenKwargs(
        until=until,
        new_tokens=new_tokens or normal["max_gen_toks"],
        infill=kwargs.get("infill", False),
        sampled=temperature > 0,
        options=options,
        form=form,
    )


Progress = Callable[..., None]  # takes what is being done, how much of it is done, and how much there is
BATCH = 16  # forwards of likelihoods at a time
CHUNK = 4  # batches of likelihoods between two entries in the ledger


@dataclass(frozen=True, slots=True)
class Job:
    """One request to answer."""

    instance: Instance
    repeat: int  # number among the samples of the same request
    key: str  # in the ledger

    @property
    def task(self) -> str:
        return str(self.instance.task_name)

    @property
    def where(self) -> str:
        return f"{self.task}, document {self.instance.doc_id}"


class DinferLM(TemplateLM):
    """Any recipe of dinfer, for any task of lm-eval."""

    def __init__(
        self, pipe: Pipeline, *, likelihood: Likelihood | None = None, among: Replicas | None = None,
        max_new_tokens: int | None = None, ledger: Ledger | None = None, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """`max_new_tokens` replaces the tasks' own lengths. `ledger` keeps answers, and has those of earlier sessions.
        `progress` is called after each answer; None: a bar if stderr is a terminal. Raises ValueError."""
        super().__init__()
        if pipe.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, and tasks are texts")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        self.pipe, self.tokenizer, self.likelihood = pipe, pipe.tokenizer, likelihood or Likelihood()
        self.among = among or Replicas(0, 1, pipe.model.device)
        self.new_tokens, self.ledger, self.progress = max_new_tokens, ledger or Ledger(), progress
        self._rank, self._world_size, self._device = self.among.rank, self.among.size, self.among.device

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Makes a model from lm-eval's `--model_args`: `model=tiny`, `decoder.threshold=0.8`, like dinfer's commands.

        Others are `likelihood.samples=32`, `preset`, `quantize`, `dtype`, `max_new_tokens`, and `rows`, the requests in
        flight. `rows` is by default lm-eval's batch size if above 1, else 32. `pretrained` and `revision` are what
        lm-eval's models call `model` and `model.revision`. Raises ValueError.
        """
        settings = arg_dict | {name: value for name, value in (additional_config or {}).items() if value is not None}
        for usual, name in (("pretrained", "model"), ("revision", "model.revision")):
            if usual in settings and name in settings:
                raise ValueError(f"model_args: {usual} and {name} are one setting: give one of them")
            if usual in settings:
                settings[name] = settings.pop(usual)
        size, device = settings.pop("batch_size", None), settings.pop("device", None)
        for name in ("max_batch_size", "trust_remote_code"):  # lm-eval's own flags; the last is for data sets, too
            settings.pop(name, None)
        dtype, quantize, preset, rows, length = (settings.pop(name, None) for name in SETTINGS)
        dtype = None if dtype == "auto" else dtype  # as lm-eval's models call it
        parts, likelihood = _parts(settings)
        among = replicas(None if device == "cuda:0" else device)  # cuda:0 is lm-eval's default
        rows = rows or (int(size) if str(size).isdigit() and int(size) > 1 else 32)
        runtime = Runtime(rows=rows, graphs=among.device.type == "cuda")
        pipe = load(
            **parts, preset=preset, device=among.device, dtype=dtype, quantize=quantize, runtime=runtime
        )  # fmt: skip
        return cls(pipe, likelihood=Likelihood(**likelihood), among=among, max_new_tokens=length)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # lm-eval's interface: answers.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts, cut at the first stop string."""

        def answers(jobs: list[Job]) -> Iterator[tuple[Job, str, dict[str, Any]]]:
            with named(jobs[0].task):
                asked = [parse(job.instance.args[1], self.pipe.recipe, self.new_tokens) for job in jobs]
            fill = self._infilled if asked[0].infill else self._generated
            for job, text, sample in fill(jobs, asked):
                yield job, text, {"sample": sample}

        return self._answered("generate_until", requests, answers, disable_tqdm)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Bounds of log p(continuation | context) in nats, and whether greedy decoding gives the continuation."""

        def answers(jobs: list[Job]) -> Iterator[tuple[Job, Any, dict[str, Any]]]:
            how = self.likelihood
            for part in (jobs[first : first + CHUNK * BATCH] for first in range(0, len(jobs), CHUNK * BATCH)):
                pairs: list[Pair] = []
                for context, text in (job.instance.args for job in part):
                    alone = [self.prefix_token_id], self.tok_encode(text, add_special_tokens=False)
                    pairs.append(self._encode_pair(context, text) if context else alone)
                written = self._on_ranks(greedy, pairs, batch=BATCH) if how.greedy else [False] * len(pairs)
                for job, bound, same in zip(part, self._bounds(part, pairs), written, strict=True):
                    yield job, (bound.value, same), _cost([bound])

        return [(value, same) for value, same in self._answered("loglikelihood", requests, answers, disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Bounds of log p(text) in nats, summed over disjoint windows of the model's length."""

        def answers(jobs: list[Job]) -> Iterator[tuple[Job, float, dict[str, Any]]]:
            for job in jobs:
                ids = self.tok_encode(job.instance.args[0], add_special_tokens=False)
                length = self.pipe.model.spec.max_length - 1  # the prefix takes one position
                windows = get_rolling_token_windows(ids, self.prefix_token_id, length, 1)
                pairs = [make_disjoint_window(window) for window in windows]
                bounds = self._bounds([job] * len(pairs), pairs)
                yield job, sum(bound.value for bound in bounds), _cost(bounds)

        return self._answered("loglikelihood_rolling", requests, answers, disable_tqdm)

    # lm-eval's interface: everything else.

    @property
    def eot_token_id(self) -> int:
        return self.pipe.model.spec.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token of an empty context: BOS, or EOS if there is no BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids. Adds special tokens unless the text begins with BOS, which a chat template may have added."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = bos is None or not string.startswith(bos)
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.pipe.written(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def all_gather(self, tensor: Any) -> Any:
        return self.among.gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        return self.among.collect(obj, dst)

    def barrier(self) -> None:
        self.among.wait()

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model."""
        recipe, how = self.pipe.recipe, self.likelihood
        parts = {"iteration": recipe.iteration, "decoder": recipe.decoder, "cache": recipe.cache}
        return {
            "model_spec": recipe.model.spec.family,
            **{name: repr(part) for name, part in (parts | {"sampling": recipe.sampling}).items()},
            "likelihood": {"estimator": estimator(recipe.model.spec), "samples": how.samples, "seed": how.seed}
            | {"guidance": how.guidance, "greedy": how.greedy},
        }

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError("likelihoods are computed from whole requests: use loglikelihood")

    # The work.

    def _answered(self, kind: str, requests: Sequence[Instance], answers: Any, disable_tqdm: bool) -> list[Any]:
        """The answers to all requests. `answers` yields those to the open jobs of one task."""
        jobs = self._jobs(kind, requests)
        left = list({job.key: job for job in jobs if self.ledger.get(job.key) is None}.values())
        quiet = disable_tqdm or self.rank > 0 or self.progress is not None or not os.isatty(2)
        done = len(jobs) - len(left)
        with tqdm(total=len(jobs), initial=done, disable=quiet, unit="request") as bar:
            for task, group in groupby(left, key=lambda job: job.task):  # each task has its own wall time
                began = time.perf_counter()
                for job, response, figures in answers(list(group)):
                    at, document = time.perf_counter() - began, int(job.instance.doc_id or 0)
                    self.ledger.add(job.key, task, document, response, at, **figures)
                    self.cache_hook.add_partial(kind, job.instance.args, response)
                    bar.update()
                    done += 1
                    if self.progress is not None:
                        self.progress(task, done, len(jobs))
        found = {answer.key: answer.response for answer in self.ledger.answers}
        return [found[job.key] for job in jobs]

    def _jobs(self, kind: str, requests: Sequence[Instance]) -> list[Job]:
        """One job for each request. lm-eval repeats a request for more samples, and also to pad ranks."""
        seen, jobs = Counter[int](), []
        for instance in requests:
            repeat = seen[id(instance)] % (instance.repeats or 1)
            seen[id(instance)] += 1
            key = key_of(kind, instance.task_name, instance.doc_id, instance.idx, repeat, instance.args)
            jobs.append(Job(instance, repeat, key))
        return jobs

    def _generated(self, jobs: list[Job], asked: list[GenKwargs]) -> Iterator[tuple[Job, str, Sample]]:
        """The generations of one task, in the order in which they end."""
        requests = []
        for job, own in zip(jobs, asked, strict=True):
            with named(job.where):
                ids = self.tok_encode(job.instance.args[0])
                language = None if own.form is None else own.form.language(self.pipe.compiler)
                requests += self.pipe.requests([ids], own.new_tokens, self._options(job, own), language)
        for update in self.pipe.engine.run(requests):
            if (done := update.completion) is not None:
                text, kept, found = cut(self.tokenizer, done.output, asked[update.index].until)
                sample = Sample.of(replace(done.counts, tokens=kept), done.stopped or found)
                yield jobs[update.index], text, sample

    def _infilled(self, jobs: list[Job], asked: list[GenKwargs]) -> Iterator[tuple[Job, str, Sample]]:
        """The same for gaps in texts, `runtime.rows` at a time."""
        rows, spec = self.pipe.engine.runtime.rows, self.pipe.model.spec
        for first in range(0, len(jobs), rows):
            part, own = jobs[first : first + rows], asked[first : first + rows]
            canvases = [self._canvas(*pair) for pair in zip(part, own, strict=True)]
            options = [self._options(*pair) for pair in zip(part, own, strict=True)]
            with named(f"{part[0].where} to {part[-1].where}"):
                form: Any = {} if own[0].form is None else {"scope": "gap", "constraint": own[0].form.constraint}
                filled = self.pipe.infill_ids(canvases, options=options, stop=True, **form)
            for job, kwargs, result in zip(part, own, filled, strict=True):
                ids = result.gaps[0]
                end = next((i for i, token in enumerate(ids) if token in spec.stop_ids), len(ids))
                text, kept, found = cut(self.tokenizer, ids[:end], kwargs.until)
                stopped = found or end < len(ids)
                yield job, text, Sample.of(replace(result.counts, tokens=kept), stopped)

    def _canvas(self, job: Job, asked: GenKwargs) -> list[int]:
        """Token ids of the request's text, a gap, and the document's text behind it."""
        document = job.instance.doc
        if not isinstance(document.get("suffix"), str):
            raise ValueError(f"{job.where}: gen_kwargs has infill, so the document needs a text 'suffix'")
        gap = document.get("gap", asked.new_tokens)
        if type(gap) is not int or gap < 1:
            raise ValueError(f"{job.where}: gap={gap!r} must be an integer, at least 1")
        before = self.tok_encode(job.instance.args[0])
        return [*before, *[self.pipe.model.spec.mask] * gap, *self.tok_encode(document["suffix"], False)]

    def _options(self, job: Job, asked: GenKwargs) -> dict[str, Any]:
        """The job's per-request options. Each sampled request has a seed of its own, the same in every run."""
        if not asked.sampled:
            return asked.options
        name = next((key for key in ("seed", "sampling.seed") if key in asked.options), "sampling.seed")
        usual = max(asked.options.get(name, int(self.pipe.recipe.sampling_of()["seed"])), 0)
        return asked.options | {name: usual + (int(job.instance.doc_id or 0) << 16) + job.repeat}

    def _on_ranks(self, work: Callable[..., list[Any]], pairs: Sequence[Pair], **settings: Any) -> list[Any]:
        return everywhere(self.pipe.recipe, work, [[[*prompt], [*answer]] for prompt, answer in pairs], **settings)

    def _bounds(self, jobs: Sequence[Job], pairs: Sequence[Pair]) -> list[Bound]:
        how = self.likelihood
        with named(f"{jobs[0].where} to {jobs[-1].where}"):
            return self._on_ranks(
                log_likelihoods, pairs, samples=how.samples, seed=how.seed, guidance=how.guidance, batch=BATCH
            )


def _cost(bounds: Sequence[Bound]) -> dict[str, Any]:
    """The standard error of a sum of bounds, and the forwards behind it."""
    return {"error": sum(bound.error**2 for bound in bounds) ** 0.5, "passes": sum(bound.samples for bound in bounds)}


def _parts(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Components as arguments of `load`, and the settings of `Likelihood`. Raises ValueError."""
    kinds, likelihood = [registry.kind for registry in REGISTRIES], list(Likelihood.__dataclass_fields__)
    known = [*kinds, *(f"{kind}.OPTION" for kind in kinds), *SETTINGS, *(f"likelihood.{name}" for name in likelihood)]
    options: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for name, value in settings.items():
        root, dot, option = name.partition(".")
        if root == "likelihood" and option in likelihood:
            found[option] = value
        elif root in kinds:
            options.setdefault(root, {})[option if dot else "name"] = value
        else:
            raise unknown("name in model_args:", name, known)
    if "name" not in options.get("model", {"name": None}):
        raise ValueError("model_args: options of a model need the model, such as model=FOLDER")
    # A name alone stands by itself: `load` takes "tiny", a hub name or a folder.
    return {kind: given["name"] if [*given] == ["name"] else given for kind, given in options.items()}, found
