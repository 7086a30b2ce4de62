"""What a measurement was made on and with, to stand beside its figures."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dinfer


def provenance(device: torch.device) -> dict[str, Any]:
    """Date, commit, versions and hardware."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "dinfer": dinfer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads",
    }


def commit(root: Path = Path(dinfer.__file__).parents[1]) -> str:
    """The commit of dinfer's own checkout, with "-dirty" if files of it were changed.

    An installed wheel has no checkout: DINFER_COMMIT, or its version.
    """
    if "DINFER_COMMIT" in os.environ:
        return os.environ["DINFER_COMMIT"]
    if (root / ".git").exists():  # of a worktree it is a file
        command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty"]
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # not a hook's
        try:
            return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return f"unknown, since git cannot read {root}"
    return f"version {dinfer.__version__}"
