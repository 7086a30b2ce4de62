"""Decoders that rewrite or lengthen what is decoded, and iterations that ask a decoder for more or less."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from torch import Tensor

from dinfer.kernels.canvas import rows_of
from dinfer.step.ability import Ability, Decision, Step
from dinfer.step.canvas import BlockView, RowCursors
from dinfer.step.parts import Parts
from dinfer.step.shape import StepShape
from dinfer.step.state import Entry


class Edits:
    """A decoder that may rewrite positions that are already decoded: all but given ones."""


class Moves(Edits):
    """A decoder that always gives `Proposal.source_RL`, and counts its steps itself."""


class Grows(Moves):
    """A decoder that begins with a canvas of its option `initial`, and always gives `Proposal.length_R`."""


class LeavesDecoded:
    """A cache whose windows may lack decoded positions, so that these have no logits."""


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


class Editing(Ability):
    """Lets a decoder rewrite what is decoded."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if isinstance(recipe.decoder, Edits) else None

    @classmethod
    def first_length(cls, recipe: Parts, entry: Entry, options: Sequence[float]) -> int:
        if not isinstance(recipe.decoder, Grows):
            return len(entry.tokens)
        names = [f"{o.kind}.{o.name}" for o in recipe.request_options]
        given = max((behind for behind, masked in enumerate(entry.masked, 1) if not masked), default=0)
        return min(max(entry.prompt + int(options[names.index("decoder.initial")]), given), len(entry.tokens))

    def view(self, step: Step, lanes: RowCursors, view: BlockView) -> BlockView:
        return replace(view, edits=True)

    def moved(self, step: Step, made: Decision) -> None:
        if made.proposal.length_R is not None:
            step.lanes = step.state.canvas.resize(step.lanes, made.proposal.length_R)


class Pacing(Ability):
    """Tells a decoder what the iteration asks for: a least confidence, and which blocks must progress."""

    @classmethod
    def of(cls, recipe: Parts, shape: StepShape) -> Self | None:
        return cls() if isinstance(recipe.iteration, Paces) else None

    def view(self, step: Step, lanes: RowCursors, view: BlockView) -> BlockView:
        iteration, blocks = step.recipe.iteration, step.shape.blocks
        assert isinstance(iteration, Paces)
        floor_B = iteration.floor(lanes)
        must_BK = iteration.must_progress(lanes, view.masked_RL.view(-1, blocks, step.shape.block))
        return replace(
            view,
            floor_R=None if floor_B is None else rows_of(floor_B, blocks),
            must_progress_R=None if must_BK is None else must_BK.flatten(),
        )
