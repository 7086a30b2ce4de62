"""What the host keeps of a request while it waits or runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from dinfer.core.canvas import Cursors
from dinfer.engine.pages import Key
from dinfer.engine.request import Request
from dinfer.engine.scheduler.grouping import Need


@dataclass(slots=True)
class Row:
    """A request, waiting or in a slot."""

    index: int
    request: Request
    snapshots: bool
    pages: list[int] = field(default_factory=list)
    began: float = 0.0
    sampled: bool = False  # its steps have to draw tokens
    top_candidates: int = 0  # size of its top-k candidate set; 0: unrestricted
    guided: bool = False  # it has a second branch
    cursors: Cursors = field(default_factory=Cursors)  # as last read
    need: Need = field(default_factory=lambda: Need(0))  # what a step computes for it, given
    planned: tuple[int, ...] = ()  # so many of its cursors
    seen: int = 0  # pages in which a step looks for its keys
    masks: list[int] = field(default_factory=list)  # how many positions before each one are to be decoded
    keys: list[Key] = field(default_factory=list)  # of the pages of its prompt that others may share
    published: int = 0  # how many of these they may by now
    progress: tuple[int, ...] = ()  # tokens committed, blocks finished, keys kept, when they last changed
    since: int = 0  # forwards at that time
    steady: bool = False  # its last step moved nothing but its counts
    fastest: int = 0  # the most that one of its steps has committed
