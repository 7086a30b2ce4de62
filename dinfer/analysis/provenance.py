"""What a measurement was made on and with, to stand beside its figures."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import torch

from dinfer import __version__


def provenance(device: torch.device) -> dict[str, Any]:
    """Date, commit, versions and hardware."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "dinfer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads",
    }


def _commit() -> str:
    """The commit that is checked out, or what DINFER_COMMIT says where there is no repository."""
    if "DINFER_COMMIT" in os.environ:
        return os.environ["DINFER_COMMIT"]
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git there)"
    return done.stdout.strip()
