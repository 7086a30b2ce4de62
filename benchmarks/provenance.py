"""The provenance of a benchmark: how it was called, and what `dinfer.analysis.provenance` says."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from dinfer.analysis.provenance import provenance as found


def provenance(device: torch.device) -> dict[str, Any]:
    """Command with the variables that change what is measured, commit, versions and hardware."""
    spec = sys.modules["__main__"].__spec__
    module = [spec.name] if spec else [sys.argv[0]]
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("DINFER_")]
    settings = [setting for setting in settings if not setting.startswith("DINFER_COMMIT=")]
    return {"command": " ".join([*settings, "python", "-m", *module, *sys.argv[1:]])} | found(device)
