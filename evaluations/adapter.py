"""dinfer as a model of lm-eval: generation in batches through the engine, likelihoods as Monte-Carlo bounds.

`DinferLM.of(pipe)` wraps a pipeline. From lm-eval's own command line (`dinfer-lm-eval --model dinfer`) the class is
built from `--model_args`: components by name, their options with a dot, as on dinfer's command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from dinfer.analysis.likelihood import Bound, Pair, estimator, greedy, log_likelihoods
from dinfer.analysis.metrics import Sample
from dinfer.core.registry import REGISTRIES, unknown
from dinfer.engine.runtime import Runtime
from dinfer.pipeline import Pipeline, load
from evaluations.gen_kwargs import Wish, cut, wish
from evaluations.ledger import Ledger, key_of
from evaluations.ranks import Ranks, ranks

Progress = Callable[..., None]  # what is being done, how much of it is, of how much
CHUNK = 4  # batches of a likelihood between two entries in the ledger


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likelihoods are estimated."""

    samples: int = 128  # noised copies of each answer; fewer where that is exact
    seed: int = 0
    guidance: float = 0.0
    batch: int = 16  # passes at a time
    greedy: bool = True  # find out whether the answer is what greedy decoding writes; false: report that it is not

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("batch", 1), ("guidance", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"likelihood.{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, slots=True)
class _Job:
    """One request that is to be answered."""

    instance: Instance
    occurrence: int  # among the repeats of the request
    key: str

    @property
    def where(self) -> str:
        return f"{self.instance.task_name}, document {self.instance.doc_id}"


class DinferLM(TemplateLM):
    """Any recipe of dinfer, for any task of lm-eval."""

    def __init__(
        self,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        dtype: str | None = None,
        rows: int | None = None,
        max_new_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: components (`decoder=threshold`), their options (`decoder.threshold=0.8`), and those of
        `Likelihood` (`likelihood.samples=32`). `rows`: requests in flight; None: lm-eval's batch size, if above 1, else
        32. `max_new_tokens` overrides the tasks'. ValueError for any other name."""
        parts, found = _parts(settings)
        where = ranks(None if device == "cuda:0" else device)  # which lm-eval says where its user says nothing
        size = int(batch_size) if str(batch_size).isdigit() and int(batch_size) > 1 else 32
        runtime = Runtime(rows=rows or size, graphs=where.device.type == "cuda")
        self._begin(
            load(**parts, device=where.device, dtype=dtype, runtime=runtime),
            Likelihood(**found),
            where,
            max_new_tokens,
            Ledger(),
            None,
        )

    @classmethod
    def of(
        cls,
        pipe: Pipeline,
        *,
        likelihood: Likelihood | None = None,
        among: Ranks | None = None,
        max_new_tokens: int | None = None,
        ledger: Ledger | None = None,
        progress: Progress | None = None,
    ) -> DinferLM:
        """The model of a pipeline. `ledger`: where answers are kept, and found if they were given before.

        `progress` is called after each answer; None: a bar, where stderr is a terminal.
        """
        lm = cls.__new__(cls)
        where = among or Ranks(0, 1, pipe.model.device)
        lm._begin(pipe, likelihood or Likelihood(), where, max_new_tokens, ledger or Ledger(), progress)
        return lm

    def _begin(
        self, pipe: Pipeline, likelihood: Likelihood, among: Ranks, max_new_tokens: int | None, ledger: Ledger,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if pipe.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, and tasks are texts")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        self.pipe, self.tokenizer, self.likelihood = pipe, pipe.tokenizer, likelihood
        self.among, self.new_tokens, self.ledger, self.progress = among, max_new_tokens, ledger, progress
        self._rank, self._world_size, self._device = among.rank, among.size, among.device

    # What lm-eval asks for: answers.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts, cut at the first stop string."""
        jobs = self._jobs("generate_until", requests)
        with self._bar(jobs, disable_tqdm) as bar:
            # Task by task, so that each has a wall time of its own.
            for _, group in groupby(self._open(jobs), key=lambda job: job.instance.task_name):
                for job, text, sample, at in self._generated(list(group)):
                    self._keep(job, "generate_until", text, at, sample=sample)
                    self._tell(bar, job)
        return [self._answer(job) for job in jobs]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Bounds of log p(continuation | context) in nats, and whether greedy decoding writes the continuation."""

        def answers(jobs: list[_Job]) -> Iterator[tuple[Any, list[Bound]]]:
            pairs = [self._pair(*job.instance.args) for job in jobs]
            how, model = self.likelihood, self.pipe.model
            written = greedy(model, pairs, batch=how.batch) if how.greedy else [False] * len(pairs)
            for bound, same in zip(self._bounds(jobs, pairs), written, strict=True):
                yield (bound.value, same), [bound]

        return [(value, same) for value, same in self._estimated("loglikelihood", requests, answers, disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Bounds of log p(text) in nats: the sum over windows as long as the model, each without the ones before it."""

        def answers(jobs: list[_Job]) -> Iterator[tuple[Any, list[Bound]]]:
            for job in jobs:
                ids = self.tok_encode(job.instance.args[0], add_special_tokens=False)
                length = self.pipe.model.spec.max_length - 1  # in front stands the prefix
                windows = get_rolling_token_windows(ids, self.prefix_token_id, length, 1)
                pairs = [make_disjoint_window(window) for window in windows]
                bounds = self._bounds([job] * len(pairs), pairs)
                yield sum(bound.value for bound in bounds), bounds

        return self._estimated("loglikelihood_rolling", requests, answers, disable_tqdm)

    # What lm-eval asks for: everything else.

    @property
    def eot_token_id(self) -> int:
        return self.pipe.model.spec.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands in for an empty context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens are added unless the text begins with BOS already, as chat templates have it."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = bos is None or not string.startswith(bos)
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except TemplateError as error:
            raise ValueError(f"the checkpoint's chat template: {error}") from error
        return str(text)

    def all_gather(self, tensor: Any) -> Any:
        return self.among.gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        return self.among.collect(obj, dst)

    def barrier(self) -> None:
        self.among.wait()

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        recipe, how = self.pipe.recipe, self.likelihood
        return {
            "model_spec": recipe.model.spec.family,
            **{name: repr(getattr(recipe, name)) for name in ("iteration", "decoder", "cache", "sampling")},
            "likelihood": {"estimator": estimator(recipe.model.spec), "samples": how.samples, "seed": how.seed}
            | {"guidance": how.guidance, "greedy": how.greedy},
        }

    # How it is done.

    def _jobs(self, kind: str, requests: Sequence[Instance]) -> list[_Job]:
        """One job a request. lm-eval repeats a request as often as it wants samples of it, and pads ranks with more."""
        seen: dict[int, int] = {}
        jobs = []
        for instance in requests:
            occurrence = seen.get(id(instance), 0)
            seen[id(instance)] = occurrence + 1
            occurrence %= instance.repeats or 1
            key = key_of(kind, instance.task_name, instance.doc_id, instance.idx, occurrence, instance.args)
            jobs.append(_Job(instance, occurrence, key))
        return jobs

    def _open(self, jobs: Sequence[_Job]) -> list[_Job]:
        """The jobs without an answer, each once."""
        return list({job.key: job for job in jobs if self.ledger.get(job.key) is None}.values())

    def _answer(self, job: _Job) -> Any:
        answer = self.ledger.get(job.key)
        if answer is None:
            raise RuntimeError(f"{job.where} was left without an answer")
        return answer.response

    def _keep(self, job: _Job, kind: str, response: Any, at: float, **fields: Any) -> None:
        self.ledger.add(job.key, str(job.instance.task_name), int(job.instance.doc_id or 0), response, at, **fields)
        self.cache_hook.add_partial(kind, job.instance.args, response)

    def _bar(self, jobs: Sequence[_Job], disable: bool) -> Any:
        quiet = disable or self.rank > 0 or self.progress is not None or not os.isatty(2)
        return tqdm(total=len(jobs), initial=len(jobs) - len(self._open(jobs)), disable=quiet, unit="request")

    def _tell(self, bar: Any, job: _Job) -> None:
        bar.n += 1  # counts also where the bar is not shown
        bar.refresh()
        if self.progress is not None:
            self.progress(str(job.instance.task_name), bar.n, bar.total)

    def _generated(self, jobs: list[_Job]) -> Iterator[tuple[_Job, str, Sample, float]]:
        """The answers to the requests of one task, each as soon as it is there, and when that was, in seconds."""
        wishes = [self._wish(job) for job in jobs]
        if wishes[0].infill:
            yield from self._infilled(jobs, wishes)
            return
        requests = []
        for job, asked in zip(jobs, wishes, strict=True):
            try:
                ids = self.tok_encode(job.instance.args[0])
                requests += self.pipe.requests([ids], asked.new_tokens, self._options(job, asked))
            except ValueError as error:
                raise ValueError(f"{job.where}: {error}") from error
        began = time.perf_counter()
        for update in self.pipe.engine.run(requests):
            if (done := update.completion) is not None:
                text, kept, found = cut(self.tokenizer, done.output, wishes[update.index].until)
                counts = done.counts
                sample = Sample(counts.forwards, counts.refreshes, kept, counts.seconds, done.stopped or found)
                yield jobs[update.index], text, sample, time.perf_counter() - began

    def _infilled(self, jobs: list[_Job], wishes: list[Wish]) -> Iterator[tuple[_Job, str, Sample, float]]:
        """The same for gaps in texts, as many at a time as run at a time."""
        rows, spec, began = self.pipe.engine.runtime.rows, self.pipe.model.spec, time.perf_counter()
        for first in range(0, len(jobs), rows):
            part, asked = jobs[first : first + rows], wishes[first : first + rows]
            canvases = [self._canvas(*pair) for pair in zip(part, asked, strict=True)]
            options = [self._options(*pair) for pair in zip(part, asked, strict=True)]
            try:
                filled = self.pipe.infill_ids(canvases, options=options, stop=True)
            except ValueError as error:
                raise ValueError(f"{part[0].where} to {part[-1].where}: {error}") from error
            at = time.perf_counter() - began
            for job, own, result in zip(part, asked, filled, strict=True):
                ids, counts = result.gaps[0], result.counts
                end = next((i for i, token in enumerate(ids) if token in spec.stop_ids), len(ids))
                text, kept, found = cut(self.tokenizer, ids[:end], own.until)
                stopped = found or end < len(ids)
                sample = Sample(counts.forwards, counts.refreshes, kept, counts.seconds, stopped)
                yield job, text, sample, at

    def _canvas(self, job: _Job, asked: Wish) -> list[int]:
        """The request's text, a gap, and what the document has behind it."""
        document = job.instance.doc
        if not isinstance(document.get("suffix"), str):
            raise ValueError(f"{job.where}: gen_kwargs has infill, so the document needs a text 'suffix'")
        gap = document.get("gap", asked.new_tokens)
        if type(gap) is not int or gap < 1:
            raise ValueError(f"{job.where}: gap={gap!r} must be an integer, at least 1")
        before = self.tok_encode(job.instance.args[0])
        return [*before, *[self.pipe.model.spec.mask] * gap, *self.tok_encode(document["suffix"], False)]

    def _wish(self, job: _Job) -> Wish:
        try:
            return wish(job.instance.args[1], self.pipe.recipe, new_tokens=self.new_tokens, default=128)
        except ValueError as error:
            raise ValueError(f"{job.instance.task_name}: {error}") from error

    def _options(self, job: _Job, asked: Wish) -> dict[str, Any]:
        """Each repeat of a sampled request has a random stream of its own."""
        if not (asked.sampled and job.occurrence):
            return asked.options
        name = next((key for key in ("seed", "sampling.seed") if key in asked.options), "sampling.seed")
        usual = self.pipe.recipe.sampling_of([])["seed"]
        return asked.options | {name: asked.options.get(name, usual) + job.occurrence}

    def _pair(self, context: str, continuation: str) -> Pair:
        if context:
            return self._encode_pair(context, continuation)
        return [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)

    def _bounds(self, jobs: Sequence[_Job], pairs: Sequence[Pair]) -> list[Bound]:
        how = self.likelihood
        try:
            return log_likelihoods(
                self.pipe.model, pairs, samples=how.samples, seed=how.seed, guidance=how.guidance, batch=how.batch
            )
        except ValueError as error:
            raise ValueError(f"{jobs[0].where} to {jobs[-1].where}: {error}") from error

    def _estimated(self, kind: str, requests: list[Instance], answers: Any, disable_tqdm: bool) -> list[Any]:
        """The answers that `answers` finds for the jobs of one task, some at a time."""
        jobs = self._jobs(kind, requests)
        with self._bar(jobs, disable_tqdm) as bar:
            for _, group in groupby(self._open(jobs), key=lambda job: job.instance.task_name):
                began, open_ = time.perf_counter(), list(group)
                size = CHUNK * self.likelihood.batch
                for part in (open_[i : i + size] for i in range(0, len(open_), size)):
                    for job, (response, bounds) in zip(part, answers(part), strict=True):
                        error = sum(bound.error**2 for bound in bounds) ** 0.5
                        passes = sum(bound.samples for bound in bounds)
                        at = time.perf_counter() - began
                        self._keep(job, kind, response, at, error=error, passes=passes)
                        self._tell(bar, job)
        return [self._answer(job) for job in jobs]

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError("likelihoods are computed from whole requests: use loglikelihood")


def _parts(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Components as mappings, and the settings of `Likelihood`."""
    kinds, likelihood = [registry.kind for registry in REGISTRIES], list(Likelihood.__dataclass_fields__)
    known = [*kinds, *(f"{kind}.OPTION" for kind in kinds), *(f"likelihood.{name}" for name in likelihood)]
    defaults = {"model": "tiny", "iteration": "blockwise", "decoder": "threshold", "cache": "dual"}
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
    parts: dict[str, Any] = {}
    for kind, given in options.items():
        if list(given) == ["name"]:  # "tiny", a hub name or a folder: `load` knows
            parts[kind] = given["name"]
        elif kind == "model" and "name" not in given:
            raise ValueError("model_args: options of a model need its family, such as model=llada")
        else:
            parts[kind] = {"name": defaults.get(kind, "standard"), **given}
    return parts, found
