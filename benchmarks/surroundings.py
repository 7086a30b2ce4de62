"""The surroundings of a benchmark: how it was called, and what `dinfer.surroundings` says."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dinfer.surroundings import surroundings as found


def surroundings(device: torch.device) -> dict[str, Any]:
    """Command, commit, versions and hardware."""
    spec = sys.modules["__main__"].__spec__
    module = [spec.name] if spec else [sys.argv[0]]
    return {"command": " ".join(["python", "-m", *module, *sys.argv[1:]])} | found(device)
