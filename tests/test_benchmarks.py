"""The benchmark scripts: what they read, what they write, and going on after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import write_checkpoint

from benchmarks import dataset, single
from benchmarks.prompts import Prompt, read_prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.checkpoint={write_checkpoint(tmp_path_factory.mktemp('checkpoint'))}"


def written(folder: Path, text: str, name: str = "data.jsonl") -> Path:
    (folder / name).write_text(text)
    return folder / name


MESSAGES = [{"role": "user", "content": "b"}]


def test_data_sets_of_every_shape_are_read(tmp_path: Path) -> None:
    expected = [Prompt("x", "a", 7), Prompt("1", MESSAGES), Prompt("2", "c")]
    entries: list[Any] = [{"id": "x", "prompt": "a", "answer": 7}, {"question": MESSAGES}, "c"]
    lines = "\n".join(map(json.dumps, entries)) + "\n\n"
    assert read_prompts(written(tmp_path, lines)) == expected
    for wrapped in (entries, {"details": entries}, {"judge_details": entries}, {"data": entries}):
        assert read_prompts(written(tmp_path, json.dumps(wrapped), "data.json")) == expected
    assert read_prompts(written(tmp_path, lines), 2) == expected[:2]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("{", "a.jsonl", r"a\.jsonl:1 is not JSON"),
        ('"a"\n\n{"answer": 1}', "a.jsonl", r"a\.jsonl:3 needs a `prompt`"),
        ('{"prompt": ""}', "a.jsonl", "needs a `prompt`"),
        ("[3]", "a.json", "entry 0 must be a text or an object, not 3"),
        ('{"rows": []}', "a.json", "must be a list of entries, or have one as details"),
        ("[]", "a.json", "has no prompts"),
        ('["a"]', "a.csv", r"must end in \.json or \.jsonl"),
        ('[{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}]', "a.json", "the id '1' occurs twice"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(written(tmp_path, text, name))
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        read_prompts(written(tmp_path, '["a"]', "b.json"), 0)


def predictions(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines()]


def test_a_run_that_was_killed_goes_on_where_it_was(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed within the second batch, and within a line: nothing is lost, nothing is answered twice."""
    data = written(tmp_path, "\n".join(f'{{"prompt": "question {i}", "answer": {i}}}' for i in range(5)))
    args = ["--batch", "2", checkpoint, "max_new_tokens=8", "iteration.block=8"]
    dataset.main([str(data), str(tmp_path / "whole"), *args])
    asked: list[str] = []
    answer = dataset.answer

    def dying(pipe: Any, prompts: list[Prompt], new_tokens: int) -> Any:
        asked.extend(prompt.id for prompt in prompts)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answer(pipe, prompts, new_tokens)

    monkeypatch.setattr(dataset, "answer", dying)
    with pytest.raises(KeyboardInterrupt):
        dataset.main([str(data), str(tmp_path / "out.v1"), *args])
    with (tmp_path / "out.v1.jsonl").open("a") as file:
        file.write('{"id": "2", "pro')
    dataset.main([str(data), str(tmp_path / "out.v1"), *args])
    assert asked == ["0", "1", "2", "3", "2", "3", "4"]
    timing = {"seconds", "wall"}
    found, whole = ([{k: v for k, v in line.items() if k not in timing} for line in predictions(out)]
                    for out in (tmp_path / "out.v1", tmp_path / "whole"))  # fmt: skip
    assert found == whole and [line["answer"] for line in found] == list(range(5))
    report = json.loads((tmp_path / "out.v1.json").read_text())
    statistics = report["statistics"]
    assert (report["prompts"], report["answered"], statistics["problems"]) == (5, 5, 5)
    assert statistics["tpf"] == pytest.approx(
        sum(line["tokens"] for line in whole) / sum(line["forwards"] for line in whole), rel=1e-5
    )
    assert report["settings"]["model"]["checkpoint"] in checkpoint and report["commit"]


def test_other_settings_do_not_mix_and_a_higher_limit_goes_on(tmp_path: Path, checkpoint: str) -> None:
    data, out = str(written(tmp_path, '"a"\n"b"\n"c"\n')), str(tmp_path / "out")
    args = [checkpoint, "max_new_tokens=8", "iteration.block=8"]
    dataset.main([data, out, "--limit", "1", *args])
    dataset.main([data, out, "--limit", "2", *args])
    assert [line["prompt"] for line in predictions(tmp_path / "out")] == ["a", "b"]
    for more, message in (
        (["decoder.threshold=0.5"], "made with another decoder"),
        (["--limit", "1"], "2 predictions already, more than --limit=1"),
        (["--batch", "0"], "--batch=0 must be at least 1"),
        (["decoder.treshold=1"], "Did you mean 'threshold'"),
    ):
        with pytest.raises(SystemExit, match=message):
            dataset.main([data, out, *args, *more])


def test_a_single_prompt_is_timed(tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "single.json"
    settings = [checkpoint, "max_new_tokens=8", "iteration.block=8"]
    single.main(["--prompt", "a", "--warmup", "1", "--repeats", "3", "--out", str(out), *settings])
    found = json.loads(out.read_text())
    assert len(found["runs"]) == 3 and found["median"] in found["runs"]
    for run in found["runs"]:
        assert run["tps"] == pytest.approx(run["tokens"] / run["seconds"])
        assert run["fps"] == pytest.approx(run["forwards"] / run["seconds"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("median: ")
    with pytest.raises(SystemExit, match="--repeats=0 must be at least 1"):
        single.main(["--repeats", "0", *settings])
