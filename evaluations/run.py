"""One evaluation: tasks through lm-eval, judged and measured together, and written down."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from dinfer.analysis.provenance import provenance
from dinfer.pipeline import Pipeline
from evaluations.adapter import DinferLM, Likelihood
from evaluations.ledger import Answer, Ledger, files
from evaluations.ranks import Ranks
from evaluations.report import report, samples_of, write_table
from evaluations.sandbox import Limits, in_sandbox

TASKS = Path(__file__).parent / "tasks"
SCHEMA = "dinfer-eval/1"
# What a task whose configuration is wrong raises when lm-eval loads it.
TASK_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    OSError,
    yaml.YAMLError,
    jinja2.TemplateError,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of an evaluation, beside the recipe."""

    tasks: tuple[str, ...]
    include: tuple[str, ...] = ()  # folders with tasks of the user's
    limit: int | float | None = None  # documents of each task; below 1: that share of them
    documents: tuple[int, int] | None = None  # instead of a limit: these alone, [first, end)
    num_fewshot: int | None = None
    chat: bool | None = None  # None: if the tokenizer has a chat template
    system: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    fewshot_seed: int = 1234
    metric: str | None = None  # that `accuracy` is; None: the first of each task
    allow_code: bool = False
    code: Limits = field(default_factory=Limits)
    likelihood: Likelihood = field(default_factory=Likelihood)
    use_cache: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks is empty: name at least one, such as tasks=mini_gsm or tasks=[gsm8k,ifeval]")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit={self.limit} must be above 0: documents, or a share below 1")
        if self.limit is not None and self.limit >= 1 and self.limit != int(self.limit):
            raise ValueError(f"limit={self.limit} must be a whole number of documents, or a share below 1")
        if self.documents is not None and self.limit is not None:
            raise ValueError(f"limit={self.limit} and documents={self.documents} are given: choose one of them")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot={self.num_fewshot} must not be negative")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")


def name_of(recipe: Mapping[str, Any], settings: Settings, runtime: Mapping[str, Any]) -> str:
    """The name of a run's files: readable, and different for whatever may change its figures."""
    everything = json.dumps([recipe, asdict(settings), runtime], sort_keys=True, default=str)
    digest = hashlib.blake2b(everything.encode(), digest_size=4).hexdigest()
    parts = ("+".join(settings.tasks), *(recipe[kind]["name"] for kind in ("model", "iteration", "decoder", "cache")))
    readable = "".join(sign if sign.isalnum() or sign in "-_+" else "_" for sign in "-".join(parts))
    return f"{readable[:100]}-{digest}"


def evaluate(
    pipe: Pipeline,
    settings: Settings,
    *,
    among: Ranks,
    recipe: Mapping[str, Any],
    runtime: Mapping[str, Any],
    out: Path | None,
    command: str = "",
) -> dict[str, Any] | None:
    """Runs the tasks, or what is left of them; the report, on the first rank.

    `out`: the folder for NAME.json, NAME.samples.jsonl, NAME.answers-RANK.jsonl and runs.csv; None: nothing is kept.
    Raises ValueError for tasks and settings that cannot be.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    versions = {name.replace("-", "_"): version(name) for name in ("lm-eval", "transformers")}
    found = provenance(among.device) | versions | {"ranks": among.size}
    stem = None if out is None else out / name_of(recipe, settings, runtime)
    setup = {name: value for name, value in found.items() if name != "date"}
    chat = settings.chat
    if chat is None:
        chat = pipe.tokenizer is not None and pipe.tokenizer.chat_template is not None
    elif chat and (pipe.tokenizer is None or pipe.tokenizer.chat_template is None):
        raise ValueError("chat=true, but the checkpoint's tokenizer has no chat template")
    with in_sandbox(settings.code):
        manager, tasks = load_tasks(settings)
        ledger = Ledger(stem, rank=among.rank, setup=setup)
        try:
            lm = DinferLM.of(
                pipe,
                likelihood=settings.likelihood,
                among=among,
                max_new_tokens=settings.max_new_tokens,
                ledger=ledger,
            )
            results = simple_evaluate(
                lm,
                tasks=tasks,
                limit=settings.limit,
                samples=chosen(tasks, settings.documents),
                num_fewshot=settings.num_fewshot,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                system_instruction=settings.system,
                gen_kwargs=dict(settings.gen_kwargs) or None,
                fewshot_random_seed=settings.fewshot_seed,
                task_manager=manager,
                use_cache=settings.use_cache,
                bootstrap_iters=1000,
                confirm_run_unsafe_code=settings.allow_code,
            )
        finally:
            ledger.close()
    gathered = among.collect(ledger.answers)
    if results is None or gathered is None:
        return None
    # lm-eval numbers requests among the chosen documents, and results among all.
    first = settings.documents[0] if settings.documents is not None else 0
    moved = (replace(answer, document=answer.document + first) for part in gathered for answer in part)
    answers: dict[str, Answer] = {answer.key: answer for answer in moved}
    document = report(results, list(answers.values()), settings.metric) | {
        "likelihood": lm.get_model_info()["likelihood"],
        "recipe": dict(recipe),
        "settings": asdict(settings) | {"tasks": list(settings.tasks), "chat": chat},
        "runtime": dict(runtime),
    }
    document = {"schema": SCHEMA, "command": command} | found | document
    if stem is not None and out is not None:
        samples = "".join(json.dumps(line, default=str) + "\n" for line in samples_of(results))
        stem.with_name(f"{stem.name}.samples.jsonl").write_text(samples, encoding="utf-8")
        _write(stem.with_name(f"{stem.name}.json"), json.dumps(document, indent=1, default=str) + "\n")
        write_table(out)
    return document


def chosen(tasks: list[Any], documents: tuple[int, int] | None) -> dict[str, list[int]] | None:
    """The documents of each task by number. Raises ValueError for a task that has fewer, or for a group."""
    if documents is None:
        return None
    found = {}
    for task in tasks:
        if not hasattr(task, "eval_docs"):
            raise ValueError("documents can be chosen of single tasks, not of groups: name one of the group's tasks")
        have = len(task.eval_docs)
        if documents[1] > have:
            raise ValueError(f"the task {task.task_name} has {have} documents, and {documents[1]} are asked for")
        found[task.task_name] = list(range(*documents))
    return found


def finished(recipe: Mapping[str, Any], settings: Settings, runtime: Mapping[str, Any], out: Path) -> Path | None:
    """The report of the same run, if it is there already."""
    path = out / f"{name_of(recipe, settings, runtime)}.json"
    return path if path.is_file() else None


def forget(recipe: Mapping[str, Any], settings: Settings, runtime: Mapping[str, Any], out: Path) -> None:
    """Removes what an earlier run with the same settings left."""
    stem = out / name_of(recipe, settings, runtime)
    for path in (stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.samples.jsonl"), *files(stem)):
        path.unlink(missing_ok=True)


def load_tasks(settings: Settings) -> tuple[TaskManager, list[Any]]:
    """The tasks, from our folder alone where that will do: to read all of lm-eval's takes seconds."""
    folders = [TASKS]
    for name in settings.include:
        folder = Path(name)
        if not folder.is_dir():
            raise ValueError(f"include={name!r}: there is no such folder")
        for path in sorted(folder.glob("**/*.yaml")):
            _read(path)  # lm-eval would leave out in silence what it cannot read
        folders.append(folder)
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not all(_names(manager, pattern) for pattern in settings.tasks):
        manager = TaskManager(include_path=folders)
    tasks: dict[str, Any] = {}
    generates = False
    for pattern in settings.tasks:
        names = _names(manager, pattern)
        if not names:
            raise _no_such_task(pattern, manager)
        for name in names:
            entry = manager.task_index.get(name)
            _allow(name, settings, bool(entry and (entry.cfg or {}).get("unsafe_code")))  # before it is downloaded
            try:
                loaded = manager.load([name])
            except TASK_ERRORS as error:
                reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"the task {name} cannot be loaded: {reason}") from error
            for task in loaded["tasks"].values():
                _allow(task.task_name, settings, getattr(task, "UNSAFE_CODE", False))
                _check(task, settings)
                generates |= task.OUTPUT_TYPE == "generate_until"
            tasks |= loaded["groups"] or loaded["tasks"]
    if settings.gen_kwargs and not generates:
        raise ValueError(f"gen_kwargs={dict(settings.gen_kwargs)} are given, but no task of {list(tasks)} generates")
    return manager, list(tasks.values())


def _check(task: Any, settings: Settings) -> None:
    """Raises ValueError for what the task cannot do, before it costs anything."""
    if settings.num_fewshot and task.get_config("num_fewshot") == 0:
        raise ValueError(f"num_fewshot={settings.num_fewshot}: the task {task.task_name} has no examples to show")
    if settings.metric is not None:
        filters = [entry["name"] for entry in task.get_config("filter_list") or [{"name": "none"}]]
        known = [f"{name},{kind}" for name in task.aggregation() for kind in filters]
        if settings.metric not in (*task.aggregation(), *known):
            raise ValueError(f"metric={settings.metric!r}: the task {task.task_name} has {', '.join(known)}")


def _allow(task: str, settings: Settings, unsafe: bool) -> None:
    if unsafe and not settings.allow_code:
        raise ValueError(
            f"the task {task} runs generated code. allow_code=true lets it, in a process with limits of time and "
            "memory (code.seconds, code.megabytes)"
        )


def _names(manager: TaskManager, pattern: str) -> list[str]:
    if pattern.endswith(".yaml"):
        _read(Path(pattern))
        return [pattern]
    return list(manager.match_tasks([pattern]))


def _read(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"task file {path}: there is no such file")
    try:
        load_yaml(path, resolve_func=False)
    except TASK_ERRORS as error:
        raise ValueError(f"task file {path} cannot be read: {error}") from error


def _no_such_task(name: str, manager: TaskManager) -> ValueError:
    close = difflib.get_close_matches(name, manager.all_tasks, 3, cutoff=0.5)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    return ValueError(f"unknown task {name!r}.{hint} `lm_eval ls tasks` lists lm-eval's, {TASKS} holds ours.")


def _write(path: Path, text: str) -> None:
    """As a whole or not at all: a report that is there is complete."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
