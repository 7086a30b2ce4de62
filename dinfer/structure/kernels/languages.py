"""What languages allow on the active positions of rows: sets of states, classes of tokens, and which choice they admit.

The rules are those of `tests.support.structure_reference`, for many rows at once. Sets are exact: a token is allowed
at a position if and only if some accepted completion of the row has it there.

Shape suffixes: B lanes, X active positions in order, Q states, C classes, P pairs of neighbouring states, E edges,
G places for languages, Y entries of all languages one after the other, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import rows_of
from dinfer.core.kernels.dispatch import compiled, triton, use_triton
from dinfer.structure.kernels.lines import LaneLanguages, Line, Settled


class Sweeps(LaneLanguages):
    """What is asked of the languages of lanes. What several answers need is gathered once."""

    @cached_property
    def meta_B8(self) -> Tensor:
        return self.languages.meta_G8.index_select(0, self.language_B)

    @cached_property
    def class_BV(self) -> Tensor:
        """The class of each token in each lane. int16"""
        return self.languages.class_GV.index_select(0, self.language_B)

    @cached_property
    def pair_BP2(self) -> Tensor:
        return self._entries(self.languages.pair_Y2, self.meta_B8[:, 3, None], self.meta_B8[:, 4, None], self.pairs)

    @cached_property
    def edge_BE3(self) -> Tensor:
        return self._entries(self.languages.edge_Y3, self.meta_B8[:, 5, None], self.meta_B8[:, 6, None], self.edges)

    @cached_property
    def state_BQ(self) -> Tensor:
        state_Q = torch.arange(self.states, device=self.language_B.device)
        return torch.where(state_Q < self.meta_B8[:, :1], state_Q, 0)

    @cached_property
    def distance_BQ(self) -> Tensor:
        state_Q = torch.arange(self.states, device=self.language_B.device)
        distance_BQ = self.languages.distance_GQ[:, : self.states].index_select(0, self.language_B)
        return torch.where(state_Q < self.meta_B8[:, :1], distance_BQ, 2**30)

    def _entries(self, flat_YN: Tensor, first_B1: Tensor, count_B1: Tensor, most: int) -> Tensor:
        """The entries of each lane's language; behind them some from the state `states`, in which no row ever is."""
        place_Z = torch.arange(most, device=flat_YN.device)
        index_BZ = (first_B1 + place_Z).clamp_max(flat_YN.shape[0] - 1)
        found_BZN = flat_YN[index_BZ].to(torch.int64)
        found_BZN[..., :: flat_YN.shape[1] - 1].clamp_max_(self.states)  # of a language that nobody is in
        return torch.where((place_Z < count_B1)[..., None], found_BZN, self.states)

    def next_of(self, class_B: Tensor) -> Tensor:
        """The state behind each state by a token of the class; `states`: nowhere. int64 [B, Q]"""
        next_BQ = self.languages.next_Y[
            self.meta_B8[:, 2, None] + class_B[:, None] * self.meta_B8[:, :1] + self.state_BQ
        ]
        return torch.where(next_BQ < 0, self.states, next_BQ.to(torch.int64).clamp_max(self.states))

    def classes_of(self, token_BX: Tensor) -> Tensor:
        """The class of each token. int64 [B, X]"""
        return self.class_BV.gather(1, token_BX.clamp(0, self.class_BV.shape[1] - 1)).to(torch.int64)

    def forward(self, line: Line) -> list[Tensor]:
        """The states that each position can be entered in, and those behind the last: X + 1 of bool [B, Q + 1]."""
        states_BQ = self._none(line).scatter_(1, line.state_B[:, None], True)
        found, class_BX = [states_BQ], self.classes_of(line.token_BX)
        for x in range(line.token_BX.shape[1]):
            by_pair = self._marked(states_BQ.gather(1, self.pair_BP2[..., 0]), self.pair_BP2[..., 1])
            by_token = self._marked(states_BQ[:, :-1], self.next_of(class_BX[:, x]))
            moved_BQ = torch.where(line.open_BX[:, x, None], by_pair, by_token)
            states_BQ = torch.where(line.outside_BX[:, x, None], states_BQ, moved_BQ)
            found.append(states_BQ)
        return found

    def backward(self, line: Line) -> list[Tensor]:
        """The states from which the row can be completed from each position on, and from behind the last."""
        ends_BQ = self._none(line)
        ends_BQ[:, :-1] = self.distance_BQ <= line.room_B[:, None]
        found, class_BX = [ends_BQ], self.classes_of(line.token_BX)
        for x in reversed(range(line.token_BX.shape[1])):
            by_pair = self._marked(ends_BQ.gather(1, self.pair_BP2[..., 1]), self.pair_BP2[..., 0])
            by_token = torch.cat((ends_BQ.gather(1, self.next_of(class_BX[:, x])), ends_BQ[:, -1:]), 1)
            moved_BQ = torch.where(line.open_BX[:, x, None], by_pair, by_token)
            ends_BQ = torch.where(line.outside_BX[:, x, None], ends_BQ, moved_BQ)
            found.append(ends_BQ)
        return found[::-1]

    def allowed(self, line: Line) -> Tensor:
        """The classes of tokens that some completion has at each position, whatever it holds now. bool [B, X, C]"""
        if use_triton(line.token_BX, "languages"):
            return triton("languages").allowed(self, line)
        if (kernels := native_languages(line.token_BX)) is not None:
            return kernels.language_allowed(self, line)
        from_BE, class_BE, to_BE = self.edge_BE3.unbind(-1)
        most = self.languages.size_GC.shape[1]
        found = []
        for states_BQ, ends_BQ in zip(self.forward(line)[:-1], self.backward(line)[1:], strict=True):
            through_BE = states_BQ.gather(1, from_BE) & ends_BQ.gather(1, to_BE)
            allowed_BC = torch.zeros(len(from_BE), most + 1, dtype=torch.bool, device=from_BE.device)
            found.append(allowed_BC.scatter_(1, torch.where(through_BE, class_BE, most), True)[:, :-1])
        return torch.stack(found, 1)

    def settled(self, line: Line, commit_BX: Tensor, token_BX: Tensor, confidence_BX: Tensor) -> Settled:
        """What is written of a choice, see `admitted`, and what then follows from the language."""
        if use_triton(line.token_BX, "languages"):
            return Settled(*triton("languages").settled(self, line, commit_BX, token_BX, confidence_BX))
        admitted_BX = self.admitted(line, commit_BX, token_BX, confidence_BX)
        held_BX = torch.where(admitted_BX, token_BX, line.token_BX)
        after = replace(line, token_BX=held_BX, open_BX=line.open_BX & ~admitted_BX)
        allowed_BXC = self.allowed(after)
        size_BC = self.languages.size_GC.index_select(0, self.language_B)
        token_BC = self.languages.token_GC.index_select(0, self.language_B).to(torch.int64)
        first_BX1 = allowed_BXC.to(torch.uint8).argmax(-1, keepdim=True)
        count_BX = (allowed_BXC * size_BC[:, None]).sum(-1)
        class_C = torch.arange(allowed_BXC.shape[-1], device=first_BX1.device)
        stop_B1 = self.meta_B8[:, 1, None] - 2  # the last two classes are stop tokens and other tail tokens
        ends_BX = ~(allowed_BXC & (class_C < stop_B1)[:, None]).any(-1) & allowed_BXC.any(-1)
        class_BX = torch.where(ends_BX, stop_B1, first_BX1[..., 0])
        only_BX = ~line.outside_BX & ((count_BX == 1) | ends_BX)
        forced_BX = only_BX & after.open_BX
        return Settled(
            written_BX=admitted_BX | forced_BX,
            token_BX=torch.where(forced_BX, token_BC.gather(1, class_BX), token_BX),
            forced_BX=forced_BX,
            text_BX=forced_BX & (class_BX != stop_B1),
            only_BX=only_BX,
        )

    def admitted(self, line: Line, commit_BX: Tensor, token_BX: Tensor, confidence_BX: Tensor) -> Tensor:
        """The part of a choice that is written: in falling order of confidence, each position that, with those written
        before it, leaves the row an accepted completion; and all that is outside. bool [B, X]

        A commit may replace a decoded token.
        """
        if use_triton(line.token_BX, "languages"):
            found = self.settled(line, commit_BX, token_BX, confidence_BX)
            return found.written_BX & ~found.forced_BX
        inside_BX = commit_BX & ~line.outside_BX
        return (commit_BX & line.outside_BX) | self._admitted(line, inside_BX, token_BX, confidence_BX)

    def _admitted(self, line: Line, commit_BX: Tensor, token_BX: Tensor, confidence_BX: Tensor) -> Tensor:
        # Equal ones are tried by position, and those that are not committed come last.
        likely_BX = confidence_BX.double().masked_fill(~commit_BX, -1.0)
        order_BX = likely_BX.argsort(dim=1, descending=True, stable=True)
        if (kernels := native_languages(line.token_BX)) is not None:
            return kernels.language_admitted(self, line, commit_BX, token_BX, order_BX)
        chosen = replace(
            line,
            token_BX=torch.where(commit_BX, token_BX, line.token_BX),
            open_BX=line.open_BX & ~commit_BX,
        )
        ends_BQ = self.distance_BQ <= line.room_B[:, None]
        whole_B1 = (self.forward(chosen)[-1][:, :-1] & ends_BQ).any(1, keepdim=True)
        tried_BX, written_BX = commit_BX & ~whole_B1, commit_BX & whole_B1
        class_BX = self.classes_of(token_BX)
        for x in range(order_BX.shape[1]):
            # A step elsewhere waits for nothing, so it goes on to the last position.
            if order_BX.device.type == "cpu" and not bool(tried_BX.gather(1, order_BX[:, x:]).any()):
                break
            place_B1 = order_BX[:, x : x + 1]
            states, ends = (torch.stack(sets, 1) for sets in (self.forward(line), self.backward(line)))
            here_B1Q = place_B1[..., None].expand(-1, -1, self.states + 1)
            enter_BQ = states.gather(1, here_B1Q)[:, 0]
            leave_BQ = ends.gather(1, here_B1Q + 1)[:, 0]
            to_BQ = self.next_of(class_BX.gather(1, place_B1)[:, 0])
            fits_B = (enter_BQ[:, :-1] & leave_BQ.gather(1, to_BQ)).any(1)
            puts_B1 = fits_B[:, None] & tried_BX.gather(1, place_B1)
            puts_BX = torch.zeros_like(commit_BX).scatter_(1, place_B1, puts_B1)
            written_BX = written_BX | puts_BX
            line = replace(
                line, token_BX=torch.where(puts_BX, token_BX, line.token_BX), open_BX=line.open_BX & ~puts_BX
            )
        return written_BX

    def leave(
        self, row_N6: Tensor, slot_B: Tensor, line: Line, token_BX: Tensor, pos_BX: Tensor, text_BX: Tensor,
        regions: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Brings the rows of `placed` up to date: the state moves on over the positions that the region has left.

        `regions`: where it began, int64 [B], where it begins now, and which lanes were live and are, bool [B]. Rows
        that leave positions begin to count anew what they take back. `text_BX`: forced text, which is counted.
        """
        start_B, after_B, live_B, still_B = regions
        if use_triton(token_BX, "languages"):
            return triton("languages").leave(self, row_N6, slot_B, line, token_BX, pos_BX, text_BX, *regions)
        passed_BX = (pos_BX >= 0) & (pos_BX < after_B[:, None]) & ~line.outside_BX
        state_B, still_B = self.run(line.state_B, token_BX, passed_BX), still_B & live_B
        row_B6 = row_N6.index_select(0, slot_B)
        row_B6[:, 1] = torch.where(still_B, state_B, row_B6[:, 1])
        row_B6[:, 4] += text_BX.sum(1) * live_B
        row_B6[:, 5].masked_fill_(still_B & (after_B > start_B), 0)
        row_N6.index_copy_(0, slot_B, row_B6)

    def masked(
        self, logits_RLV: Tensor, allowed_RLC: Tensor, outside_RL: Tensor, keep: int, revive: bool = False
    ) -> Tensor:
        """The logits, with -inf for tokens whose class is not allowed, but where that is `outside`. Changes the given
        ones. `keep`: a token that is never ruled out, -1: none. `revive`: where no other token is left, all that are
        allowed get 0."""
        if use_triton(logits_RLV, "languages"):
            return triton("languages").masked(self, logits_RLV, allowed_RLC, outside_RL, keep, revive)
        fits_RLV, inside_RL1 = allowed_RLC.gather(2, self.class_RLV(logits_RLV)), ~outside_RL[..., None]
        other_V = torch.arange(logits_RLV.shape[-1], device=logits_RLV.device) != keep
        logits_RLV = logits_RLV.masked_fill_(~fits_RLV & inside_RL1 & other_V, float("-inf"))
        if revive:
            none_RL1 = ((logits_RLV == float("-inf")) | ~other_V).all(-1, keepdim=True)
            logits_RLV = logits_RLV.masked_fill_(none_RL1 & inside_RL1 & fits_RLV, 0.0)
        return logits_RLV

    def class_RLV(self, logits_RLV: Tensor) -> Tensor:
        """The class of each token at each position of rows of blocks. int64, expanded"""
        class_RV = rows_of(self.class_BV, len(logits_RLV) // len(self.class_BV))
        return class_RV.to(torch.int64)[:, None].expand(logits_RLV.shape)

    def run(self, state_B: Tensor, token_BX: Tensor, passed_BX: Tensor) -> Tensor:
        """The state behind the tokens that are `passed`, which are all in the language. int64 [B]"""
        if (kernels := native_languages(token_BX)) is not None:
            return kernels.language_run(self, state_B, token_BX, passed_BX)
        class_BX = self.classes_of(token_BX)
        for x in range(token_BX.shape[1]):
            next_B = self.next_of(class_BX[:, x]).gather(1, state_B[:, None])[:, 0]
            state_B = torch.where(passed_BX[:, x] & (next_B < self.states), next_B, state_B)
        return state_B

    def _none(self, line: Line) -> Tensor:
        return torch.zeros(len(line.state_B), self.states + 1, dtype=torch.bool, device=line.state_B.device)

    def _marked(self, flags_BZ: Tensor, state_BZ: Tensor) -> Tensor:
        """The states of all flags; the last column, which stands for nowhere, stays empty. bool [B, Q + 1]"""
        marked_BQ = torch.zeros(len(flags_BZ), self.states + 1, dtype=torch.bool, device=flags_BZ.device)
        marked_BQ.scatter_(1, torch.where(flags_BZ, state_BZ, self.states), True)
        marked_BQ[:, -1] = False
        return marked_BQ


def placed(row_N6: Tensor, slot_B: Tensor, pos_BX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of lanes: the place of the language, 0 without one; whether there is one; of a `Line`: what is outside, the
    state, and the room behind. int64 [B], bool [B], bool [B, X], int64 [B] twice

    `row_N6`: int64. Of each slot the place of its language, negative: none; the state before the active region; where
    the language begins and ends; forced tokens; steps of the region in which edits took something back.
    """
    if use_triton(pos_BX, "languages"):
        return triton("languages").placed(row_N6, slot_B, pos_BX)
    place_B, state_B, first_B, until_B = row_N6.index_select(0, slot_B)[:, :4].unbind(1)
    outside_BX = (pos_BX < first_B[:, None]) | (pos_BX >= until_B[:, None]) | (place_B < 0)[:, None]
    room_B = (until_B - torch.maximum(pos_BX.amax(1) + 1, first_B)).clamp_min(0)
    return place_B.clamp_min(0), place_B >= 0, outside_BX, state_B, room_B


def native_languages(x: Tensor) -> Any | None:
    """`dinfer.kernels.cpu.linear`, if it takes these tensors."""
    able = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return compiled("languages") if able else None
