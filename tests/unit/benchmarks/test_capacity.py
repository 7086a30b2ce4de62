"""The simulator of many cards: queues as theory has them, steps as the engine takes them, and clear refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks import throughput
from benchmarks.capacity import check, denoising, measure
from benchmarks.capacity.__main__ import main
from benchmarks.capacity.cluster import Cluster, Router, cost, percentiles
from benchmarks.capacity.denoising import Denoising
from benchmarks.capacity.replica import FrontEnd, Setting, lanes_of
from benchmarks.capacity.steps import Spread, StepTimes, Unmeasured
from benchmarks.capacity.traffic import Asked, poisson, trace
from benchmarks.clock import Clock
from dinfer.core.engine.request import Request, Update
from dinfer.core.step.cursors import Phase
from dinfer.scale.parallel.leader import leader

LANES = (1, 2, 4, 8, 64)


def report(ms: float = 10.0, **setting: Any) -> dict[str, Any]:
    """Steps that all take the same."""
    same = {"canvas": 4096, "launches": 9, "mean_ms": ms, "quantiles_ms": [ms] * 5}
    windows = [{"phase": "WINDOW", "lanes": n, "width": w, **same} for n in LANES for w in (32, 64)]
    prefills = [{"phase": "PREFILL", "lanes": 1, "width": w, **same} for w in (32, 8192)]
    return {"setting": {"shape": "small-llada2", "block": 32} | setting, "steps": windows + prefills}


def cluster(rows: int = 1, rate: float = 32, replicas: int = 1, seed: int = 0, **more: Any) -> Cluster:
    router = Router(**{name: more.pop(name) for name in ("policy", "seconds") if name in more})
    times, warm = more.pop("times", None) or StepTimes(report(), "made"), more.pop("warm", 0.0)
    few, denoising = more.pop("few", None), Denoising.at_rate(rate, 32)
    setting = Setting(rows=rows, **more)
    return Cluster(times, denoising, setting, router, replicas=replicas, seed=seed, warm=warm, few=few)


def test_the_wait_of_a_lone_slot_is_that_of_an_m_d_1_queue_and_littles_law_holds() -> None:
    service, seconds = 0.010, 150
    for load in (0.3, 0.6):
        work = poisson(load / service, [(1, 31)], seconds, Random(1))
        found = cluster().open_loop(work, seconds)
        assert found["queue_s"]["mean"] == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)
        assert found["latency_s"]["mean"] - found["queue_s"]["mean"] == pytest.approx(service, abs=1e-5)
        assert found["in_system"] == pytest.approx(found["requests_per_s"] * found["latency_s"]["mean"], rel=0.01)
        assert found["card_busy"] == pytest.approx(load, rel=0.03)


def test_no_request_and_no_token_is_lost() -> None:
    work = [Asked(i / 50, 100 + i % 7, 20 + i % 90) for i in range(400)]
    found = cluster(rows=4, rate=3, replicas=2, most=6, policy="least").open_loop(work, 60)
    assert found["offered"] == 400 == found["ended"] + found["refused"] and found["left"] == 0
    assert found["refused"] > 0
    busy = cluster(rows=4, rate=3, replicas=2).open_loop(work, 5)
    assert busy["offered"] == sum(one.at < 5 for one in work) == busy["ended"] + busy["left"]
    every = cluster(rows=4, rate=3, replicas=2).open_loop(work, 60)
    assert every["tokens_per_s"] * 60 == pytest.approx(sum(one.new for one in work))


def test_few_requests_get_another_recipe_and_keep_it() -> None:
    """Steps of it take 10 ms and decode all of a block, the others take 20 ms and decode half of it."""
    few = 2, StepTimes(report(10.0), "few"), Denoising.at_rate(32, 32)
    usual = {"rows": 8, "rate": 16, "times": StepTimes(report(20.0), "usual")}
    work = [Asked(0.0, 1, 31)] * 16

    def latency(in_flight: int, **more: Any) -> float:
        return float(cluster(**usual, **more).closed_loop(work, in_flight)["latency_s"]["p50"])

    assert latency(2, few=few) == pytest.approx(0.010) and latency(2) == pytest.approx(0.040)
    assert latency(8, few=few) == latency(8) == pytest.approx(0.040)
    both = cluster(**usual, few=few)  # the second comes while the first, of two blocks, is on its way
    found = both.open_loop([Asked(0.0, 1, 63), *[Asked(0.001, 1, 31)] * 7], 1.0)
    assert found["ended"] == 8 and found["left"] == 0
    first = min(both.tally.jobs, key=lambda job: job.sent)
    assert first.ended == pytest.approx(0.010 + 0.030)  # its second round stands beside the first one of the others
    assert max(job.ended for job in both.tally.jobs) == pytest.approx(0.060)


def test_a_seed_says_it_all() -> None:
    def found(seed: int) -> dict[str, Any]:
        return cluster(rows=4, replicas=3, seed=seed).open_loop(poisson(300, [(64, 64)], 5, Random(seed)), 5)

    assert found(1) == found(1) != found(2)


def test_a_router_that_is_busy_limits_all_replicas() -> None:
    found = cluster(rows=64, replicas=4, seconds=0.02).open_loop(poisson(100, [(1, 31)], 20, Random(0)), 20)
    assert found["requests_per_s"] == pytest.approx(50, rel=0.02)


def test_the_host_limits_short_steps() -> None:
    slow = report(1.0) | {"host": [{"rows": 1, "round_ms": 4.0}], "rounds": [{"rows": 1, "canvas": 64, "gap_ms": 0.5}]}
    work = [Asked(0.0, 1, 31)] * 10
    assert cluster(times=StepTimes(slow, "made")).closed_loop(work, 1)["latency_s"]["p50"] == pytest.approx(0.004)
    slow["host"] = []
    assert cluster(times=StepTimes(slow, "made")).closed_loop(work, 1)["latency_s"]["p50"] == pytest.approx(0.0015)
    served = cluster(times=StepTimes(slow, "made"), front=FrontEnd(request=0.003, round=0.001))
    assert served.closed_loop(work, 1)["latency_s"]["p50"] == pytest.approx(0.004)


class Recorded(StepTimes):
    """Notes the steps that are asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: Counter[tuple[str, int, int]] = Counter()

    def window(self, lanes: int, width: int, canvas: int) -> Spread:
        self.asked["WINDOW", lanes, width] += 1
        return super().window(lanes, width, canvas)

    def wide(self, phase: str, lanes: int, width: int) -> Spread:
        self.asked[phase, lanes, width] += 1
        return super().wide(phase, lanes, width)


@pytest.mark.rest(but=2)
@pytest.mark.parametrize(
    ("shape", "many", "ahead", "cache"),
    [
        ("small-llada2", False, False, []),
        ("small-llada2", False, False, ["--cache", "narrow_block"]),
        ("small-llada2", True, False, []),
        ("small-llada2", True, True, []),
        ("small", False, False, []),
    ],
)
def test_a_replica_takes_the_steps_that_the_engine_takes(shape: str, many: bool, ahead: bool, cache: list[str]) -> None:
    """Nearly all of them where rounds are launched ahead: the engine may guess wrong, and the simulator never does."""
    flags = ["--favour", "throughput"] * many + ["--positions", "128" if many else "8192"]
    given = throughput.arguments(
        ["--shape", shape, "--device", "cpu", "--in-flight", "4", "--prompt", "72", "--new", "120", *flags, *cache]
    )
    pipe = throughput.pipeline(given, torch.device("cpu"))
    news = [88, 24, 56, 120, 88, 56, 24] if shape != "small" else [64, 32, 96, 64, 64, 32, 96]  # whole blocks
    requests = [pipe.requests(throughput.prompts(given, pipe, 1), new, None)[0] for new in news]
    pipe.engine.loop.ahead = ahead
    with Clock(pipe.engine) as clock:
        assert len(list(pipe.engine.run(requests))) > len(news)
    taken = Counter((s.phase.name, *lanes_of(s.phase.name, rows, s.width, 32)) for s, rows, *_ in clock.marks)

    made = report(settle=many, shape=shape, device="cuda" if ahead else "cpu")
    if shape == "small":
        made["steps"] += [row | {"phase": "FULL"} for row in made["steps"] if row["phase"] == "PREFILL"]
    if cache:
        made["steps"] += [row | {"width": 12} for row in made["steps"] if row["phase"] == "WINDOW"]
    times = Recorded(made, "made")
    held = cluster(rows=4, rate=given.rate, times=times, gather=many, positions=given.positions)
    held.closed_loop([Asked(0.0, 72, new) for new in news], len(news))
    assert (times.asked - taken).total() <= 0.1 * ahead * taken.total() >= (taken - times.asked).total()


def test_wide_windows_that_were_not_measured_take_what_as_many_positions_take() -> None:
    made = report()
    made["steps"] = [row for row in made["steps"] if (row["phase"], row["width"]) != ("WINDOW", 64)]
    for row in made["steps"]:
        row["quantiles_ms"] = [row["lanes"]] * 5
        row["mean_ms"] = row["lanes"] * (1 if row["lanes"] < 64 else 9)  # some of these launches captured a graph
    times = StepTimes(made, "made")
    assert times.window(2, 64, 4096).p50 == times.window(4, 32, 4096).p50 == 4
    assert times.window(64, 32, 4096).p50 == 64
    made["steps"] += [row | {"width": 64, "canvas": 1024} for row in made["steps"] if row["lanes"] == 1]
    assert StepTimes(made, "made").window(2, 64, 4096).p50 == 4  # such a window was measured, but none of this size
    with pytest.raises(Unmeasured, match="64 rows x 64"):
        times.window(64, 64, 4096)


def test_times_are_interpolated_between_measurements_and_never_beyond() -> None:
    made = report()
    for row in made["steps"]:
        row["mean_ms"] = 2.0 * row["lanes"] if row["phase"] == "WINDOW" else row["width"] / 8
        row["quantiles_ms"] = [row["mean_ms"] * share for share in (0.8, 0.9, 1.0, 1.1, 1.2)]
    times = StepTimes(made, "made")
    assert times.window(6, 32, 100).p50 == pytest.approx(12) and times.window(36, 64, 4096).p95 == pytest.approx(86.4)
    assert times.wide("PREFILL", 2, 1024).mean == pytest.approx(256)
    assert times.wide("PREFILL", 1, 16).mean == pytest.approx(4)  # no less than the least that was measured
    draws = [times.window(8, 32, 100).at(i / 1000) for i in range(1000)]
    assert sum(draws) / 1000 == pytest.approx(16, rel=1e-3) and (min(draws), max(draws)) == pytest.approx((12.8, 19.2))
    for window in (
        lambda: times.window(65, 32, 100),
        lambda: times.window(1, 32, 4097),
        lambda: times.window(1, 96, 9),
    ):
        with pytest.raises(Unmeasured, match=r"made has no window step of \d+ rows.*measure more"):
            window()
    with pytest.raises(Unmeasured, match="no step FULL of 100 positions"):
        times.wide("FULL", 1, 100)
    with pytest.raises(Unmeasured, match="--rows 65: made has steps of at most 64 rows"):
        cluster(rows=65)
    with pytest.raises(Unmeasured, match="a request of 5000 positions: made has canvases of at most 4096"):
        cluster().closed_loop([Asked(0.0, 4000, 1000)], 1)


def test_traces_of_both_kinds_are_read(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:47.5000000,4808,10\n2023-11-16 18:15:46.0000000,374,44\n"
    )
    assert trace(azure) == [Asked(0.0, 374, 44), Asked(1.5, 4808, 10)]
    assert trace(azure, 3.0)[1].at == pytest.approx(0.5)
    azure.write_text(  # as the traces of 2024 are, and as spreadsheets save them
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\r\n2024-05-10 02:00:01+02:00,2399,6\r\n"
    )
    assert trace(azure) == [Asked(0.0, 2162, 5), Asked(pytest.approx(0.99007), 2399, 6)]
    mooncake.write_text(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46]}\n\n'
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": []}\n'
    )
    assert trace(mooncake) == [Asked(0.0, 6955, 52), Asked(pytest.approx(3.053), 6472, 26)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "has no column GeneratedTokens: give a CSV with"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,x\n", "line 2: invalid literal"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", "line 2: Invalid isoformat"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,0\n", "line 2: 2 and 0 tokens: both must be at least 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,2,3\n", "line 2: the time nan must be a finite number"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 5.5}\n', "line 1: 5.5 tokens must be a whole number"),
        ('{"timestamp": 1, "input_length": 2}\n', "line 1: KeyError: 'output_length'"),
        ('{"timestamp": 1,\n', "line 1: JSONDecodeError"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        trace(path)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, played, slow = tmp_path / "steps.json", tmp_path / "trace.csv", tmp_path / "slow.json"
    steps.write_text(json.dumps(report(tensor_parallel=2)))
    played.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,20,30\n2,5000,3\n3,40,50\n")
    slow.write_text(json.dumps({"block": 16, "steps_per_block": {"3": 1}}))

    def said(*more: str) -> str:
        args = ["--steps", str(steps), "--rows", "4", "--cards", "2", "--seconds", "9", "--warm", "0", *more]
        with pytest.raises(SystemExit) as stopped:
            main(args)
        return f"{stopped.value}{capsys.readouterr().err}"

    rate, tokens = ("--rate", "5"), ("--tokens-per-step", "4")
    assert "--cards 3 must be a multiple of 2" in said(*rate, *tokens, "--cards", "3")
    assert "1 of 3 requests are longer than the 4096 positions" in said("--trace", str(played), *tokens)
    assert "--rate 0.0 must be above 0" in said("--rate", "0", *tokens)
    assert "--tokens-per-step 40.0 must be above 0 and at most the block, 32" in said(*rate, "--tokens-per-step", "40")
    assert "has blocks of 16, and the steps are of 32" in said(*rate, "--denoising", str(slow))
    assert "--warm 9.0 must be" in said(*rate, *tokens, "--warm", "9")
    assert "--price -1.0 must be at least 0" in said(*rate, *tokens, "--price", "-1")
    assert "'nan' must be a finite number" in said("--rate", "nan", *tokens)
    assert "'inf' must be a finite number" in said(*rate, *tokens, "--price", "inf")
    assert "argument --cards: '1,' must be numbers with commas" in said(*rate, *tokens, "--cards", "1,")
    assert "Not a directory" in said(*rate, *tokens, "--out", str(steps / "out.json"))
    assert "--speed 0.0 must be above 0" in said("--trace", str(played), "--speed", "0", *tokens)
    assert "has no figures of a front end" in said(*rate, *tokens, "--front-end", str(slow))
    assert "is not a file of benchmarks.capacity.measure" in said(*rate, *tokens, "--steps", str(slow))
    assert "No such file" in said(*rate, *tokens, "--steps", str(tmp_path / "none.json"))

    out = tmp_path / "out.json"
    args = ["--steps", str(steps), "--rows", "4", "--cards", "2,4", "--trace", str(played), "--leave-out-longer"]
    main([*args, *tokens, "--seconds", "9", "--warm", "0", "--price", "3.5", "--out", str(out)])
    runs = json.loads(out.read_text())["runs"]
    assert [(run["cards"], run["replicas"], run["ended"], run["left_out"]) for run in runs] == [
        (2, 1, 2, 1),
        (4, 2, 2, 1),
    ]
    assert runs[0]["cost_per_million_tokens"] == pytest.approx(3.5 * 2 / 3600 / (80 / 9) * 1e6, rel=1e-3)
    assert "2 cards, 4 rows, 9 tokens/s" in capsys.readouterr().out


def test_blocks_take_as_many_steps_as_were_counted(tmp_path: Path) -> None:
    counts = Denoising({4: 3, 12: 1}, 32)
    drawn = Counter(counts.steps(32, draw) for draw in [Random(0)] for _ in range(2000))
    assert drawn[4] / 2000 == pytest.approx(0.75, abs=0.03) and {*drawn} == {4, 12}
    assert counts.tokens_per_step == pytest.approx(32 * 4 / 24)
    assert Denoising.at_rate(2.6, 32).steps(32, Random(0)) == 13 and Denoising.at_rate(2.6, 32).steps(1, Random(0)) == 1
    regions = [(0, 32)] * 9 + [(32, 64)] * 5 + [(64, 96)] * 3 + [(96, 100)] * 2  # a prompt of 20 tokens is in the first
    updates = [Update(0, i, Phase.WINDOW, region) for i, region in enumerate(regions)]
    found = denoising.counted([Update(0, 0, Phase.PREFILL, (32, 64)), *updates], [[1] * 20], 32)
    assert found == {5: 1, 3: 1}
    out = tmp_path / "steps.json"
    out.write_text(json.dumps({"block": 32, "steps_per_block": found}))
    assert Denoising.read(out, 32).tokens_per_step == 8


def test_the_steps_of_ones_own_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, out = tmp_path / "prompts.txt", tmp_path / "steps.json"
    texts.write_text("Start with 78: add 114, add 59, then add 96. What is the result?\n\n")
    args = ["--device", "cpu", "--prompts", str(texts)]
    denoising.main([*args, "--new", "64", "--out", str(out)])
    assert sum(json.loads(out.read_text())["steps_per_block"].values()) > 0
    for given, message in (
        (["--new", "8"], "--new 8: no answer to 1 prompts has a whole block"),
        (["--prompts", str(tmp_path / "none")], "No such file"),
        (["--model", "nowhere"], "unknown checkpoint 'nowhere'"),
        (["--out", str(texts / "out.json")], "Not a directory"),
    ):
        with pytest.raises(SystemExit, match=message):
            denoising.main([*args, *given])


def test_what_is_measured_can_be_simulated_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP", 0)
    monkeypatch.setattr(measure, "TIMED", 2)
    out = tmp_path / "steps.json"
    common = ["--shape", "small-llada2", "--device", "cpu", "--in-flight", "2"]
    measure.main([*common, "--prompts-of", "32", "--new", "64", "--out", str(out)])
    times = StepTimes.read(out)
    assert times.rows == 2 and times.spreads and times.longest == 96 and {2} == {*times.gaps} == {*times.host}
    run = {"in_flight": 2, "requests": 3, "tokens_per_s": 100.0, "tokens": 192}
    setting = json.loads(out.read_text())["setting"] | {"prompt": 32, "new": 64}
    row = check.compared(times, setting, run, FrontEnd())["tokens_per_s"]
    assert row["simulated"] > 0 and row["off"] == pytest.approx(row["simulated"] / 100 - 1)


def test_the_requests_of_a_run_are_those_that_were_measured() -> None:
    """With `stagger` the first have all lengths. A run may end within a round."""
    setting = {"prompt": 8, "new": 32, "stagger": True}
    asked = check.asked(setting, {"in_flight": 18, "requests": 40})
    requests = [Request([5], 32, {})] * 18
    assert [one.new for one in asked] == [one.new_tokens for one in throughput.repeated(requests, 3, True)][:40]
    assert [one.new for one in asked[14:20]] == [30, 32, 2, 4, 32, 32]
    assert {one.new for one in check.asked(setting | {"stagger": False}, {"in_flight": 18, "requests": 40})} == {32}


@pytest.mark.rest
def test_a_replica_of_two_ranks_is_measured(tmp_path: Path) -> None:
    out, common = tmp_path / "steps.json", "--shape small-llada2 --device cpu --spread --prompts-of 32 --new 32"
    try:
        measure.main([*common.split(), "--in-flight", "1", "--tensor-parallel", "2", "--out", str(out)])
    finally:
        if (ranks := leader()) is not None:
            ranks.close()
    assert StepTimes.read(out).cards == 2


def test_prices_and_percentiles() -> None:
    assert cost({"tokens_per_s": 1000.0, "cards": 2}, 1.8) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no token was generated"):
        cost({"tokens_per_s": 0.0, "cards": 2}, 1.8)
    assert percentiles([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([]) == {} and FrontEnd().request == 0


def test_a_step_may_be_a_little_larger_than_measured_if_one_says_so() -> None:
    times = StepTimes(report(), "made", reach=0.25)
    assert times.window(64, 32, 100).p50 == 10 and times.window(80, 32, 4096).p50 == pytest.approx(12.5)
    assert times.window(64, 64, 5120).p50 == pytest.approx(12.5) and (times.steps, times.beyond) == (3, 2)
    assert times.wide("PREFILL", 1, 10240).p50 == pytest.approx(12.5)
    with pytest.raises(Unmeasured):
        times.window(81, 32, 100)
    found = cluster(rows=80, times=times).closed_loop([Asked(0.0, 1, 31)] * 80, 80)
    assert found["beyond"] == 1 and cluster().closed_loop([Asked(0.0, 1, 31)], 1)["beyond"] == 0
    with pytest.raises(ValueError, match=r"--reach -0\.1 must be at least 0"):
        StepTimes(report(), "made", reach=-0.1)
