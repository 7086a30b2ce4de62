"""What iterations that go through the canvas from left to right have in common."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dinfer.abilities.pacing import Aligned, Edits
from dinfer.kernels.advance import Grid, leave_blocks
from dinfer.recipe.refusals import Refusal, Trait
from dinfer.recipe.registry import option
from dinfer.step.contracts import BlockAfter, Iteration, Moved, RowCursors, State

STOPS = ("block", "cut", "off")


@dataclass(frozen=True, kw_only=True)
class AlignedSweep(Iteration, Aligned):
    """One block after the other, each beginning at a multiple of the block length. Blocks without masks are skipped.

    `stop` says what a generated stop token does. "block" finishes its block. "cut" ends the row as soon as all before
    the first one is decoded. Decoded tokens do not change, so the answer is the same in fewer forwards; decoders that
    edit refuse it. Positions that are left undecoded hold EOS.
    """

    shortest: ClassVar[int] = 1  # block
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            "iteration.stop=cut ends a row while {decoder} may still edit what it decoded.",
            iteration=Trait(
                lambda iteration: iteration.stop == "cut", "`iteration.stop=cut`", instead="iteration.stop=block"
            ),
            decoder=Edits,
        ),
    )

    block: int = option(32, "block length, in tokens")
    stop: Literal["block", "cut", "off"] = option(
        "block", "at a stop token: finish its 'block'; 'cut' once all before it is decoded; 'off': decode all the same"
    )

    def __post_init__(self) -> None:
        if self.block < self.shortest:
            raise ValueError(f"iteration.block={self.block} must be at least {self.shortest}")
        if self.stop not in STOPS:
            raise ValueError(f"iteration.stop={self.stop!r} must be one of {', '.join(STOPS)}")

    @property
    def grid(self) -> Grid:
        """Where blocks begin and end."""
        return Grid(self.block)

    def first_region(self, prompt: int, length: int) -> tuple[int, int]:
        start, end = self.grid.block_at(prompt)
        return start, min(end, length)

    @property
    def alignment(self) -> int:
        return self.block if self.grid.align and not self.grid.lead else 1

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        return sweep_on(lanes, after, self.grid, self.stop)


def sweep_on(lanes: RowCursors, after: BlockAfter, grid: Grid, stop: str = "off") -> Moved:
    """Moves rows whose blocks are finished to the next block; see `dinfer.kernels.advance.leave_blocks`."""
    entered_B, done_B, start_B, end_B, block_B = leave_blocks(
        after.finished_BK, after.stop_BKL.flatten(1), after.given_BKL.flatten(1), after.open_BKL.flatten(1),
        after.next_B, lanes.length_B, lanes.start_B, lanes.end_B, lanes.block_B, grid=grid, stop=stop,
    )  # fmt: skip
    return Moved(start_B, end_B, block_B, entered_B[:, None], done_B)


@dataclass(frozen=True, kw_only=True)
class BlockSweep(AlignedSweep):
    """The same from the end of the prompt on, or, where gaps are filled in, from the beginning of each."""

    align: bool = option(
        False, "begin blocks at multiples of the block length, so that the first one may overlap the prompt"
    )

    @property
    def grid(self) -> Grid:
        return Grid(self.block, align=self.align)
