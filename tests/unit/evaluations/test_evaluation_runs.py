"""Runs of evaluations: what is written, nothing lost or done twice, ranks, and tasks that are wrong."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from lm_eval.tasks._yaml_loader import _import_func_in_yml
from support.evaluation import NEW, RECIPE, RUNTIME, recipe_pipe, run
from support.files import small_files
from support.rank_processes import free_port

from dinfer.core.pipeline import Pipeline
from dinfer.demo.problems import FAMILIES, generate
from dinfer.lab.metrics import Sample
from evaluations.names import check_names
from evaluations.replicas import Replicas, replicas
from evaluations.report import Ledger, files, kept, key_of, rows_of, seconds
from evaluations.run import TASKS, evaluate, load_tasks, report_of, stem_of
from evaluations.sandbox import CODE_EVAL, in_sandbox
from evaluations.settings import Limits, Settings

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return recipe_pipe()


def test_every_family_has_a_task_of_its_own(pipe: Pipeline) -> None:
    tasks = load_tasks(Settings(tasks=("mini_*",)))["tasks"].values()
    names = {task.task_name for task in tasks}
    assert names == {f"mini_{name}" for name in (*FAMILIES, "gsm", "choice", "perplexity", "infill")}
    for task in tasks:
        if (family := task.task_name.removeprefix("mini_")) in FAMILIES:
            assert set(task.dataset["test"]["family"]) == {family}
            assert task.dataset["test"][0]["question"] == generate("heldout", 1, 0, [family])[0].question


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ()}, "tasks is empty"),
        ({"tasks": ("mini_gms",)}, "unknown task 'mini_gms'. Did you mean mini_gsm"),
        ({"limit": 0}, "limit=0 must be above 0"),
        ({"limit": 2.5}, "limit=2.5 must be a whole number"),
        ({"num_fewshot": -1}, "num_fewshot=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"metric": "acc"}, "metric='acc': the task mini_gsm has exact_match,none"),
        ({"metric": "exact_match,strict"}, "metric='exact_match,strict': the task mini_gsm has exact_match,none"),
        ({"num_fewshot": 4}, "num_fewshot=4: the task mini_gsm has no examples to show"),
        ({"tasks": ("mini_choice",), "gen_kwargs": {"threshold": 0.5}}, "no task of \\['mini_choice'\\] generates"),
        ({"include": ("nowhere",)}, "include='nowhere': there is no such folder"),
        ({"tasks": ("nowhere.yaml",)}, "task file nowhere.yaml: there is no such file"),
    ],
)
def test_settings_that_cannot_be(pipe: Pipeline, settings: dict[str, Any], message: str, monkeypatch) -> None:
    monkeypatch.setattr(
        "evaluations.run.TaskManager", lambda **kwargs: TaskManager(**kwargs | {"include_defaults": False})
    )
    with pytest.raises(ValueError, match=message):
        run(pipe, **{"limit": 1} | settings)


def test_a_typo_is_told_before_lm_eval_is_imported() -> None:
    code = (
        "import atexit, sys; from dinfer.__main__ import main; "
        "atexit.register(lambda: print('lm_eval' in sys.modules)); main(['eval', 'tasks=gsm8kk'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "unknown task 'gsm8kk'. Did you mean gsm8k" in done.stderr, done.stderr
    assert done.stdout == "False\n"
    check_names(["mini_*", "acp_bench", "nowhere.yaml"])  # lm-eval makes this name of parts


def test_a_task_that_does_not_exist_leaves_no_file(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        run(pipe, tmp_path, tasks=("nowhere.yaml",))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("task: [unclosed", "cannot be read"),
        ("- a\n- list", "cannot be read"),
        (
            "task: broken\noutput_type: sing\ncustom_dataset: !function evaluations.problems.questions",
            "sing",
        ),
        ("task: broken\ntest_split: test\ncustom_dataset: !function evaluations.problems.nothing", "nothing"),
        ("task: broken\ncustom_dataset: !function evaluations.problems.questions\ntest_split: tset", "tset"),
        (
            "task: broken\ntest_split: test\ncustom_dataset: !function evaluations.problems.questions\n"
            "doc_to_text: '{{question'\ndoc_to_target: '{{answer}}'",
            "the task .* cannot be loaded",
        ),
    ],
)
def test_malformed_tasks(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tasks(Settings(tasks=(str(path),)))
    if "cannot be read" in message:
        with pytest.raises(ValueError, match=message):
            load_tasks(Settings(tasks=("mini_gsm",), include=(str(tmp_path),)))


def test_a_task_of_the_user(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"include: {TASKS}/mini_gsm.yaml\ntask: own\ndescription: ''\n")
    assert run(pipe, tasks=("own",), include=(str(tmp_path),), limit=1)["tasks"]["own"]["documents"] == 1


def test_programs_are_judged_in_the_sandbox(pipe: Pipeline, tmp_path: Path) -> None:
    """Whatever the model writes becomes a text literal in a program that passes its test, or does not."""
    text = {"prompt": 'text = """', "suffix": '"""\nx = 1'}
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": "Hm?", "test": f"assert x == {x}"} | text) + "\n" + "\n" for x in (1, 2, 1))
    )
    (tmp_path / "programs.yaml").write_text(f"""
task: programs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
unsafe_code: true
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{test}}}}"
generation_kwargs: {{max_gen_toks: 8, until: []}}
filter_list: [{{name: program, filter: [{{function: custom, filter_fn: !function evaluations.sandbox.filled}}]}}]
metric_list: [{{metric: !function evaluations.sandbox.pass_at_1, aggregation: mean, higher_is_better: true}}]
""")
    settings = {"tasks": (str(tmp_path / "programs.yaml"),), "limit": None, "max_new_tokens": None}
    with pytest.raises(ValueError, match="the task programs runs generated code"):
        run(pipe, **settings)
    line = run(pipe, **settings, allow_code=True)["tasks"]["programs"]
    assert line["metric"] == "pass_at_1,program" and line["score"] == pytest.approx(2 / 3)
    assert line["metrics"]["accuracy"] == pytest.approx(66.6667)


def test_lm_evals_code_tasks_use_the_sandbox() -> None:
    folder = Path(lm_eval.__file__).parent / "tasks"
    with in_sandbox(Limits(seconds=60)):
        for name, judge in (("humaneval", "pass_at_k"), ("mbpp", "pass_at_1"), ("humaneval_infilling", "pass_at_k")):
            module = _import_func_in_yml(f"utils.{judge}", folder / name).__globals__
            assert CODE_EVAL in module.values(), name


def test_the_usual_tasks_are_there() -> None:
    folder = Path(lm_eval.__file__).parent / "tasks"
    names = {"humaneval", "minerva_math", "hendrycks_math", "ifeval", "mmlu", "mbpp", "gsm8k", "humaneval_infilling"}
    index = TaskIndex.build([folder / name for name in names])
    wanted = {"humaneval", "humaneval_instruct", "minerva_math500", "ifeval", "mmlu", "mbpp", "gsm8k", "gsm8k_cot"}
    assert wanted <= index.keys() and "humaneval_single_line_infilling" in index
    ours = TaskIndex.build([TASKS])
    assert {"gsm8k_llada", "mbpp_sanitized_llada", "humaneval_infill_llada"} <= ours.keys()


def test_what_is_written(
    pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    document = run(pipe, tmp_path, limit=3)
    settings = Settings(tasks=("mini_gsm",), limit=3, max_new_tokens=NEW)
    path = report_of(stem_of(tmp_path, RECIPE, settings, RUNTIME))
    assert json.loads(path.read_text()) == json.loads(json.dumps(document))
    assert document["schema"] == "dinfer-eval/1" and document["recipe"] == RECIPE
    for name in (
        "command",
        "date",
        "commit",
        "dinfer",
        "torch",
        "python",
        "lm_eval",
        "transformers",
        "hardware",
        "replicas",
    ):
        assert name in document
    assert document["settings"]["likelihood"]["seed"] == 0
    run(pipe, tmp_path, tasks=("mini_ages", "mini_lists"), limit=1)
    table = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [row["task"] for row in table] == ["mini_ages", "mini_lists", "mini_gsm"]
    assert (
        table[2]["decoder.threshold"] == "0.6"
        and float(table[2]["tpf"]) == document["tasks"]["mini_gsm"]["metrics"]["tpf"]
    )
    samples = [json.loads(line) for line in path.with_suffix(".samples.jsonl").read_text().splitlines()]
    assert [line["doc_id"] for line in samples] == [0, 1, 2] and samples[0]["resps"][0][0]
    (tmp_path / "other.json").write_text('{"schema": "of something else"}')
    assert list(rows_of(tmp_path / "other.json")) == []
    assert "fatal" not in capfd.readouterr().err, "the folder is no git repository, and nobody asked"


@pytest.mark.rest
def test_a_killed_run_goes_on(pipe: Pipeline, tmp_path: Path) -> None:
    """A real kill, in the middle of the answers; then the rest, and the figures of a run that was not killed."""
    add, added = Ledger.add, 0

    def last(self: Ledger, *args: Any, **fields: Any) -> Any:
        nonlocal added
        answer, added = add(self, *args, **fields), added + 1
        if added == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    def killed() -> None:
        Ledger.add = last  # type: ignore[method-assign]
        run(pipe, tmp_path)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join(240)
    child.kill()
    assert child.exitcode == -signal.SIGKILL
    path = next(tmp_path.glob("*.answers-0.jsonl"))
    before = path.read_bytes()
    assert not list(tmp_path.glob("*.json")) and before.count(b"\n") - 1 == 4
    path.write_bytes(before + b'{"key": "cut sh')
    asked: list[int] = []
    engine_run = pipe.engine.run

    def counted(requests: Any, **kwargs: Any) -> Any:
        asked.append(len(requests))
        return engine_run(requests, **kwargs)

    pipe.engine.run = counted  # type: ignore[method-assign]
    try:
        resumed = run(pipe, tmp_path)
    finally:
        pipe.engine.run = engine_run  # type: ignore[method-assign]
    after = path.read_bytes()
    keys = [line["key"] for line in map(json.loads, after.splitlines()) if "key" in line]
    assert after.startswith(before) and len(keys) == len(set(keys)) == 12
    assert asked == [12 - 4]
    whole = run(pipe)["tasks"]["mini_gsm"]
    for name in ("correct", "nfe", "tpf", "tokens"):
        assert resumed["tasks"]["mini_gsm"]["metrics"][name] == whole["metrics"][name]
    assert resumed["tasks"]["mini_gsm"]["scores"] == whole["scores"]


def test_sessions_that_differ_are_not_mixed(tmp_path: Path) -> None:
    stem = tmp_path / "run"
    first = Ledger(stem, setup={"torch": "1", "commit": "a"})
    with first:
        first.add(key_of("x"), "task", 0, "text", 1.0, sample=Sample(1, 0, 1, 0.1, True))
    with pytest.raises(ValueError, match="was begun with commit='a', and this run has 'b'"):
        Ledger(stem, setup={"torch": "1", "commit": "b"})
    with Ledger(stem, among=Replicas(1, 2, torch.device("cpu")), setup={"torch": "1", "commit": "a"}) as again:
        assert again.get(key_of("x")) == first.get(key_of("x"))
        again.add(key_of("y"), "task", 1, "text", 3.0)
    assert len(files(stem)) == 2 and kept(stem) == 2
    assert seconds(again.answers) == 3.0
    path, other = files(stem)
    with other.open("ab") as file:
        file.write('{"key": "z", "response": "ü'.encode()[:-1])  # another rank is killed within a character
    with Ledger(stem, setup={"torch": "1", "commit": "a"}) as last:
        assert {answer.key for answer in last.answers} == {key_of("x"), key_of("y")}
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1, is not an answer"):
        Ledger(stem, setup={"torch": "1", "commit": "a"})


def test_time_adds_up_over_sessions_and_not_over_ranks() -> None:
    ledger = Ledger()
    base = ledger.add("a", "task", 0, "", 2.0)
    other = [
        type(base)(**asdict(base) | {"key": key, "at": at, "session": session, "rank": rank})
        for key, at, session, rank in (("b", 5.0, "s", 0), ("c", 4.0, "s", 0), ("d", 1.0, "t", 0), ("e", 5.5, "u", 1))
    ]
    assert seconds([base, *other]) == 2.0 + 5.0 + 1.0


def test_a_run_can_begin_anew(pipe: Pipeline, tmp_path: Path) -> None:
    """Also with fewer ranks than before: what ranks left that are gone is removed."""
    run(pipe, tmp_path, limit=1)
    (answers,) = tmp_path.glob("*.answers-0.jsonl")
    other = answers.with_name(answers.name.replace("answers-0", "answers-1"))
    other.write_text("of another commit\n")
    before = answers.read_text()
    run(pipe, tmp_path, limit=1, more={"overwrite": True})
    assert not other.exists() and answers.read_text() != before and len(before.splitlines()) == 2
    settings = Settings(tasks=("mini_gsm",), limit=1, max_new_tokens=NEW)
    stem = stem_of(tmp_path, RECIPE, settings, RUNTIME)
    assert report_of(stem).is_file()
    assert stem != stem_of(tmp_path, RECIPE | {"cache": {"name": "none"}}, settings, RUNTIME)


def test_two_processes_do_not_share_a_run(pipe: Pipeline, tmp_path: Path) -> None:
    settings = Settings(tasks=("mini_gsm",), limit=1, max_new_tokens=NEW)
    with (
        Ledger(stem_of(tmp_path, RECIPE, settings, RUNTIME)),
        pytest.raises(ValueError, match="another process writes"),
    ):
        run(pipe, tmp_path, limit=1)
    run(pipe, tmp_path, limit=1, more={"overwrite": True})  # the lock went with its owner


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with Ledger(tmp_path / "run") as ledger, small_files(100), pytest.raises(OSError, match=r"run\.answers-0\.jsonl"):
        ledger.add("key", "task", 0, "a long text" * 99, 1.0)


class Threads(Replicas):
    """Replicas that are threads of this process: what they exchange lies on a table between them."""

    table: ClassVar[dict[int, Any]] = {}
    barrier: ClassVar[threading.Barrier] = threading.Barrier(2, timeout=240)

    def exchanged(self, value: Any) -> list[Any]:
        self.wait()
        self.table[self.rank] = value
        self.wait()
        return [self.table[rank] for rank in range(self.size)]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchanged(tensor))

    def collect(self, value: Any, to: int = 0) -> list[Any] | None:
        found = self.exchanged(value)
        return found if self.rank == to else None

    def wait(self) -> None:
        self.barrier.wait()


def test_ranks_share_the_documents(pipe: Pipeline, tmp_path: Path) -> None:
    """Two ranks, five documents: one is padded, none is counted twice."""
    settings = Settings(tasks=("mini_gsm",), limit=5, max_new_tokens=NEW)

    def rank(number: int) -> Any:
        among = Threads(number, 2, torch.device("cpu"))
        return evaluate(recipe_pipe, settings, among=among, recipe=RECIPE, runtime={}, stem=tmp_path / "run")

    with ThreadPoolExecutor(2) as pool:
        document, other = pool.map(rank, (0, 1))
    assert document is not None and other is None
    alone, both = run(pipe, limit=5)["tasks"]["mini_gsm"], document["tasks"]["mini_gsm"]
    assert document["replicas"] == 2 and both["scores"] == alone["scores"]
    for name in ("problems", "correct", "nfe", "tpf", "tokens"):
        assert both["metrics"][name] == alone["metrics"][name]
    parts = [path.read_text().splitlines()[1:] for path in sorted(tmp_path.glob("*.answers-*.jsonl"))]
    assert [len(lines) for lines in parts] == [3, 2]


@pytest.mark.rest
def test_ranks_of_a_launcher() -> None:
    """As torchrun and accelerate start them: by environment variables."""
    code = """
import torch
from evaluations.replicas import replicas
here = replicas("cpu")
here.wait()
print(here.size, here.gather(torch.tensor(here.rank + 5)).tolist(), here.collect({"rank": here.rank}))
torch.distributed.destroy_process_group()
"""
    port = str(free_port())
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=shared | {"RANK": rank, "LOCAL_RANK": rank},
                         stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]  # fmt: skip
    said = [child.communicate(timeout=240)[0].strip() for child in children]
    assert said == ["2 [5, 6] [{'rank': 0}, {'rank': 1}]", "2 [5, 6] None"]


def test_a_card_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device='cuda:1' names one card for several replicas"):
        replicas("cuda:1")
