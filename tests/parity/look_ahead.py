"""Info-Gain's recorded random numbers, in the order in which it draws them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dinfer.core.step.contracts import BlockView
from dinfer.research.iterations.look_ahead import LookAhead
from tests.parity.golden import Fields, Skip


@dataclass(frozen=True, kw_only=True)
class RecordedLookAhead(LookAhead):
    """look_ahead of a single request whose draws are recorded: for each candidate a number for each mask."""

    recorded: Iterator[list[float]]

    now: dict[str, Tensor]

    def draws(self, view: BlockView) -> Tensor:
        return self.now["draws_RJL"]

    def offers(self, confidence_RL: Tensor, view: BlockView) -> Tensor:
        open_L, drawn_JL = confidence_RL[0] >= 0, torch.full((self.branches - 1, view.pos_RL.shape[1]), 0.5)
        # The reference draws only where it looks ahead, and so where nothing was committed.
        if bool((open_L == view.masked_RL[0]).all()) and int(open_L.sum()) > 1 and self.heat and self.branches > 1:
            drawn_JL[:, open_L] = torch.tensor([next(self.recorded) for _ in drawn_JL])
        self.now["draws_RJL"] = drawn_JL[None]
        return super().offers(confidence_RL, view)


def recorded(options: dict[str, Any], doc: Fields) -> LookAhead:
    if doc.take("masks_left"):
        raise Skip("Info-Gain: its number of steps leaves masks, a defect")
    options = {name: value for name, value in options.items() if name != "name"}
    return RecordedLookAhead(**options, recorded=iter(doc.take("uniform_draws")), now={})
