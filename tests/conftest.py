"""One thread a test process: the models are tiny, and pytest-xdist brings the parallelism."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, by whichever test

torch.set_num_threads(1)
settings.register_profile("dinfer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dinfer")
