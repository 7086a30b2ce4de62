"""Rank 0 and the others: messages, answers, and every way to fail. Small processes without torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.rank_processes import runs, until

from dinfer.core.engine.errors import RankFailed
from dinfer.scale.parallel.follower import uninterrupted
from dinfer.scale.parallel.leader import Leader

WORK = """
import signal, sys, time
from dinfer.scale.parallel.follower import connected
follower, said = connected(*sys.argv[1:]), []
def work(name, given):
    if name == "say":
        said.append(given)
        return said
    if name == "sleep":
        time.sleep(given[0])
    if name == "raise":
        raise {"ValueError": ValueError, "MemoryError": MemoryError, "KeyError": KeyError}[given[0]]("why\\nnot")
follower.serve(work)
"""
Start = Callable[..., Leader]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Leader] = []

    def leader(size: int = 2, program: str = WORK) -> Leader:
        made.append(Leader(size, [sys.executable, "-c", program]))
        return made[-1]

    yield leader
    for one in made:
        one.close()


def test_ranks_hear_the_same_in_order_and_end_in_peace(start: Start) -> None:
    ranks = start(3)
    for i in range(50):
        ranks.tell("say", i, "x" * 5000)
    here, there = ranks.together("say", [1.5, None], work=lambda: "here")
    assert here == "here"
    for heard in there:
        assert [first for first, *_ in heard] == [*range(50), [1.5, None]]
    processes = [*ranks.processes.values()]
    assert len(processes) == 2 and all(map(runs, processes))
    ranks.close()
    assert not any(map(runs, processes)) and ranks.failure is None
    with pytest.raises(RankFailed, match="have ended: load it again"):
        ranks.tell("say")


@pytest.mark.parametrize("kind", [ValueError, MemoryError])
def test_what_a_rank_refuses_is_raised_and_nothing_is_lost(start: Start, kind: type[Exception]) -> None:
    ranks = start()
    with pytest.raises(kind, match="rank 1: why"):
        ranks.together("raise", kind.__name__, work=int)
    with pytest.raises(ValueError, match="here"):
        ranks.together("say", 1, work=lambda: exec("raise ValueError('here')"))
    assert ranks.together("say", 2, work=int)[1] == [[[1], [2]]]


def failed(ranks: Leader, said: str) -> None:
    """All ends, with that reason, which is raised again and again."""
    processes = [*ranks.processes.values()]
    for _ in range(2):
        with pytest.raises(RankFailed, match=said):
            while True:
                ranks.together("say", 1, work=int)
    assert until(lambda: not any(map(runs, processes)))


def test_a_rank_that_meets_an_error_says_which(start: Start) -> None:
    ranks = start(3)
    ranks.tell("raise", "KeyError")
    failed(ranks, r"rank [12] \(process \d+\): KeyError: 'why.*not'. All 3 ranks have ended")


def test_an_error_of_rank_0_ends_the_others(start: Start) -> None:
    ranks = start()
    with pytest.raises(RankFailed, match=rf"rank 0 \(process {os.getpid()}\): KeyError: 3"):
        ranks.together("sleep", 60, work=lambda: {}[3])
    failed(ranks, "rank 0")


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_is_named(start: Start, by: signal.Signals) -> None:
    ranks = start(3)
    os.kill(process := ranks.processes[2], by)
    failed(ranks, rf"rank 2 \(process {process}\) was killed by {by.name}")


def test_a_rank_that_ends_before_it_speaks_is_named(start: Start) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) ended with status 3"):
        start(program="raise SystemExit(3)")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 .*cannot be started.*/nowhere"):
        Leader(2, ["/nowhere/python"])


def test_ranks_that_do_not_move_hang(start: Start) -> None:
    ranks = start()
    ranks.patience = 1.2
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) hangs: no rank has moved on"):
        ranks.together("sleep", 60, work=int)


def test_an_interrupt_waits_for_the_end_of_a_message() -> None:
    done: list[Any] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)
        done.append(2)
    assert done == [1, 2] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
