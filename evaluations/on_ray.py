"""Data-parallel ranks on a Ray cluster. Ray Train starts them and sets torchrun's variables."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError

from dinfer.serving.ray.cluster import connect, device_of, placed, usual

Work = Callable[[], dict[str, Any] | None]


def on_ray(work: Work, address: str, count: int | None, *, cards: int, device: str | None) -> dict[str, Any] | None:
    """Calls `work` in `count` processes (None: one for each card). Returns the result of the first.

    Each has `cards` cards. `work` finds the others by `evaluations.ranks.ranks`. Raises ValueError, and the error of
    `work`.
    """
    connect(address, logs=True)
    where = device_of(device)
    count = count or usual(cards, where)
    resources = placed(count, cards, where)
    rank: Any = _rank  # Ray Train's types do not know that it returns a result
    with tempfile.TemporaryDirectory() as folder:  # Ray Train needs one; `work` writes its results elsewhere
        trainer = TorchTrainer(
            rank, train_loop_config={"work": work, "folder": os.getcwd()},
            scaling_config=ScalingConfig(num_workers=count, use_gpu=where == "cuda", resources_per_worker=resources),
            torch_config=TorchConfig(backend="nccl" if where == "cuda" else "gloo"),
            run_config=RunConfig(storage_path=folder),
        )  # fmt: skip
        try:
            result: Any = trainer.fit()
        except WorkerGroupError as error:
            raise next(iter(error.worker_failures.values())) from error
    return result.return_value  # of the first one


def _rank(config: dict[str, Any]) -> dict[str, Any] | None:
    os.chdir(config["folder"])  # Ray Train changes the folder, but paths are relative to the command's
    return config["work"]()
