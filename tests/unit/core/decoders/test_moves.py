"""Proposals that say where tokens come from: insertion and deletion inside a block, see `Edit.source_RL`."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.matrix import completions, engine_for
from support.models import EOS, MASK, VOCAB
from support.scripted import Scripted

from dinfer.core.engine.request import Request
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.step.contracts import BlockView, Decoder, Edit, Proposal, State, TokenStats
from dinfer.core.step.mixins import Moves

STEPS = 6  # of moving about; then all that is left is committed
Row = list[tuple[int, bool]]  # token and whether it is masked, by place


@dataclass(frozen=True, kw_only=True)
class Shuffling(Decoder, Moves):
    """Moves, commits and masks at random, also where it may not; notes what it saw and what should come of it."""

    want: dict[int, tuple[int, Row]]  # by position of the block: its step, and what it holds after that

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        (rows, length), rng = view.pos_RL.shape, random.Random(int(view.forward_R.sum()))
        source_RL = torch.arange(length).repeat(rows, 1)
        token_RL, commit_RL = torch.randint(3, VOCAB - 1, (rows, length)), view.masked_RL.clone()
        remask_RL = torch.zeros_like(commit_RL)
        for r, there in enumerate((view.pos_RL >= 0).any(-1).tolist()):
            step, here = int(view.step_R[r]), int(view.pos_RL[r, 0])
            if not there:
                continue
            now = list(zip(view.tokens_RL[r].tolist(), view.masked_RL[r].tolist(), strict=True))
            seen, row = self.want.get(here, (-1, now))
            assert seen == step - 1 and row == now
            if step < STEPS:
                source_RL[r] = torch.tensor(rng.choices([-1, length, *range(length)], k=length))
                commit_RL[r], remask_RL[r] = (torch.rand(length) < 0.3 for _ in range(2))
            given, sources, tokens = (t[r].tolist() for t in (view.given_RL, source_RL, token_RL))
            after = list(now)
            for place, source in enumerate(sources):
                if given[place]:
                    continue
                inside = 0 <= source < length and (source == place or not given[source])
                after[place] = now[source] if inside else (MASK, True)
                if commit_RL[r, place]:
                    after[place] = (tokens[place], False)
                elif remask_RL[r, place]:
                    after[place] = (MASK, True)
            self.want[here] = (step, after)
        busy_R = view.step_R < STEPS
        return Proposal(commit_RL, token_RL, busy_R=busy_R, edit=Edit(remask_RL=remask_RL, source_RL=source_RL))


def recipe(decoder: Decoder, **iteration: Any) -> Recipe:
    table = torch.randn(3, 5, VOCAB, dtype=torch.float64)
    return compose(Scripted(table), iteration=iteration, decoder=decoder, cache="dual")


@pytest.mark.parametrize("blocks", [1, 2])
def test_tokens_come_from_where_the_decoder_says(blocks: int) -> None:
    """The first block overlaps the prompt, the last one is short, and blocks begin anew after they have moved."""
    sweep = {"name": "multi_block", "blocks": blocks, "add_at": 0.0, "stop": "off"} if blocks > 1 else {
        "name": "blockwise", "stop": "off"
    }  # fmt: skip
    decoder = Shuffling(want={})
    made = recipe(decoder, block=5, align=True, **sweep)
    (done,) = completions(engine_for(made), [Request.behind([7, EOS, 9, 8], 10)])
    assert done.canvas[:4] == [7, EOS, 9, 8] and MASK not in done.canvas and done.counts.committed == 10
    got = [token for _, row in sorted(decoder.want.items()) for token, _ in row[1]]
    assert sorted(decoder.want) == [0, 5, 10] and got[: len(done.canvas)] == done.canvas


def test_text_behind_a_gap_is_refused_where_tokens_move() -> None:
    made = recipe(Shuffling(want={}), name="blockwise", block=4)
    with pytest.raises(ValueError, match=r"text behind a gap, and decoder=Shuffling moves tokens"):
        engine_for(made).check(Request([1, 2, 3], [False, True, False]))
    engine_for(made).check(Request([1, 2, 3], [False, True, True]))
