"""The step keeps the promises whatever a decoder proposes, and hands it what the contract says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.host import Host
from support.matrix import completions, engine_for, launched_ahead
from support.models import EOS, MASK, VOCAB, tiny_model
from support.scripted import Scripted

from dinfer.core.caches.window import BlockCache
from dinfer.core.decoders.schedule import Fixed
from dinfer.core.engine.errors import StalledRow
from dinfer.core.engine.request import Request, Wants
from dinfer.core.recipe.recipe import Recipe, compose
from dinfer.core.registry import ITERATIONS
from dinfer.core.step.contracts import BlockView, Decoder, Edit, Proposal, State, TokenStats
from dinfer.core.step.cursors import Phase
from dinfer.core.step.mixins import Edits, Feeds
from dinfer.research.abilities.following import Watches

PROMPT, NEW, BLOCK = [1, 2, 3, 4, 5], 19, 8


def scripted_recipe(decoder: Decoder, *, cache: str = "dual", **iteration: Any) -> Recipe:
    table = torch.randn(5, 7, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table[..., EOS] = -50.0
    recipe = compose(
        Scripted(table),
        iteration={"name": "blockwise", "block": BLOCK, "align": True} | iteration,
        decoder="threshold",
        cache=cache,
    )
    return replace(recipe, decoder=decoder)


@dataclass(frozen=True, kw_only=True)
class Proposing(Decoder):
    """Proposes what a function says."""

    propose: Callable[[TokenStats, BlockView], Proposal]

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        return self.propose(stats, view)


@dataclass(frozen=True, kw_only=True)
class Editing(Proposing, Edits):
    """May rewrite what is decoded."""


def every(view: BlockView, value: bool = True) -> torch.Tensor:
    return torch.full_like(view.masked_RL, value)


def tokens(view: BlockView, value: int) -> torch.Tensor:
    return torch.full_like(view.tokens_RL, value)


NONSENSE: dict[str, Callable[[TokenStats, BlockView], Proposal]] = {
    "nothing": lambda stats, view: Proposal(every(view, False)),
    "everything": lambda stats, view: Proposal(every(view)),
    "the prompt": lambda stats, view: Proposal(view.given_RL, tokens(view, 9)),
    "padding": lambda stats, view: Proposal(view.pos_RL < 0, tokens(view, 9)),
    "the mask": lambda stats, view: Proposal(every(view), tokens(view, MASK)),
    "the mask nowhere": lambda stats, view: Proposal(every(view, False), tokens(view, MASK)),
    "no such token": lambda stats, view: Proposal(every(view), tokens(view, VOCAB)),
    "a negative token": lambda stats, view: Proposal(every(view), tokens(view, -1)),
    "take all back": lambda stats, view: Proposal(every(view, False), edit=Edit(remask_RL=every(view))),
    "take the prompt back": lambda stats, view: Proposal(every(view), edit=Edit(remask_RL=view.given_RL)),
    "give one, take all": lambda stats, view: Proposal(view.pos_RL % 8 == 5, edit=Edit(remask_RL=every(view))),
    "every other": lambda stats, view: Proposal(every(view), torch.where(view.pos_RL % 2 == 0, 7, MASK)),
}


@pytest.mark.parametrize("kind", [Proposing, Editing])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_contained(name: str, kind: type[Proposing]) -> None:
    recipe = scripted_recipe(kind(propose=NONSENSE[name]))
    before = PROMPT + [MASK] * NEW
    for update in engine_for(recipe).run([Request.behind(PROMPT, NEW)], Wants(snapshots=True)):
        assert update.tokens is not None and update.masked is not None
        assert update.tokens[: len(PROMPT)] == PROMPT
        assert all(0 <= token < VOCAB for token in update.tokens)
        assert sum(t == MASK for t in update.tokens) == sum(update.masked) < sum(t == MASK for t in before)
        before = update.tokens
    assert update.completion is not None and update.completion.counts.committed == NEW


def test_forced_progress_takes_the_best_position_that_is_not_declined() -> None:
    table = torch.zeros(1, 64, VOCAB, dtype=torch.float64)
    table[0, 5, 10], table[0, 6, 11], table[0, 7, 12] = 6.0, 1.0, 2.0
    table[0, 5, MASK] = 7.0  # the position with the surest token, 0.26 against 0.07 and 0.16, would rather wait
    recipe = replace(scripted_recipe(Proposing(propose=NONSENSE["nothing"])), model=Scripted(table))
    seen = [u.tokens for u in engine_for(recipe).run([Request.behind(PROMPT, 3)], Wants(snapshots=True))]
    assert [row[5:] for row in seen] == [[MASK, MASK, 12], [MASK, 11, 12], [10, 11, 12]]


def test_a_decoder_that_waits_need_not_commit() -> None:
    """Without a draft, which only models without a mask token have. It may wait in some rows and not in others."""

    def propose(stats: TokenStats, view: BlockView) -> Proposal:
        return Proposal(every(view, False), waits_R=view.step_R % 3 < 2)

    recipe = scripted_recipe(Proposing(propose=propose))
    counts = [update.committed for update in engine_for(recipe).run([Request.behind(PROMPT, 3)], Wants(snapshots=True))]
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_decoder_that_is_busy_for_ever_is_stopped(ahead: bool) -> None:
    def propose(stats: TokenStats, view: BlockView) -> Proposal:
        return Proposal(every(view), busy_R=torch.ones_like(view.step_R, dtype=torch.bool))

    engine = engine_for(scripted_recipe(Proposing(propose=propose)))
    engine = launched_ahead(engine) if ahead else engine
    for _ in range(2):  # the engine is good for another run
        with pytest.raises(StalledRow, match=r"request 0: .* Proposing keeps the row busy"):
            completions(engine, [Request.behind(PROMPT, NEW), Request.behind(PROMPT, 1)])


def test_an_editing_decoder_that_never_settles_is_stopped() -> None:
    def propose(stats: TokenStats, view: BlockView) -> Proposal:
        flip_RL = torch.where(view.tokens_RL == 7, 8, 7)
        return Proposal(every(view), flip_RL, torch.ones_like(view.step_R, dtype=torch.bool))

    with pytest.raises(StalledRow, match="busy"):
        completions(engine_for(scripted_recipe(Editing(propose=propose))), [Request.behind(PROMPT, NEW)])


def test_busy_rows_take_another_step_and_edits_do_not_count_as_commits() -> None:
    def propose(stats: TokenStats, view: BlockView) -> Proposal:
        return Proposal(every(view), tokens(view, 9) + view.step_R[:, None], view.step_R < 2)

    completion = completions(engine_for(scripted_recipe(Editing(propose=propose))), [Request.behind(PROMPT, NEW)])[0]
    assert completion.counts.committed == NEW
    assert completion.counts.forwards == 9  # three steps in each of three blocks
    assert completion.output == [11] * NEW


def test_a_decoder_without_edits_cannot_rewrite() -> None:
    def propose(stats: TokenStats, view: BlockView) -> Proposal:
        return Proposal(every(view), tokens(view, 9) + view.step_R[:, None], view.step_R < 2)

    completion = completions(engine_for(scripted_recipe(Proposing(propose=propose))), [Request.behind(PROMPT, NEW)])[0]
    assert completion.output == [9] * NEW


def test_the_view_is_what_the_contract_says() -> None:
    views: list[BlockView] = []

    def propose(stats: TokenStats, view: BlockView) -> Proposal:
        views.append(view)
        return Proposal(view.pos_RL % 2 == 1)

    completions(engine_for(scripted_recipe(Proposing(propose=propose))), [Request.behind(PROMPT, 6)])
    first, later, last = views[0], views[1], views[-1]
    assert first.pos_RL.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert first.given_RL.tolist() == [[True] * 5 + [False] * 3]
    assert first.masked_RL.tolist() == [[False] * 5 + [True] * 3]
    assert first.tokens_RL.tolist() == [[*PROMPT, MASK, MASK, MASK]]
    assert [v.step_R.item() for v in views] == [0, 1, 0, 1, 2]  # 5 and 7, 6; 9, then 8 and 10 by force
    assert [v.quota_R.item() for v in views] == [3] * 5
    assert later.masked_RL.tolist() == [[False] * 6 + [True, False]]
    assert last.pos_RL.tolist() == [[8, 9, 10, -1, -1, -1, -1, -1]]
    assert last.given_RL[0, 3:].all() and not last.masked_RL[0, 3:].any()
    assert all(v.must_progress_R is None for v in views)


@dataclass(frozen=True, kw_only=True)
class Remembering(Decoder):
    """Counts its steps in state of its own and compares with the view's."""

    seen: list[tuple[int, int]]

    def fresh_state(self, spec: Any, block: int) -> State:
        return {"steps": torch.full((), 3), "where": torch.zeros(block, spec.vocab)}

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        self.seen.extend(zip(state["steps"].tolist(), view.step_R.tolist(), strict=True))
        assert state["where"].shape == (*view.pos_RL.shape, VOCAB)
        state["steps"] += 1
        return Proposal(every(view, False))


def test_decoder_state_is_fresh_in_every_block_and_request() -> None:
    decoder = Remembering(seen=[])
    engine = engine_for(scripted_recipe(decoder), rows=2)
    for _ in range(2):
        completions(engine, [Request.behind(PROMPT, NEW), Request.behind([1], 9), Request.behind([1, 2], 4)])
    assert len(decoder.seen) == 2 * (NEW + 9 + 4)
    assert all(mine == theirs + 3 for mine, theirs in decoder.seen)


@dataclass(frozen=True, kw_only=True)
class Counting(BlockCache, Watches):
    """Counts the passes that it sees."""

    def fresh_state(self, spec: Any, length: int) -> State:
        return {"passes": torch.zeros((), dtype=torch.int64)}

    def observe(self, pos_BW: Any, old_BWX: Any, new_BWX: Any, lanes: Any, state: State) -> None:
        state["passes"] += 1


def test_passes_that_decode_nothing_keep_the_state_of_the_cache() -> None:
    """A prefill in pieces, and a step in which one row settles its finished block while the other one decodes."""
    model = tiny_model("block_causal", causal_block=BLOCK)
    sweep = {"name": "block_diffusion", "block": BLOCK, "stop": "off"}
    recipe = compose(model, iteration=sweep, decoder=Fixed(steps=1), cache=Counting())
    host = Host(recipe, [Request.behind([1] * 20, 16), Request.behind([1] * 16, 16)])
    first, second = host.slots
    for phase, slots, width in (
        (Phase.PREFILL, [first, second], BLOCK), (Phase.PREFILL, [second, first], 2 * BLOCK),
        (Phase.WINDOW, [first], BLOCK), (Phase.WINDOW, [first, second], BLOCK),
    ):  # fmt: skip
        host.step(phase, slots, width=width, settles=phase == Phase.WINDOW)
    assert host.forwards() == [4, 3] and host.steps() == [1, 1]
    assert host.state.cache.rows["passes"][host.slots].tolist() == [4, 3]
    host.run_at_random()
    assert host.state.cache.rows["passes"][host.slots].tolist() == host.forwards()


@pytest.mark.parametrize("name", [name for name in ITERATIONS.names() if issubclass(ITERATIONS.get(name), Feeds)])
def test_what_a_model_is_fed_leaves_the_state_of_the_iteration_alone(name: str) -> None:
    """A pass that decodes nothing embeds too, and does not store that state."""
    models = {"self_conditioned": "uniform", "block_diffusion": "block_causal"}
    model, iteration = tiny_model(models.get(name, "bidirectional")), ITERATIONS.build(name)
    recipe = compose(model, iteration=iteration, decoder="entropy_bound", cache="none")
    host = Host(recipe, [Request.behind([1] * 5, 16)])
    host.step(Phase.FULL, host.slots)
    slot_B = torch.tensor(host.slots)
    lanes, state = host.state.canvas.lanes(slot_B, Phase.FULL), host.state.iteration.lanes(slot_B)
    before = {key: tensor.clone() for key, tensor in state.items()}
    pos_BW = torch.arange(sum(host.lengths))[None]
    tokens_BW, _ = host.state.canvas.gather(slot_B, pos_BW)
    iteration.embed(model, tokens_BW, pos_BW, lanes, state)
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())


def test_a_decoder_that_adjusts_logits_says_so() -> None:
    """Else the step would compute no logits for it, and never call it."""

    @dataclass(frozen=True, kw_only=True)
    class Silent(Proposing):
        def adjust(self, logits_RLV: torch.Tensor, view: BlockView, state: State) -> torch.Tensor:
            return logits_RLV + 1

    with pytest.raises(TypeError, match=r"Silent defines `adjust`, .* derive from Adjusts"):
        compose(
            tiny_model(),
            iteration="full",
            decoder=Silent(propose=lambda stats, view: Proposal(every(view))),
            cache="none",
        )
