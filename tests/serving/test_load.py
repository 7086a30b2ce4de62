"""The load test of a server: its requests, and what the engine did for those that were timed."""

from __future__ import annotations

from argparse import Namespace

from support.serving import listening, served

from benchmarks.serving import load


def test_a_load_comes_twice_and_the_second_time_counts() -> None:
    asked = Namespace(in_flight=[2], new=8, rounds=2, no_drafts=True, name="tiny")
    with served() as client, listening(client) as url:
        (run,) = load.measure(Namespace(url=url, **vars(asked)), [])["runs"]
        done = load.work(url)
    assert run["requests"] == 4 and run["tokens"] == 4 * 8
    assert done["graphs"] == run["captured_while_timed"] == 0
    assert 0 < run["rounds"] < done["rounds"] and 0 < run["round_ms"] * run["rounds"] < 1e3 * done["seconds"]
