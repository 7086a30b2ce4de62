"""The load test of a server: its requests, and what the engine did for those that were timed."""

from __future__ import annotations

import json
import re
import urllib.request
from argparse import Namespace
from pathlib import Path

from support.serving import listening, served

from benchmarks.serving import load


def test_a_load_that_captures_nothing_comes_twice_and_the_second_time_counts(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    with served() as client, listening(client) as url:
        bounds = {"passes": 4, "warm_up": 60.0}
        asked = Namespace(
            url=url, in_flight=[2], new=8, rounds=2, no_drafts=True, name="tiny", out=out, **bounds
        )  # fmt: skip
        (run,) = load.measure(asked, [])["runs"]
        done = load.work(url)
        with urllib.request.urlopen(f"{url}metrics", timeout=60) as response:
            answered = re.findall(r"^dinfer_requests_finished_total{.*} (\S+)$", response.read().decode(), re.MULTILINE)
    assert run["requests"] == 4 and run["tokens"] == 4 * 8
    assert done["graphs"] == run["captured_while_timed"] == 0
    assert sum(map(float, answered)) == 2 * 4 and 0 < run["rounds"] < done["rounds"]
    assert 0 < run["round_ms"] * run["rounds"] < 1e3 * done["seconds"]
    assert json.loads(out.read_text())["runs"] == [run]
