"""One denoising step. The only place where model, cache, iteration and decoder meet.

Every combination of components is this one function. It is pure device work on tensors whose addresses never
change: no host synchronisation, no data-dependent shape, nothing allocated that outlives it. So it can be captured
whole, LM head and commits included, once per `StepShape`. What only some recipes have is in `dinfer.core.abilities`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dinfer.core.kernels.attention import attention_interval
from dinfer.core.kernels.canvas import rows_of
from dinfer.core.memory import Seen
from dinfer.core.step.commits import blanks, commit, finish
from dinfer.core.step.contracts import BlockAfter
from dinfer.core.step.cursors import BlockView, RowCursors
from dinfer.core.step.model import Parts
from dinfer.core.step.record import record
from dinfer.core.step.scores import logits_of, scored
from dinfer.core.step.shape import StepShape
from dinfer.core.step.state import BatchState
from dinfer.core.step.window import window
from dinfer.core.step.work import Decision, Forward, Known, Step, first


def denoise_step(recipe: Parts, state: BatchState, shape: StepShape, slot_B: Tensor) -> None:
    """Runs one step of `shape` on the slots named by `slot_B` (int64 [B]). Lanes without a row name the scratch slot.

    Slots that are not in `shape.phase`, or need a wider window, stay exactly as they are. Any other slot is named once
    at most.
    """
    step = Step.of(recipe, state, shape, slot_B)
    for ability in step.abilities:
        ability.begin(step)
    for known in decisions(step):
        made = propose(step, known)
        write(step, made)
        move_on(step, made)


def decisions(step: Step) -> Iterator[Known]:
    """What the step decides by: one forward, unless an ability says otherwise.

    An ability may have the step decide several times. After each decision its iterator goes on, and finds in
    `step.lanes` where that decision has moved the rows.
    """
    if (own := first(ability.decisions(step) for ability in step.abilities)) is not None:
        return own
    run = forward(step)
    return iter([Known(run)] if run.decodes else [])


def forward(step: Step) -> Forward:
    """The network: the cache says which positions and which keys, the iteration what is fed there."""
    recipe, state, shape = step.recipe, step.state, step.shape
    computed = window(recipe.cache, step.region, state.canvas, recipe.model.spec, shape, step.cache_state)
    for ability in step.abilities:
        computed = ability.window(step, computed)
    live_B, pos_BW, tokens_BW, status_BW = state.canvas.window_values(step.lanes, computed.pos_BW, computed.fits_B)
    step.narrow(live_B)  # rows that do not fit the window sit the step out
    place_BW = pos_BW if computed.stop_B is None else torch.where(pos_BW >= 0, computed.place_BW, -1)
    sees = seen(step, step.lanes, place_BW, computed.stop_B)
    run = Forward(recipe.model, computed, pos_BW, place_BW, tokens_BW, status_BW, sees, computed.logit_place_RL)
    own = first([ability.prepare(step, run) for ability in step.abilities])  # a list: each of them prepares
    run.attend = own or state.kv.attend(step.lanes.slot_B, pos_BW, run.seen, shape.pages, place_BW=place_BW)
    for ability in step.abilities:
        ability.feed(step, run)
    x_BWD = run.model.embed(run.tokens_BW) if run.x_BWD is None else run.x_BWD
    attend = run.attend if run.fed is None else run.fed
    run.h_BWD = run.model.forward(x_BWD, attend.reading(run.needed_BX))
    for ability in step.abilities:
        ability.ran(step, run)
    if computed.kept_B is not None:
        step.lanes = replace(step.lanes, kept_B=computed.kept_B)
    return run


def seen(step: Step, lanes: RowCursors, place_BW: Tensor, stop_B: Tensor | None = None) -> Seen:
    """What each query sees: the keys of its row up to `stop_B` (None: the whole canvas), as far as the model looks."""
    if (own := first(ability.seen(step, lanes, place_BW) for ability in step.abilities)) is not None:
        return own
    spec, end_B = step.recipe.model.spec, lanes.length_B if stop_B is None else stop_B
    prompt_B = spec.origin(lanes.prompt_B) if spec.prompt_block else None
    return Seen(attention_interval(place_BW, None, end_B, spec.causal_block, prompt_B))


def propose(step: Step, known: Known) -> Decision:
    """The decoder says which positions to commit."""
    recipe, state, lanes, blocks = step.recipe, step.state, step.lanes, step.shape.blocks
    view, row_R = block_view(step, lanes), state.block_rows(lanes.slot_B, lanes.block_B, blocks)
    copies, large = state.decoder.lanes(row_R), state.decoder.in_place(row_R, rows_of(lanes.live_B, blocks))
    decoder_state = {**copies, **large}
    if known.opened_BK is not None:
        state.decoder.refresh(decoder_state, known.opened_BK.flatten())
    made = Decision(known, lanes, view, row_R, decoder_state)
    stats = first(ability.statistics(step, made) for ability in step.abilities)
    made.stats = scored(step, made, logits_of(step, known)) if stats is None else stats
    proposal = first(ability.select(step, made) for ability in step.abilities)
    made.proposal = proposal or recipe.decoder.select(made.stats, view, decoder_state)
    for ability in step.abilities:
        ability.proposed(step, made)
    return made


def write(step: Step, made: Decision) -> None:
    """The commits: `dinfer.core.step.commits` keeps the promises that every decoder may rely on."""
    blank_RL = blanks(step.recipe, made.view, made.decoder_state)  # what open positions hold after this step
    spec = step.recipe.model.spec
    made.commits = commit(step.state.canvas, step.lanes, made.view, made.stats, made.proposal, spec, blank_RL)
    record(step, made)
    for ability in step.abilities:
        ability.written(step, made)


def move_on(step: Step, made: Decision) -> None:
    """The cursors: the iteration moves its rows on, and the cache says what they need next."""
    recipe, state, commits = step.recipe, step.state, made.commits
    quota_BK = made.view.quota_R.view(step.shape.lanes, -1)  # the view of a new block has counted its masks
    step.lanes = replace(step.lanes, quota_BK=quota_BK)
    moved = made.moved = recipe.iteration.advance(step.lanes, block_after(step, made), step.iteration_state)
    state.enter_blocks(made.decoder_state, moved)
    seen_B = step.lanes.end_B  # every key of the region is there: this step or an earlier one has computed it
    step.lanes = replace(step.lanes, start_B=moved.start_B, end_B=moved.end_B, block_B=moved.block_B, seen_B=seen_B)
    for ability in step.abilities:
        ability.moved(step, made)
    lanes, before_B = step.lanes, made.known.gained_B
    finish(
        state.canvas, lanes, moved, gained_B=commits.gained_B if before_B is None else commits.gained_B + before_B,
        full_B=recipe.cache.needs_full_pass(lanes, moved, step.shape.phase, step.cache_state),
        broken_B=commits.broken_B, refreshed=step.refreshes, hit=made.known.hit,
    )  # fmt: skip
    state.iteration.store(lanes.slot_B, step.iteration_state, lanes.live_B)
    state.decoder.store(made.row_R, made.decoder_state, rows_of(lanes.live_B, step.shape.blocks))
    state.cache.store(lanes.slot_B, step.cache_state, lanes.live_B)


def block_view(step: Step, lanes: RowCursors) -> BlockView:
    """The active blocks of the lanes, as rows of blocks."""
    canvas, blocks = step.state.canvas, step.shape.blocks
    pos_RL, tokens_RL, masked_RL, given_RL, quota_R = canvas.active_rows(lanes, step.shape.block)
    view = BlockView(
        pos_RL, tokens_RL, masked_RL, given_RL, step_R=lanes.step_BK.flatten(), quota_R=quota_R,
        forward_R=rows_of(lanes.steps_B, blocks), seed_R=rows_of(lanes.seed_B, blocks),
        prompt_R=rows_of(lanes.prompt_B, blocks), length_R=rows_of(lanes.length_B, blocks),
        options=step.state.options(step.recipe, lanes.slot_B, "decoder", blocks),
    )  # fmt: skip
    for ability in step.abilities:
        view = ability.view(step, lanes, view)
    return view


def block_after(step: Step, made: Decision) -> BlockAfter:
    """The active blocks after the commits, by lane."""
    by_block, commits, busy_R = (step.shape.lanes, step.shape.blocks), made.commits, made.proposal.busy_R
    finished_R = commits.finished_R if busy_R is None else commits.finished_R & ~busy_R
    return BlockAfter(
        made.view, made.stats, stop_BKL=commits.stop_RL.view(*by_block, -1),
        open_BKL=commits.open_RL.view(*by_block, -1), finished_BK=finished_R.view(by_block), next_B=commits.next_B,
    )  # fmt: skip
