"""Caches and decoders that see the attention of a forward, or how its values change."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.abilities.traits import GUIDED
from dinfer.core.kernels.attention import taken
from dinfer.core.kernels.canvas import rows_of
from dinfer.core.memory import PagedAttend
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import ByPart, Decision, Forward, State, Step, TokenStats
from dinfer.core.step.contracts import Proposal
from dinfer.core.step.cursors import BlockView, Phase, RowCursors, Status
from dinfer.core.step.mixins import MIXINS, Branches, KeepsNothing, ReadsForward
from dinfer.research.kernels.received import attention_paid, attention_received


class Weighs(ABC):
    """A decoder that orders masks by another confidence than the probability of the most likely token."""

    @abstractmethod
    def weighed(self, top_RL: Tensor, token_RL: Tensor, options: Mapping[str, Tensor], state: State) -> Tensor:
        """The confidence of tokens with these probabilities. [R, L] Reads the decoder's `state`, and never changes it.

        `options`: per-request options of the decoder, [R, 1] each.
        """


@dataclass(frozen=True, slots=True)
class Followed:
    """The attention of a forward that has ended."""

    attend: PagedAttend

    @property
    def layers(self) -> int:
        return len(self.attend.queries or ())

    def received(self, layer: int, weight_BW: Tensor) -> Tensor:
        """Attention that each position receives from queries of these weights, as a mean over heads. float32 [B, S]"""
        pool, queries = self.attend.pool, self.attend.queries
        assert queries is not None
        keys = pool.layer(layer)[0]
        got_BS = attention_received(queries[layer], keys, self.attend.pages_BP, self.attend.interval_BW, weight_BW)
        return pool.ranks.all_reduce(got_BS) / pool.ranks.size

    def paid(self, layer: int, place_BX: Tensor) -> Tensor:
        """How much the queries at these places of the window look at each position. float32 [B, X, S]"""
        pool, queries = self.attend.pool, self.attend.queries
        assert queries is not None
        lane_B1 = torch.arange(len(place_BX), device=place_BX.device)[:, None]
        interval_BX = [bound_BW[lane_B1, place_BX] for bound_BW in self.attend.interval_BW]
        q_BXHE = queries[layer][lane_B1, place_BX]
        paid_BXS = attention_paid(q_BXHE, pool.layer(layer)[0], self.attend.pages_BP, interval_BX)
        return pool.ranks.all_reduce(paid_BXS) / pool.ranks.size


def last_values(attend: PagedAttend) -> Tensor:
    """The last layer's values at the queries' positions, of all ranks; anything at padding. [B, W, G * E]"""
    v_XGE = taken(attend.pool.layer(-1)[1].flatten(0, 1), attend.write_X)
    return attend.pool.ranks.all_gather(v_XGE.view(*attend.pos_BW.shape, -1)).movedim(0, -2).flatten(-2)


class Follows(ReadsForward, ABC):
    """A cache that follows attention, and may leave out masks of the active blocks."""

    score: Literal["low_confidence", "margin"]  # what confidence of a mask is; the former is weighed as decoders do

    @abstractmethod
    def follow(
        self, attend: Followed, confidence: Callable[[], Tensor], pos_BW: Tensor, lanes: RowCursors, shift: int,
        phase: Phase, state: State,
    ) -> None:  # fmt: skip
        """Sees the attention of a forward, and may ask for the confidence of the tokens it predicts. [B, W]"""


class Watches(ReadsForward, ABC):
    """A cache that sees how values change."""

    @abstractmethod
    def observe(self, pos_BW: Tensor, old_BWX: Tensor, new_BWX: Tensor, lanes: RowCursors, state: State) -> None:
        """Sees the last layer's values at the window's positions before and after the forward."""


@dataclass(frozen=True, slots=True)
class Looks:
    """What a decoder sees of a forward over all positions."""

    paid_RLS: Tensor  # float32, how much each position of the block looks at each other, a mean over heads and layers
    got_RS: Tensor  # float32, how much all positions look at each, as a mean over them
    top_RS: Tensor  # the largest probability at each position, of whatever token
    open_RS: Tensor  # bool, still to be decoded, or beyond the request


class Heeds(ABC):
    """A decoder that asks which positions look at which."""

    layers: int  # the last so many, over whose attention the mean goes

    @abstractmethod
    def heed(self, stats: TokenStats, view: BlockView, looks: Looks) -> Proposal:
        """What `Decoder.select` returns, by the attention too."""


MIXINS["cache"] += [Follows, Watches]
MIXINS["decoder"].append(Heeds)


@ABILITIES.register("following")
class Following(ByPart[Follows]):
    """Shows a cache the attention of each forward."""

    kind = Follows
    refusals = (
        Refusal("{cache} follows the attention of one branch, and guidance takes two.", sampling=GUIDED, cache=Follows),
    )

    def feed(self, step: Step, run: Forward) -> None:
        run.attend = replace(run.attend, queries=[])

    def ran(self, step: Step, run: Forward) -> None:
        confidence, shift = partial(self.confidence, step, run), step.recipe.model.spec.shift
        seen, lanes, phase = Followed(run.attend), step.lanes, step.shape.phase
        self.part.follow(seen, confidence, run.pos_BW, lanes, shift, phase, step.cache_state)

    def confidence(self, step: Step, run: Forward) -> Tensor:
        """The confidence of the most likely token that each position of the window predicts. [B, W]"""
        top_BWX, token_BWX = run.model.logits(run.h_BWD).float().softmax(-1).topk(2, -1)
        top_BW, next_BW = top_BWX.unbind(-1)
        if self.part.score == "margin":
            return top_BW - next_BW
        if not isinstance(decoder := step.recipe.decoder, Weighs):
            return top_BW
        state, slot_B, blocks = step.state, step.lanes.slot_B, step.shape.blocks
        row_R = state.block_rows(slot_B, step.lanes.block_B, blocks)
        row_B = row_R[:: len(row_R) // len(slot_B)]  # one a slot where the decoder has no state of blocks
        options = state.options(step.recipe, slot_B, "decoder")
        return decoder.weighed(top_BW, token_BWX[..., 0], options, state.decoder.lanes(row_B))


@ABILITIES.register("watching")
class Watching(ByPart[Watches]):
    """Shows a cache the last layer's values before and after each forward."""

    kind = Watches

    def feed(self, step: Step, run: Forward) -> None:
        step.notes[Watching] = last_values(run.attend)

    def ran(self, step: Step, run: Forward) -> None:
        old_BWX = step.notes[Watching]
        self.part.observe(run.pos_BW, old_BWX, last_values(run.attend), step.lanes, step.cache_state)


HEEDS = "{decoder} reads who attends to whom, in a forward of its own over all positions of one state."


@ABILITIES.register("heeding")
class Heeding(ByPart[Heeds]):
    """Shows a decoder the attention of each forward."""

    kind = Heeds
    whole_logits = True
    refusals = (
        Refusal(HEEDS, decoder=Heeds, cache=Trait(lambda cache: not isinstance(cache, KeepsNothing))),
        Refusal(HEEDS, decoder=Heeds, iteration=Branches),
        Refusal(HEEDS, decoder=Heeds, sampling=GUIDED),
        Refusal(HEEDS, decoder=Heeds,
                runtime=Trait(lambda run: run.speculate != 0, "`runtime.speculate`", instead="runtime.speculate=0")),
    )  # fmt: skip

    def feed(self, step: Step, run: Forward) -> None:
        run.attend, run.needed_BX = replace(run.attend, queries=[]), None

    def ran(self, step: Step, run: Forward) -> None:
        step.notes[Heeding] = run

    def select(self, step: Step, made: Decision) -> Proposal:
        run, view, shift = step.notes[Heeding], made.view, step.recipe.model.spec.shift
        seen, blocks = Followed(run.attend), step.shape.blocks
        layers = range(max(seen.layers - self.part.layers, 0), seen.layers)
        there_BW = run.pos_BW >= 0  # all positions, in order
        place_BX = view.pos_RL.clamp_min(0).view(len(there_BW), -1)
        weight_BW = there_BW / (there_BW.sum(-1, keepdim=True) * max(len(layers), 1)).clamp_min(1)
        none_BS = weight_BW.new_zeros(len(there_BW), run.attend.pages_BP.shape[1] * run.attend.pool.page)
        got_BS = sum((seen.received(layer, weight_BW) for layer in layers), none_BS)
        none_BXS = none_BS[:, None].expand(-1, place_BX.shape[1], -1)
        paid_BXS = sum((seen.paid(layer, place_BX) / len(layers) for layer in layers), none_BXS)
        dtype = vars(torch)[step.recipe.decoder.precision]
        top_BW = run.model.logits(run.h_BWD).to(dtype).softmax(-1).amax(-1)
        top_BW = torch.cat((top_BW[:, :shift], top_BW[:, : top_BW.shape[1] - shift]), 1)  # the first keeps its own
        open_BW = (run.status_BW == int(Status.OPEN)) | ~there_BW
        more = got_BS.shape[1] - top_BW.shape[1]
        top_BS, open_BS = F.pad(top_BW, (0, more)), F.pad(open_BW, (0, more), value=True)
        found = (rows_of(x_BS, blocks) for x_BS in (got_BS, top_BS, open_BS))
        return self.part.heed(made.stats, view, Looks(paid_BXS.reshape(*view.pos_RL.shape, -1), *found))
