"""Serves a full-size shape with random weights, after its engine has run the same requests alone.

    python -m benchmarks.serving.full_size --out engine.json --shape llada2-mini --spread --in-flight 1,64 --port 8100

Arguments but `--port` are those of benchmarks.throughput. Every token is a word: `w17` is token 17.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import throughput
from benchmarks.clock import lap, settled
from benchmarks.provenance import begun, save
from dinfer import Pipeline
from dinfer.serving.guard import log_as_json
from dinfer.serving.run import serve, tuned
from dinfer.serving.served import catalogue, warm_up
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings, listen


def main(args: list[str]) -> None:
    """`args`: `--port` and its number, then arguments of benchmarks.throughput."""
    given, settings = throughput.arguments(args[2:]), Settings(port=int(args[1]))
    device = torch.device(given.device)
    made = throughput.pipeline(given, device)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(made.model.spec.vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pipe = Pipeline(made.recipe, PreTrainedTokenizerFast(tokenizer_object=words), made.engine.runtime)
    report = {**begun(given, device), "runs": []}
    requests = pipe.requests(throughput.prompts(given, pipe, max(given.in_flight)), given.new, None)
    for in_flight, rounds in zip(given.in_flight, given.rounds, strict=True):
        timed = throughput.repeated(requests[:in_flight], rounds, given.stagger)
        work = partial(throughput.closed_loop, pipe.engine, timed, in_flight)
        (run, *_), about = settled(partial(lap, work, pipe.engine), given.passes, given.warm_up)
        report["runs"].append({"in_flight": in_flight, **run, **about})
    save(report, given.out)
    served = catalogue(pipe, {"shape": pipe.recipe}, max_new_tokens=given.new, created=int(time.time()))
    with listen(settings) as socket:
        log_as_json()
        warm_up(served, given.prompt)
        with tuned():
            serve(Server(served, settings), socket, lambda address: print(f"ready: {address}", flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
