"""One thread a test process: the models are tiny, and pytest-xdist brings the parallelism."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import defaultdict
from collections.abc import Generator
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
# The same examples at each run. `--hypothesis-profile=explore` draws others from a new seed, which it prints.
settings.register_profile("fixed", deadline=None, max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, database=None, print_blob=True)
settings.load_profile("fixed")


SEED = "DINFER_HYPOTHESIS_SEED"  # in the environment, which the workers of pytest-xdist inherit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-recipe", action="store_true", help="all legal recipes, not the pairwise sample")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for all workers of a run that explores."""
    selection.every_recipe = config.option.every_recipe
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
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a module's fixtures draw without a seed is the same at each run, whichever test asks for them first."""
    seed(str(item.path.relative_to(item.config.rootpath)))


@pytest.fixture(autouse=True)
def drawn_alike(request: pytest.FixtureRequest) -> None:
    """The same for what a test draws, which is not what its module's fixtures draw."""
    seed(request.node.nodeid)


def seed(text: str) -> None:
    number = crc32(text.encode())
    random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed is slow: it keeps the stack for CUDA


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`rest(but=n)` is no mark of n of a test's cases, which lie at equal distances in the order of its parameters."""
    cases = defaultdict(list)
    for item in items:
        if any("but" in mark.kwargs for mark in item.iter_markers("rest")):
            cases[item.nodeid.partition("[")[0]].append(item)
    for own in cases.values():
        free = [item for item in own if not any("but" not in mark.kwargs for mark in item.iter_markers("rest"))]
        but = next(mark.kwargs["but"] for mark in own[0].iter_markers("rest") if mark.kwargs)
        for at in range(min(but, len(free))):
            item = free[at * len(free) // min(but, len(free))]
            item.own_markers = [mark for mark in item.own_markers if mark.name != "rest"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What tests recorded under "summary", those of pytest-xdist's workers too, whose output is lost; and the seed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(value)
    if config.option.hypothesis_profile == "explore":
        seed = config.option.hypothesis_seed
        terminalreporter.write_line(f"Hypothesis drew examples; --hypothesis-seed={seed} draws the same again")
