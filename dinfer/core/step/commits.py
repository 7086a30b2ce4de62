"""What a step writes: the decoder's proposal without forbidden writes, a commit where the row must progress, cursors.

The rules hold for every decoder, so they are here and not in the decoders. `core.step.step` says when they apply.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import moved
from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import Edit, ModelSpec, Moved, Proposal, State
from dinfer.core.step.cursors import BlockView, Phase, RowCursors
from dinfer.core.step.model import Parts
from dinfer.core.terms.stats import TokenStats


@dataclass(frozen=True, slots=True)
class Commits:
    """The active blocks after the commits of a step, and what became of their lanes."""

    tokens_RL: Tensor
    open_RL: Tensor  # bool: still to be decoded
    stop_RL: Tensor  # bool: the token is one that ends an answer, and the request minds
    finished_R: Tensor  # bool: nothing is left to decode
    gained_B: Tensor  # int64, masked positions decoded, less those masked again
    broken_B: Tensor  # bool: logits that were to be decoded are not finite, so nothing was written
    next_B: Tensor  # int64, the first position behind the blocks that is to be decoded; the row's length if none is


def commit(
    canvas: Canvas, lanes: RowCursors, view: BlockView, stats: TokenStats, proposal: Proposal, spec: ModelSpec,
    blank_RL: Tensor | int,
) -> Commits:  # fmt: skip
    """Writes what may be written of a proposal to the canvas, in live lanes whose logits are finite.

    `blank_RL`: what open positions hold from now on.
    """
    edits, view = view.edits, excused(view, proposal)
    edit = proposal.edit if edits else Edit()
    if use_triton(canvas.tokens_NS, "commit"):
        return Commits(
            *triton("advance").commit(canvas, lanes, view, stats, replace(proposal, edit=edit), spec, blank_RL)
        )
    lane_count = lanes.slot_B.shape[0]
    blocks = view.pos_RL.shape[0] // lane_count
    written_RL = ~view.given_RL if edits else view.masked_RL
    broken_B = (written_RL & ~stats.finite_RL).view(lane_count, -1).any(-1) & lanes.live_B
    able_R1 = (lanes.live_B & ~broken_B).repeat_interleave(blocks)[:, None]
    masks_B, moved_RL = view.masked_RL.view(lane_count, -1).sum(-1), torch.zeros_like(view.masked_RL)
    if edit.source_RL is not None:
        source_RL, moved_RL = allowed_moves(edit.source_RL, view)
        moved_RL, tokens_RL = moved_RL & able_R1, moved(view.tokens_RL, source_RL, blank_RL)
        view = replace(view, tokens_RL=tokens_RL, masked_RL=moved(view.masked_RL, source_RL, True))
    commit_RL, token_RL = allowed_commits(proposal, stats, view, spec)
    commit_RL = commit_RL & able_R1
    remask_RL = allowed_remasks(edit, commit_RL, view) & able_R1
    left_RL = (view.masked_RL & ~commit_RL) | remask_RL
    token_RL = torch.where(left_RL, blank_RL, token_RL)
    token_RL = torch.where(commit_RL | left_RL, token_RL, view.tokens_RL)
    open_RL = remask_RL if spec.mask_id is not None else left_RL & able_R1  # other masks are there already
    done_RL, open_RL = commit_RL | (moved_RL & ~left_RL), open_RL | (moved_RL & left_RL)
    by_lane = (lane_count, -1)
    canvas.write(lanes.slot_B, *(t.view(by_lane) for t in (view.pos_RL, token_RL, done_RL, open_RL)))
    stops_RL = (lanes.stops_B > 0).repeat_interleave(blocks)[:, None] & (view.pos_RL >= 0)
    return Commits(
        tokens_RL=token_RL,
        open_RL=left_RL,
        stop_RL=canvas.is_stop(token_RL) & stops_RL,
        finished_R=~left_RL.any(-1),
        gained_B=masks_B - left_RL.view(by_lane).sum(-1),
        broken_B=broken_B,
        next_B=canvas.next_NS[lanes.slot_B, lanes.end_B],
    )


def excused(view: BlockView, proposal: Proposal) -> BlockView:
    """The view without the duty to commit in rows whose decoder waits."""
    if (waits_R := proposal.waits_R) is None:
        return view
    must_R = view.must_progress_R
    return replace(view, must_progress_R=~waits_R if must_R is None else must_R & ~waits_R)


def allowed_commits(proposal: Proposal, stats: TokenStats, view: BlockView, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Which positions to write and what: the proposal without what may not be written, and with one commit where a
    row must progress but chose none. A decoder that moves tokens may choose none.

    That commit is at the most confident masked position, if possible one where the model prefers a token to the mask.
    So no decoder can hang the loop, whatever the logits. The mask, and numbers outside the vocabulary, are not written.
    """
    commit_RL = proposal.commit_RL & (~view.given_RL if view.edits else view.masked_RL)
    token_RL = stats.token_RL
    if proposal.token_RL is not None:
        wanted_RL = proposal.token_RL
        valid_RL = (wanted_RL >= 0) & (wanted_RL < spec.vocab)
        if spec.mask_id is not None:
            valid_RL = valid_RL & (wanted_RL != spec.mask_id)
        commit_RL, token_RL = commit_RL & valid_RL, torch.where(valid_RL, wanted_RL, token_RL)
    if proposal.edit.source_RL is not None and view.edits:
        return commit_RL, token_RL
    return with_progress(commit_RL, stats, view), token_RL


def with_progress(commit_RL: Tensor, stats: TokenStats, view: BlockView) -> Tensor:
    """The commits, and the surest open position of each block that must commit something and would not. bool [R, L]"""
    if use_triton(commit_RL, "commit"):
        return triton("advance").with_progress(commit_RL, stats, view.masked_RL, view.must_progress_R)
    score_RL = (stats.confidence_RL - 2.0 * stats.declined_RL).masked_fill(~view.masked_RL, -4.0)
    best_RL = torch.arange(score_RL.shape[1], device=score_RL.device) == score_RL.argmax(-1, keepdim=True)
    stuck_R = view.masked_RL.any(-1) & ~(commit_RL & view.masked_RL).any(-1)
    if view.must_progress_R is not None:
        stuck_R = stuck_R & view.must_progress_R
    return commit_RL | (best_RL & stuck_R[:, None])


def allowed_remasks(edit: Edit, commit_RL: Tensor, view: BlockView) -> Tensor:
    """Decoded positions to mask again; none in a row that would not end up with fewer masks.

    So a decoder that takes tokens back cannot hang the loop, unless it counts these steps itself (`retry_R`) or moves.
    """
    if edit.remask_RL is None:
        return torch.zeros_like(commit_RL)
    remask_RL = edit.remask_RL & ~view.masked_RL & ~view.given_RL & ~commit_RL
    if edit.source_RL is not None:
        return remask_RL
    free_R = (commit_RL & view.masked_RL).sum(-1) > remask_RL.sum(-1)
    if edit.retry_R is not None:
        free_R = free_R | edit.retry_R
    return remask_RL & free_R[:, None]


def allowed_moves(source_RL: Tensor, view: BlockView) -> tuple[Tensor, Tensor]:
    """Where each position's token comes from, and which positions take another's: what is given stays.

    A source that is given, or outside the block, stands for a new mask.
    """
    own_L = torch.arange(source_RL.shape[1], device=source_RL.device)
    source_RL = torch.where((source_RL >= 0) & (source_RL < own_L.shape[0]), source_RL, -1)
    source_RL = torch.where(view.given_RL, own_L, source_RL.masked_fill(moved(view.given_RL, source_RL, False), -1))
    return source_RL, source_RL != own_L


def blanks(recipe: Parts, view: BlockView, state: State) -> Tensor | int:
    """What open positions hold after this step: the mask token, or, where models have none, drafts and noise.

    `state`: the decoder's, see `dinfer.core.step.mixins.Drafts`.
    """
    spec = recipe.model.spec
    if spec.mask_id is not None:
        return spec.mask_id
    noise_RL = recipe.sampling.noise(view.seed_R[:, None], view.pos_RL, view.forward_R[:, None] + 1, spec.vocab)
    if (draft_RL := state.get("draft")) is None:
        return noise_RL
    return torch.where((draft_RL >= 0) & (draft_RL < spec.vocab), draft_RL, noise_RL)


def finish(
    canvas: Canvas, lanes: RowCursors, moves: Moved, *, gained_B: Tensor, broken_B: Tensor, full_B: Tensor | bool,
    refreshed: bool, hit: bool,
) -> None:  # fmt: skip
    """Counts the step in live lanes, says what they need next, and writes their cursors back.

    Rows that are `broken` are stopped; others that are not `done` go on with a FULL pass where `full`. Blocks that
    `entered` begin their count of steps; those behind the `left` first ones move to the front with theirs.
    `refreshed`: this one was a FULL pass whose keys are kept. `hit`: it had no forward of its own.
    """
    done_B, left_B = moves.done_B, moves.left_B
    if use_triton(canvas.cursors_NC, "advance"):
        return triton("advance").finish(
            canvas, lanes, moves, gained_B=gained_B, broken_B=broken_B, full_B=full_B, refreshed=refreshed, hit=hit
        )
    step_BK, quota_BK = lanes.step_BK + 1, lanes.quota_BK
    if left_B is not None:
        last = step_BK.shape[1] - 1
        from_BK = (torch.arange(last + 1, device=left_B.device) + left_B[:, None]).clamp_max(last)
        step_BK, quota_BK = step_BK.gather(1, from_BK), quota_BK.gather(1, from_BK)
    full_B = torch.full_like(done_B, full_B) if isinstance(full_B, bool) else full_B
    phase_B = torch.where(full_B, int(Phase.FULL), int(Phase.WINDOW)).masked_fill(done_B, int(Phase.IDLE))
    canvas.store(
        replace(
            lanes,
            phase_B=phase_B.masked_fill(broken_B, int(Phase.FAULT)),
            forwards_B=lanes.forwards_B + (not hit),
            steps_B=lanes.steps_B + 1,
            refreshes_B=lanes.refreshes_B + refreshed,
            committed_B=lanes.committed_B + gained_B,
            hits_B=lanes.hits_B + hit,
            step_BK=step_BK.masked_fill(moves.entered_BK, 0),
            quota_BK=quota_BK,
        )
    )
