"""The published tasks on small local files in the form of their data sets, as on a cluster without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.model import LM
from support.evaluation import recipe_pipe, run

from evaluations.run import TASKS, load_tasks
from evaluations.sandbox import in_sandbox
from evaluations.settings import Limits, Settings

SUM = {
    "question": "Ann has 1,000 pens and buys 2. How many pens?",
    "answer": "She has 1000+2=<<1000+2=1002>>.\n#### 1,002",
}
GSM8K = {"train": [SUM] * 4, "test": [SUM, {"question": "What is 3 * 4?", "answer": "#### 12"}]}
ADD = {
    "source_file": "x", "task_id": 2, "prompt": "Write a function that adds.", "code": "",
    "test_imports": ["import math"], "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"],
}  # fmt: skip
MBPP = {"test": [ADD, ADD | {"task_id": 3}]}
LINE = {
    "task_id": "SingleLineInfilling/HumanEval/0/L0", "entry_point": "twice", "prompt": "def twice(x):\n",
    "suffix": "\n    return y\n", "canonical_solution": "    y = 2 * x",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}  # fmt: skip
INFILL = {"test": [LINE, LINE | {"task_id": "SingleLineInfilling/HumanEval/0/L1"}]}


def local(task: str, splits: dict[str, list[dict[str, Any]]], folder: Path) -> str:
    """A task like a published one, whose data lies in files."""
    files = {}
    for split, rows in splits.items():
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{task}_local.yaml"
    path.write_text(
        f"include: {TASKS / task}.yaml\ntask: {task}_local\n"
        f"dataset_path: json\ndataset_name: null\ndataset_kwargs: {json.dumps({'data_files': files})}\n"
    )
    return str(path)


class Scripted(LM):
    """Answers with texts that are given, in order, and keeps what it was asked."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts, self.asked = texts, list[str]()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self.asked = [request.args[0] for request in requests]
        return list(self.texts)

    loglikelihood = loglikelihood_rolling = None  # type: ignore[assignment]


CASES = [
    ("gsm8k_llada", GSM8K, ("So 1000 + 2 = 1002.\n#### $1,002.", "It is 13."), "exact_match,flexible-extract", 0.5),
    (
        "mbpp_sanitized_llada", MBPP,
        ("Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", "```\ndef add(a, b):\n    return 3\n```"),
        "pass_at_1,program", 0.5,
    ),
    ("humaneval_infill_llada", INFILL, ("    y = x + x", "    y = x"), "pass_at_1,program", 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("task", "splits", "texts", "metric", "score"), CASES, ids=[case[0] for case in CASES])
def test_right_and_wrong_answers_are_told_apart(
    task: str, splits: Any, texts: tuple[str, ...], metric: str, score: float, tmp_path: Path
) -> None:
    model = Scripted(*texts)
    with in_sandbox(Limits(seconds=60)):
        tasks = load_tasks(Settings(tasks=(local(task, splits, tmp_path),), allow_code=True))
        found = lm_eval.evaluate(model, tasks, bootstrap_iters=0, confirm_run_unsafe_code=True)
    assert found is not None and found["results"][f"{task}_local"][metric] == score
    if task == "gsm8k_llada":
        assert model.asked[1].count("Question: ") == 5 and model.asked[1].endswith("Question: What is 3 * 4?\nAnswer:")
    if task == "mbpp_sanitized_llada":
        assert "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n\nAnswer with one block of Python" in model.asked[0]


def test_a_gap_is_filled_by_a_model(tmp_path: Path) -> None:
    task = local("humaneval_infill_llada", INFILL, tmp_path)
    document = run(recipe_pipe(), tmp_path / "out", tasks=(task,), limit=1, max_new_tokens=8, allow_code=True)
    (found,) = document["tasks"].values()
    assert found["documents"] == 1 and found["score"] in (0, 1) and found["metrics"]["tokens"] <= 8
