"""A trainer in a process of its own, which broadcasts weights over gloo: PORT FILE FLAT LAST."""

from __future__ import annotations

import signal
import sys

import torch
from safetensors.torch import load_file

from dinfer.rollouts.transport import broadcast, join, leave


def main(port: str, file: str, flat: str, last: str) -> None:
    """`last`: the number of tensors after which it ends without a word; "wait": it waits to be killed."""
    group = join("127.0.0.1", int(port), 0, 2, patience=240)
    if last == "wait":
        signal.pause()
    every = [*load_file(file).values()]
    tensors = every[: int(last)]
    if flat == "1":
        tensors = [torch.cat([one.contiguous().view(torch.uint8).flatten() for one in tensors])]
    for tensor in tensors:
        broadcast(group, tensor)
    if len(tensors) < len(every) and flat == "0":
        signal.raise_signal(signal.SIGKILL)
    leave(group)


if __name__ == "__main__":
    main(*sys.argv[1:])
