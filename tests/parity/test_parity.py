"""The goldens pass, none is skipped in silence, and the harness fails where it must."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity import Report, UsageError, check
from tests.parity.__main__ import main
from tests.parity.check import find
from tests.parity.golden import Skip
from tests.parity.kinds.models import real_tokens

GOLDENS = Path(__file__).parents[1] / "goldens"
SHARED = Path(__file__).parents[3] / "shared" / "goldens"  # the whole set, where the project is developed
PASSING = {
    "models/llada/": 5, "decoders/": 259, "generation/llada/": 133, "generation/llada2_moe/": 28,
    "generation/dream/": 19,
}  # fmt: skip
BEYOND = {  # in the whole set alone
    "models/dream": 3, "models/llada2_moe": 5, "models/sdar": 4, "models/llada_moe": 3, "models/diffusion_gemma": 4,
    "generation/sdar": 14, "generation/llada_moe": 5, "generation/diffusion_gemma": 3,
}  # fmt: skip
NEXT = SHARED.with_name("goldens-next")
LATER = {  # of the sets that came later
    "models/": 1, "decoders/sglang_eb": 19, "decoders/sglang_entropy": 14, "decoders/sglang_hierarchy": 22,
    "decoders/sglang_gemma4": 12, "decoders/sglang_joint_threshold_indel": 60, "generation/llada2_moe/indel": 14,
    "generation/llada/d2f": 26, "generation/dream/d2f": 13, "generation/llada/full_multiblock": 8,
    "generation/llada2_moe/multi_bd": 23, "generation/sdar/multi_bd": 4, "generation/llada2_moe/dmax": 11,
    "generation/llada/d2cache": 5, "generation/dream/d2cache": 3, "generation/llada/daedal": 11,
    "generation/llada/prophet": 5, "generation/llada/streaming": 5, "generation/sdar/s2d2": 12,
    "generation/dream/lopa": 8,
    "generation/llada/certainty": 3, "generation/llada/pcsampler": 1, "generation/dream/pcsampler": 1,
}  # fmt: skip
FAMILIES = {"models/a2d": 18, "generation/a2d": 25}  # of goldens-families
RULES = {"info_gain": 66, "dawn": 41, "freedave": 30, "dsb": 9}  # of goldens-rules; of dsb the constant window alone
RUN = "generation/llada/blockwise_dual_thre_0p6_noalign"
MODEL, MODEL_CASES = "models/llada", "models/llada/cases.safetensors"
DINFER, SGLANG = "decoders/dinfer_threshold", "decoders/sglang_low_confidence"


def failures(report: Report) -> dict[str, str]:
    return {result.id: result.remark for result in report.results if result.outcome == "failed"}


def passed(report: Report, prefix: str) -> int:
    return sum(result.outcome == "passed" and result.id.startswith(prefix) for result in report.results)


def tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    held = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is mapped until then
    change(held)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, path)


def text(path: Path, change: Callable[[Any], Any]) -> None:
    doc = json.loads(path.read_text())
    change(doc)
    path.write_text(json.dumps(doc))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with one run, one model and two decoders, to be tampered with."""
    shutil.copytree(GOLDENS / "models" / "llada", tmp_path / "models" / "llada")
    (tmp_path / "generation" / "llada").mkdir(parents=True)
    shutil.copy(GOLDENS / f"{RUN}.json", tmp_path / f"{RUN}.json")
    (tmp_path / "decoders").mkdir()
    for name in ("sequences", "dinfer_threshold", "sglang_low_confidence"):
        for suffix in ("json", "safetensors"):
            shutil.copy(GOLDENS / "decoders" / f"{name}.{suffix}", tmp_path / "decoders")
    return tmp_path


def test_every_fourth_case_passes() -> None:
    ids = [case.id for case in find(GOLDENS)][::4]
    report = check(GOLDENS, ids)
    assert failures(report) == {}
    assert (len(report.results), report.count("passed")) == (len(ids), len(ids)) and len(ids) > 100


@pytest.mark.rest  # it takes 13 seconds
def test_everything_in_scope_passes() -> None:
    report = check(GOLDENS)
    assert failures(report) == {}
    assert {prefix: passed(report, prefix) for prefix in PASSING} == PASSING
    assert report.summary == f"{sum(PASSING.values())} passed, 0 failed, 0 skipped"


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")
def test_what_only_the_whole_set_has_passes_too() -> None:
    """What both sets have is the same to the byte, so it is run once."""
    for path in (path for path in GOLDENS.rglob("*.*") if path.suffix in (".json", ".safetensors")):
        assert path.read_bytes() == (SHARED / path.relative_to(GOLDENS)).read_bytes(), path
    report = check(SHARED, [*BEYOND])
    assert failures(report) == {}
    assert {prefix: passed(report, prefix) for prefix in BEYOND} == BEYOND
    assert len(report.results) == sum(BEYOND.values())
    assert len(find(SHARED)) == sum((PASSING | BEYOND).values())


@pytest.mark.skipif(not NEXT.is_dir(), reason="the recorded runs of further families are not here")
def test_recorded_runs_of_a2d_are_repeated() -> None:
    report = check(NEXT.with_name("goldens-families"), ["models/a2d*", "generation/a2d*"])
    assert not failures(report)
    assert {prefix: passed(report, prefix) for prefix in FAMILIES} == FAMILIES


@pytest.mark.rest  # it takes 15 seconds
@pytest.mark.skipif(not NEXT.is_dir(), reason="the recorded runs of further rules are not here")
def test_recorded_runs_of_further_rules_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "generation").symlink_to(NEXT.with_name("goldens-rules") / "generation")
    (tmp_path / "models").symlink_to(SHARED / "models")
    report = check(tmp_path, [f"generation/*/{name}_*" for name in RULES])
    assert not failures(report)
    assert {name: sum(f"/{name}" in result.id and result.outcome == "passed" for result in report.results)
            for name in RULES} == RULES  # fmt: skip


@pytest.mark.rest  # it takes 10 seconds
@pytest.mark.skipif(not NEXT.is_dir(), reason="the recorded runs with images are not here")
def test_recorded_runs_with_images_are_repeated() -> None:
    assert check(NEXT.with_name("goldens-images")).summary == "16 passed, 0 failed, 0 skipped"


@pytest.mark.rest  # it takes 20 seconds
@pytest.mark.skipif(not NEXT.is_dir(), reason=f"{NEXT} is not here")
def test_what_came_later_passes() -> None:
    report = check(NEXT)
    assert failures(report) == {}
    assert {prefix: passed(report, prefix) for prefix in LATER} == LATER
    assert report.summary == f"{sum(LATER.values())} passed, 0 failed, 0 skipped"


def flip(name: str, *index: int) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        held[name][index] += 1

    return change


def drop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda held: held.pop(name)


def first_row(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda held: held.update({name: held[name][:, :1]})


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("path", "change", "case", "difference"),
    [
        (MODEL_CASES, flip("b2_t33.logits", 1, 32, 319), f"{MODEL}/b2_t33", "logits[1, 32, 319]: want"),
        (MODEL_CASES, flip("b2_t19_leftpad.logits", 1, 18, 0), f"{MODEL}/b2_t19_leftpad", "logits[1, "),
        (MODEL_CASES, drop("b1_t17.logits"), f"{MODEL}/b1_t17", "lacks the tensor 'b1_t17.logits'"),
        (f"{DINFER}.safetensors", flip("c003.tokens", 2, 0, 3), f"{DINFER}/c003", "step 2: tokens[0][3]: want"),
        (f"{DINFER}.safetensors", first_row("c003.tokens"), f"{DINFER}/c003", "do not fit"),
    ],
)
def test_a_wrong_tensor_fails(copied: Path, path: str, change: Any, case: str, difference: str) -> None:
    tensors(copied / path, change)
    found = failures(check(copied))
    assert list(found) == [case]
    assert difference in found[case]


def test_a_wrong_weight_fails(copied: Path) -> None:
    tensors(copied / "models/llada/model.safetensors", lambda t: t["model.transformer.ln_f.weight"].mul_(1.5))
    assert {"models/llada/b1_t17", RUN} <= failures(check(copied)).keys()


def test_padded_rows_are_not_compared(copied: Path) -> None:
    tensors(copied / "models/llada/cases.safetensors", lambda t: t["b2_t19_leftpad.logits"][1, 0].fill_(float("nan")))
    assert failures(check(copied, ["models/llada"])) == {}


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    """A change of a JSON document: the entry at `path` becomes `value`, or what `value` makes of it."""

    def change(doc: Any) -> None:
        for key in path[:-1]:
            doc = doc[key]
        doc[path[-1]] = value(doc[path[-1]]) if callable(value) else value

    return change


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("path", "change", "case", "difference"),
    [
        (f"{RUN}.json", put(lambda n: n + 1, "final_array", 0, 20), RUN, "final_array[0][20]: want"),
        (f"{RUN}.json", put(lambda n: n + 1, "output_ids", 0, 9), RUN, "output_ids[0][9]: want"),
        (f"{RUN}.json", put(lambda row: row[:-1], "output_ids", 0), RUN, "length of output_ids[0]: want 31, got 32"),
        (f"{RUN}.json", put(18, "num_forwards"), RUN, "num_forwards: want at most 18, got 19"),
        (f"{RUN}.json", drop("num_forwards"), RUN, "the field 'num_forwards' is missing"),
        (f"{RUN}.json", put(0.9, "params", "decoder", "threshold"), RUN, "final_array[0]["),
        (f"{RUN}.json", put(7, "params"), RUN, "must be an object"),
        (f"{SGLANG}.json", put(True, "cases", 0, "done", 0, 1), f"{SGLANG}/c000", "done[1]: want True, got False"),
        (f"{DINFER}.json", put("nope", "cases", 0, "sequence"), f"{DINFER}/c000", "lacks the tensor 'nope.logits'"),
        (f"{DINFER}.json", put(2.0, "cases", 0, "params", "threshold"), f"{DINFER}/c000", "must be between 0 and 1"),
        (f"{DINFER}.json", put({}, "cases"), DINFER, "cases must be a list"),
        ("models/llada/config.json", put("gpt2", "model_type"), RUN, "is not of the family 'llada'"),
    ],
)
def test_a_wrong_entry_fails(copied: Path, path: str, change: Any, case: str, difference: str) -> None:
    text(copied / path, change)
    found = failures(check(copied, [case] if case == RUN else ()))
    assert list(found) == [case]
    assert difference in found[case]


ORIGIN = "generation/dream/origin_s6_n12_B2"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (put(lambda d: 1 - d, "uniform_draws_per_step", 5, 0), ""),  # the last step commits whatever is drawn
        (put(0.0, "uniform_draws_per_step", 2, 0), "uniform_draws_per_step[3] has 15 draws for 14 masks"),
        (put(lambda rows: rows[:-1], "uniform_draws_per_step"), "has 5 steps, not steps=6"),
        (drop("uniform_draws_per_step"), "the field 'uniform_draws_per_step' is missing"),
        (put(7, "uniform_draws_per_step"), "must be a list of lists of type float, not 7"),
        (put(lambda n: n + 1, "snapshots", 1, 0, 7), "steps of row 0"),
        (put([], "prompt_ids"), "prompt_ids must be a list of lists of type int, not []"),
        (put(400, "prompt_ids", 1, 0), "prompt_ids must be tokens of the model's vocabulary of 320"),
        (put(["x"], "params", "algorithm"), "algorithm must be a text"),
        (put("6", "params", "steps"), "decoder.steps='6' must be an integer"),
    ],
)
def test_a_recorded_run_is_read_strictly(tmp_path: Path, change: Any, difference: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/dream").symlink_to(GOLDENS / "models/dream")
    (tmp_path / ORIGIN).parent.mkdir(parents=True)
    shutil.copy(GOLDENS / f"{ORIGIN}.json", tmp_path / f"{ORIGIN}.json")
    text(tmp_path / f"{ORIGIN}.json", change)
    found = failures(check(tmp_path))
    assert list(found) == ([ORIGIN] if difference else [])
    assert difference in found.get(ORIGIN, "")


def test_a_file_that_is_no_json_fails_and_the_others_run(copied: Path) -> None:
    (copied / f"{RUN}.json").write_text("{")
    report = check(copied)
    assert list(failures(report)) == [RUN]
    assert passed(report, "decoders") == 66


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("dInferNext", "params", "algorithm"), "algorithm 'dInferNext' has no translation yet"),
        (put("oracle", "params", "decoder", "name"), "golden decoder 'dinfer_oracle' has no translation yet"),
        (put("vicinity9", "params", "cache"), "cache 'vicinity9' is not registered"),
        (put(3, "params", "tricks"), "algorithm 'BlockWise': no rule for 'tricks'"),
        (put(3, "params", "decoder", "tricks"), "decoder 'threshold': no rule for 'tricks'"),
        (put("models/none", "model"), "models/none is not in this folder"),
    ],
)
def test_what_is_not_there_yet_is_skipped_with_the_reason(copied: Path, change: Any, reason: str) -> None:
    text(copied / f"{RUN}.json", change)
    report = check(copied, [RUN])
    assert report.skips() == [(reason, 1)]
    assert report.summary == "0 passed, 0 failed, 1 skipped"


def test_an_unknown_family_is_skipped(copied: Path) -> None:
    text(copied / "models/llada/config.json", put("novel", "model_type"))
    text(copied / "models/llada/cases.json", put("novel", "family"))
    assert check(copied, ["models"]).skips() == [("model family 'novel' is not registered", 5)]


@pytest.mark.rest(but=2)
@pytest.mark.parametrize(
    ("only", "count"),
    [
        (["models/llada*"], 5),
        (["models/llada/"], 5),
        (["models/llada/b1_t17", "decoders/dinfer_threshold/c003"], 2),
        (["decoders/dinfer_threshold/c00?"], 10),
        (["decoders/sglang*", "*/sglang_low_confidence/c000"], 30),
        (["generation/llada/blockwise_dual_thre_0p6*"], 1),
        ([f"{RUN}.json"], 1),
        ([], 72),
    ],
)
def test_only_selects_by_id(copied: Path, only: list[str], count: int) -> None:
    report = check(copied, only)
    assert (len(report.results), report.count("passed")) == (count, count)


def test_names_sizes_and_vocabularies_are_free(copied: Path) -> None:
    """The same data under other names, fewer rows and steps, and with every token renumbered in a larger vocabulary."""
    (copied / "models/llada").rename(copied / "models/m")
    text(copied / "models/m/cases.json", put(lambda cases: cases[1:3], "cases"))
    (copied / "generation/llada").rename(copied / "generation/g")
    (copied / f"generation/g/{RUN.rsplit('/')[-1]}.json").rename(copied / "generation/g/x.json")
    text(copied / "generation/g/x.json", lambda doc: (put("models/m", "model")(doc), doc.pop("name")))

    number_V = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    sequences = load_file(copied / "decoders/sequences.safetensors")
    old = sequences["general_gaps.logits"]
    new = torch.full((*old.shape[:-1], 80), -1e4)
    new[..., number_V[:64]] = old
    renumbered = {
        "s.logits": new[:, 1:2].contiguous(),
        "s.x0": number_V[sequences["general_gaps.x0"]][1:2].contiguous(),
    }
    save_file(renumbered, copied / "decoders/sequences.safetensors")
    cases = json.loads((copied / "decoders/dinfer_threshold.json").read_text())
    case = next(c for c in cases["cases"] if c["sequence"] == "general_gaps")
    want = load_file(copied / "decoders/dinfer_threshold.safetensors")[f"{case['case']}.tokens"].long()
    for path in (copied / "decoders").iterdir():
        if path.name != "sequences.safetensors":
            path.unlink()
    save_file({"y.tokens": number_V[want][:7, 1:2].int().contiguous()}, copied / "decoders/d.safetensors")
    doc = cases | {"mask_id": int(number_V[63]), "eos_id": int(number_V[62])}
    doc["cases"] = [case | {"case": "y", "sequence": "s"}]
    (copied / "decoders/d.json").write_text(json.dumps(doc))

    report = check(copied)
    assert [r.id for r in report.results] == ["decoders/d/y", "generation/g/x", "models/m/b2_t33", "models/m/b1_t64"]
    assert failures(report) == {}
    assert report.count("passed") == 4


def test_padding_that_cannot_be_left_out_is_skipped() -> None:
    ids_T, hole, end = torch.arange(4), torch.tensor([[1, 0, 1, 1]]), torch.tensor([[0, 1, 1, 0]])
    assert real_tokens(0, ids_T, end, None, "bidirectional") == slice(1, 3)
    assert real_tokens(0, ids_T, None, torch.tensor([[7, 8, 9, 10]]), "causal") == slice(0, 4)
    for mask_BT, pos_BT, attention in (
        (hole, None, "bidirectional"),
        (end, torch.tensor([[0, 1, 3, 4]]), "bidirectional"),
        (end, None, "block_causal"),
    ):
        with pytest.raises(Skip):
            real_tokens(0, ids_T, mask_BT, pos_BT, attention)


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_nothing_to_check_is_bad_usage(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / folder)]) == 2
    assert str(tmp_path / folder) in capsys.readouterr().err


def test_a_folder_inside_the_goldens_names_the_one_to_give() -> None:
    with pytest.raises(UsageError, match=r"did you mean .*goldens --only models/llada\?"):
        check(GOLDENS / "models" / "llada")


def test_a_pattern_without_a_match_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'models/lada' matches none of the .* try 'models/llada'"):
        check(GOLDENS, ["models/llada/b1_t17", "models/lada"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GOLDENS), "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_eighth_case_passes_on_cuda() -> None:
    report = check(GOLDENS, [case.id for case in find(GOLDENS)][::8], device=torch.device("cuda"))
    assert failures(report) == {}


def test_a_file_that_no_kind_takes_is_skipped(copied: Path) -> None:
    text(copied / f"{RUN}.json", lambda doc: doc["params"].pop("algorithm"))
    assert check(copied, [RUN]).skips() == [(f"no kind takes {RUN}", 1)]


def test_no_folder_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "DIR" in capsys.readouterr().err


def test_a_folder_whose_cases_are_all_skipped_is_no_success(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text(copied / "decoders/dinfer_threshold.json", put(1, "cases", 0, "params", "tricks"))
    assert main([str(copied), "--only", "decoders/dinfer_threshold/c000"]) == 2
    assert "every case was skipped" in capsys.readouterr().err


def test_command_line(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text(copied / f"{RUN}.json", put(1, "num_forwards"))
    text(copied / "decoders/dinfer_threshold.json", put(1, "cases", 0, "params", "tricks"))
    assert main([str(copied), "--only", RUN, "decoders/dinfer_threshold/c00[01]"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"FAILED  {RUN}: num_forwards: want at most 1, got 19",
        "skipped:",
        "  decoder 'dinfer_threshold': no rule for 'tricks': 1",
        "1 passed, 1 failed, 1 skipped",
    ]


def test_verbose_tells_of_every_case(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(copied), "--only", "decoders/sglang*", RUN, "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 32
    assert lines[-2] == f"PASSED  {RUN}: 19 forwards, reference 20"
    assert lines[-1] == "31 passed, 0 failed, 0 skipped"
