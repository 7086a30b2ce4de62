"""The figures of a run, against hand-made answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dinfer
from dinfer.lab.metrics import Sample, measure, wilson

HALF = [Sample(4, 1, 8, 1.0, True, 1.0, 30, 10), Sample(12, 3, 24, 3.0, False, 0.0, 90, 30)]


def test_each_figure() -> None:
    found = measure(HALF, 4.0)
    assert (found.problems, found.correct, found.accuracy) == (2, 1.0, 50.0)
    assert (found.nfe, found.refreshes, found.tpf, found.tps) == (8.0, 2.0, 2.0, 8.0)
    assert (found.tokens, found.stopped, found.tokens_to_eos) == (16.0, 50.0, 8.0)
    assert found.positions_per_committed == 3.0
    assert (found.latency, found.latency_p50, found.latency_p90, found.seconds) == (2.0, 2.0, 2.8, 4.0)
    assert found.latency_p95 == pytest.approx(2.9) and found.latency_p99 == pytest.approx(2.98)


def test_the_ratio_is_of_sums() -> None:
    assert measure([Sample(1, 0, 10, 1, True), Sample(9, 0, 10, 1, True)], 1).tpf == 2.0


def test_nothing_judged_nothing_stopped() -> None:
    found = measure([Sample(1, 0, 0, 0.0, False)], 1.0)
    assert found.accuracy is found.accuracy_low is found.correct is found.tokens_to_eos is None
    assert found.positions_per_committed is None  # as in reports of before
    assert found.row()["accuracy"] is None and found.row()["problems"] == 1


def test_the_wilson_interval() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20.
    assert wilson(81, 263) == pytest.approx((25.53, 36.62), abs=0.01)
    assert wilson(0, 20) == pytest.approx((0.0, 16.11), abs=0.01)


@given(st.integers(1, 500), st.data())
def test_the_interval_holds_the_share(count: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, count))
    low, high = wilson(correct, count)
    assert 0 <= low <= 100 * correct / count + 1e-9 and 100 * correct / count - 1e-9 <= high <= 100


@pytest.mark.parametrize(
    ("samples", "seconds", "message"),
    [
        ([], 1.0, "samples is empty"),
        (HALF, 0.0, "seconds=0.0 must be positive"),
        (HALF, float("nan"), "seconds=nan must be positive"),
        ([HALF[0], Sample(1, 0, 1, 1.0, True)], 1.0, "1 of 2 samples have a score"),
    ],
)
def test_what_cannot_be_measured(samples: list[Sample], seconds: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(samples, seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forwards": 0}, "forwards=0"),
        ({"tokens": -1}, "tokens=-1"),
        ({"score": 1.5}, "score=1.5"),
    ],
)
def test_what_no_sample_can_be(change: dict[str, float], message: str) -> None:
    values = {"forwards": 1, "refreshes": 0, "tokens": 1, "seconds": 1.0, "stopped": True} | change
    with pytest.raises(ValueError, match=message):
        Sample(**values)


def test_samples_of_results() -> None:
    results = dinfer.load("tiny", device="cpu").generate(["Dan has 3 pens.", "Eva has 4 cups."], max_new_tokens=32)
    found = measure([Sample.of(result.counts, result.stopped) for result in results], 1.0)
    assert found.tps == sum(len(result.ids) for result in results)
    assert found.nfe == sum(result.counts.forwards for result in results) / 2
