"""The device-side state of a running batch: the tokens, and where each row is in its denoising.

A request lives in a *slot*. A step works on *lanes*, and each lane names a slot. So rows enter and leave between steps,
and rows in another phase cost nothing. Every tensor here is allocated once and written in place, so that CUDA graphs
may hold its address. One more slot is scratch: lanes that fill up a bucket name it, and no step acts on it.

Shape suffixes: N slots, B lanes, K blocks of the active region, R = B * K rows of blocks, L block length,
S canvas length, W query positions of one forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import (
    canvas_values,
    host_rows,
    lane_columns,
    padded,
    store_rows,
    uploaded,
    window_values,
)


class Phase(IntEnum):
    """What a row needs next. A step acts on the rows of one phase and leaves all others as they are."""

    IDLE = 0  # empty slot, or finished
    FULL = 1  # a pass over the whole canvas, as far as anyone sees it yet, which rewrites every key and value
    WINDOW = 2  # a pass over the cache policy's window alone
    FAULT = 3  # stopped: the model's logits were not finite
    PREFILL = 4  # a pass over the prompt that leaves its keys and decodes nothing; a WINDOW pass follows
    VERIFY = 5  # a pass over the draft of the last one, see `dinfer.research.abilities.verification`


ACTIVE = (Phase.PREFILL, Phase.FULL, Phase.WINDOW, Phase.VERIFY)  # the phases there are steps of


class Status(IntEnum):
    """What a position of the canvas holds."""

    OPEN = 0  # still to be decoded ("masked"): holds the mask token, or noise or a draft where there is none
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

    @property
    def region_and_length(self) -> tuple[int, int, int, int, int, int, int]:
        """What the width of a row's window depends on, see `core.terms.plan`. It is the same wherever masks are."""
        return self.start, self.end, self.length, self.kept, self.prompt, self.seen, self.start


CURSORS = tuple(f"{name}_B" for name in Cursors._fields)


@dataclass(frozen=True, slots=True)
class RowCursors:
    """The cursors of the rows of one step: copies, as they were when it began.

    All but the last two are int64 [B]; the last two int64 [B, K]. The iteration says where the active region moves
    (`Moved`). What is counted, the step counts in the end, as it writes the cursors back where `live_B`.
    """

    slot_B: Tensor
    live_B: Tensor  # bool: the row is in the phase of this step
    phase_B: Tensor
    prompt_B: Tensor  # prompt length
    length_B: Tensor  # prompt + generation
    start_B: Tensor  # active region [start, end)
    end_B: Tensor
    block_B: Tensor  # blocks finished
    kept_B: Tensor  # keys and values before this position are those of final tokens, as far as the cache minds
    seen_B: Tensor  # the end of the last active region of which every key has been computed
    forwards_B: Tensor  # NFE since admission
    steps_B: Tensor  # denoise steps: what schedules and random streams count, so no cache shifts them
    refreshes_B: Tensor  # full passes whose keys and values were kept
    committed_B: Tensor  # masked positions decoded, less those masked again
    hits_B: Tensor  # denoise steps without a forward: a candidate of the forward before had their logits
    seed_B: Tensor  # of the request's random stream
    stops_B: Tensor  # 1: a generated stop token ends the request; 0: it is a token like others
    step_BK: Tensor  # steps taken in each active block
    quota_BK: Tensor  # masks each active block began with

    @property
    def region_and_length_B(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the width of a row's window depends on, see `core.terms.plan`. It is the same wherever masks are."""
        return self.start_B, self.end_B, self.length_B, self.kept_B, self.prompt_B, self.seen_B, self.start_B


@dataclass(frozen=True, slots=True)
class BlockView:
    """All that a decoder may see of the active blocks. Names end in the shape: [R, L], [R] or [R, 1]."""

    pos_RL: Tensor  # absolute positions, -1 past the end of a short last block
    tokens_RL: Tensor
    masked_RL: Tensor  # bool, still to be decoded
    given_RL: Tensor  # bool, part of the request or padding: never to be written
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


@dataclass(slots=True)
class Canvas:
    """Tokens, statuses and cursors of every slot."""

    tokens_NS: Tensor  # int64; the last column is scratch, where writes of padding land
    status_NS: Tensor  # uint8, of Status
    next_NS: Tensor  # int64, the next open position of the request at or after each; its length if there is none
    cursors_NC: Tensor  # int64, columns CURSORS; behind them the steps, then the quotas of the K active blocks
    stop_X: Tensor  # int64, ids that end a generation

    @classmethod
    def alloc(cls, slots: int, length: int, blocks: int, stop_ids: tuple[int, ...], device) -> Self:
        """A canvas for `slots` requests of at most `length` positions, `blocks` active blocks each."""
        n, s = slots + 1, length + 1
        return cls(
            tokens_NS=torch.zeros(n, s, dtype=torch.int64, device=device),
            status_NS=torch.full((n, s), int(Status.DONE), dtype=torch.uint8, device=device),
            next_NS=torch.zeros(n, s, dtype=torch.int64, device=device),
            cursors_NC=torch.zeros(n, len(CURSORS) + 2 * blocks, dtype=torch.int64, device=device),
            stop_X=torch.tensor(stop_ids, dtype=torch.int64, device=device),
        )

    @property
    def scratch(self) -> int:
        return self.tokens_NS.shape[0] - 1

    @property
    def capacity(self) -> int:
        return self.tokens_NS.shape[1] - 1

    def admit(
        self, slot_A: Tensor, cursors: Sequence[Cursors], tokens_AS: Tensor, masked_AS: Tensor, end_A: Tensor
    ) -> None:
        """Places requests in free slots. Host side: only `slot_A` is on the device.

        `tokens_AS`: as wide as `tokens_NS`; open positions keep these tokens until they are decoded.
        `masked_AS`: which positions to decode. `end_A`: positions of each request; tokens are 0 behind them.
        """
        place_S, end_A1 = torch.arange(self.capacity + 1), end_A[:, None]
        given_AS = torch.where(place_S < end_A1, int(Status.GIVEN), int(Status.DONE))
        status_AS = torch.where(masked_AS, int(Status.OPEN), given_AS).to(torch.uint8)
        next_AS = torch.where(masked_AS, place_S, end_A1).flip(1).cummin(1).values.flip(1)
        cursors_AC = host_rows(cursors, self.cursors_NC.shape[1], 0)
        for rows, values in (
            (self.next_NS, next_AS), (self.tokens_NS, tokens_AS), (self.status_NS, status_AS),
            (self.cursors_NC, cursors_AC),
        ):  # fmt: skip
            rows.index_copy_(0, slot_A, uploaded(values, rows.device))

    def lanes(self, slot_B: Tensor, phase: Phase) -> RowCursors:
        columns_CB, live_B = lane_columns(self.cursors_NC, slot_B, int(phase))
        blocks = (columns_CB.shape[0] - len(CURSORS)) // 2
        cursors_CB, step_KB, quota_KB = columns_CB.split((len(CURSORS), blocks, blocks))
        cursors = dict(zip(CURSORS, cursors_CB.unbind(0), strict=True))
        return RowCursors(slot_B=slot_B, live_B=live_B, step_BK=step_KB.T, quota_BK=quota_KB.T, **cursors)

    def store(self, lanes: RowCursors) -> None:
        """Writes the cursors of live lanes back to their slots. The slot of a live lane is named once."""
        blocks = *lanes.step_BK.unbind(1), *lanes.quota_BK.unbind(1)
        columns_BC = torch.stack([*(getattr(lanes, name) for name in CURSORS), *blocks], 1)
        store_rows(self.cursors_NC, lanes.slot_B, lanes.live_B, columns_BC)

    def gather(self, slot_B: Tensor, pos_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and statuses at the positions of each lane; scratch where the position is -1."""
        return canvas_values(self.tokens_NS, self.status_NS, slot_B, pos_BW)

    def window_values(self, lanes: RowCursors, pos_BW: Tensor, fits_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which rows are live and fit the window; their positions, -1 in other rows; the tokens and statuses there."""
        return window_values(self.tokens_NS, self.status_NS, lanes.slot_B, lanes.live_B, fits_B, pos_BW)

    def write(self, slot_B: Tensor, pos_BW: Tensor, tokens_BW: Tensor, commit_BW: Tensor, open_BW: Tensor) -> None:
        """Writes the tokens where `commit_BW`, and marks them decoded, or `open_BW`, and marks them open."""
        index = slot_B[:, None], padded(torch.where(commit_BW | open_BW, pos_BW, -1), self.capacity)
        self.tokens_NS.index_put_(index, tokens_BW)
        status_BW = torch.where(open_BW, int(Status.OPEN), int(Status.DONE)).to(torch.uint8)
        self.status_NS.index_put_(index, status_BW)

    def is_stop(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self.stop_X).any(-1)
