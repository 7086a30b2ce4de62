"""One thread a test process: the models are tiny, and pytest-xdist brings the parallelism."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import defaultdict
from collections.abc import Generator
from math import ceil
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings
from support import selection

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, by whichever test

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as behind a shell's `&`; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
# `make test` tries the same examples at each run. `make test-all` draws others (support/examples.py says how many).
settings.register_profile("fixed", deadline=None, max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, database=None, print_blob=True)
settings.load_profile("fixed")


SEED = "DINFER_HYPOTHESIS_SEED"  # in the environment, which the workers of pytest-xdist inherit


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for all workers of a run that explores; and no thousands of cases that `-m` would leave out."""
    selection.matrix = "not matrix" not in config.option.markexpr
    if config.option.hypothesis_profile == "explore" and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = os.environ.setdefault(SEED, str(random.SystemRandom().getrandbits(32)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays until the end, so the garbage collector need not look for what is left of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that `make test` leaves out with `matrix`: all but one in so many, the same at each run.

    Of a test in Triton's interpreter, which is slow, at most one case in five stays. A card runs all of its own.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") is None and item.get_closest_marker("gpu") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, own in cases.items():
        mark = own[0].get_closest_marker("one_in")
        some = max(5 if "/test_triton" in test else 1, mark.args[0] if mark else 1)
        # By a hash, since neighbours often have the same setting of one kind.
        for item in sorted(own, key=lambda item: crc32(item.nodeid.encode()))[ceil(len(own) / some) :]:
            item.add_marker(pytest.mark.matrix)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What tests recorded under "summary", those of pytest-xdist's workers too, whose output is lost; and the seed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(value)
    if config.option.hypothesis_profile == "explore":
        seed = config.option.hypothesis_seed
        terminalreporter.write_line(f"Hypothesis drew examples; --hypothesis-seed={seed} draws the same again")
