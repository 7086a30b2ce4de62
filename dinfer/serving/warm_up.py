"""What a server does before it is ready, so that the first clients need not wait for it."""

import logging
import random
import time
from dataclasses import replace

from dinfer.serving.served import Catalogue, Served

LOG = logging.getLogger("dinfer.serving")
PARTS = 16  # answers are of so many lengths: rows then enter and leave one by one, and all numbers of rows come up


def warm_up(catalogue: Catalogue, prompt_tokens: int) -> None:
    """Runs requests in every engine: memory is allocated, kernels are compiled and graphs captured.

    Prompts are random tokens, `prompt_tokens` of them, or as many as there is room for. Steps of requests that ask for
    drafts, log-probabilities or a temperature have graphs of their own, which are captured when they come up.
    """
    for served in {id(served.engine): served for served in catalogue}.values():
        began = time.perf_counter()
        _run(served, prompt_tokens)
        LOG.info("%s: warm after %.1f s", served.name, time.perf_counter() - began)


def _run(served: Served, prompt_tokens: int) -> None:
    """Keeps all rows busy, twice: a graph is captured when its shape comes up the second time."""
    pipe, draw = served.pipe, random.Random(0)
    spec, rows = pipe.model.spec, pipe.engine.runtime.rows
    most = min(served.max_new_tokens, served.max_length - 1)
    size = min(prompt_tokens, served.max_length - most)
    mask = spec.mask_id or 0  # any token but this one
    prompts = [[(mask + draw.randrange(1, spec.vocab)) % spec.vocab for _ in range(size)] for _ in range(2 * rows)]
    lengths = [max(most * (1 + i % PARTS) // PARTS, 1) for i in range(2 * rows)]
    requests = [replace(request, stops=False) for request in pipe.requests(prompts, lengths, None)]
    for _ in range(2):
        for _update in pipe.engine.run(requests, deltas="commit"):
            pass
