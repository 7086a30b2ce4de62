"""Headless Chromium, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def chromium(profile: Path, size: str) -> Iterator[Any]:
    """A headless browser with a new profile. `size`: of its window, "width,height"."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(PROGRAM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={size}",
        f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield found
    finally:
        found.quit()
