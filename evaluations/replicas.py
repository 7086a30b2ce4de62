"""Replicas that share the documents: processes of `torchrun`, `accelerate launch` or a Ray cluster, or one process."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dinfer.core.pipeline.pipeline import device_of


@dataclass(frozen=True, slots=True)
class Replicas:
    """This process, one of `size` replicas that share the documents."""

    rank: int
    size: int
    device: torch.device

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all replicas, of which there are several, one behind the other."""
        from accelerate.utils import gather

        return gather(tensor)

    def collect(self, value: Any, to: int = 0) -> list[Any] | None:
        """The values of all replicas at replica `to`, None elsewhere."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.rank == to else None
        torch.distributed.gather_object(value, found, dst=to)
        return found

    def wait(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


ALONE = Replicas(0, 1, torch.device("cpu"))


def replicas(device: str | None, tensor_parallel: int = 1) -> Replicas:
    """The replicas of this run. `device`: None takes CUDA if there is any, with a card for each replica of a machine.

    With `tensor_parallel` above 1 torchrun's processes run one model and share no documents. Raises ValueError.
    """
    alone = tensor_parallel > 1 or int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not alone and device and ":" in device:
        raise ValueError(f"device={device!r} names one card for several replicas: leave the number out")
    where = device_of(device)
    if alone:
        return Replicas(0, 1, where)
    from accelerate import PartialState

    state = PartialState(cpu=where.type == "cpu")
    return Replicas(state.process_index, state.num_processes, state.device)


def on_ray(
    work: Callable[[], dict[str, Any] | None], address: str, count: int | None, *, cards: int, device: str | None
) -> dict[str, Any] | None:
    """Calls `work` in `count` processes (None: one for each card). Returns the result of the first.

    Each has `cards` cards. `work` finds the others by `replicas`. Raises ValueError, and the error of
    `work`.
    """
    from ray.train import RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchConfig, TorchTrainer

    from dinfer.scale.ray.cluster import connect, device_of, placed

    connect(address, logs=True)
    where = device_of(device)
    count, resources = placed(count, cards, where)
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
