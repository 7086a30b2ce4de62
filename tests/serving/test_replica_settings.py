"""What is wrong with the settings of replicas is said before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dinfer[ray]'")

from ray.exceptions import RayError
from support.command_line import CommandLine

import dinfer.cli.conf
from dinfer.core.loading.files import locate
from dinfer.scale.ray import cluster, replicas, shards
from dinfer.serving.batch_file import Ask
from dinfer.serving.run import EngineFailed
from dinfer.serving.settings import Settings, listen

TINY = locate("tiny")


@pytest.fixture
def dinfer_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "replicas=0"], "replicas=0 must be at least 1"),
        (["serve", "replicas=two"], "replicas='two'"),
        (["serve", "replicas=2", "port=0", "ray=127.0.0.1:1"], "ray=127.0.0.1:1: no Ray cluster answers there"),
        (["serve", "replicas=2", "port=0", "ray=somewhere"], "ray=somewhere must be auto, local, or the HOST:PORT"),
        (["serve", "replicas=2", "port=0", "ray=ray://head:10001"], "run this command on a machine of the cluster"),
        (["serve", "autoscaling={max_replicas: 2}"], "give replicas= too"),
        (
            ["serve", "replicas=2", "port=0", "ray=local"],
            "no cluster runs, and the processes of a new one",
        ),
        (["batch", "in.jsonl", "out.jsonl", "replicas=2"], "replicas=2 needs a Ray cluster: give ray=auto too"),
        (["batch", "in.jsonl", "out.jsonl", "ray=auto", "replicas=0"], "replicas=0 must be at least 1"),
        (["eval", "replicas=2"], "replicas=2 needs a Ray cluster: give ray=auto too"),
        (["eval", "replicas=0", "ray=auto"], "replicas=0 must be at least 1"),
        (["batch", "in.jsonl", "out.jsonl", "ray=127.0.0.1:1"], "no Ray cluster answers there"),
    ],
)
def test_settings_that_cannot_be_meant(
    dinfer_command: CommandLine, args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("{}\n")
    said = dinfer_command(*args)
    assert said.status == 2 and message in said.err, said.err


@pytest.mark.parametrize("args", [["serve", "replicas=2"], ["batch", "in.jsonl", "out.jsonl", "ray=auto"]])
def test_a_missing_ray_names_its_extra(
    dinfer_command: CommandLine, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("{}\n")
    monkeypatch.setattr(dinfer.cli.conf, "find_spec", lambda name: None if name == "ray" else name)
    said = dinfer_command(*args)
    assert said.status == 2 and "pip install 'dinfer[ray]'" in said.err


def test_a_port_that_is_taken_is_named_before_ray_starts(
    dinfer_command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "connect", lambda *_, **__: pytest.fail("Ray starts"))
    with listen(Settings(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        said = dinfer_command("serve", "replicas=1", f"port={port}")
    assert said.status == 2 and f"port={port}: Address already in use. Choose another port" in said.err, said.err


def test_only_the_owner_reads_ray_s_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "auth_token"
    monkeypatch.setattr(cluster, "TOKEN", token)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda *_, **__: token.write_text("secret"))
    cluster.connect("local", logs=False)
    assert token.stat().st_mode & 0o777 == 0o600


def machines(monkeypatch: pytest.MonkeyPatch, *resources: dict[str, float]) -> None:
    nodes: list[dict[str, Any]] = [{"Alive": True, "Resources": one} for one in resources]
    nodes.append({"Alive": False, "Resources": {"GPU": 8, "CPU": 64}})
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)


def test_more_replicas_than_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    machines(monkeypatch, {"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 1})
    assert cluster.placed(4, 1, "cuda") == cluster.placed(None, 1, "cuda") == (4, {"CPU": 1, "GPU": 1})
    assert cluster.placed(1, 2, "cuda") == cluster.placed(None, 2, "cuda") == (1, {"CPU": 2, "GPU": 2})
    assert cluster.placed(8, 2, "cpu") == (8, {"CPU": 2}) and cluster.placed(None, 1, "cpu") == (2, {"CPU": 1})
    with pytest.raises(
        ValueError, match=r"replicas=5 with .*=1: each replica needs 1 .* 4 cards in 2 machines, has room for 4"
    ):
        cluster.placed(5, 1, "cuda")
    with pytest.raises(ValueError, match="has room for 1"):  # a replica's cards are of one machine
        cluster.placed(2, 2, "cuda")
    with pytest.raises(ValueError, match=r"replicas=17 .*16 cores"):
        cluster.placed(17, 1, "cpu")


def test_ray_chooses_the_card() -> None:
    with pytest.raises(ValueError, match="device=cuda:1 names one card"):
        cluster.device_of("cuda:1")


@pytest.mark.rest(but=5)
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cache=block", "cache=block keeps the keys of finished blocks for good"),
        ("quantize=fp9", "quantize='fp9' is not known"),
        ("dtype=int3", "dtype='int3' is not known"),
        ("runtime.rows=0", "runtime.rows=0 must be between 1 and"),
        ("model.checkpoint=damaged", "model.safetensors is truncated"),
        ("model.checkpoint=bare", "its weights are not there"),
    ],
)
@pytest.mark.parametrize("args", [["serve", "replicas=1"], ["batch", "in.jsonl", "out.jsonl", "ray=auto"]])
def test_what_cannot_be_loaded_is_said_before_a_cluster_starts(
    dinfer_command: CommandLine, args: list[str], setting: str, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "connect", lambda *_, **__: pytest.fail("it asks for a cluster"))
    Path("in.jsonl").write_text("{}\n")
    shutil.copytree(TINY, "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree("bare", "damaged")
    Path("damaged/model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:100_000])
    said = dinfer_command(*args, "device=cpu", setting)
    assert said.status == 2 and message in said.err, said.err


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cache=block", "cache=block keeps the keys"),
        ("include=[nowhere]", "there is no such folder"),
        ("out=in.jsonl", "in.jsonl: Not a directory"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_a_cluster_starts(
    dinfer_command: CommandLine, setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluations.replicas.on_ray", lambda *_, **__: pytest.fail("it asks for a cluster"))
    Path("in.jsonl").touch()
    said = dinfer_command("eval", "ray=auto", "replicas=2", "device=cpu", setting)
    assert said.status == 2 and message in said.err, said.err


def test_why_no_replica_starts_is_the_last_line_of_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        said = "Traceback (most recent call last):\n  File ...\nMemoryError: the weights need 20 GB\n"
        replica = SimpleNamespace(message=f"The deployment failed to start 3 times. Error:\n{said}")
        found = {"dinfer": SimpleNamespace(deployments={"Replica": replica})}
        monkeypatch.setattr(replicas.serve, "status", lambda: SimpleNamespace(applications=found))
        raise RuntimeError("Deploying application dinfer failed: Failed to update the deployments ['Replica'].")

    monkeypatch.setattr(replicas.serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(replicas.serve, "run", fail)
    for name in ("start", "delete"):
        monkeypatch.setattr(replicas.serve, name, lambda *_, **__: None)
    plan = replicas.Plan(replicas=1, rows=1, resources={"CPU": 1})
    with (
        listen(Settings(port=0)) as made,
        pytest.raises(EngineFailed, match=r"^the replicas could not start: MemoryError: the weights need 20 GB$"),
        replicas.deployed(
            lambda _: pytest.fail("it makes a server"),
            Settings(port=0),
            plan,
            made,
        ),
    ):
        pass


def test_why_no_actor_answers_is_the_last_line_of_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RayError("The actor died:\n  File ...\nMemoryError: the weights need 20 GB\n")

    answers = SimpleNamespace(map_batches=lambda *_, **__: SimpleNamespace(iter_batches=fail))
    monkeypatch.setattr(shards.ray.data, "from_items", lambda *_, **__: answers)
    ask = Ask(custom_id="a", method="POST", url="/v1/completions", body={})
    with pytest.raises(EngineFailed, match=r"^the Ray cluster could not answer: MemoryError: the weights need 20 GB$"):
        shards.answer_on_cluster(
            iter([("a", ask)]), print, make=lambda: pytest.fail("it makes a server"), replicas=1,
            resources={"CPU": 1}, at_once=1,
        )  # fmt: skip
