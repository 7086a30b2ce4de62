"""A server of a model with random weights, for measurements: takes the arguments of `benchmarks.throughput`.

Its vocabulary is a word a token.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import dinfer
from benchmarks import throughput
from dinfer.serving import run
from dinfer.serving.log import log_as_json
from dinfer.serving.served import catalogue
from dinfer.serving.server import Server
from dinfer.serving.settings import Settings


def tokenizer(vocab: int) -> Any:
    """Token i is the word `i`."""
    words = Tokenizer(models.WordLevel({f" {index}": index for index in range(vocab)}, unk_token=" 0"))
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def main() -> None:
    given = throughput.arguments(sys.argv[1:])
    pipe = throughput.pipeline(given, torch.device(given.device))
    if pipe.tokenizer is None:
        pipe = dinfer.Pipeline(pipe.recipe, tokenizer(pipe.model.spec.vocab), pipe.engine.runtime)
    settings = Settings(port=0)
    server = Server(
        catalogue(pipe, {"shape": pipe.recipe}, max_new_tokens=given.new, created=int(time.time())), settings
    )
    log_as_json()
    with run.listen(settings) as socket:
        run.serve(server, socket, lambda address: print(f"shape: {address} is ready", flush=True))


if __name__ == "__main__":
    main()
