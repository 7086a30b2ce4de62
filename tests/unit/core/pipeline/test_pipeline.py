"""The facade: what goes in is checked and named, what comes out is complete."""

from __future__ import annotations

import pickle
import re
import shutil
import traceback
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import CONFIG, EOS, MASK, VOCAB, tiny_model
from support.tokenizer import save_tokenizer

import dinfer
from dinfer.core.engine.errors import NonFiniteLogits
from dinfer.core.engine.runtime import Runtime
from dinfer.core.models.llada import Llada
from dinfer.core.pipeline import Pipeline, load
from dinfer.core.recipe.recipe import IncompatibleRecipe, compose
from dinfer.core.registry import UnknownName
from dinfer.formats.saving import save_network
from dinfer.lab.trace.record import record

STOPS = {EOS, 28}
MESSAGES = [{"role": "user", "content": "w1 w2 w3"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_network(tiny_model(dtype=torch.float32), Llada(), path, CONFIG)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return load(str(folder), iteration={"name": "blockwise", "block": 8}, device="cpu")


def bare(**iteration: Any) -> Pipeline:
    """Without a tokenizer."""
    recipe = compose(
        tiny_model(), iteration={"name": "blockwise", "block": 8} | iteration, decoder="threshold", cache="dual"
    )
    return Pipeline(recipe, None, Runtime())


def plain(result: Any) -> tuple[Any, ...]:
    """All but the time."""
    c = result.counts
    return result.text, result.ids, result.canvas, result.stopped, c.forwards, c.refreshes, c.committed, c.tokens


def test_load_reads_what_it_is_given(pipe: Pipeline, folder: Path) -> None:
    assert pipe.model.dtype == torch.float32 and pipe.model.device.type == "cpu"
    same = load({"name": "llada", "checkpoint": str(folder)}, device="cpu", dtype="float64")
    assert same.model.dtype == torch.float64
    assert load(folder, device="cpu").model.spec == pipe.model.spec  # a Path too
    with_stop = load({"name": "llada", "checkpoint": str(folder), "stop_ids": [5]}, device="cpu")
    assert with_stop.model.spec.stop_ids == (EOS, 28, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' is not known; use one of float32"),
        ({"dtype": torch.int32}, "dtype"),
        ({"decoder": "treshold"}, "Did you mean 'threshold'"),
        ({"decoder": {"name": "threshold", "treshold": 1}}, "Did you mean 'threshold'"),
        ({"decoder": {"name": "threshold", "threshold": "high"}}, "decoder.threshold='high' must be a number"),
        ({"decoder": {"name": "threshold", "threshold": 1.5}}, "threshold=1.5 must be between 0 and 1"),
        ({"decoder": {"name": "threshold", "threshold": float("nan")}}, "must be between 0 and 1"),
        ({"decoder": {"name": "fixed", "steps": 2.5}}, "steps=2.5 must be an integer"),
        ({"decoder": {"stesp": 0.5}}, "unknown option of decoder"),  # of the usual one
        ({"cache": "dula"}, "Did you mean 'dual'"),
        ({"iteration": {"name": "blockwise", "block": 0}}, "block=0 must be at least 1"),
        (
            {"iteration": {"name": "blockwise", "stop": "never"}},
            "iteration.stop='never' must be 'block' or 'cut' or 'off'",
        ),
        ({"iteration": {"name": "blockwise", "align": "false"}}, "align='false' must be true or false"),
        ({"model": {"name": "lada"}}, "Did you mean 'llada'"),
        ({"model": ""}, "checkpoint='' names no model"),
        ({"device": "cpu:7"}, "device='cpu:7' cannot be used; use cpu"),
        ({"device": "meta"}, "device='meta' cannot be used; use cpu"),
        ({"runtime": {"rows": 2}}, "must be a dinfer.Runtime, such as"),
    ],
)
def test_load_says_what_is_wrong(folder: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**({"model": str(folder), "device": "cpu"} | given))


def test_parts_that_do_not_fit_are_named_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(IncompatibleRecipe, match=r"Use cache=.*dual"):
        load(tmp_path / "bare", cache="block", device="cpu")


def test_one_prompt_gives_one_result_and_a_list_a_list(pipe: Pipeline) -> None:
    one = pipe.generate("w1 w2 w3", max_new_tokens=12)
    listed = pipe.generate(["w1 w2 w3", "w5"], max_new_tokens=[12, 20])
    assert [plain(r) for r in listed] == [plain(one), plain(pipe.generate("w5", max_new_tokens=20))]
    assert [len(r.canvas) - len(r.prompt_ids) for r in listed] == [12, 20]
    assert pipe.generate([]) == [] and pipe.generate_ids([]) == []
    assert plain(pipe.generate(("w5",), max_new_tokens=20)[0]) == plain(listed[1])


def test_texts_are_messages_of_a_user(pipe: Pipeline) -> None:
    text, chat = pipe.generate("w1 w2 w3", max_new_tokens=9), pipe.generate(MESSAGES, max_new_tokens=9)
    assert plain(text) == plain(chat)
    assert chat.prompt_ids == [36, 1, 2, 3, 37]  # the template's marks around the words
    assert [plain(r) for r in pipe.generate([MESSAGES, "w1 w2 w3"], max_new_tokens=9)] == [plain(chat)] * 2
    raw = pipe.generate("w1 w2 w3", chat=False, max_new_tokens=9)
    assert raw.prompt_ids == [1, 2, 3]
    assert plain(raw) == plain(pipe.generate_ids([[1, 2, 3]], max_new_tokens=9)[0])
    assert raw.text == " ".join(f"w{i}" for i in raw.ids if i < 36)


def test_options_belong_to_their_request(pipe: Pipeline) -> None:
    low, high = {"threshold": 0.0}, {"decoder.threshold": 1}
    both = pipe.generate_ids([[1, 2]] * 2, max_new_tokens=24, options=[low, high])
    for result, options in zip(both, (low, high), strict=True):
        assert plain(result) == plain(pipe.generate_ids([[1, 2]], max_new_tokens=24, options=options)[0])
    assert both[0].counts.forwards < both[1].counts.forwards
    assert plain(pipe.generate_ids([[1, 2]], max_new_tokens=24)[0]) == plain(
        pipe.generate_ids([[1, 2]], max_new_tokens=24, options={"threshold": 0.9, "least": 1})[0]
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"treshold": 0.5}, UnknownName, "Did you mean 'decoder.threshold'"),
        ({"block": 4}, UnknownName, "per-request option 'block'"),
        ({"threshold": 1.5}, ValueError, "threshold=1.5 must be between 0 and 1"),
        ({"threshold": "0.5"}, ValueError, "must be"),
        ({"threshold": True}, ValueError, "must be"),
        ({"threshold": None}, ValueError, "must be"),
        ({"least": 0}, ValueError, "least=0 must be at least 1"),
        ({"least": 1.0}, ValueError, "must be"),
        ({"least": 2**53 + 1}, ValueError, "decoder.least=9007199254740993 is too large"),
        ({"threshold": 0.5, "decoder.threshold": 0.6}, ValueError, "twice"),
        ([{}, {}], ValueError, "options has 2 values for 1 prompts"),
        ("threshold", ValueError, "options must be a mapping"),
        (3, ValueError, "options must be a mapping"),
    ],
)
def test_wrong_options_are_named(pipe: Pipeline, options: Any, error: type[ValueError], message: str) -> None:
    with pytest.raises(error, match=message):
        pipe.generate_ids([[1, 2]], options=options)


@pytest.mark.parametrize(
    "parts",
    [
        {"iteration": {"name": "blockwise", "block": 10**30}},
        {"decoder": {"name": "threshold", "horizon": 10**30}},
        {"cache": {"name": "dual", "interval": 10**30}},
    ],
)
def test_a_number_that_no_tensor_holds_is_named(parts: dict[str, Any]) -> None:
    ((kind, part),) = parts.items()
    with pytest.raises(ValueError, match=rf"{kind}\.{[*part][1]}=10+ is too large"):
        compose(tiny_model(), **{"iteration": "blockwise", "decoder": "threshold", "cache": "dual"} | parts)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1, 2], []], 8, "prompt 1: the prompt is empty"),
        ([[1, 2.0]], 8, "prompt 0: token=2.0 must be an integer"),
        ([[True]], 8, "prompt 0: token=True must be an integer"),
        ([["1"]], 8, "prompt 0: token='1' must be an integer"),
        ([[None]], 8, "prompt 0: token=None must be an integer"),
        ([[np.True_]], 8, "prompt 0: token=.*True.* must be an integer"),
        (torch.tensor([[1.0]]), 8, "prompt 0: token=.* must be an integer"),
        (torch.tensor([[True]]), 8, "prompt 0: token=.* must be an integer"),
        ([1, 2, 3], 8, "prompt 0 must be a list, not 1"),
        ("w1", 8, "prompts must be"),
        (["w1"], 8, "prompt 0 must be a list, not 'w1'"),
        (torch.tensor([1, 2]), 8, "prompt 0 must be a list"),
        ({"a": 1}, 8, "prompts must be"),
        (7, 8, "prompts must be"),
        (None, 8, "prompts must be"),
        ([[1, -1]], 8, "token -1 is outside the vocabulary of 40"),
        ([[VOCAB]], 8, "token 40 is outside the vocabulary of 40"),
        ([[1, MASK]], 8, "the mask token 39 stands at position 1"),
        ([[1]], 0, "max_new_tokens=0 must be at least 1"),
        ([[1]], -3, "max_new_tokens=-3 must be at least 1"),
        ([[1]], 2.0, "max_new_tokens=2.0 must be an integer"),
        ([[1]], True, "max_new_tokens=True must be an integer"),
        ([[1]], "8", "max_new_tokens='8' must be an integer"),
        ([[1]], None, "max_new_tokens=None must be an integer"),
        ([[1], [2]], [8], "max_new_tokens has 1 values for 2 prompts"),
        ([[1], [2]], [8, 2.5], "prompt 1: max_new_tokens=2.5 must be an integer"),
        ([[1] * 250], 7, "prompt 0: 250 prompt tokens and 7 new ones exceed the model's 256 positions"),
    ],
)
def test_wrong_ids_are_named(pipe: Pipeline, prompts: Any, new: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe.generate_ids(prompts, max_new_tokens=new)


@pytest.mark.parametrize(
    "prompts",
    ["", "  \n", [""], [[]], [{}], {"role": "user", "content": "w1"}, [{"role": "user"}], 3, None, [3], [None],
     [[{"role": "user", "content": 3}]], [{"role": 3, "content": "w1"}], [b"w1"]],
    ids=repr,
)  # fmt: skip
def test_wrong_texts_are_named(pipe: Pipeline, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        pipe.generate(prompts)


def test_errors_of_a_list_name_the_prompt(pipe: Pipeline) -> None:
    for prompts in (["w1", ""], ["w1", 3]):
        with pytest.raises(ValueError, match=r"^prompt 1: "):
            pipe.generate(prompts)
    with pytest.raises(ValueError, match=r"^text 1: '\[MASK:0\]' is no gap"):
        pipe.infill(["w1 [MASK:2]", "w1 [MASK:0]"])
    with pytest.raises(UnknownName, match=r"^prompt 1: unknown .*'treshold'"):
        pipe.generate(["w1", "w2"], options=[{}, {"treshold": 1}])


def test_integers_of_other_libraries_are_good(pipe: Pipeline) -> None:
    want = plain(pipe.generate_ids([[1, 2]], max_new_tokens=9)[0])
    for ids in (torch.tensor([[1, 2]]), np.array([[1, 2]]), ((1, 2),), [np.array([1, 2], dtype=np.uint8)]):
        assert plain(pipe.generate_ids(ids, max_new_tokens=np.int64(9))[0]) == want
    assert plain(pipe.generate_ids([[1, 2]], max_new_tokens=np.array([9]))[0]) == want


def test_without_a_tokenizer_there_are_ids() -> None:
    pipe = bare()
    assert pipe.generate_ids([[1]], max_new_tokens=3)[0].text == ""
    with pytest.raises(ValueError, match="use generate_ids"):
        pipe.generate("w1")


def test_without_a_chat_template_texts_go_in_as_they_are(folder: Path) -> None:
    pipe = load(str(folder), device="cpu")
    pipe.tokenizer.chat_template = None
    assert pipe.encode("w1 w2") == [1, 2]
    for given in ({"prompt": MESSAGES}, {"prompt": "w1", "chat": True}):
        with pytest.raises(ValueError, match="no chat template"):
            pipe.encode(**given)


@pytest.mark.parametrize("stop", ["block", "cut", "off"])
def test_the_trace_is_the_canvas_after_every_step(stop: str) -> None:
    pipe = bare(stop=stop)
    results = pipe.generate_ids([[i, 3, 2 * i] for i in range(1, 9)], max_new_tokens=30, trace=True)
    assert any(r.stopped for r in results)
    cut = 0
    for r in results:
        assert r.trace is not None and len(r.trace) == r.counts.forwards
        assert [EOS if t == MASK else t for t in r.trace[-1]] == r.canvas
        masks = [row.count(MASK) for row in [[MASK] * 30, *r.trace]]
        assert all(b < a for a, b in zip(masks, masks[1:], strict=False))
        assert r.counts.committed == 30 - masks[-1]
        cut += masks[-1]
    assert (cut > 0) == (stop != "off")
    assert all(r.trace is None for r in pipe.generate_ids([[1]], max_new_tokens=3))


def test_an_early_stop_only_cuts() -> None:
    """Up to the block of the stop token both decode the same; `ids` end before it either way."""
    prompts = [[i, 3, 2 * i] for i in range(1, 9)]
    stopped, whole = (bare(stop=stop).generate_ids(prompts, max_new_tokens=30) for stop in ("block", "off"))
    assert [r.ids for r in stopped] == [r.ids for r in whole]
    assert any(a.counts.forwards < b.counts.forwards for a, b in zip(stopped, whole, strict=True))
    for r in whole:
        assert not STOPS & set(r.ids) and r.stopped == bool(STOPS & set(r.canvas[3:]))


def test_a_stop_token_of_the_prompt_does_not_stop() -> None:
    """It stands in the first block where blocks are aligned. dInfer stops there."""
    prompt = [1, EOS, 3]
    ours = bare(align=True).generate_ids([prompt], max_new_tokens=30)[0]
    first_stop = next((i for i, t in enumerate(ours.canvas[3:]) if t in STOPS), 30)
    assert first_stop >= 5, "the model must not stop in the first block by itself"
    assert ours.counts.committed > 5 and len(ours.ids) == first_stop


def test_updates_are_the_steps_of_one_prompt(pipe: Pipeline) -> None:
    want = pipe.generate("w1 w2 w3", max_new_tokens=20, trace=True)
    updates = list(pipe.updates("w1 w2 w3", max_new_tokens=20))
    assert [u.tokens for u in updates] == want.trace
    assert [u.forwards for u in updates] == list(range(1, want.counts.forwards + 1))
    assert [u.completion is None for u in updates[:-1]] == [True] * (len(updates) - 1)
    assert updates[-1].completion is not None and updates[-1].completion.output == want.ids
    with pytest.raises(ValueError, match="empty"):
        pipe.updates(" ")  # before the first step, not at it


def test_a_broken_model_is_reported_by_name() -> None:
    pipe = bare()
    with torch.no_grad():
        pipe.model.embedding.weight[7] = float("nan")
    with pytest.raises(NonFiniteLogits, match="request 1: "):
        pipe.generate_ids([[1], [7]], max_new_tokens=4)
    assert plain(pipe.generate_ids([[1]], max_new_tokens=4)[0]) == plain(
        bare().generate_ids([[1]], max_new_tokens=4)[0]
    )


def test_public_names_are_there() -> None:
    assert all(hasattr(dinfer, name) for name in dinfer.__all__)


def test_code_beside_the_weights_is_never_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the hub's LLaDA checkpoints come: with an auto_map that names Python files."""
    auto = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoTokenizer": ["evil.Slow", "evil.Fast"]}
    save_network(tiny_model(dtype=torch.float32), Llada(), tmp_path, CONFIG | {"auto_map": auto})
    save_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    pipe = load(tmp_path, device="cpu")
    assert pipe.generate("w1 w2", max_new_tokens=3).prompt_ids == [36, 1, 2, 37]
    assert not (tmp_path / "ran").exists()
    assert not caplog.records  # nor is the user bothered with what transformers thinks of the config


def test_a_message_may_spell_the_mask_token_and_pipelines_and_recipes_show_what_they_are() -> None:
    pipe = load("tiny", device="cpu")
    ids = pipe.encode("one <|user|>, two <|mdm_mask|> and <|endoftext|>")
    assert ids.count(pipe.encode("x")[0]) == 1 and pipe.model.spec.mask_id not in ids
    assert not set(pipe.model.spec.stop_ids) & set(ids)
    assert "<|user|>, two <|mdm_mask|> and <|endoftext|>" in pipe.tokenizer.decode(ids, skip_special_tokens=False)
    for text in (repr(pipe), repr(pipe.recipe)):
        assert "\n" not in text and len(text) < 400
        assert "llada" in text and "Blockwise(block=32" in text and "threshold=0.9" in text
    assert "float32 on cpu" in repr(pipe)


NOTEBOOK = methodcaller("_repr_html_")  # what notebooks call


def test_a_notebook_shows_results_and_traces_in_short(pipe: Pipeline) -> None:
    result = pipe.generate("w1 w2", max_new_tokens=12, trace=True)
    gap = pipe.infill("w1 [MASK:3] w2")
    for text in (repr(result), repr(gap), repr([result] * 2).replace("Result", "", 1)):
        assert "\n" not in text and len(text) < 400 and "tokens, " in text
    shown = NOTEBOOK(replace(result, text="<b>"))
    assert "<pre" in shown and "&lt;b&gt;" in shown and shown.count("<span") == len(result.canvas)
    assert len(set(re.findall("hsl[^)]*", shown))) > 1, "positions differ by the step that decided them"
    assert NOTEBOOK(gap).count("<span") == len(gap.ids)
    recorded = record(pipe, "w1", max_new_tokens=8)
    assert len(repr(recorded)) < 200 and NOTEBOOK(recorded).startswith("<iframe")
    assert "<script" not in NOTEBOOK(recorded), "the page is an attribute, not a part of the notebook"


def test_an_error_of_the_user_shows_no_frames_of_ours(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DINFER_DEBUG", raising=False)
    ours = str(Path(dinfer.__file__).parent)
    for call in (lambda: pipe.generate(["w1", ""]), lambda: pipe.infill(3), lambda: load("")):  # type: ignore[call-overload]
        with pytest.raises(ValueError) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert sum(frame.filename.startswith(ours) for frame in frames) == 1 and caught.value.__cause__ is None
    monkeypatch.setenv("DINFER_DEBUG", "1")
    with pytest.raises(ValueError) as caught:
        pipe.generate("")
    assert len(caught.traceback) > 3


def test_a_pipeline_says_why_it_cannot_be_pickled(pipe: Pipeline) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled: it has threads .* In another process call dinfer\.load"):
        pickle.dumps(pipe)
