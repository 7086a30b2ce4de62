"""Drafts that an answer in its language may go on with, for decoders that verify what they draft.

Each position's logits know nothing of the drafts before it, so the likeliest drafts of all positions often make no
answer together. The automaton of a language is deterministic: a path of drafts is in one state, which says what may
follow.

Shape suffixes beside those of `dinfer.structure.kernels.languages`: P paths of one length, K candidates, D drafts of a
path, R = B rows, L = X active positions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dinfer.core.step.ability import Decision, Step, StepShape
from dinfer.core.step.step import block_view
from dinfer.structure.abilities.constraints import Constrained, Constraints
from dinfer.structure.kernels.languages import Sweeps
from dinfer.structure.kernels.lines import Line

CANDIDATES = 64  # of a position, beside the first token of each class: a form may leave none of the likeliest ones
SURE = -1e-6  # the logarithm of a chance


class Paths(NamedTuple):
    """Drafts of rows in languages."""

    bound_B: Tensor  # bool: rows in a language; what is said of others means nothing
    path_BPD: Tensor  # int64, the likeliest paths; -1: no draft
    draft_BD: Tensor  # int64, the likeliest draft behind each draft
    sure_BD: Tensor  # the same, as far as the language leaves nothing else


def paths_in_languages(
    step: Step, made: Decision, first_B: Tensor, count: int, depth: int, widest: int
) -> Paths | None:
    """What rows in languages may go on with at the active positions from the `first_B`-th on. None: no row is in one.

    Positions before hold tokens by now. `widest`: drafts at the first position of a tree; half of them at each further
    one.
    """
    if (ability := _of(step)) is None:
        return None
    (sweeps, line, bound_B), by_lane = ability.line(step, made.view), ability.layout(step, made.view).by_lane
    place_X = torch.arange(line.token_BX.shape[1], device=first_B.device)
    passed_BX = (place_X < first_B[:, None]) & ~line.outside_BX
    state_B = sweeps.run(line.state_B, by_lane(made.commits.tokens_RL), passed_BX)
    return Paths(bound_B, *likeliest(sweeps, line, state_B, first_B, made.adjusted_RLV, count, depth, widest))


def likeliest(
    sweeps: Sweeps, line: Line, state_B: Tensor, first_B: Tensor, logits_BXV: Tensor, count: int, depth: int,
    widest: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of `Paths` all but the first. `state_B`: before the `first_B`-th position."""
    active, lane_B1 = logits_BXV.shape[1], torch.arange(len(state_B), device=state_B.device)[:, None]
    at_BD = first_B[:, None] + torch.arange(depth, device=state_B.device)
    room_BD = line.room_B[:, None] + active - 1 - at_BD
    there_BD = (at_BD < active) & ~line.outside_BX.gather(1, at_BD.clamp_max(active - 1))
    own_BDV = logits_BXV[lane_B1, at_BD.clamp_max(active - 1)].float()
    token_BDK, worth_BDK = candidates(sweeps, own_BDV)
    class_BDK = sweeps.class_BV.gather(1, token_BDK.flatten(1)).view(token_BDK.shape).to(torch.int64)
    state_BP, worth_BP = state_B[:, None], torch.zeros_like(state_B, dtype=torch.float32)[:, None]
    path_BPD = state_B.new_full((len(state_B), 1, depth), -1)
    sure, found = path_BPD[:, 0].clone(), list[tuple[Tensor, Tensor]]()
    for place in range(depth):
        class_B1K, wide = class_BDK[:, place, None], max(widest >> place, 1)
        state_BPK = after(sweeps, state_BP[..., None], class_B1K)
        fits_BPK = leads(sweeps, state_BPK, room_BD[:, place, None, None]) & there_BD[:, place, None, None]
        value_BPK = worth_BDK[:, place, None].masked_fill(~fits_BPK, float("-inf"))
        total_BP1 = value_BPK.logsumexp(-1, keepdim=True).clamp_min(-1e9)  # -inf less -inf is NaN
        chance_BPW, best_BPW = (value_BPK - total_BP1).topk(wide)
        if found:  # a path that surely goes on is confirmed with what follows, which needs no lane beside its own
            found[-1] = found[-1][0].masked_fill(chance_BPW[..., 0] > SURE, float("-inf")), found[-1][1]
        worth_BP = (worth_BP[..., None] + chance_BPW).flatten(1)
        draft_BP = token_BDK[:, place].gather(1, best_BPW.flatten(1)).masked_fill(worth_BP == float("-inf"), -1)
        state_BP = state_BPK.gather(2, best_BPW).flatten(1).clamp_min(0)
        path_BPD = path_BPD.repeat_interleave(wide, 1)
        path_BPD[..., place] = draft_BP
        sure[:, place] = torch.where(worth_BP[:, 0] > SURE, draft_BP[:, 0], -1)
        found.append((worth_BP, path_BPD))
    greedy_BD = path_BPD[:, 0].masked_fill((path_BPD[:, 0] < 0).cumsum(-1) > 0, -1)
    worth_BP, all_BPD = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    length_BP = (all_BPD >= 0).sum(-1)  # of paths as likely, the longer one
    best_BP = (worth_BP + 1e-3 * length_BP).topk(min(count, worth_BP.shape[1])).indices
    none_BP1 = (worth_BP.gather(1, best_BP) == float("-inf"))[..., None]
    chosen_BPD = all_BPD.gather(1, best_BP[..., None].expand(-1, -1, depth)).masked_fill(none_BP1, -1)
    more_BPD = chosen_BPD.new_full((len(state_B), count - chosen_BPD.shape[1], depth), -1)
    return torch.cat((chosen_BPD, more_BPD), 1), greedy_BD, sure


def candidates(sweeps: Sweeps, own_BDV: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens and the first token of each class, int64 [B, D, K], and what they are worth; each once."""
    most_BDK = own_BDV.topk(min(CANDIDATES, own_BDV.shape[-1])).indices
    token_BC, size_BC = (
        rows.index_select(0, sweeps.language_B) for rows in (sweeps.languages.token_GC, sweeps.languages.size_GC)
    )
    first_BDC = torch.where(size_BC > 0, token_BC, 0).to(torch.int64)[:, None].expand(-1, own_BDV.shape[1], -1)
    again_BDC = (first_BDC[..., None] == most_BDK[..., None, :]).any(-1) | (size_BC == 0)[:, None]
    token_BDK = torch.cat((most_BDK, first_BDC), -1)
    # What is ruled out here may have been so behind a draft that was refused.
    worth_BDK = own_BDV.gather(2, token_BDK).clamp_min(-1e4)
    none_BDK = torch.cat((torch.zeros_like(most_BDK, dtype=torch.bool), again_BDC), -1)
    return token_BDK, worth_BDK.masked_fill(none_BDK, float("-inf"))


def after(sweeps: Sweeps, state: Tensor, classes: Tensor) -> Tensor:
    """The state behind a token of the class; -1: none. Both begin with lanes. int64"""
    meta = sweeps.meta_B8.view(len(sweeps.meta_B8), *(1,) * (state.dim() - 1), 8)
    known = classes < meta[..., 1]
    place = meta[..., 2] + torch.where(known, classes, 0) * meta[..., 0] + state
    next_state = sweeps.languages.next_Y[place].to(torch.int64)
    return torch.where(known & (next_state < sweeps.states), next_state, -1)  # more has a language that nobody is in


def leads(sweeps: Sweeps, state: Tensor, room: Tensor) -> Tensor:
    """Whether an answer can end from the state within so many positions."""
    distance = sweeps.distance_BQ.gather(1, state.clamp_min(0).flatten(1)).view(state.shape)
    return (state >= 0) & (distance <= room)


def hold(step: Step, logits_CRLV: Tensor, paths_RCD: Tensor) -> Tensor:
    """The logits, where tokens that no answer has behind the drafts of the version are ruled out. A copy.

    `paths_RCD`: of all versions but the first, which has none. Other positions than those of drafts stay as they are.
    """
    if (ability := _of(step)) is None:
        return logits_CRLV
    sweeps, line, _ = ability.line(step, block_view(step, step.lanes))
    logits_CRLV = logits_CRLV.clone()
    paths_RCD = torch.nn.functional.pad(paths_RCD, (0, 0, 1, 0), value=-1)[:, : len(logits_CRLV)]
    state_RC, behind = line.state_B[:, None].expand(paths_RCD.shape[:2]), line.token_BX.shape[1] - 1
    class_C = torch.arange(sweeps.languages.size_GC.shape[1], device=state_RC.device)
    for place in range(paths_RCD.shape[2]):
        next_RCK = after(sweeps, state_RC[..., None], class_C)
        fits_RCK = leads(sweeps, next_RCK, (line.room_B + behind - place)[:, None, None])
        class_RCV = sweeps.class_BV.to(torch.int64)[:, None].expand(*state_RC.shape, -1)
        fits_RCV = fits_RCK.gather(2, class_RCV) | line.outside_BX[:, place, None, None]
        logits_CRLV[:, :, place].masked_fill_(~fits_RCV.transpose(0, 1), float("-inf"))
        draft_RC = paths_RCD[..., place]
        following_RC = after(sweeps, state_RC, sweeps.classes_of(draft_RC.clamp_min(0)))
        state_RC = torch.where((draft_RC >= 0) & (following_RC >= 0), following_RC, state_RC)
    return logits_CRLV


def in_languages(shape: StepShape) -> bool:
    """Whether some row of a step is in a language."""
    return shape.extra(Constrained) is not None


def _of(step: Step) -> Any:
    """What holds the rows of a step to languages, where no text stands behind gaps; None: nothing does."""
    found = next((one for one in step.abilities if isinstance(one, Constraints)), None)
    return None if found is None or found.extra.behind else found
