"""Addresses, keys and limits that are not safe or not possible are refused before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.serving import served, tiny

import dinfer
from dinfer.core.engine.request import Wants
from dinfer.core.step.shape import StepShape
from dinfer.serving.served import catalogue, meet_shapes, warm_up
from dinfer.serving.settings import Settings
from dinfer.speed.graphs import bucket


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert Settings(host=host).keys() == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_addresses_need_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ValueError, match="api_key"):
        Settings(host=host)
    assert Settings(host=host, insecure=True).keys() == []


def test_keys_come_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET", "a-long-key")
    assert Settings(api_key="env:SECRET").keys() == [b"a-long-key"]
    (tmp_path / "keys").write_text("first-key\n\nsecond-key\n")
    assert Settings(api_key=f"file:{tmp_path / 'keys'}").keys() == [b"first-key", b"second-key"]


@pytest.mark.parametrize("api_key", ["a-long-key", "env:NO_SUCH_VARIABLE", "env:SHORT", "file:", "env:"])
def test_a_key_that_is_none_is_refused(api_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "short")
    with pytest.raises(ValueError):
        Settings(api_key=api_key).keys()


@pytest.mark.parametrize("prefix", ["llm", "/llm/", "/"])
def test_a_prefix_that_no_path_has_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="root_path"):
        Settings(root_path=prefix)


@pytest.mark.parametrize("field", ["max_requests", "max_tokens", "max_body", "deadline", "send_timeout"])
def test_a_limit_that_lets_nothing_through_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Settings(**{field: 0})


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        (Settings(), "localhost:8000", 200),
        (Settings(), "127.0.0.1", 200),
        (Settings(), "[::1]:8000", 200),
        (Settings(), "rebound.example:8000", 421),
        (Settings(insecure=True), "rebound.example", 200),
        (Settings(api_key="env:SECRET"), "rebound.example", 200),
    ],
)
def test_no_web_site_reaches_a_server_without_keys_by_its_own_name(
    settings: Settings, host: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "a-long-key")
    with served(settings) as client:
        assert client.ask("/health", host=host).status_code == status


def test_a_warm_server_has_its_memory_and_answers_as_any() -> None:
    pipe = dinfer.Pipeline(tiny().recipe, tiny().tokenizer, dinfer.Runtime(rows=2, max_length=24, share=True))
    with served(pipe=pipe) as client:
        warm_up(client.server.catalogue, 512)  # more than there is room for
        taken = pipe.engine.occupancy()
        assert taken["pages"] == taken["pages_free"] > 0 and taken["running"] == taken["waiting"] == 0
        body = {"model": "tiny", "prompt": "2 + 3", "max_tokens": 8}
        (want,) = pipe.generate(["2 + 3"], max_new_tokens=8, chat=False)
        assert client.ask("/v1/completions", body).json()["choices"][0]["text"] == want.text


def test_a_warm_server_has_met_the_shapes_that_clients_lead_to() -> None:
    """Also those of rows that enter a block together, and of prompts none of which shares keys."""
    pipe = dinfer.load(
        "tiny-llada2", iteration="block_diffusion", decoder={"name": "threshold", "threshold": 0.02}, cache="block",
        device="cpu", runtime=dinfer.Runtime(rows=2, max_length=64, share=True, favour="throughput"),
    )  # fmt: skip
    runner, met = pipe.engine.runner, Counter[StepShape]()

    @contextmanager
    def note(shape: StepShape, slots: Sequence[int]) -> Iterator[None]:
        kv, capacity = runner.state.kv, runner.state.canvas.capacity
        met[bucket(shape, kv.page, kv.table_NP.shape[1], capacity, pipe.model.spec.vocab)] += 1
        yield

    runner.observer = note
    (served,) = catalogue(pipe, {"tiny": pipe.recipe}, max_new_tokens=32, created=0).values()
    meet_shapes(served, 16, times=2)
    captured = {shape.bare() for shape, count in met.items() if count > 1}  # they stand in
    met.clear()
    prompts = [[*range(first, first + 16)] for first in range(10, 100, 16)]
    for _ in pipe.engine.run(pipe.requests(prompts, 32, None), Wants(deltas="commit")):
        pass
    assert met.keys() <= captured
