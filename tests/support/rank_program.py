"""Runs a model on several ranks, and says how far it is: `python -m support.rank_program FOLDER RANKS DEVICE`."""

from __future__ import annotations

import os
import sys
from typing import Any

import dinfer
import dinfer.pipeline.ranks
from dinfer.distributed.started import leader


def say(*words: Any) -> None:
    print(*words, flush=True)


def main(folder: str, ranks: str, device: str) -> None:
    share = dinfer.pipeline.ranks.share

    def told(*given: Any) -> Any:
        present = leader()
        say("loading", os.getpid(), *(present.processes.values() if present else ()))
        return share(*given)

    dinfer.pipeline.ranks.share = told
    runtime = dinfer.Runtime(tensor_parallel=int(ranks), graphs=device == "cuda")
    pipe = dinfer.load(folder, device=device, dtype="float32", runtime=runtime)
    for _ in range(3):  # the steps of the last time are CUDA graphs
        pipe.generate_ids([[7, 5, 9]] * 4, max_new_tokens=64)
    say("running")
    while True:
        pipe.generate_ids([[7, 5, 9]] * 4, max_new_tokens=64)


if __name__ == "__main__":
    main(*sys.argv[1:])
