"""Info-Gain as published: its recorded random numbers, steps that leave masks, and the logits of its form for dllm."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dinfer.core.step.contracts import BlockAfter, BlockView, Decoder, Moved, Proposal, RowCursors, State, TokenStats
from dinfer.research.decoders.when_sure import WhenSure
from dinfer.research.iterations.look_ahead import LookAhead
from tests.parity.golden import Fields


@dataclass(frozen=True, kw_only=True)
class RecordedLookAhead(LookAhead):
    """look_ahead of a single request whose draws are recorded: for each candidate a number for each mask.

    `last`: a row leaves its block after so many steps, whatever is still masked.
    """

    recorded: Iterator[list[float]]
    last: int
    now: dict[str, Tensor]

    def draws(self, view: BlockView) -> Tensor:
        return self.now["draws_RJL"]

    def offers(self, confidence_RL: Tensor, view: BlockView, share_R1: Tensor, size: int) -> Tensor:
        open_L, drawn_JL = confidence_RL[0] >= 0, torch.full((self.branches - 1, view.pos_RL.shape[1]), 0.5)
        # The reference draws only where it looks ahead, and so where nothing was committed.
        looks = bool((open_L == view.masked_RL[0]).all()) and int(view.step_R[0]) < self.last
        if looks and int(open_L.sum()) > 1 and self.heat and self.branches > 1:
            drawn_JL[:, open_L] = torch.tensor([next(self.recorded) for _ in drawn_JL])
        self.now["draws_RJL"] = drawn_JL[None]
        return super().offers(confidence_RL, view, share_R1, size)

    def advance(self, lanes: RowCursors, after: BlockAfter, state: State) -> Moved:
        """A step that looks ahead writes as the next one begins."""
        wrote_BK = (after.view.masked_RL.view(after.open_BKL.shape) & ~after.open_BKL).any(-1)
        over_BK = lanes.step_BK + wrote_BK >= self.last
        return super().advance(lanes, replace(after, finished_BK=after.finished_BK | over_BK), state)


def recorded(options: dict[str, Any], doc: Fields, *, last: int) -> LookAhead:
    options = {name: value for name, value in options.items() if name != "name"}
    return RecordedLookAhead(**options, recorded=iter(doc.take("uniform_draws")), last=last, now={})


@dataclass(frozen=True, kw_only=True)
class Ends(WhenSure):
    """when_sure that commits nothing after the last step of a block."""

    last: int

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        found, late_R = super().select(stats, view, state), view.step_R >= self.last
        assert found.waits_R is not None
        return replace(found, commit_RL=found.commit_RL & ~late_R[:, None], waits_R=found.waits_R | late_R)


def ending(options: dict[str, Any], doc: Fields, prompts: list[list[int]], new_tokens: int, *, last: int) -> Decoder:
    return Ends(**{name: value for name, value in options.items() if name != "name"}, last=last)


def fewer_ends(eos_id: int | None, pad_id: int | None) -> Callable[[Any], Any]:
    """The form for dllm has the logits of EOS and of padding 4 lower in every forward, which is no option there."""

    def lowered(network: Any) -> Any:
        logits = network.logits

        def fewer(h: Tensor) -> Tensor:
            found = logits(h)
            for token in (eos_id, pad_id):
                if token is not None:
                    found[..., token] -= 4
            return found

        network.logits = fewer
        return network.forward

    return lowered
