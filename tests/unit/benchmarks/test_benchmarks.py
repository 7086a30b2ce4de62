"""The benchmark scripts: what they read, what they write, and going on after a kill."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dinfer.kernels
from benchmarks import card, figures, goals, operators, parts, report, step, throughput
from benchmarks.clock import Lap, lap, settled
from benchmarks.feeds import apart, plain_tokens, random_prompts
from benchmarks.limits import limits, operations, weight_bytes
from benchmarks.parts import Span, by_kernel, by_part, longest
from benchmarks.peers import ours, work
from benchmarks.shapes import SHAPES, shape
from dinfer.core.memory import KVPool, PoolSize
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.cursors import Phase
from dinfer.core.step.shape import StepShape
from dinfer.formats.holding import quantize
from dinfer.lab.random_network import random_network


def random_recipe(name: str) -> Recipe:
    family, spec = shape(name)
    torch.manual_seed(0)
    model = random_network(family, spec, dtype=torch.float32, device=torch.device("cpu"))
    iteration, cache = ("blockwise", "dual") if spec.causal_block is None else ("block_diffusion", "block")
    return compose(model, iteration={"name": iteration, "stop": "off"}, decoder="threshold", cache=cache)


def test_prompts_have_no_special_token() -> None:
    _, spec = shape("small")
    assert plain_tokens(spec) == range(510)
    assert plain_tokens(replace(spec, mask_id=None, eos_id=1, stop_ids=(1, 106))) == range(107, 512)
    some, more = random_prompts(spec, 2, 8), random_prompts(spec, 3, 8)
    assert some == more[:2] and {len(prompt) for prompt in more} == {8}


def test_apart_masks_are_fed_tokens_of_their_own_and_reach_more_experts() -> None:
    alike, recipe = random_recipe("small-llada2"), apart(random_recipe("small-llada2"))
    prompts = random_prompts(recipe.model.spec, 1, 32)
    assert step.experts_read(recipe, prompts) > step.experts_read(alike, prompts) + 1
    tokens_BW = torch.full((2, 8), recipe.model.spec.mask)
    tokens_BW[:, 0] = 7
    fed_BWD = recipe.model.embed(tokens_BW)
    assert (fed_BWD[:, 0] == recipe.model.embed(torch.tensor([7]))).all()
    assert fed_BWD[:, 1:].flatten(0, 1).unique(dim=0).shape[0] == 2 * 7  # every row and position


def test_what_a_step_reads_and_multiplies() -> None:
    model = random_recipe("small-llada2").model
    spec, each = model.spec, 3 * 64 * 32
    linear = 3 * (64 * (4 + 2 + 2) * 16 + 4 * 16 * 64) + 3 * 64 * 128 + 2 * (64 * 16 + each)  # one dense layer, 2 mixed
    work = operations(model, positions=40, decoded=32, keys=100)
    assert work["weights"] == 2 * (40 * (linear + 2 * 4 * each) + 32 * 64 * 512)
    assert work["attention"] == 2 * 3 * 40 * 100 * 2 * spec.heads * spec.head_dim
    everything = sum(p.nbytes for p in model.parameters()) - model.embedding.weight.nbytes
    assert weight_bytes(model, None) == everything
    assert weight_bytes(model, 8) == pytest.approx(everything - 2 * (8 * each + 8) * 4)  # the bias is counted with them
    kv = KVPool.alloc(spec, PoolSize(1, 128, 8, 16), dtype=torch.float32, device="cpu")
    card = {"copy_bytes_per_s": 1e9, "weights_per_s": 1e9, "bfloat16_per_s": 1e8}
    found = limits(model, kv, rows=1, width=40, block=32, keys=100, experts=8, rates=card)
    cached = 2 * 3 * 100 * 2 * 16 * 4
    assert found["bytes_ms"] == pytest.approx((weight_bytes(model, 8) + cached) / 1e6)
    assert found["flops_ms"] == pytest.approx(work["weights"] / 1e6 + work["attention"] / 1e5)
    assert found["limit_ms"] == max(found["bytes_ms"], found["flops_ms"])
    quantize(model, "fp8")
    assert everything / 4 < weight_bytes(model, None) < everything / 3


def test_kernels_are_summed_by_part_and_no_moment_twice() -> None:
    spans = [Span("_linear", 0, 10), Span("_swiglu", 4, 12), Span("_linear", 20, 30), Span("void nvjet_x", 30, 31)]
    spans += [Span("void at::native::where<4>", 22, 25)]
    rows = by_kernel(spans, 2)
    assert {row["kernel"]: row["own_us"] for row in rows} == {
        "_linear": 10.0, "_swiglu": 1.0, "nvjet_x": 0.5, "where<4>": 0.0
    }  # fmt: skip
    found = by_part(rows, step_ms=0.020)
    assert found["linear"] == {"calls": 1.5, "us": 10.5, "own_us": 10.5} and found["gate"]["us"] == 4.0
    assert found["rest"] == {"calls": 0.5, "us": 1.5, "own_us": 0.0}
    assert sum(row["own_us"] for row in found.values()) == pytest.approx(20)


def test_kernels_are_parts_by_the_file_they_are_in() -> None:
    names = {path.stem for path in (Path(dinfer.kernels.__file__).parent / "triton").glob("*.py")}
    assert set(parts.FILES) <= names, "benchmarks/parts.py names a file that is gone"
    assert set(parts.FILES.values()) <= set(parts.PARTS)
    assert parts.part_of("_linear") == parts.part_of("nvjet_sm90_tst_96x64_TNN") == "linear"
    assert parts.part_of("_expert_linear") == "experts" and parts.part_of("_swiglu") == "gate"
    assert parts.part_of("_attend") == parts.part_of("_attend_wide") == "attention"
    assert parts.part_of("Memcpy DtoH (Device -> Pinned)") == "rest"


def test_the_longest_run_of_window_steps_is_profiled() -> None:
    narrow = StepShape(Phase.WINDOW, 1, 32, 1, 32, 8)
    wide, full = replace(narrow, width=64), replace(narrow, phase=Phase.FULL)
    assert longest([full, narrow, wide, narrow, narrow, narrow, full, narrow]) == (3, 6)
    assert longest([full, *[narrow] * 99]) == (1, 1 + parts.LONGEST)
    prefill = replace(narrow, phase=Phase.PREFILL)
    assert longest([prefill, prefill, full]) == (2, 3)


@pytest.mark.rest
@pytest.mark.parametrize(
    "options", ["--shape small", "--shape small-llada2 --spread --iteration block_diffusion --cache block"]
)
def test_a_step_is_timed(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    step.main([*options.split(), "--device", "cpu", "--prompt", "32", "--new", "32", "--out", str(out)])
    found = json.loads(out.read_text())
    timed, mixed = found["eager"], "llada2" in options
    assert timed["repeats_itself"] and (timed["lanes"], timed["width"]) == (1, 32)
    assert sum(row["launches"] for row in timed["steps"]) == 32 + mixed  # a prefill
    assert (found["experts_read"] is not None) == mixed
    assert found["without_network"]["share"] > 0
    assert found["profile"]["steps"] == parts.LONGEST and found["profile"]["kernels"]
    assert "between kernels" in capsys.readouterr().out


def test_steps_without_a_cache_are_full_passes(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    step.main(
        ["--shape", "small", "--cache", "none", *["--device", "cpu", "--prompt", "8", "--new", "8", "--out"], str(out)]
    )
    found = json.loads(out.read_text())
    assert (found["eager"]["width"], found["eager"]["steps"][0]["phase"]) == (16, "FULL")
    assert found["profile"]["steps"] == found["eager"]["steps"][0]["launches"] == 8


def test_throughput_with_tokens_that_choose_experts_apart(tmp_path: Path) -> None:
    out = tmp_path / "throughput.json"
    args = "--shape small-llada2 --device cpu --in-flight 2 --rounds 1 --prompt 32 --new 32 --spread --quantize int8"
    args += " --warm-up 0"  # which is cut short at once, and leaves nothing that runs
    throughput.main([*args.split(), "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["setting"]["spread"] and found["runs"][0]["requests"] == 2
    assert found["setting"]["quantize"] == "int8"
    run = found["runs"][0]
    assert run["limit"]["tokens_per_s"] > run["tokens_per_s"] and 0 < run["limit"]["prefill"]["share"] < 1
    with pytest.raises(SystemExit):
        throughput.main(["--spread", "--model", "tiny"])


@pytest.mark.rest
def test_runs_for_the_goals_are_gone_on_with_and_told_in_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in goals.ROWS:  # every row is a level of a run that throughput takes
        assert row.in_flight in throughput.arguments(goals.line(row.run, dry=True)).in_flight
    assert "Not measured" in report.goals(tmp_path)
    args = [*goals.line("mini", dry=True), "--in-flight", "64,1", "--block", "1", "--new", "16", "--rounds", "3"]
    throughput.main([*args, "--out", str(tmp_path / "goals-mini-h200.json")])
    capsys.readouterr()
    goals.main(["--out", str(tmp_path), "--only", "mini"])  # whole, so nothing runs
    steady = json.loads((tmp_path / "goals-mini-h200.json").read_text())["runs"][0]["steady_tokens_per_s"]
    assert (
        f"LLaDA2-mini, bf16, 64 in flight: steady tokens/s {goals.number(steady)}, goal 11,000"
        in capsys.readouterr().out
    )
    text = report.goals(tmp_path)
    assert f"| LLaDA2-mini, bf16 | 64 | steady tokens/s | {goals.number(steady)} | 11,000 |" in text
    assert "| LLaDA2-mini, bf16 | 128 | steady tokens/s | - | 14,500 | - | - |" in text
    text = report.curve(tmp_path)
    assert text.index("| bf16, 1 |") < text.index("| bf16, 64 |")  # as the curve goes, not as it was measured
    pytest.importorskip("matplotlib")
    assert [len(axes.lines) for axes in figures.curve(tmp_path).axes] == [2, 2]


def test_our_side_of_the_comparison_does_the_common_work(tmp_path: Path) -> None:
    """As many forwards as the peer runs: in each block one over the canvas, then windows, four tokens a step."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["small"]))
    line = ["--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "out.json"), "--device", "cpu"]
    ours.main([*line, "--prompt", "8", "--new", "16", "--block", "8", "--repeats", "2"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["forwards"] == 16 / work.RATE and found["same_tokens"] and len(found["all_s"]) == 2
    assert {width: row["forwards"] for width, row in found["by_width"].items()} == {"24": 2, "8": 2}


@pytest.mark.rest
def test_a_session_on_a_card_goes_on_with_its_file_and_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.json"
    line = ["graph_kernels", "step_times", "--tiny", "--device", "cpu", "--out", str(out), "--cases"]
    card.main([*line, "llada-8b"])
    first = json.loads(out.read_text())["cases"]["llada-8b"]
    assert set(first["kernels"]) == set(first["step_ms"]) == {"FULL 1x104", "WINDOW 1x32"}
    assert all(len(row["runs"]) == 3 and row["spread"] >= 0 for row in first["step_ms"].values())
    card.main([*line, "llada-8b", "sdar-4b-batch128"])
    cases = json.loads(out.read_text())["cases"]
    assert cases["llada-8b"] == first and [*cases] == ["llada-8b", "sdar-4b-batch128"]
    capsys.readouterr()
    other = json.loads(out.read_text())
    other["cases"]["llada-8b"]["kernels"]["WINDOW 1x32"][1] = "new"
    (tmp_path / "other.json").write_text(json.dumps(other))
    card.main(["--compare", str(out), str(tmp_path / "other.json")])
    told = capsys.readouterr().out
    assert "llada-8b FULL 1x104" in told and "kernels, in the same order" in told and "and with ['new']" in told


def test_a_family_without_a_published_checkpoint_is_in_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model of the tutorial, whose author runs the tests."""
    usual, names = report.families(), report.MODELS.names()
    monkeypatch.setattr(type(report.MODELS), "names", lambda self: [*names, "plain"])
    assert report.families() == usual


def test_operators_are_compared_to_the_end() -> None:
    """A recipe that is refused by now is a line, and costs none of the others."""
    setting = operators.step_settings()[0] | {"new": 8}
    same = {"setting": setting} | operators.measured(setting)
    gone = same | {"setting": setting | {"decoder": "gone"}}
    lines = [*operators.differences([gone, same, same | {"operators": 1}])]
    assert len(lines) == 2 and "none any more" in lines[0] and f"operators 1 -> {same['operators']}" in lines[1]


@pytest.mark.parametrize(
    ("captures", "bounds", "passes", "left"),
    [
        ([9, 4, 1, 0], {}, 3, 0),  # the first that captures none counts
        ([0, 0], {}, 1, 0),  # the first never does: it compiles
        ([9, 9, 9], {"passes": 3}, 2, 9),
        ([9, 9], {"most_s": 0.0}, 1, 9),
        ([9, 0], {"first": list}, 2, 0),  # something else takes the place of the first
    ],
)
def test_a_run_that_captures_graphs_does_not_count_unless_a_bound_says_so(
    captures: list[int], bounds: dict[str, Any], passes: int, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [Lap(f"run {number}", 1.0, graphs) for number, graphs in enumerate(captures)]
    runs = iter(made)
    found, about = settled(lambda: next(runs), **bounds)
    assert (found, [*runs]) == (made[-1], [])
    assert (about["warm_up_passes"], about["captured_while_timed"]) == (passes, left) and about["warm_up_s"] >= 0
    assert (f"no fair figure: {left} graphs" in capsys.readouterr().err) == bool(left)


def test_a_lap_counts_the_graphs_of_its_engine_and_of_no_other_time() -> None:
    engine: Any = SimpleNamespace(runner=SimpleNamespace(captured=3))

    def work() -> str:
        engine.runner.captured += 2
        return "done"

    assert lap(work, engine)[::2] == ("done", 2) and lap(work)[::2] == ("done", 0)
