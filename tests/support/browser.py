"""Headless Chromium, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")


def dom(page: Path, profile: Path, fragment: str = "") -> str:
    """The page's HTML once its script has run."""
    done = subprocess.run(
        [
            str(PROGRAM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--dump-dom", f"{page.as_uri()}#{fragment}",
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
