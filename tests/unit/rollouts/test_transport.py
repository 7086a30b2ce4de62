"""Weights that come from a trainer in another process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.rollouts.test_weights import answers, folders, new_weights, pipeline  # noqa: F401, a fixture

from dinfer.rollouts.transport import join, leave
from dinfer.rollouts.weights import WeightsIncomplete

ROOT = Path(__file__).parents[3]


@pytest.mark.rest(but=2)
@pytest.mark.parametrize("how", ["one by one", "lost", "flat"])
def test_broadcasts(how: str, folders: Any) -> None:  # noqa: F811
    """A trainer that is lost in the middle leaves a pause that says so."""
    pipe, new = pipeline(folders("llada", "A"), "llada"), new_weights(folders, "llada")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    last = "3" if how == "lost" else str(len(new))
    command = [
        sys.executable,
        "-m",
        "unit.rollouts.trainer",
        str(port),
        str(folders("llada", "B") / "model.safetensors"),
    ]
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    with subprocess.Popen([*command, str(int(how == "flat")), last], env=os.environ | {"PYTHONPATH": path}) as trainer:
        group = join("127.0.0.1", port, 1, 2, name="weight_update_group", patience=60)
        told = [*new], [str(one.dtype) for one in new.values()], [[*one.shape] for one in new.values()]
        try:
            if how == "lost":
                with pytest.raises(RuntimeError, match=r"closed|reset|peer|Connection"), pipe.updating() as into:
                    into.receive(group, *told)
                with pytest.raises(WeightsIncomplete, match="an update failed"):
                    answers(pipe)
            else:
                with pipe.updating(9) as into:
                    into.receive(group, *told, flat=how == "flat")
        finally:
            leave(group)
        assert trainer.wait() == (-signal.SIGKILL if how == "lost" else 0)
    if how == "lost":
        with pipe.updating() as into:
            into.load_all(new)
    assert answers(pipe) == answers(pipeline(folders("llada", "B"), "llada"))
