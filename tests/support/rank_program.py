"""Runs a model on several ranks, and says how far it is: `python -m support.rank_program FOLDER RANKS DEVICE`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

import dinfer
import dinfer.scale.parallel.divided_model
from dinfer.scale.parallel.leader import leader


def say(*words: Any) -> None:
    print(*words, flush=True)


def tell_of_captures() -> None:
    """Says when the first capture of a CUDA graph has begun, and stays in it for a while."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def told(graph: torch.cuda.CUDAGraph, *given: Any, **named: Any) -> None:
        torch.cuda.CUDAGraph.capture_begin = begin  # type: ignore[method-assign]
        begin(graph, *given, **named)
        say("capturing")
        time.sleep(2)

    torch.cuda.CUDAGraph.capture_begin = told  # type: ignore[method-assign]


def main(folder: str, ranks: str, device: str) -> None:
    share = dinfer.scale.parallel.divided_model.share

    def told(*given: Any) -> Any:
        present = leader()
        say("loading", os.getpid(), *(present.processes.values() if present else ()))
        return share(*given)

    dinfer.scale.parallel.divided_model.share = told
    if device == "cuda":
        tell_of_captures()
    runtime = dinfer.Runtime(tensor_parallel=int(ranks), graphs=device == "cuda")
    pipe = dinfer.load(folder, device=device, dtype="float32", runtime=runtime)
    for _ in range(3):  # the steps of the last time are CUDA graphs
        pipe.generate_ids([[7, 5, 9]] * 4, max_new_tokens=64)
    say("running")
    while True:
        pipe.generate_ids([[7, 5, 9]] * 4, max_new_tokens=64)


if __name__ == "__main__":
    main(*sys.argv[1:])
