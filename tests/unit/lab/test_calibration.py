"""Temperatures of probabilities: what is fitted is what the answers were drawn with."""

from __future__ import annotations

import math
import random

import pytest

from dinfer.lab.calibration import Calibrated, expected_error, fit, tempered


@pytest.mark.parametrize("true", [0.5, 1.0, 3.0])
def test_the_fitted_temperature_is_that_of_the_answers(true: float) -> None:
    draw = random.Random(0)
    logps = [[draw.gauss(0, 3) for _ in range(4)] for _ in range(4000)]
    right = [draw.choices(range(4), tempered(row, true))[0] for row in logps]
    found = fit(logps, right)
    assert found == pytest.approx(true, rel=0.1)
    before, after = Calibrated.of(logps, right, 1.0), Calibrated.of(logps, right, found)
    assert after.ece < 0.03 and after.log_loss <= before.log_loss and after.accuracy == before.accuracy
    assert true == 1.0 or before.ece > 3 * after.ece


def test_the_error_is_by_hand() -> None:
    assert sum(tempered([0.0, math.log(3), -1e9], 1.0)) == pytest.approx(1)
    assert tempered([0.0, math.log(3)], 2.0)[1] == pytest.approx(math.sqrt(3) / (1 + math.sqrt(3)))
    assert expected_error([0.9] * 10, [1.0] * 9 + [0.0]) == pytest.approx((9 * 0.1 + 0.9) / 10)  # a bin for each
    assert expected_error([0.9] * 100, ([1.0] * 9 + [0.0]) * 10) == pytest.approx(0)
    assert fit([[0.0, 1.0]] * 9, [1] * 9) < 0.05  # always right: as sure as may be
