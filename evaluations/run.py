"""Runs tasks through lm-eval, scores and measures them, and writes the report."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import lm_eval
import yaml
from lm_eval.tasks import TaskManager
from transformers import set_seed

from dinfer.core.pipeline import Pipeline
from dinfer.lab.outputs import write
from dinfer.lab.provenance import provenance
from evaluations.adapter import DinferLM, Progress
from evaluations.names import TASKS, check_names, unknown_task
from evaluations.replicas import Replicas
from evaluations.report import Ledger, report, samples_of, sessions, write_table
from evaluations.sandbox import in_sandbox, warn_of_gaps
from evaluations.settings import Settings

SCHEMA = "dinfer-eval/1"
SEED = 1234  # lm-eval's, also of the examples that a task shows
# The errors of lm-eval when it loads a task with a wrong configuration.
TASK_ERRORS = (
    ValueError, KeyError, TypeError, AttributeError, ImportError, OSError, yaml.YAMLError, jinja2.TemplateError,
)  # fmt: skip


def stem_of(out: Path, recipe: Mapping[str, Any], settings: Settings, runtime: Mapping[str, Any]) -> Path:
    """The path of a run's files without their endings. It depends on every setting that may change a figure."""
    everything = json.dumps([recipe, asdict(settings), runtime], sort_keys=True, default=str)
    digest = hashlib.blake2b(everything.encode(), digest_size=4).hexdigest()
    parts = ("+".join(settings.tasks), *(recipe[kind]["name"] for kind in ("model", "iteration", "decoder", "cache")))
    readable = "".join(sign if sign.isalnum() or sign in "-_+" else "_" for sign in "-".join(parts))
    return out / f"{readable[:100]}-{digest}"


def report_of(stem: Path) -> Path:
    """The path of a run's report. The file exists only if the run is complete."""
    return stem.with_name(f"{stem.name}.json")


def evaluate(
    load: Callable[[], Pipeline], settings: Settings, *, among: Replicas, recipe: Mapping[str, Any],
    runtime: Mapping[str, Any], stem: Path | None, overwrite: bool = False, command: str = "",
    progress: Progress | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Runs the tasks, or the rest of them. Returns the report on the first rank, None on others.

    `load` makes the pipeline once files and tasks are checked. `stem`: the run writes STEM.json, STEM.samples.jsonl,
    STEM.answers-RANK.jsonl, and runs.csv in the same folder; None: it writes nothing. `overwrite`: begins anew. Raises
    OSError, and ValueError for tasks or settings that do not work, or if another process is at this run.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    say = progress or (lambda *_: None)
    versions = {name.replace("-", "_"): version(name) for name in ("lm-eval", "transformers")}
    setup = provenance(among.device) | versions | {"replicas": among.size}
    date = setup.pop("date")
    with in_sandbox(settings.code), ExitStack() as files:
        set_seed(SEED)  # before tasks shuffle their documents
        say("loading the tasks")
        tasks = load_tasks(settings)
        ledger = files.enter_context(Ledger(stem, among=among, setup=setup, overwrite=overwrite))
        say("loading the model")
        pipe = load()
        templates = pipe.tokenizer is not None and pipe.tokenizer.chat_template is not None
        if settings.chat and not templates:
            raise ValueError("chat=true, but the checkpoint's tokenizer has no chat template")
        chat = templates if settings.chat is None else settings.chat
        lm = DinferLM(
            pipe, likelihood=settings.likelihood, among=among, max_new_tokens=settings.max_new_tokens, ledger=ledger,
            progress=progress,
        )  # fmt: skip
        results = lm_eval.evaluate(
            lm, tasks, limit=settings.limit, samples=chosen(tasks, settings.documents), bootstrap_iters=1000,
            system_instruction=settings.system, apply_chat_template=chat, fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=settings.allow_code,
        )  # fmt: skip
        gathered = among.collect(ledger.answers)
    if results is None or gathered is None:
        return None
    # lm-eval numbers the documents of requests among the chosen ones, but those of results among all.
    first = settings.documents[0] if settings.documents is not None else 0
    moved = (replace(answer, document=answer.document + first) for part in gathered for answer in part)
    answers = list({answer.key: answer for answer in moved}.values())
    document = {
        "schema": SCHEMA, "command": command, "date": date, **setup, "sessions": sessions(answers),
        **report(results, answers, settings.metric),
        "likelihood": lm.get_model_info()["likelihood"], "recipe": dict(recipe), "runtime": dict(runtime),
        "settings": asdict(settings) | {"tasks": list(settings.tasks), "chat": chat},
    }  # fmt: skip
    if stem is not None:
        samples = "".join(json.dumps(line, default=str) + "\n" for line in samples_of(results))
        write(stem.with_name(f"{stem.name}.samples.jsonl"), samples)
        write(report_of(stem), json.dumps(document, indent=1, default=str) + "\n")
        write_table(stem.parent)
    return document


def chosen(tasks: Mapping[str, Any], documents: tuple[int, int] | None) -> dict[str, list[int]] | None:
    """The numbers of each task's chosen documents. Raises ValueError for a task with fewer documents, or a group."""
    if documents is None:
        return None
    if tasks["groups"]:
        raise ValueError("documents can be chosen of single tasks, not of groups: name one of the group's tasks")
    for name, task in tasks["tasks"].items():
        if documents[1] > len(task.eval_docs):
            raise ValueError(f"the task {name} has {len(task.eval_docs)} documents, and {documents[1]} are asked for")
    return {name: list(range(*documents)) for name in tasks["tasks"]}


def load_tasks(settings: Settings) -> dict[str, Any]:
    """The tasks for lm-eval. It tries our folder first, since reading all of lm-eval's tasks takes seconds.

    Raises ValueError for tasks that do not exist, cannot be loaded, or contradict the settings.
    """
    check_names(settings.tasks, settings.include)
    folders = [TASKS, *map(Path, settings.include)]
    for folder in folders[1:]:
        for path in sorted(folder.glob("**/*.yaml")):
            _read(path)  # lm-eval silently skips files that it cannot read
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not all(_names(manager, pattern) for pattern in settings.tasks):
        manager = TaskManager(include_path=folders)
    found: list[Any] = []
    for pattern in settings.tasks:
        names = _names(manager, pattern)
        if not names:
            raise unknown_task(pattern, manager.all_tasks)
        for name in names:
            entry = manager.task_index.get(name)
            _allow(
                name, settings, bool(entry and (entry.cfg or {}).get("unsafe_code"))
            )  # before its data is downloaded
            try:
                loaded = manager.load([name])
            except TASK_ERRORS as error:
                reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"the task {name} cannot be loaded: {reason}") from error
            for task in loaded["tasks"].values():
                _allow(task.task_name, settings, getattr(task, "UNSAFE_CODE", False))
                _configure(task, settings)
            inside = {child for children in loaded["group_map"].values() for child in children}
            found += [one for key, one in (loaded["groups"] | loaded["tasks"]).items() if key not in inside]
    tasks = manager.load(found)
    if settings.gen_kwargs and not any(task.OUTPUT_TYPE == "generate_until" for task in tasks["tasks"].values()):
        raise ValueError(
            f"gen_kwargs={dict(settings.gen_kwargs)} are given, but no task of {list(tasks['tasks'])} generates"
        )
    return dict(tasks)


def _configure(task: Any, settings: Settings) -> None:
    """Gives a task its settings. Raises ValueError for settings that the task cannot have."""
    if settings.num_fewshot and task.get_config("num_fewshot") == 0:
        raise ValueError(f"num_fewshot={settings.num_fewshot}: the task {task.task_name} has no examples to show")
    if settings.metric is not None:
        filters = [entry["name"] for entry in task.get_config("filter_list") or [{"name": "none"}]]
        known = [f"{name},{kind}" for name in task.aggregation() for kind in filters]
        if settings.metric not in (*task.aggregation(), *known):
            raise ValueError(f"metric={settings.metric!r}: the task {task.task_name} has {', '.join(known)}")
    if settings.gen_kwargs and task.OUTPUT_TYPE == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(settings.gen_kwargs), update=True)
    shots = task.get_config("num_fewshot") if settings.num_fewshot is None else settings.num_fewshot
    task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=SEED)


def _allow(task: str, settings: Settings, unsafe: bool) -> None:
    if unsafe and settings.allow_code:
        warn_of_gaps()
    elif unsafe:
        raise ValueError(
            f"the task {task} runs generated code. allow_code=true lets it, in a process with limits of time and "
            "memory (code.seconds, code.megabytes)"
        )


class _Loader(yaml.SafeLoader):
    """Reads a task's YAML and leaves out its functions."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _names(manager: TaskManager, pattern: str) -> list[str]:
    if pattern.endswith(".yaml"):
        _read(Path(pattern))
        return [pattern]
    return list(manager.match_tasks([pattern]))


def _read(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"task file {path}: there is no such file")
    try:
        if not isinstance(yaml.load(path.read_text(encoding="utf-8"), _Loader), dict):
            raise ValueError("it must be a mapping of names to values")
    except TASK_ERRORS as error:
        raise ValueError(f"task file {path} cannot be read: {error}") from error
