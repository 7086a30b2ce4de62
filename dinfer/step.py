"""One denoising step. The only place where model, cache, iteration and decoder meet.

Every combination of components is this one function. It is pure device work on tensors whose addresses never
change: no host synchronisation, no data-dependent shape, nothing allocated that outlives it. So it can be captured
whole, LM head and commits included, once per `StepShape`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dinfer.canvas import BlockView, Canvas, Lanes, Phase, Status, span
from dinfer.compose import Recipe
from dinfer.guidance import guided
from dinfer.kernels.attention import attention_interval, encoder_intervals, local_interval
from dinfer.kernels.token_stats import TokenStats, token_stats
from dinfer.protocols import BlockAfter, ModelSpec, Moved, Proposal, State, StepShape
from dinfer.state import BatchState

Interval = tuple[Tensor, Tensor]


def denoise_step(recipe: Recipe, state: BatchState, shape: StepShape, slot_B: Tensor) -> None:
    """Runs one step of `shape` on the slots named by `slot_B` (int64 [B]; the scratch slot fills a bucket up).

    Slots that are not in `shape.phase`, or need a wider window, stay exactly as they are. Each slot but the scratch one
    may be named once.
    """
    model, iteration, decoder, cache = recipe.model, recipe.iteration, recipe.decoder, recipe.cache
    canvas, spec = state.canvas, model.spec
    lanes = canvas.lanes(slot_B, shape.phase)
    iteration_state, cache_state = state.iteration.lanes(slot_B), state.cache.lanes(slot_B)
    decoder_state = {name: t.flatten(0, 1) for name, t in state.decoder.lanes(slot_B).items()}

    # The forward: the cache says which positions and which keys, the iteration what is fed there.
    window = cache.window(lanes, canvas, spec, shape, cache_state)
    lanes.live_B = lanes.live_B & window.fits_B
    pos_BW = torch.where(lanes.live_B[:, None], window.pos_BW, -1)
    interval_BW, local_BW, context_BW = seen(recipe, lanes, pos_BW)
    tokens_BW, _ = canvas.gather(slot_B, pos_BW)
    x_BWD = iteration.embed(model, tokens_BW, pos_BW, lanes, iteration_state)
    attend = state.kv.attend(slot_B, pos_BW, interval_BW, shape.pages, local_BW=local_BW, context_BW=context_BW)
    old_BWX, fed = attend.values() if cache.watches else None, attend
    if shape.guided:
        model, fed = guided(recipe, state, slot_B, pos_BW, interval_BW, shape.pages)
    h_BWD = model.forward(x_BWD, fed)
    if old_BWX is not None:
        cache.observe(pos_BW, old_BWX, attend.values(), lanes, cache_state)
    kept_B = cache.kept(lanes, spec)
    if window.settled_B is not None:
        settle(canvas, lanes, window.settled_B, kept_B, shape.phase)
        if shape.phase == Phase.PREFILL:  # the keys are all that is wanted of it: no LM head, nothing to decode
            return
        lanes.live_B = lanes.live_B & (window.settled_B < 0)
    lanes.kept_B = kept_B
    if iteration.scores == "window":
        logits_BWV = model.logits(h_BWD)
        logits_RLV = take(logits_BWV, window.logits_RL)
    else:
        logits_BWV = None
        logits_RLV = model.logits(take(h_BWD, window.logits_RL))

    # The commits: the decoder says which positions, the step keeps the promises every decoder may rely on.
    view = block_view(recipe, state, shape, lanes)
    stats, adjusted_RLV = proposed_tokens(recipe, state, shape, lanes, view, logits_RLV, decoder_state)
    proposal = decoder.select(stats, view, decoder_state)
    written_RL = ~view.given_RL if decoder.edits else view.masked_RL
    broken_B = (written_RL & ~stats.finite_RL).view(slot_B.shape[0], -1).any(-1) & lanes.live_B
    able_R1 = rows_of(lanes.live_B & ~broken_B, shape.blocks)[:, None]
    commit_RL, token_RL = allowed_commits(proposal, stats, view, spec, decoder.edits)
    commit_RL = commit_RL & able_R1
    remask_RL = allowed_remasks(proposal, commit_RL, view, decoder.edits) & able_R1
    left_RL = (view.masked_RL & ~commit_RL) | remask_RL
    blank_RL = what_is_left(recipe, lanes, view, proposal)
    token_RL = torch.where(left_RL, blank_RL, token_RL)
    open_RL = remask_RL if spec.mask_id is not None else left_RL & able_R1  # other masks are there already
    canvas.write(slot_B, *fold(slot_B, view.pos_RL, token_RL, commit_RL, open_RL))
    if logits_BWV is not None:
        iteration.observe(model, logits_BWV, pos_BW, lanes, iteration_state)
    elif iteration.scores == "adjusted":
        by_lane = (slot_B.shape[0], -1)
        pos_BX, adjusted_BXV = view.pos_RL.view(by_lane), adjusted_RLV.reshape(*by_lane, spec.vocab)
        iteration.observe(model, adjusted_BXV, pos_BX, lanes, iteration_state)

    # The cursors: count, then let the iteration move its rows on and the cache say what they need next.
    finished_R = ~left_RL.any(-1) if proposal.busy_R is None else ~left_RL.any(-1) & ~proposal.busy_R
    if (lingers_B := cache.lingers(lanes, shape.phase, cache_state)) is not None:
        finished_R = finished_R & ~rows_of(lingers_B, shape.blocks)
    after_RL = torch.where(commit_RL | left_RL, token_RL, view.tokens_RL)
    by_block = (slot_B.shape[0], shape.blocks)
    after = BlockAfter(
        tokens_BKL=after_RL.view(*by_block, -1),
        given_BKL=view.given_RL.view(*by_block, -1),
        stop_BKL=(canvas.is_stop(after_RL) & (view.pos_RL >= 0)).view(*by_block, -1)
        & (lanes.stops_B > 0)[:, None, None],
        open_BKL=left_RL.view(*by_block, -1),
        finished_BK=finished_R.view(by_block),
        next_B=canvas.next_open(slot_B, lanes.end_B),
    )
    lanes.forwards_B = lanes.forwards_B + 1
    if cache.reuses and shape.phase == Phase.FULL:
        lanes.refreshes_B = lanes.refreshes_B + 1
    gained_RL = (commit_RL & view.masked_RL).to(torch.int64) - remask_RL.to(torch.int64)
    lanes.committed_B = lanes.committed_B + gained_RL.view(slot_B.shape[0], -1).sum(-1)
    lanes.step_BK, lanes.quota_BK = lanes.step_BK + 1, view.quota_R.view(by_block)
    moved = iteration.advance(lanes, after)
    state.decoder.refresh(decoder_state, rows_of(moved.entered_B, shape.blocks))
    finish(lanes, moved, broken_B, cache.next_phase(lanes, moved, shape.phase, cache_state))

    canvas.store(lanes)
    state.iteration.store(slot_B, iteration_state, lanes.live_B)
    state.decoder.store(slot_B, decoder_state, lanes.live_B)
    state.cache.store(slot_B, cache_state, lanes.live_B)


def seen(recipe: Recipe, lanes: Lanes, pos_BW: Tensor) -> tuple[Interval, Interval | None, Tensor | None]:
    """The interval each query sees, the one in layers with local attention, and which queries are an encoder's."""
    spec = recipe.model.spec
    if not spec.encoder:
        return attention_interval(pos_BW, *recipe.cache.visible(lanes), spec.causal_block), None, None
    context_BW, interval_BW = encoder_intervals(pos_BW, lanes.start_B, lanes.end_B)
    if spec.local is None:
        return interval_BW, None, context_BW
    return interval_BW, local_interval(interval_BW, pos_BW, lanes.start_B, spec.local.window), context_BW


def settle(canvas: Canvas, lanes: Lanes, settled_B: Tensor, kept_B: Tensor, phase: Phase) -> None:
    """Stores the cursors of rows that had keys computed and decode nothing; a prefill goes on where keys are left."""
    rest_B = (settled_B < kept_B) & (phase == Phase.PREFILL)
    passed = replace(
        lanes,
        live_B=lanes.live_B & (settled_B >= 0),
        kept_B=settled_B,
        forwards_B=lanes.forwards_B + 1,
        prefills_B=lanes.prefills_B + 1,
        phase_B=torch.where(rest_B, int(Phase.PREFILL), int(Phase.WINDOW)),
    )
    canvas.store(passed)


def block_view(recipe: Recipe, state: BatchState, shape: StepShape, lanes: Lanes) -> BlockView:
    """The active blocks of the lanes, as rows of blocks."""
    pos_BX = span(lanes.start_B, lanes.end_B, shape.blocks * shape.block)
    tokens_BX, status_BX = state.canvas.gather(lanes.slot_B, pos_BX)
    pos_RL, tokens_RL, status_RL = (t.view(-1, shape.block) for t in (pos_BX, tokens_BX, status_BX))
    masked_RL = (status_RL == int(Status.OPEN)) & (pos_RL >= 0)
    step_R = lanes.step_BK.flatten()
    return BlockView(
        pos_RL=pos_RL,
        tokens_RL=tokens_RL,
        masked_RL=masked_RL,
        given_RL=(status_RL == int(Status.GIVEN)) | (pos_RL < 0),
        step_R=step_R,
        quota_R=torch.where(step_R == 0, masked_RL.sum(-1), lanes.quota_BK.flatten()),
        floor_R=rows_of(recipe.iteration.floor(lanes), shape.blocks),
        must_progress_R=recipe.iteration.must_progress(lanes).flatten(),
        forward_R=rows_of(lanes.steps_B, shape.blocks),
        seed_R=rows_of(lanes.seed_B, shape.blocks),
        options=state.options(recipe, lanes.slot_B, "decoder", shape.blocks),
    )


def proposed_tokens(
    recipe: Recipe, state: BatchState, shape: StepShape, lanes: Lanes, view: BlockView, logits_RLV: Tensor,
    decoder_state: State,
) -> tuple[TokenStats, Tensor]:  # fmt: skip
    """A token for each position of the blocks, drawn if some row asks for it, and what its probability is.

    And the logits, as they were adjusted.
    """
    decoder, sampling, spec, draw = recipe.decoder, recipe.sampling, recipe.model.spec, None
    if shape.sampled:
        options = state.options(recipe, lanes.slot_B, "sampling", shape.blocks)
        seen_RV = rows_of(state.canvas.seen(lanes.slot_B, spec.vocab, spec.mask_id), shape.blocks)
        logits_RLV = sampling.adjust(logits_RLV, options, seen_RV, spec)
    logits_RLV = decoder.adjust(logits_RLV, view, decoder_state)
    if shape.sampled:
        draw = sampling.draw(logits_RLV, view, options, spec, shape.most)
    return token_stats(
        logits_RLV, spec.mask_id, getattr(torch, decoder.precision),
        **{name: name in decoder.needs for name in ("entropy", "margin", "best")}, draw=draw,
    ), logits_RLV  # fmt: skip


def allowed_commits(
    proposal: Proposal, stats: TokenStats, view: BlockView, spec: ModelSpec, edits: bool
) -> tuple[Tensor, Tensor]:
    """Which positions to write and what: the proposal without what may not be written, and with one commit where a
    row must progress but chose none. A decoder that drafts may choose none.

    That one is the most confident masked position, of those where the model prefers a token to the mask if any. So
    no decoder can hang the loop, whatever the logits. A token that is the mask or none at all is not written either.
    """
    commit_RL = proposal.commit_RL & (~view.given_RL if edits else view.masked_RL)
    token_RL = stats.token_RL
    if proposal.token_RL is not None:
        wanted_RL = proposal.token_RL
        valid_RL = (wanted_RL >= 0) & (wanted_RL < spec.vocab)
        if spec.mask_id is not None:
            valid_RL = valid_RL & (wanted_RL != spec.mask_id)
        commit_RL, token_RL = commit_RL & valid_RL, torch.where(valid_RL, wanted_RL, token_RL)
    if proposal.draft_RL is not None:
        return commit_RL, token_RL
    score_RL = (stats.confidence_RL - 2.0 * stats.declined_RL).masked_fill(~view.masked_RL, -4.0)
    best_RL = torch.arange(score_RL.shape[1], device=score_RL.device) == score_RL.argmax(-1, keepdim=True)
    stuck_R = view.must_progress_R & view.masked_RL.any(-1) & ~(commit_RL & view.masked_RL).any(-1)
    return commit_RL | (best_RL & stuck_R[:, None]), token_RL


def what_is_left(recipe: Recipe, lanes: Lanes, view: BlockView, proposal: Proposal) -> Tensor | int:
    """What open positions hold after this step: the mask token, or, where models have none, drafts and noise."""
    spec = recipe.model.spec
    if spec.mask_id is not None:
        return spec.mask_id
    noise_RL = recipe.sampling.noise(view.seed_R[:, None], view.pos_RL, view.forward_R[:, None] + 1, spec.vocab)
    draft_RL = noise_RL if proposal.draft_RL is None else proposal.draft_RL
    return torch.where((draft_RL >= 0) & (draft_RL < spec.vocab), draft_RL, noise_RL)


def allowed_remasks(proposal: Proposal, commit_RL: Tensor, view: BlockView, edits: bool) -> Tensor:
    """Decoded positions to mask again; none in a row that must progress and would not end up with fewer masks.

    So a decoder that takes back cannot hang the loop, except where it says that it counts these steps (`retry_R`).
    """
    if proposal.remask_RL is None or not edits:
        return torch.zeros_like(commit_RL)
    remask_RL = proposal.remask_RL & ~view.masked_RL & ~view.given_RL & ~commit_RL
    free_R = (commit_RL & view.masked_RL).sum(-1) > remask_RL.sum(-1)
    if proposal.retry_R is not None:
        free_R = free_R | proposal.retry_R
    return remask_RL & (free_R | ~view.must_progress_R)[:, None]


def finish(lanes: Lanes, moved: Moved, broken_B: Tensor, next_B: Tensor) -> None:
    """Sets the phase of every lane, and starts the counts of the blocks that were entered."""
    lanes.step_BK = lanes.step_BK.masked_fill(moved.entered_B[:, None], 0)
    next_B = torch.where(moved.done_B, int(Phase.IDLE), next_B)
    lanes.phase_B = torch.where(broken_B, int(Phase.FAULT), next_B)


def rows_of(flags_B: Tensor, blocks: int) -> Tensor:
    """One value a lane, repeated for each of its blocks. [B] -> [R]"""
    return flags_B.repeat_interleave(blocks, 0)


def fold(slot_B: Tensor, *tensors_RL: Tensor) -> tuple[Tensor, ...]:
    """Rows of blocks as rows of lanes. [R, L] -> [B, K * L]"""
    return tuple(t.view(slot_B.shape[0], -1) for t in tensors_RL)


def take(x_BWX: Tensor, index_RL: Tensor) -> Tensor:
    """The chosen positions of the window, one row a block. [B, W, X] -> [R, L, X]; -1 takes any."""
    index_BX = index_RL.clamp_min(0).view(x_BWX.shape[0], -1, 1).expand(-1, -1, x_BWX.shape[-1])
    return x_BWX.gather(1, index_BX).view(*index_RL.shape, x_BWX.shape[-1])
