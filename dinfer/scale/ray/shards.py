"""Answers a file of requests on a Ray cluster: Ray Data with one model for each actor."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

from dinfer.serving.app import application
from dinfer.serving.batch_file import Ask, answered
from dinfer.serving.run import EngineFailed, check
from dinfer.serving.server import Server

SHARDS = 8  # in flight for each actor; with more, shards are smaller, so a kill loses less work and load is more even


class Answers:
    """An actor with a model and the application that answers lines."""

    def __init__(self, make: Callable[[], Server]) -> None:
        self._server = make()
        self._app = application(self._server)

    async def __call__(self, shard: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The answers to some requests, denoised together with those of other shards."""
        asked = [(one, Ask(**json.loads(ask))) for one, ask in zip(shard["id"], shard["ask"], strict=True)]
        async with self._server.watched():
            found = await asyncio.gather(*(answered(self._app, *one) for one in asked))
        check(self._server)
        yield {"answer": [json.dumps(answer) for answer in found]}


def answer_on_cluster(
    waiting: Iterator[tuple[str, Ask]], keep: Callable[[dict[str, Any]], None], *, make: Callable[[], Server],
    replicas: int, resources: Mapping[str, float], at_once: int,
) -> None:  # fmt: skip
    """Answers requests with `replicas` actors, `at_once` at a time in each.

    The answers of a shard are kept when all are there. If an actor dies, Ray gives its shard to another. Raises
    EngineFailed.
    """
    rows = [{"id": answer_id, "ask": json.dumps(ask.model_dump())} for answer_id, ask in waiting]
    if not rows:
        return
    context = DataContext.get_current()
    context.enable_progress_bars = False  # the command has its own
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors come here with the same tracebacks
    size = max(1, min(at_once // SHARDS, -(-len(rows) // replicas)))
    answers = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size)).map_batches(
        Answers, fn_constructor_args=(make,), batch_size=None, num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU"),
        compute=ActorPoolStrategy(
            size=replicas, max_tasks_in_flight_per_actor=SHARDS, max_concurrent_calls_per_actor=SHARDS
        ),
    )  # fmt: skip
    try:
        for shard in answers.iter_batches(batch_size=None, prefetch_batches=0):
            for answer in shard["answer"]:
                keep(json.loads(answer))
    except RayError as error:
        raise EngineFailed(f"the Ray cluster could not answer: {str(error).strip().splitlines()[-1]}") from error
