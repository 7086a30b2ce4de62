"""Pareto fronts and areas under accuracy and parallelism: against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dinfer.lab.plots import aup, front

ROWS = st.lists(st.builds(dict, tpf=st.integers(1, 6), accuracy=st.integers(0, 6)), min_size=1, max_size=12)


@given(ROWS)
def test_the_front_is_what_no_row_beats(rows: list[dict[str, int]]) -> None:
    def beaten(row: dict[str, int]) -> bool:
        return any(o["tpf"] >= row["tpf"] and o["accuracy"] >= row["accuracy"] and o != row for o in rows)

    found = front(rows)
    assert {tuple(row.values()) for row in found} == {tuple(row.values()) for row in rows if not beaten(row)}
    assert [row["tpf"] for row in found] == sorted({row["tpf"] for row in found})


def test_the_front_by_another_speed() -> None:
    rows: list[dict[str, Any]] = [{"tpf": 1, "tps": 9, "accuracy": 50}, {"tpf": 2, "tps": 1, "accuracy": 60}]
    assert front(rows) == rows[1:] and front(rows, "tps") == rows[::-1]


def test_the_area_by_hand() -> None:
    assert aup([(2.0, 80.0)]) == 160.0
    # No accuracy is lost: a rectangle.
    assert aup([(1.0, 80.0), (4.0, 80.0)]) == pytest.approx(320)
    # Some is: the second end of the trapezoid weighs less; the first term never does.
    weight = math.exp(-3 * (1 - 76 / 80))
    assert aup([(4.0, 76.0), (1.0, 80.0)]) == pytest.approx(80 + 3 * (80 + 76 * weight) / 2)
    # Against a better method, all but the first term weighs less.
    low = math.exp(-3 * (1 - 80 / 90))
    assert aup([(1.0, 80.0), (4.0, 80.0)], best=90) == pytest.approx(80 + 3 * 80 * low)


def test_points_that_lost_too_much_do_not_count() -> None:
    assert aup([(1.0, 80.0), (9.0, 74.9)]) == 80.0
    assert aup([(1.0, 80.0), (2.0, 60.0), (3.0, 80.0)]) == aup([(1.0, 80.0), (3.0, 80.0)])
    assert aup([(1.0, 80.0), (9.0, 70.0)], slack=20) > 80.0
    assert aup([(1.0, 70.0), (1.0, 80.0)]) == 80.0
    assert aup([(1.0, 0.0)]) == 0.0


@pytest.mark.parametrize("points", [[], [(0.0, 50.0)], [(1.0, 101.0)], [(1.0, float("nan"))], [(float("nan"), 1.0)]])
def test_what_is_no_point_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match=r"at least one point|is no point"):
        aup(points)
