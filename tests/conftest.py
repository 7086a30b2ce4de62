"""One thread a test process: the models are tiny, and pytest-xdist brings the parallelism."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, by whichever test

torch.set_num_threads(1)
settings.register_profile("dinfer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dinfer")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests recorded under "summary"; also from the workers of pytest-xdist, whose output is not shown."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(value)
