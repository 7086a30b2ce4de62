"""One denoising step. The only place where model, cache, iteration and decoder meet.

Every combination of components is this one function. It is pure device work on tensors whose addresses never
change: no host synchronisation, no data-dependent shape, nothing allocated that outlives it. So it can be captured
whole, LM head and commits included, once per `StepShape`.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dinfer.abilities.branches import Branches, branching
from dinfer.abilities.candidates import Candidates, deciding, longest_chain
from dinfer.abilities.guidance import Guided, guided
from dinfer.abilities.reports import Told
from dinfer.abilities.verification import postpone, verified
from dinfer.kernels.attention import attention_interval, encoder_intervals, local_interval
from dinfer.kernels.canvas import active_rows
from dinfer.kernels.positions import compact
from dinfer.kernels.rows import rows_of, take
from dinfer.kernels.token_stats import token_stats
from dinfer.recipe.recipe import Recipe
from dinfer.step.canvas import BlockView, Canvas, Phase, RowCursors, Status
from dinfer.step.commits import commit
from dinfer.step.contracts import BlockAfter, Divided, Model, Moved, Proposal, State, StepShape
from dinfer.step.state import BatchState
from dinfer.step.stats import Columns, Draw, TokenStats
from dinfer.step.window import places_read, window

Interval = tuple[Tensor, Tensor]


def denoise_step(recipe: Recipe, state: BatchState, shape: StepShape, slot_B: Tensor) -> None:
    """Runs one step of `shape` on the slots named by `slot_B` (int64 [B]; the scratch slot fills a bucket up).

    Slots that are not in `shape.phase`, or need a wider window, stay exactly as they are. Each slot but the scratch one
    may be named once.
    """
    model, iteration, cache, canvas = recipe.model, recipe.iteration, recipe.cache, state.canvas
    lanes = canvas.lanes(slot_B, shape.phase)
    iteration_state, cache_state = state.iteration.lanes(slot_B), state.cache.lanes(slot_B)
    if shape.phase == Phase.VERIFY:
        decode(recipe, state, shape, lanes, verified(recipe, state, shape, lanes), iteration_state, cache_state)
        return

    # The forward: the cache says which positions and which keys, the iteration what is fed there.
    branches = None
    if shape.candidates and state.added is not None:
        branches = Branches.of(state.added, canvas, lanes, branching(iteration), shape)
    elif state.added is not None and shape.phase == deciding(recipe):  # rows with branches wait for a step with them
        lanes.live_B = lanes.live_B & ~state.added.there(slot_B)
    region = lanes if branches is None else branches.region(lanes)
    computed = window(cache, region, canvas, model.spec, shape, cache_state)
    fits_B = computed.fits_B if branches is None else computed.fits_B & state.kv.forks(computed.place_BW)
    pos_BW, tokens_BW, status_BW = canvas.enter(lanes, computed.pos_BW, fits_B)
    place_BW = pos_BW if computed.stop_B is None else torch.where(pos_BW >= 0, computed.place_BW, -1)
    interval_BW, local_BW, context_BW = seen(recipe, lanes, place_BW, computed.stop_B)
    candidates, intervals = None, [interval_BW] * (shape.candidates + 1)
    if branches is not None:
        regions = (branches.region(lanes, branch) for branch in range(branches.count))
        candidates = branches.candidates
        intervals = [seen(recipe, own, place_BW, computed.stop_B)[0] for own in regions]
    elif shape.candidates and state.drafts is not None:
        candidates = Candidates.of(state.drafts, canvas, lanes, shape)
    if candidates is not None:
        tokens_BW = candidates.windows(pos_BW, tokens_BW)
        attend = candidates.attend(state.kv, pos_BW, place_BW, intervals, shape.pages)
    else:
        attend = state.kv.attend(
            slot_B, pos_BW, interval_BW, shape.pages, place_BW=place_BW, local_BW=local_BW, context_BW=context_BW
        )
    attend = replace(attend, queries=[]) if cache.follows else attend
    x_BWD = iteration.embed(model, tokens_BW, attend.pos_BW, lanes, iteration_state)
    old_BWX, fed = attend.values() if cache.watches else None, attend
    if shape.guided:
        model, fed = guided(recipe, state, slot_B, pos_BW, place_BW, tokens_BW, status_BW, interval_BW, shape.pages)
    read_BX = places_read(cache, iteration, model.spec, shape, computed)
    h_BWD = model.forward(x_BWD, fed.reading(read_BX))
    if old_BWX is not None:
        cache.observe(pos_BW, old_BWX, attend.values(), lanes, cache_state)
    if cache.follows:
        logits = partial(model.logits, h_BWD)
        cache.follow(attend, logits, pos_BW, lanes, model.spec.shift, shape.phase, cache_state)
    kept_B = lanes.kept_B if computed.kept_B is None else computed.kept_B
    if computed.settled_B is not None:
        settled_B = settle(canvas, lanes, computed.settled_B, kept_B, shape.phase)
        state.cache.store(slot_B, cache_state, settled_B)
        if shape.phase == Phase.PREFILL:  # it computes keys only: no LM head, nothing to decode
            return
        lanes.live_B = lanes.live_B & ~settled_B
    lanes.kept_B, logits_RL = kept_B, computed.logits_RL
    if read_BX is not None and h_BWD.shape[1] == read_BX.shape[1]:  # the model has left out what nobody reads
        logits_RL = torch.arange(h_BWD.shape[1], device=slot_B.device).view(-1, shape.block).repeat(shape.lanes, 1)

    if candidates is None:
        left = Hidden(model, h_BWD, pos_BW, logits_RL)
        decode(recipe, state, shape, lanes, left, iteration_state, cache_state)
        return
    count = shape.candidates + 1
    lanes_GWD = take(h_BWD, logits_RL.repeat(count, 1))
    logits_CRLV = read_logits(recipe, shape, model, lanes_GWD).unflatten(0, (count, -1))
    row_R = torch.arange(logits_CRLV.shape[1], device=slot_B.device)
    if branches is not None:
        choice_B = best_branch(recipe, state, shape, lanes, branches, logits_CRLV)
        added = branches.follow(choice_B, canvas, lanes, state.kv, place_BW, shape.block)
        logits_RLV = logits_CRLV[rows_of(choice_B, shape.blocks), row_R]
        decode(recipe, state, shape, lanes, logits_RLV, iteration_state, cache_state, added=added)
        return
    decode(recipe, state, shape, lanes, logits_CRLV[0].clone(), iteration_state, cache_state)
    for _ in range(longest_chain(shape.candidates)):
        candidates.live_B = lanes.live_B
        lanes, choice_B = candidates.reached(canvas, shape.phase)
        logits_RLV = logits_CRLV[rows_of(choice_B, shape.blocks), row_R]
        iteration_state, cache_state = state.iteration.lanes(slot_B), state.cache.lanes(slot_B)
        decode(recipe, state, shape, lanes, logits_RLV, iteration_state, cache_state, hit=True)


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a forward leaves: hidden states, where they are, and where in them those of the active blocks are."""

    model: Model  # of this step
    h_BWD: Tensor
    pos_BW: Tensor
    logits_RL: Tensor


def decode(
    recipe: Recipe, state: BatchState, shape: StepShape, lanes: RowCursors, known: Hidden | Tensor,
    iteration_state: State, cache_state: State, *, hit: bool = False, added: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """The part of a denoise step behind its forward. `known`: what the forward left, or logits of the active blocks.

    `hit`: the logits are those of a candidate, so no forward is counted. `added`: what `Branches.follow` returns.
    """
    iteration, decoder, cache = recipe.iteration, recipe.decoder, recipe.cache
    canvas, spec, slot_B = state.canvas, recipe.model.spec, lanes.slot_B
    model = known.model if isinstance(known, Hidden) else recipe.model
    # The commits: the decoder says which positions, `dinfer.step.commits` keeps the promises every decoder may rely on.
    view, logits_BWV = block_view(recipe, state, shape, lanes), None
    row_R, live_R = state.block_rows(slot_B, lanes.block_B, shape.blocks), rows_of(lanes.live_B, shape.blocks)
    decoder_state = state.decoder.lanes(row_R) | state.decoder.in_place(row_R, live_R)
    if added is not None:
        state.decoder.refresh(decoder_state, added[1].flatten())
    if shape.scored and isinstance(known, Hidden):
        stats, lanes.live_B = open_stats(recipe, shape, lanes, view, known.h_BWD, known.logits_RL)
    else:
        if isinstance(known, Tensor):
            logits_RLV = known
        elif iteration.scores == "window":
            logits_BWV = model.logits(known.h_BWD)
            logits_RLV = take(logits_BWV, known.logits_RL)
        else:
            logits_RLV = read_logits(recipe, shape, model, take(known.h_BWD, known.logits_RL))
        own_RLV = logits_RLV.clone() if shape.told == Told.LOGPROBS else logits_RLV  # adjusting may be in place
        stats, adjusted_RLV = proposed_tokens(recipe, state, shape, lanes, view, logits_RLV, decoder_state)
    if cache.follows and isinstance(known, Hidden):  # what is not computed has no logits, and is not decoded
        here_RL = known.logits_RL >= 0
        stats = stats.each(lambda stat_RL: stat_RL.masked_fill(~here_RL, 0))
        proposal = decoder.select(stats, view, decoder_state)
        proposal = replace(proposal, commit_RL=proposal.commit_RL & here_RL)
    elif shape.phase == Phase.VERIFY:
        proposal = decoder.verify(adjusted_RLV, view, decoder_state)
    else:
        proposal = decoder.select(stats, view, decoder_state)
    if proposal.verify_R is not None:
        verify_B = proposal.verify_R & (stats.finite_RL | ~view.masked_RL).all(-1)
        state.decoder.store(row_R, decoder_state, lanes.live_B & verify_B)
        postpone(canvas, lanes, verify_B, refreshed=cache.reuses and shape.phase == Phase.FULL)
    blank_RL = what_is_left(recipe, view, proposal)
    commits = commit(canvas, lanes, view, stats, proposal, spec, blank_RL, decoder.edits)
    if shape.told:
        written, token_RL = state.tellings.tell(
            slot_B, lanes.live_B, view, stats, commits, spec.vocab, branches=iteration.branches > 0
        )
        if shape.told == Told.LOGPROBS:
            state.tellings.tell_logprobs(written, token_RL, own_RLV)
    if logits_BWV is not None and isinstance(known, Hidden):
        iteration.observe(model, logits_BWV, known.pos_BW, lanes, iteration_state)
    elif iteration.scores == "adjusted":
        by_lane = (slot_B.shape[0], -1)
        pos_BX, adjusted_BXV = view.pos_RL.view(by_lane), adjusted_RLV.reshape(*by_lane, spec.vocab)
        iteration.observe(model, adjusted_BXV, pos_BX, lanes, iteration_state)

    # The cursors: the iteration moves its rows on, and the cache says what they need next.
    finished_R = commits.finished_R if proposal.busy_R is None else commits.finished_R & ~proposal.busy_R
    by_block = (slot_B.shape[0], shape.blocks)
    after = BlockAfter(
        given_BKL=view.given_RL.view(*by_block, -1),
        stop_BKL=commits.stop_RL.view(*by_block, -1),
        open_BKL=commits.open_RL.view(*by_block, -1),
        finished_BK=finished_R.view(by_block),
        confidence_BKL=stats.confidence_RL.view(*by_block, -1),
        stable_BK=stability(stats, view).view(by_block) if iteration.reads_stability else None,
        next_B=commits.next_B,
    )
    lanes.quota_BK = view.quota_R.view(by_block)
    end_B, gained_B = lanes.end_B, commits.gained_B if added is None else commits.gained_B + added[0]
    moved = iteration.advance(lanes, after, iteration_state)
    if decoder_state:
        state.decoder.refresh(decoder_state, fresh_rows(moved))
    if proposal.length_R is not None:
        canvas.resize(lanes, proposal.length_R)
    canvas.finish(
        lanes, gained_B=gained_B, entered_BK=moved.entered_BK, left_B=moved.left_B, done_B=moved.done_B,
        broken_B=commits.broken_B, stale_B=cache.stale(lanes, moved, shape.phase, cache_state),
        refreshed=cache.reuses and shape.phase == Phase.FULL, hit=hit,
    )  # fmt: skip

    state.iteration.store(slot_B, iteration_state, lanes.live_B)
    state.decoder.store(row_R, decoder_state, rows_of(lanes.live_B, shape.blocks))
    state.cache.store(slot_B, cache_state, lanes.live_B)
    if state.drafts is not None:
        state.drafts.keep(lanes, stats, commits, moved)
    if state.added is not None:
        state.added.keep(lanes, end_B, view, stats, branching(iteration).value(stats), commits)


def best_branch(
    recipe: Recipe, state: BatchState, shape: StepShape, lanes: RowCursors, branches: Branches, logits_CRLV: Tensor
) -> Tensor:
    """The branch that goes on in each lane. int64 [B]"""
    iteration, by_lane, worth = branching(recipe.iteration), (lanes.slot_B.shape[0], -1), list[Tensor]()
    for branch, logits_RLV in enumerate(logits_CRLV):
        own = branches.region(lanes, branch)
        view = branches.view(branch, block_view(recipe, state, shape, own))
        decoder_state = state.decoder.lanes(state.block_rows(lanes.slot_B, lanes.block_B, shape.blocks))
        stats, _ = proposed_tokens(recipe, state, shape, own, view, logits_RLV.clone(), decoder_state)
        value_BX, masked_BX = iteration.value(stats).view(by_lane), view.masked_RL.view(by_lane)
        worth.append(iteration.worth(value_BX, masked_BX, branches.value_BC[:, branch]))
    return branches.best(torch.stack(worth, 1))


def seen(
    recipe: Recipe, lanes: RowCursors, pos_BW: Tensor, stop_B: Tensor | None = None
) -> tuple[Interval, Interval | None, Tensor | None]:
    """The interval each query sees, the one in layers with local attention, and which queries are an encoder's."""
    spec = recipe.model.spec
    if not spec.encoder:
        (start_B, end_B), prompt_B = recipe.cache.visible(lanes), lanes.prompt_B if spec.prompt_block else None
        end_B = end_B if stop_B is None else stop_B
        return attention_interval(pos_BW, start_B, end_B, spec.causal_block, prompt_B), None, None
    context_BW, interval_BW = encoder_intervals(pos_BW, lanes.start_B, lanes.end_B)
    if spec.local is None:
        return interval_BW, None, context_BW
    return interval_BW, local_interval(interval_BW, pos_BW, lanes.start_B, spec.local.window), context_BW


def settle(canvas: Canvas, lanes: RowCursors, settled_B: Tensor, kept_B: Tensor, phase: Phase) -> Tensor:
    """Stores the cursors of rows whose keys were computed and which decode nothing, and says which these are.

    A prefill continues in the next step where keys are missing. bool [B]
    """
    rest_B = (settled_B < kept_B) & (phase == Phase.PREFILL)
    passed = replace(
        lanes,
        live_B=lanes.live_B & (settled_B >= 0),
        kept_B=settled_B,
        forwards_B=lanes.forwards_B + 1,
        phase_B=torch.where(rest_B, int(Phase.PREFILL), int(Phase.WINDOW)),
    )
    canvas.store(passed)
    return passed.live_B


def own_columns(recipe: Recipe, shape: StepShape) -> Columns:
    """Which tokens' logits a rank needs: all, or its own alone, where only statistics and a draw by parts read them."""
    decoder, vocab = recipe.decoder, recipe.model.spec.vocab
    own = recipe.ranks.columns(vocab)
    reads = decoder.reads_logits or decoder.verifies or recipe.iteration.scores != "block"
    # As many candidates as a rank has tokens are no fewer numbers than the logits.
    draws = shape.sampled and (not recipe.sampling.by_parts or shape.top_candidates >= own.most)
    return Columns(0, vocab, vocab) if reads or draws or shape.told == Told.LOGPROBS else own


def read_logits(recipe: Recipe, shape: StepShape, model: Model, h_RLD: Tensor) -> Tensor:
    """The logits of `own_columns`. `model`: of this step. [R, L, V]"""
    if own_columns(recipe, shape).all_gather is None or not isinstance(model, Divided | Guided):
        return model.logits(h_RLD)
    return model.own_logits(h_RLD)


def block_view(recipe: Recipe, state: BatchState, shape: StepShape, lanes: RowCursors) -> BlockView:
    """The active blocks of the lanes, as rows of blocks."""
    canvas, floor_B = state.canvas, recipe.iteration.floor(lanes)
    pos_RL, tokens_RL, masked_RL, given_RL, quota_R = active_rows(
        canvas.tokens_NS, canvas.status_NS, lanes.slot_B, lanes.start_B, lanes.end_B, lanes.step_BK, lanes.quota_BK,
        block=shape.block, open_status=int(Status.OPEN), given_status=int(Status.GIVEN),
    )  # fmt: skip
    must_BK = recipe.iteration.must_progress(lanes, masked_RL.view(-1, shape.blocks, shape.block))
    return BlockView(
        pos_RL=pos_RL,
        tokens_RL=tokens_RL,
        masked_RL=masked_RL,
        given_RL=given_RL,
        step_R=lanes.step_BK.flatten(),
        quota_R=quota_R,
        floor_R=None if floor_B is None else rows_of(floor_B, shape.blocks),
        must_progress_R=None if must_BK is None else must_BK.flatten(),
        forward_R=rows_of(lanes.steps_B, shape.blocks),
        seed_R=rows_of(lanes.seed_B, shape.blocks),
        prompt_R=rows_of(lanes.prompt_B, shape.blocks),
        length_R=rows_of(lanes.length_B, shape.blocks),
        options=state.options(recipe, lanes.slot_B, "decoder", shape.blocks),
    )


def proposed_tokens(
    recipe: Recipe, state: BatchState, shape: StepShape, lanes: RowCursors, view: BlockView, logits_RLV: Tensor,
    decoder_state: State,
) -> tuple[TokenStats, Tensor]:  # fmt: skip
    """A token for each position of the blocks, drawn if some row asks for it, and what its probability is.

    And the logits, as they were adjusted.
    """
    decoder, sampling, spec, draw = recipe.decoder, recipe.sampling, recipe.model.spec, None
    columns = own_columns(recipe, shape)
    if shape.sampled:
        options = state.options(recipe, lanes.slot_B, "sampling", shape.blocks)
        logits_RLV = sampling.adjust(logits_RLV, view, options, spec, columns)
    if decoder.reads_logits and shape.phase != Phase.VERIFY:
        logits_RLV = decoder.adjust(logits_RLV, view, decoder_state)
    logits_RLV = offered(recipe, logits_RLV, columns)
    if shape.sampled:
        count_RV = rows_of(columns.part(state.canvas.counts(lanes.slot_B, spec.vocab, spec.mask_id)), shape.blocks)
        draw = sampling.draw(logits_RLV, count_RV, view, options, spec, shape.top_candidates, columns)
    wanted_RL, drawn_RL = (~view.given_RL, view.masked_RL) if decoder.edits else (view.masked_RL, None)
    return statistics(recipe, logits_RLV, wanted_RL, draw, columns, drawn_RL), logits_RLV


def open_stats(
    recipe: Recipe, shape: StepShape, lanes: RowCursors, view: BlockView, h_BWD: Tensor, logits_RL: Tensor
) -> tuple[TokenStats, Tensor]:
    """The statistics where the LM head runs on open positions alone, and the lanes whose open positions all fit."""
    (rows, length), width = view.masked_RL.shape, h_BWD.shape[1]
    flags_RL = view.masked_RL & rows_of(lanes.live_B, shape.blocks)[:, None]
    index_1M, place_1X = compact(flags_RL.view(1, -1), shape.scored)
    fits_B = (place_1X < shape.scored).view(lanes.live_B.shape[0], -1).all(-1)
    lane_R = torch.arange(rows, device=h_BWD.device)[:, None] // shape.blocks
    where_X = (logits_RL.clamp_min(0) + lane_R * width).flatten()
    h_1MD = h_BWD.flatten(0, 1).index_select(0, where_X.index_select(0, index_1M[0].clamp_min(0)))[None]
    columns, logits_1MV = own_columns(recipe, shape), read_logits(recipe, shape, recipe.model, h_1MD)
    stats = statistics(recipe, offered(recipe, logits_1MV, columns), index_1M >= 0, None, columns)
    back_X = place_1X[0].clamp(0, shape.scored - 1)

    def placed(stat_1M: Tensor) -> Tensor:
        return stat_1M[0].index_select(0, back_X).view(rows, length).masked_fill(~flags_RL, 0)

    return stats.each(placed), lanes.live_B & fits_B


def offered(recipe: Recipe, logits_RLV: Tensor, columns: Columns) -> Tensor:
    """The logits, in place without the tokens that the decoder does not take."""
    spec, decoder = recipe.model.spec, recipe.decoder
    masks = (spec.mask_id,) if decoder.suppress_mask and spec.mask_id is not None else ()
    columns.fill(logits_RLV, *masks, *(() if decoder.moves else spec.moving_ids))
    return logits_RLV


def statistics(
    recipe: Recipe, logits_RLV: Tensor, wanted_RL: Tensor, draw: Draw | None, columns: Columns,
    drawn_RL: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """What the decoder needs to know of the logits. `drawn_RL`: where tokens are drawn; None: wherever any are."""
    decoder, needs = recipe.decoder, (*recipe.decoder.needs, *recipe.iteration.needs)
    return token_stats(
        logits_RLV, recipe.model.spec.mask_id, decoder.softmax_dtype,
        **{name: name in needs for name in ("entropy", "margin", "best")}, draw=draw, wanted_RL=wanted_RL,
        columns=columns, drawn_RL=drawn_RL,
    )  # fmt: skip


def what_is_left(recipe: Recipe, view: BlockView, proposal: Proposal) -> Tensor | int:
    """What open positions hold after this step: the mask token, or, where models have none, drafts and noise."""
    spec = recipe.model.spec
    if spec.mask_id is not None:
        return spec.mask_id
    noise_RL = recipe.sampling.noise(view.seed_R[:, None], view.pos_RL, view.forward_R[:, None] + 1, spec.vocab)
    draft_RL = noise_RL if proposal.draft_RL is None else proposal.draft_RL
    return torch.where((draft_RL >= 0) & (draft_RL < spec.vocab), draft_RL, noise_RL)


def stability(stats: TokenStats, view: BlockView) -> Tensor:
    """The share of the tokens decoded before this step that it predicted again; 1 of none. float64 [R]"""
    decoded_RL = ~view.masked_RL & ~view.given_RL
    again_RL = decoded_RL & (stats.token_RL == view.tokens_RL) & ~stats.declined_RL
    count_R = decoded_RL.sum(-1)
    return torch.where(count_R > 0, again_RL.sum(-1).to(torch.float64) / count_R.clamp_min(1), 1.0)


def fresh_rows(moved: Moved) -> Tensor:
    """The rows of decoder state that belong to a new block from now on, see `BatchState.block_rows`. bool [R]"""
    if moved.left_B is None:
        return moved.entered_BK.flatten()
    blocks = moved.entered_BK.shape[1]
    block_BK = (torch.arange(blocks, device=moved.left_B.device) - moved.left_B[:, None]) % blocks
    return moved.entered_BK.gather(1, block_BK).flatten()
