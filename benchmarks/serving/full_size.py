"""Serves a full-size shape with random weights, after measuring its engine alone: the baseline of a load generator.

    python -m benchmarks.serving.full_size --out engine.json --shape llada2-mini --spread --gather --in-flight 1,64,256
    python -m benchmarks.serving.full_size --shape small-llada2 --device cpu --prompt 40 --new 64     # dry run

All arguments but `--port`, `--out` and `--prompts-to` are those of benchmarks.throughput, whose scripted decoder
commits the same number of tokens whatever the logits say. Every token is a word: `w17` is token 17. `--prompts-to` is a
folder for the load generator: the tokenizer, and prompts.jsonl with the prompts that the engine runs. For each number
in flight the engine runs `--rounds` times as many requests to capture its graphs, and the same again, timed. With
`--stagger` the first of them are of all lengths, so that the others do not all end at the same moment.
`streaming_tokens_per_s` is what it yields where each step is followed, as a server does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import throughput
from benchmarks.provenance import begun, save
from dinfer import Pipeline
from dinfer.engine.request import Wants
from dinfer.serving.log import log_as_json
from dinfer.serving.run import serve, tuned
from dinfer.serving.served import catalogue
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings, listen
from dinfer.serving.warm_up import warm_up
from dinfer.step.contracts import ModelSpec


def words(spec: ModelSpec) -> PreTrainedTokenizerFast:
    """A tokenizer with a word for each token of the vocabulary."""
    vocab = {f"w{i}": i for i in range(spec.vocab)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def main(args: list[str] | None = None) -> None:
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__, **how)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts-to", type=Path)
    own, rest = parser.parse_known_args(args)
    given = throughput.arguments(rest)
    if own.prompts_to and given.stagger and len(given.in_flight) > 1:
        parser.error("--stagger takes one number --in-flight: --prompts-to has the requests of one")
    device = torch.device(given.device)
    made = throughput.pipeline(given, device)
    pipe = Pipeline(made.recipe, words(made.model.spec), made.engine.runtime)
    report: dict[str, Any] = {**begun(given, device), "runs": []}
    prompts = throughput.prompts(given, pipe, max(given.in_flight))
    requests = pipe.requests(prompts, given.new, None)
    if own.prompts_to:
        pipe.tokenizer.save_pretrained(own.prompts_to)
        rows = [
            {"prompt": " ".join(f"w{i}" for i in request.prompt), "output_tokens_count": request.new_tokens}
            for request in throughput.repeated(requests, max(given.rounds), given.stagger)
        ]
        (own.prompts_to / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for in_flight, rounds in zip(given.in_flight, given.rounds, strict=True):
        timed = throughput.repeated(requests[:in_flight], rounds, given.stagger)
        throughput.closed_loop(pipe.engine, timed, in_flight)  # what comes up twice is captured
        captured = pipe.engine.runner.captured
        alone = throughput.closed_loop(pipe.engine, timed, in_flight)
        alone["captured_while_timed"] = pipe.engine.runner.captured - captured
        followed = throughput.closed_loop(pipe.engine, requests[:in_flight], in_flight, Wants(deltas="commit"))
        streaming = {"streaming_tokens_per_s": followed["tokens_per_s"]}
        report["runs"].append({"in_flight": in_flight, **alone, **streaming})
        print(report["runs"][-1], flush=True)
    save(report, own.out)
    settings = Settings(port=own.port, max_new_tokens=given.new)
    models_served = catalogue(pipe, {"shape": pipe.recipe}, max_new_tokens=given.new, created=int(time.time()))
    with listen(settings) as socket:
        log_as_json()
        warm_up(models_served, given.prompt)
        with tuned():
            serve(Server(models_served, settings), socket, lambda address: print(f"ready: {address}", flush=True))


if __name__ == "__main__":
    main()
