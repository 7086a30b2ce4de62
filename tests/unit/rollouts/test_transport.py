"""Weights that come from a trainer in another process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.rank_processes import free_port, until
from support.serving import served
from torch.distributed import TCPStore
from unit.rollouts.test_weights import answers, folders, new_weights, pipeline  # noqa: F401, a fixture

import dinfer
from dinfer.rollouts import transport, weights
from dinfer.rollouts.transport import join, leave
from dinfer.rollouts.weights import WeightsIncomplete
from dinfer.serving.settings import Settings

ROOT = Path(__file__).parents[3]


def started(port: int, *given: str) -> subprocess.Popen[bytes]:
    """A trainer, see `unit.rollouts.trainer`."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    command = [sys.executable, "-m", "unit.rollouts.trainer", str(port), *given]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("how", ["one by one", "lost late", "flat", "lost"])
def test_broadcasts(how: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A trainer that is lost leaves the old weights, and once some were written, a pause that says so."""
    lost = how.startswith("lost")
    if how == "lost late":
        monkeypatch.setattr(weights, "BUCKET", 1)
    pipe, new = pipeline(folders("llada", "A"), "llada"), new_weights(folders, "llada")
    port, last = free_port(), "3" if lost else str(len(new))
    with started(port, str(folders("llada", "B") / "model.safetensors"), str(int(how == "flat")), last) as trainer:
        group = join("127.0.0.1", port, 1, 2, name="weight_update_group", patience=240)
        told = [*new], [str(one.dtype) for one in new.values()], [[*one.shape] for one in new.values()]
        try:
            if lost:
                with pytest.raises(RuntimeError, match=r"closed|reset|peer|Connection"), pipe.updating() as into:
                    into.receive(group, *told)
                if how == "lost late":
                    with pytest.raises(WeightsIncomplete, match="an update failed"):
                        answers(pipe)
                else:
                    assert answers(pipe) == answers(pipeline(folders("llada", "A"), "llada"))
            else:
                with pipe.updating(9) as into:
                    into.receive(group, *told, flat=how == "flat")
        finally:
            leave(group)
        assert trainer.wait() == (-signal.SIGKILL if lost else 0)
    if lost:
        with pipe.updating() as into:
            into.load_all(new)
    assert answers(pipe) == answers(pipeline(folders("llada", "B"), "llada"))


@pytest.mark.rest
def test_a_trainer_that_is_started_anew_takes_the_place_of_one_that_died(
    folders: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It died within an update, which is given up with its group. Of one that lives, neither is."""
    monkeypatch.setattr(transport, "REACH", 240)  # its process starts meanwhile
    file = str(folders("llada", "B") / "model.safetensors")
    with served(Settings(rollouts=True), dinfer.load("tiny", device="cpu")) as client:

        def init(port: int) -> Any:
            info = {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1,
                "world_size": 2,
                "backend": "gloo",
            }
            return client.ask("/init_weight_transfer_engine", {"init_info": info})

        for turn in range(2):
            port = free_port()
            with started(port, file, "0", "wait") as trainer:
                assert init(port).status_code == 200
                again = init(port)
                assert again.status_code == 400 and "is there already" in again.text
                trainer.kill()
                assert trainer.wait() == -signal.SIGKILL
            assert client.ask("/start_weight_update", {"is_checkpoint_format": True}).status_code == 200, turn
        assert client.ask("/finish_weight_update", {"weight_version": 3}).status_code == 200
        assert client.ask("/weight_info").json() == {"weight_version": "3"}
        # Torch keeps groups by name for the whole process, which runs other tests too.
        assert client.ask("/destroy_weights_update_group", {}).status_code == 200


def test_a_trainer_that_dies_while_a_group_is_made_is_told_and_others_go_on_meanwhile() -> None:
    port = free_port()
    held = [TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)]
    before = held[0].num_keys()
    pipe = dinfer.load("tiny", device="cpu")  # others share the usual one, and would tell versions from now on
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    asked = {"init_info": where | {"backend": "gloo", "group_name": "lost"}}

    with served(Settings(rollouts=True), pipe) as client:

        async def both() -> tuple[Any, Any]:
            lost = asyncio.ensure_future(client.http.post("/init_weight_transfer_engine", json=asked))
            await asyncio.to_thread(until, lambda: held[0].num_keys() > before)  # the engine has left its address there
            other = await client.http.post("/update_weight_version", json={"new_version": 5})
            assert not lost.done()
            held.clear()
            return other, await lost

        other, found = client.loop.run(both())
    assert other.status_code == 200
    assert found.status_code == 400 and f"master_port={port}: no group: " in found.text, found.text


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_a_wrong_address_or_port_is_told_soon(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REACH", 0.5)
    where = {"master_address": address, "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    with served(Settings(rollouts=True), dinfer.load("tiny", device="cpu")) as client:
        wrong = client.ask("/init_weights_update_group", where | {"backend": "gloo"})
    assert wrong.status_code == 400 and f"master_port={where['master_port']}: no group: " in wrong.text, wrong.text
