"""What some components are beside `Decoder`, `CachePolicy` or `Iteration`: base classes that an ability asks.

A component derives from them too, and defines what they ask for. Shape suffixes as in `dinfer.core.step.contracts`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from dinfer.core.step.contracts import Iteration, Proposal, State
from dinfer.core.step.cursors import BlockView, RowCursors
from dinfer.core.step.model import Model
from dinfer.core.step.window import CanvasRows, Chooses, KeepsNothing  # noqa: F401, caches derive from them

# Decoders.


class Adjusts(ABC):
    """A decoder that reads the logits of the whole active blocks."""

    @abstractmethod
    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        """Logits to take the statistics of; changes `state` in place, never the logits."""


class Edits:
    """A decoder that may rewrite positions that are already decoded: all but given ones."""


class Moves(Edits):
    """A decoder that always gives `Edit.source_RL`, and counts its steps itself."""


class Grows(Moves):
    """A decoder that begins with a canvas of its option `initial`, and always gives `Edit.length_R`."""


class Drafts:
    """A decoder with state "draft": int64 [R, L], what open positions of the block hold in the next forward.

    -1: the mask token, or fresh noise in models without one. A draft is no token: the decoder decides anew.
    """


class Verifies(Drafts, ABC):
    """A decoder that may give `Proposal.verify_R`: its draft stands in the second pass alone."""

    @abstractmethod
    def verify(self, logits_RLV: Tensor, view: BlockView, state: State) -> Proposal:
        """The positions to commit after the pass that `select` asked for.

        `logits_RLV`: what the model says of each position, knowing the draft before it and nothing behind it.
        """


# Caches.


class RecomputesEveryKey:
    """A cache each of whose passes rewrites every key of the pass before, except keys of final tokens.

    So no later key depends on which steps had a forward of their own. Candidates and second passes need this.
    """


class RefreshesWithin:
    """A cache that keeps its keys fresh however long a row stays in a block. Others refresh as a block is entered."""

    @property
    def refreshes_within(self) -> bool:
        """Whether it does so with these options."""
        return True


class ReadsForward:
    """A cache that reads what a forward computes at all positions of its window, so each step has one forward."""


class LeavesDecoded:
    """A cache whose windows may lack decoded positions, so that these have no logits."""


class LeavesMasks:
    """A cache whose windows may leave out masks of the active blocks, which are then not decoded."""


# Iterations.


class Slides:
    """An iteration whose active region moves on without entering a block. Its caches are those that need no entry."""


class Aligned(ABC):
    """An iteration whose active blocks begin and end at multiples of `alignment`, or where the canvas ends."""

    @property
    @abstractmethod
    def alignment(self) -> int: ...


class Pads(ABC):
    """An iteration that decodes positions behind the last that is asked for, so that all blocks are whole."""

    @abstractmethod
    def padding(self, new_tokens: int) -> int:
        """Positions decoded behind the last of `new_tokens`. Host side."""


class Paces:
    """An iteration that asks a decoder for more or less."""

    def floor(self, lanes: RowCursors) -> Tensor | None:
        """Least confidence that a commit must have at this step. float32 or float64 [B]; None: any will do"""
        return None

    def must_progress(self, lanes: RowCursors, open_BKL: Tensor) -> Tensor | None:
        """Which active blocks must commit a token at every step. bool [B, K]; None: all

        `open_BKL`: what is still to be decoded. The first block with open positions must be among them."""
        return None


class Feeds(ABC):
    """An iteration that feeds more than tokens."""

    scores: ClassVar[Literal["window", "adjusted", "none"]] = "none"  # which logits it sees, see `observe`
    mixes: ClassVar[bool] = False  # feeds decoded tokens in mixtures, so no other request may have their keys

    @abstractmethod
    def embed(self, model: Model, tokens_BW: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> Tensor:
        """What the model is fed. [B, W, D] Reads `state` and never changes it: a prefill does not store it."""

    def observe(self, model: Model, logits_BWV: Tensor, pos_BW: Tensor, lanes: RowCursors, state: State) -> None:
        """Sees logits, after the commits: if `scores` is "window", those of the whole window; if "adjusted", those of
        the active blocks as the decoder has adjusted them, before any draw."""
        raise NotImplementedError(f"{type(self).__name__} has scores={self.scores!r}, so it must define `observe`")


def scores_of(iteration: Iteration) -> str:
    """Which logits an iteration sees: "window", "adjusted" or "none"."""
    return iteration.scores if isinstance(iteration, Feeds) else "none"


class Branches(ABC):
    """An iteration that runs versions of the active blocks beside them."""

    branches: int  # J
    by: str  # what says how sure each proposed token is, see `TokenStats.surest`

    @abstractmethod
    def worth(self, value_BX: Tensor, masked_BX: Tensor, token_B: Tensor) -> Tensor:
        """What a branch is worth, by how sure its masks are, and of the token that it adds. float64 [B]"""

    @abstractmethod
    def opens(self, open_BX: Tensor, stopped_B: Tensor, start_B: Tensor, end_B: Tensor, next_B: Tensor,
              length_B: Tensor) -> Tensor:  # fmt: skip
        """Where one more block opens behind `end_B`. `next_B`: the next open position there. bool [B]"""

    @abstractmethod
    def present(self, alone_B: Tensor) -> Tensor:
        """Whether the present state takes part. `alone_B`: the row has no other branch. bool [B]"""


MIXINS: dict[str, list[type]] = {
    "decoder": [Adjusts, Verifies], "cache": [Chooses], "iteration": [Feeds, Paces, Pads],
}  # fmt: skip
"""By the kind of component, those that are asked for their methods. Layers add theirs."""
