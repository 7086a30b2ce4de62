"""One thread a test process: the models are tiny, and pytest-xdist brings the parallelism."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("dinfer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dinfer")
