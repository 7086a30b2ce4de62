"""Replicas on a Ray cluster of this machine: what a kill leaves, of a server and of a file of requests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dinfer[ray]'")

import ray
from ray import serve
from support.command_line import CommandLine
from support.rank_processes import free_port
from support.serving import tiny

from dinfer.cli import conf
from dinfer.cli.commands.serve import made
from dinfer.scale.ray.cluster import connect
from dinfer.scale.ray.replicas import Plan, deployed
from dinfer.serving.settings import Settings, listen
from tests.support.kills import Clusters, Kill, questions, trial
from tests.support.ray_cluster import QUIET, Cluster, cluster

REPLICA = "ServeReplica:dinfer:Replica"
LIMIT = 120.0  # seconds for an answer, however busy the machine
SERVE = ("device=cpu", "runtime.rows=4", "max_new_tokens=32")


@pytest.fixture(scope="module")
def machine() -> Iterator[Cluster]:
    os.environ.update(QUIET)
    with cluster(2) as made:
        yield made
        ray.shutdown()


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": questions(16)[number]}]} | fields


def wanted() -> list[str]:
    asked = [[{"role": "user", "content": question}] for question in questions(16)]
    return [found.text for found in tiny().generate(asked, max_new_tokens=32)]


def ask(address: str, number: int, stream: bool) -> tuple[int, str, str | None]:
    """Status, text, and the code of the error if there is one."""
    response = httpx.post(f"{address}v1/chat/completions", json=body(number, stream=stream), timeout=240)
    if not stream or response.status_code != 200:
        said = response.json()
        if error := said.get("error"):
            return response.status_code, "", error["code"]
        return 200, said["choices"][0]["message"]["content"], None
    *pieces, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    error = None if last == "[DONE]" else json.loads(last)["error"]["code"]
    said = [json.loads(piece)["choices"][0]["delta"].get("content") or "" for piece in pieces]
    return 200, "".join(said), error


@pytest.mark.rest  # half a minute for a cluster; test_gateway runs by default
def test_a_replica_is_killed_under_load(machine: Cluster) -> None:
    """Requests that have streamed nothing are answered by another one; streams that had begun end with an error."""
    connect(machine.address, logs=False)
    with conf.session():
        config = conf.compose("serve", ["model=tiny", *SERVE]) | {"name": "tiny"}
    plan = Plan(replicas=2, rows=4, resources={"CPU": 1})
    want = wanted()
    settings = Settings(port=0, max_new_tokens=32)
    with listen(settings) as socket, deployed(partial(made, config, {}), settings, plan, socket) as here:
        odd = httpx.get(f"{here.address}ready", headers={"X-Request-Id": b"\xff\xfe"}, timeout=LIMIT)
        assert odd.status_code == 200 and odd.headers["x-request-id"].startswith("req-")
        assert httpx.get(f"{here.address}-/routes", timeout=LIMIT).status_code == 404
        assert httpx.get(f"{here.address}ready", timeout=LIMIT).json() == {"status": "ready"}
        with ThreadPoolExecutor(8) as threads:
            found = [threads.submit(ask, here.address, i % 16, i % 2 == 1) for i in range(24)]
            while sum(one.done() for one in found) < 4:
                time.sleep(0.01)
            machine.workers(REPLICA)[0].kill()
            results = [one.result() for one in found]
        metrics = httpx.get(f"{here.address}metrics", timeout=LIMIT).text
    serve.shutdown()
    for i, (status, text, error) in enumerate(results):
        assert status == 200, results[i]
        if error is None:
            assert text == want[i % 16]
        else:
            assert i % 2 == 1 and error == "replica_lost" and text and want[i % 16].startswith(text)
    assert 'replica="' in metrics and "dinfer_requests_retried_total" in metrics


@pytest.mark.rest
def test_a_later_command_takes_over_without_a_gap(machine: Cluster, tmp_path: Path) -> None:
    """A rolling restart: the second `dinfer serve` replaces the first one's replicas, which then ends in peace."""
    command = [sys.executable, "-m", "dinfer", "serve", "replicas=2", f"ray={machine.address}", *SERVE]
    port = free_port()

    def start(name: str) -> tuple[subprocess.Popen[str], str]:
        with (tmp_path / name).open("w") as log:
            process = subprocess.Popen(
                [*command, f"port={port}"], env=os.environ | QUIET, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert process.stdout is not None
        found = next((at for said in process.stdout if (at := re.search(r"http://\S+?/(?=\s)", said))), None)
        assert found, (tmp_path / name).read_text()
        return process, found[0]

    first, address = start("first.log")
    want, over, results = wanted(), False, list[tuple[int, str, str | None]]()

    def load(number: int) -> None:
        while not over:
            results.append(ask(address, number, False))
            assert results[-1][1] == want[number], results[-1]

    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load, number) for number in range(3)]
        try:
            second, again = start("second.log")
            assert again == address and first.wait(200) == 0
        finally:
            over = True
        for one in loads:
            one.result()
    assert results
    second.send_signal(signal.SIGTERM)
    assert second.wait(200) == 0


@pytest.mark.rest
def test_a_file_is_answered_in_spite_of_kills(tmp_path: Path) -> None:
    """Of a worker, which the run survives; of the driver and the head, after which the command goes on."""
    with Clusters() as clusters:
        kills = [Kill("worker", 1), Kill("driver", 12), Kill("head", 24)]
        found = trial(clusters, 0, tmp_path, lines=40, kills=kills)
    assert found.good, found
    assert [status == 0 for status in found.statuses] == [False, False, True]


@pytest.mark.rest
def test_ranks_of_a_cluster_share_the_documents(
    machine: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dinfer = CommandLine(monkeypatch, capsys)
    settings = ("eval", "limit=6", "device=cpu", "max_new_tokens=32")
    said = dinfer(*settings, "out=alone")
    assert said.status == 0, said.err
    again = dinfer(*settings, "out=shared", f"ray={machine.address}", "replicas=2")
    assert again.status == 0 and "mini_gsm" in again.out, again.err
    alone, shared = (json.loads(next(Path(folder).glob("*.json")).read_text()) for folder in ("alone", "shared"))
    assert (alone["replicas"], shared["replicas"]) == (1, 2) and len([*Path("shared").glob("*.answers-*")]) == 2
    assert alone["tasks"]["mini_gsm"]["scores"] == shared["tasks"]["mini_gsm"]["scores"]
    assert alone["tasks"]["mini_gsm"]["metrics"]["tpf"] == shared["tasks"]["mini_gsm"]["metrics"]["tpf"]
