"""The processes that run one model: they do what one process does, and end when one of them does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.rank_processes import LIMIT, Program, children, kill, runs, until
from support.ranks import save

import dinfer
import dinfer.scale.parallel.divided_model
from dinfer.__main__ import main
from dinfer.core.decoders.threshold import Threshold
from dinfer.core.engine.errors import NonFiniteLogits, RankFailed
from dinfer.core.engine.request import Wants
from dinfer.core.pipeline import Pipeline
from dinfer.core.ranks.ranks import ALONE
from dinfer.core.registry import option
from dinfer.lab.bounds import log_likelihoods
from dinfer.lab.trace.record import record
from dinfer.scale.parallel.divided_model import everywhere
from dinfer.scale.parallel.leader import leader
from dinfer.serving.errors import ApiError
from dinfer.serving.served import catalogue
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings

QUESTIONS = ["What is 3 + 4?", "Repeat: tree, sun.", "What is 9 - 5?"]
TWO = dinfer.Runtime(tensor_parallel=2, rows=2)


def same(pipe: Pipeline, alone: Pipeline, **given: Any) -> None:
    results = [each.generate(QUESTIONS, max_new_tokens=32, **given) for each in (pipe, alone)]
    for one, other in zip(*results, strict=True):
        assert one.canvas == other.canvas and one.counts.forwards == other.counts.forwards


def test_two_processes_do_what_one_does_until_one_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = dinfer.load("tiny", dtype="float64", sampling={"name": "standard", "seed": 3}, runtime=TWO)
    alone = dinfer.load("tiny", dtype="float64", sampling={"name": "standard", "seed": 3})
    same(pipe, alone)
    same(pipe, alone, options=[{"temperature": 0.9}, {"threshold": 0.5}, {"guidance": 1.0}])
    same(pipe, alone, schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    filled = [each.infill("[MASK:2] + [MASK:3]", regex=["[a-f]+", "[0-9]+"], scope="gap") for each in (pipe, alone)]
    assert filled[0].ids == filled[1].ids

    updates = pipe.engine.run(pipe.requests([[5, 6, 7]] * 3, 32, None), Wants(snapshots=True))
    next(updates)
    updates.close()  # in the middle of its requests
    assert "".join(pipe.stream(QUESTIONS[0])) == "".join(alone.stream(QUESTIONS[0]))

    uncached = dinfer.compose(pipe.model, iteration="full", decoder="factor", cache="none")
    other = dinfer.compose(alone.model, iteration="full", decoder="factor", cache="none")
    same(Pipeline(uncached, pipe.tokenizer, TWO), Pipeline(other, alone.tokenizer, dinfer.Runtime()))
    assert record(pipe, QUESTIONS[0]).steps == record(alone, QUESTIONS[0]).steps
    pairs = [[[3, 4, 5], [6, 7]]]
    bounds = [everywhere(each.recipe, log_likelihoods, pairs, samples=2) for each in (pipe, alone)]
    assert bounds[0][0].value == pytest.approx(bounds[1][0].value, rel=1e-9)

    with pytest.raises(ValueError, match="where other ranks cannot import it"):
        Pipeline(replace(pipe.recipe, decoder=local_decoder()), pipe.tokenizer, TWO)
    with pytest.raises(ValueError, match=r"tensor_parallel=4, and this process has a model with .*tensor_parallel=2"):
        dinfer.load("tiny", runtime=dinfer.Runtime(tensor_parallel=4))
    same(pipe, alone)

    for more in ([], ["runtime.tensor_parallel=2"]):
        main(["generate", QUESTIONS[0], "dtype=float64", *more])
    answers = capsys.readouterr().out.splitlines()
    assert answers[0] == answers[1] != ""

    broken(pipe, alone)
    same(pipe, alone)
    killed(pipe)


def broken(pipe: Pipeline, alone: Pipeline) -> None:
    """A row of rank 0's embedding makes NaN of one request, which fails alone on both ranks."""
    row = pipe.model.embedding.weight[9].clone()
    engine, [good, bad] = pipe.engine, pipe.requests([[5, 6, 7], [9, 5]], 32, None)
    pipe.model.embedding.weight[9] = float("nan")
    names, found = [engine.add(request) for request in (good, bad)], {}
    while engine.busy:
        found |= {u.index: u for u in engine.step() if u.completion is not None or u.error is not None}
    pipe.model.embedding.weight[9] = row
    assert isinstance(found[names[1]].error, NonFiniteLogits)
    assert found[names[0]].completion.canvas == alone.generate_ids([[5, 6, 7]], max_new_tokens=32)[0].canvas


def killed(pipe: Pipeline) -> None:
    """Kills rank 1 while it runs. The engine, its callers and its server say who ended."""
    ranks = leader()
    assert ranks is not None
    process = ranks.processes[1]
    server = Server(catalogue(pipe, {"tiny": pipe.recipe}, max_new_tokens=8, created=0), Settings())
    server.check()
    threading.Timer(0.2, os.kill, (process, signal.SIGKILL)).start()
    with pytest.raises(RankFailed, match=rf"rank 1 \(process {process}\) was killed by SIGKILL"):
        while True:
            pipe.generate(QUESTIONS)
    assert not runs(process) and isinstance(server.failure, RankFailed)
    with pytest.raises(ApiError) as refused:
        server.check()
    assert refused.value.status == 503
    with pytest.raises(RankFailed, match="rank 1"):
        pipe.generate(QUESTIONS)


def local_decoder() -> Any:
    from dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True)
    class Mine(Threshold):
        """Like its base."""

        extra: int = option(1, "nothing")

    return Mine()


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process starts and no weight is read."""
    for name in ("started", "load_network"):
        monkeypatch.setattr(dinfer.scale.parallel.divided_model, name, lambda *given, **named: pytest.fail("too late"))
    yield


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ({"ranks": 0}, {}, r"runtime\.tensor_parallel=0 must be at least 1"),
        ({"ranks": 2, "expert_parallel": True}, {}, r"expert_parallel=true, and llada has no experts: leave it out"),
        ({"ranks": 1, "expert_parallel": True}, {}, r"expert_parallel=true .* runtime.tensor_parallel=1 is one card"),
        ({"ranks": 3}, {}, r"tensor_parallel=3: heads=4 cannot be divided .* Use runtime.tensor_parallel=2$"),
        ({"ranks": 2, "device": "cuda"}, {}, r"tensor_parallel=2: torch .* finds 1 CUDA devices"),
        ({"ranks": 2, "device": "cuda:0"}, {}, r"tensor_parallel=2 and device='cuda:0' contradict each other"),
        ({"ranks": 2, "device": "meta"}, {}, "device='meta' cannot be used"),
        ({"ranks": 2}, {"WORLD_SIZE": "4"}, r"tensor_parallel=2, and torchrun has started 4 processes"),
        ({"ranks": 2}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}, "must be on one"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    given: dict[str, Any], environment: dict[str, str], said: str, untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        dealt = given.get("expert_parallel", False)
        runtime = dinfer.Runtime(tensor_parallel=given["ranks"], expert_parallel=dealt)
        dinfer.load("tiny", device=given.get("device", "cpu"), runtime=runtime)


def test_ranks_of_torchrun_have_the_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multicast hangs on hosts where it is broken. torchrun's other ranks never came to the line that forbids it."""
    module, here = dinfer.scale.parallel.divided_model, dict[str, str | None]()
    for name in module.SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(module, "follows", lambda size: True)
    monkeypatch.setattr(module, "serve_torchrun", lambda: here.update({n: os.environ.get(n) for n in module.SETTINGS}))
    monkeypatch.setattr(module, "check", lambda *given: (_ for _ in ()).throw(ValueError("a rank does not come here")))
    with pytest.raises(ValueError, match="does not come here"):
        dinfer.load("tiny", device="cpu", runtime=TWO)
    assert here == module.SETTINGS


def test_a_missing_nccl_is_named(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match=r"tensor_parallel=2 needs nccl, and torch .* was built without it"):
        dinfer.load("tiny", device="cuda", runtime=dinfer.Runtime(tensor_parallel=2))


def test_a_model_that_one_process_has_is_not_for_two() -> None:
    pipe = dinfer.load("tiny", device="cpu")
    with pytest.raises(ValueError, match=r"tensor_parallel=2, but the model is divided among 1: load it"):
        Pipeline(pipe.recipe, pipe.tokenizer, dinfer.Runtime(tensor_parallel=2))


@pytest.mark.rest
def test_ranks_end_in_peace_and_others_can_start() -> None:
    results = []
    for _ in range(2):
        pipe, ranks = dinfer.load("tiny", runtime=TWO), leader()
        assert ranks is not None
        results.append(pipe.generate(QUESTIONS[0]).text)
        processes = [*ranks.processes.values()]
        assert all(map(runs, processes))
        ranks.close()
        assert len(processes) == 1 and not any(map(runs, processes))
        with pytest.raises(RankFailed, match="have ended: load it again"):
            pipe.generate(QUESTIONS[0])
    assert results[0] == results[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_joins_those_of_the_device_of_rank_0(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda host, port, is_master: port)
    for name in ("join", "share"):
        monkeypatch.setattr(dinfer.scale.parallel.divided_model, name, lambda *given: done.append(given) or ALONE)
    monkeypatch.setattr(dinfer.scale.parallel.divided_model.Source, "read", lambda told: told)
    hands = dinfer.scale.parallel.divided_model.RankCommands(1)
    assert hands("join", [4711, 2, device, 1]) is False
    hands("load", [0, "source", True])
    assert done == [(4711, 1, 2, device), ("source", ALONE, True)]


# What follows starts up to four processes a case, which takes some ten seconds.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save("llada", folder)
    return folder / "llada"


@pytest.mark.rest
@pytest.mark.parametrize("stage", ["start", "loading", "running"])
@pytest.mark.parametrize(
    ("victim", "by"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (3, signal.SIGKILL), (0, signal.SIGSTOP), (3, signal.SIGSTOP)],
    ids=lambda given: given.name if isinstance(given, signal.Signals) else f"rank{given}",
)
def test_a_rank_that_dies_or_hangs_ends_the_others(
    checkpoint: Path, stage: str, victim: int, by: signal.Signals
) -> None:
    kill(Program(str(checkpoint), 4), stage, victim, by)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


@pytest.mark.rest
@pytest.mark.parametrize(("count", "status", "said"), [(2, 0, "tokens per forward"), (3, 1, "torchrun has started 3")])
def test_torchrun_starts_the_ranks(count: int, status: int, said: str) -> None:
    torchrun = command("torch.distributed.run", "--nproc-per-node", str(count), "-m", "dinfer")
    given = ["generate", QUESTIONS[0], "model=tiny", "runtime.tensor_parallel=2"]
    done = subprocess.run([*torchrun, *given], capture_output=True, text=True, timeout=280)
    assert done.returncode == status and said in done.stderr
    assert len(done.stdout.splitlines()) == (status == 0)  # rank 0 alone answers


@pytest.mark.rest
def test_a_server_without_a_rank_says_so_and_ends() -> None:
    serve = command("dinfer", "serve", "model=tiny", "port=0", "runtime.tensor_parallel=2")
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            address = server.stdout.readline().split()[1]
            (rank,) = children(server.pid)
            assert httpx.get(f"{address}ready", timeout=LIMIT).status_code == 200
            os.kill(rank, signal.SIGKILL)
            assert until(lambda: not_ready(address))
            assert server.wait(LIMIT) == 1
            assert f"dinfer: rank 1 (process {rank}) was killed by SIGKILL" in server.stderr.read()
        finally:
            server.kill()


def not_ready(address: str) -> bool:
    """Whether a server says so, or has ended before anybody could ask."""
    try:
        return httpx.get(f"{address}ready", timeout=LIMIT).status_code == 503
    except httpx.TransportError:
        return True
