"""Where each row is in its denoising, and what a decoder sees of it.

A request lives in a *slot*. A step works on *lanes*, and each lane names a slot. So rows enter and leave between steps,
and rows in another phase cost nothing.

Shape suffixes, one letter a dimension, in order: N slots, B lanes (the rows of one step), K active blocks of a row, R =
B * K rows of blocks, L block length, S canvas length, W query positions of one forward, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Phase(IntEnum):
    """What a row needs next. A step acts on the rows of one phase, and leaves all others as they are."""

    IDLE = 0  # empty slot, or finished
    FULL = 1  # a pass over the whole canvas, which rewrites every key and value that some position may see
    WINDOW = 2  # a pass over the cache policy's window alone
    FAULT = 3  # stopped: the model's logits were not finite
    PREFILL = 4  # a pass over the prompt that leaves its keys and decodes nothing; a WINDOW pass follows
    VERIFY = 5  # a pass that checks the draft of the last pass, see `dinfer.research.abilities.verification`


ACTIVE = (Phase.PREFILL, Phase.FULL, Phase.WINDOW, Phase.VERIFY)  # a row in one of these needs another step


class Status(IntEnum):
    """What a position of the canvas holds."""

    OPEN = 0  # still to be decoded ("masked"): holds the mask token; in models without one, noise or a draft
    DONE = 1  # decoded
    GIVEN = 2  # came with the request; never written


class Cursors(NamedTuple):
    """The cursors of one row, as the host reads them: columns of `Canvas.cursors_NC`. `RowCursors` explains them."""

    phase: int = Phase.IDLE
    prompt: int = 0
    length: int = 0
    start: int = 0
    end: int = 0
    block: int = 0
    kept: int = 0
    seen: int = 0
    forwards: int = 0
    steps: int = 0
    refreshes: int = 0
    committed: int = 0
    hits: int = 0
    seed: int = 0
    stops: int = 0


CURSORS = tuple(f"{name}_B" for name in Cursors._fields)


@dataclass(frozen=True, slots=True)
class RowCursors:
    """The cursors of the rows of one step: copies, as they were when it began.

    Those that end in _B are int64 [B], those that end in _BK int64 [B, K]. The iteration says where the active region
    moves (`Moved`). The step counts the rest, and writes the cursors of live rows back when it ends.
    """

    slot_B: Tensor
    live_B: Tensor  # bool: the row is in the phase of this step
    phase_B: Tensor
    prompt_B: Tensor  # prompt length
    length_B: Tensor  # prompt + generation
    start_B: Tensor  # active region [start, end)
    end_B: Tensor
    block_B: Tensor  # blocks finished
    kept_B: Tensor  # before this position all keys and values are final: the cache never recomputes them
    seen_B: Tensor  # the end of the last active region whose keys have all been computed
    forwards_B: Tensor  # NFE since admission
    steps_B: Tensor  # denoise steps. Schedules and random streams count these, so they go with every cache
    refreshes_B: Tensor  # full passes whose keys and values are kept
    committed_B: Tensor  # masked positions decoded, less those masked again
    hits_B: Tensor  # denoise steps without a forward: an earlier forward had computed their logits as a guess
    seed_B: Tensor  # of the request's random stream
    stops_B: Tensor  # 1: a generated stop token ends the request; 0: it is a token like others
    step_BK: Tensor  # steps taken in each active block
    quota_BK: Tensor  # masks each active block began with


@dataclass(frozen=True, slots=True)
class BlockView:
    """All that a decoder may see of the active blocks. Names end in the shape: [R, L], [R] or [R, 1]."""

    pos_RL: Tensor  # absolute positions, -1 past the end of a short last block
    tokens_RL: Tensor
    masked_RL: Tensor  # bool, still to be decoded
    given_RL: Tensor  # bool, part of the request, or padding: never to be written
    step_R: Tensor  # steps already taken in this block
    quota_R: Tensor  # masks the block began with
    forward_R: Tensor  # steps the request has taken before this one
    seed_R: Tensor  # of the request, for `dinfer.core.kernels.random`
    prompt_R: Tensor  # prompt length of the request
    length_R: Tensor  # prompt + generation
    options: dict[str, Tensor]  # the decoder's per-request options, [R, 1] each
    floor_R: Tensor | None = None  # least confidence the iteration asks for; None: it asks for none
    must_progress_R: Tensor | None = None  # bool, the row must commit at least one token; None: every row must
    edits: bool = False  # decoded positions may be written too

    def at_least(self, count: Tensor | int) -> Tensor | int:
        """`count` in rows that must progress, and 0 in others. [R, 1], or one number for all rows"""
        return count if self.must_progress_R is None else count * self.must_progress_R[:, None]

    def bar(self, threshold_R1: Tensor) -> Tensor:
        """The threshold, raised to what the iteration asks for. [R, 1]"""
        return threshold_R1 if self.floor_R is None else torch.maximum(threshold_R1, self.floor_R[:, None])
