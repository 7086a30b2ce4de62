"""Warms up a server before it is ready, so that the first clients need not wait."""

import logging
import random
import time
from dataclasses import replace

from dinfer.engine.engine import Engine
from dinfer.engine.request import Request, Wants
from dinfer.serving.served import Catalogue, Served

LOG = logging.getLogger("dinfer.serving")
PARTS = 16  # lengths of answers; rows then enter and leave one by one, so that all numbers of rows come up
PAUSES = 2.0, 10.0  # rounds of steps that a client waits on average before it asks again


def warm_up(catalogue: Catalogue, prompt_tokens: int) -> None:
    """Runs requests in every engine, so that memory is allocated, kernels are compiled and graphs captured.

    Prompts are `prompt_tokens` random tokens, or fewer if the model has less room. Their graphs tell drafts, so that
    they serve requests with and without. Requests for log-probabilities or a temperature have graphs of their own,
    which are captured when one comes.
    """
    for served in {id(served.engine): served for served in catalogue}.values():
        began = time.perf_counter()
        meet_shapes(served, prompt_tokens, times=2 if served.pipe.engine.runtime.graphs else 1)
        LOG.info("%s: warm after %.1f s", served.name, time.perf_counter() - began)


def meet_shapes(served: Served, prompt_tokens: int, *, times: int) -> None:
    """Runs clients that ask at once, that want answers of different lengths, and that ask at random times.

    Rows that enter a block together take other steps than rows that enter one by one. `times`: repetitions, since a
    graph is captured when its shape comes up the second time. No prompt comes twice, since it would share keys.
    """
    pipe, draw = served.pipe, random.Random(0)
    vocab, mask, rows = pipe.model.spec.vocab, pipe.model.spec.mask_id or 0, pipe.engine.runtime.rows
    most = min(served.max_new_tokens, served.max_length - 1)
    size = min(prompt_tokens, served.max_length - most)
    whole, parts = [most] * rows * 2, [max(most * (1 + i % PARTS) // PARTS, 1) for i in range(rows * 2)]
    for lengths, pause in times * [(whole, 0.0), (parts, 0.0), *((whole, pause) for pause in PAUSES)]:
        drawn = (draw.choices(range(1, vocab), k=size) for _ in lengths)
        prompts = [[(mask + token) % vocab for token in tokens] for tokens in drawn]  # without the mask token
        requests = [replace(request, stops=False) for request in pipe.requests(prompts, lengths, None)]
        _ask(pipe.engine, requests, rows, pause)


def _ask(engine: Engine, requests: list[Request], clients: int, pause: float) -> None:
    """Each client asks again after its answer and `pause` rounds on average. Raises the error of a request."""
    draw, now, waiting = random.Random(0), 0, requests[::-1]

    def later() -> int:
        return now + (int(draw.expovariate(1 / pause)) if pause else 0)

    due = [later() for _ in range(clients)]
    while waiting or engine.busy:
        while waiting and due and min(due) <= now:
            due.remove(min(due))
            engine.add(waiting.pop(), Wants(deltas="commit", drafts=True))
        now += 1
        for update in engine.step() if engine.busy else ():
            if update.error is not None:
                raise update.error
            if update.completion is not None:
                due.append(later())
