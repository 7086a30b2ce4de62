"""From hidden states to what a decoder knows: logits, what is offered, draws and statistics."""

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import rows_of, take
from dinfer.core.kernels.token_stats import token_stats
from dinfer.core.step.ability import Decision, Known, Step
from dinfer.core.step.canvas import Canvas
from dinfer.core.step.contracts import ModelSpec, State
from dinfer.core.step.cursors import CURSORS, BlockView, RowCursors, Status
from dinfer.core.step.model import Network, OwnLogits
from dinfer.core.step.record import Raw
from dinfer.core.step.shape import Sampled
from dinfer.core.terms.stats import Draw, TokenStats, VocabularySlice


def needed_vocabulary(step: Step) -> VocabularySlice:
    """Which tokens' logits a rank needs: all, or its own alone, where only statistics and a draw by parts read them."""
    recipe, vocab, sampled = step.recipe, step.recipe.model.spec.vocab, step.shape.extra(Sampled)
    own = recipe.ranks.columns(vocab)
    reads = any(ability.whole_logits for ability in step.abilities)
    # As many candidates as a rank has tokens are no fewer numbers than the logits.
    draws = sampled is not None and (not recipe.sampling.by_parts or sampled.top >= own.most)
    return VocabularySlice(0, vocab, vocab) if reads or draws else own


def logits_of(step: Step, known: Known) -> Tensor:
    """The logits of the active blocks. [R, L, V]"""
    if known.logits_RLV is not None:
        return known.logits_RLV
    assert known.run is not None, "a decision goes by a forward or by logits"
    return read_logits(step, known.run.model, take(known.run.h_BWD, known.run.logit_place_RL))


def read_logits(step: Step, model: Network, h_RLD: Tensor) -> Tensor:
    """The logits of `needed_vocabulary`. `model`: of this step. [R, L, V]"""
    parted = needed_vocabulary(step).all_gather is not None
    return model.own_logits(h_RLD) if parted and isinstance(model, OwnLogits) else model.logits(h_RLD)


def scored(step: Step, made: Decision, logits_RLV: Tensor) -> TokenStats:
    """The statistics of the logits of the active blocks."""
    for ability in step.abilities:
        ability.read(step, made, logits_RLV)
    raw_RLV = logits_RLV
    keeps = any(ability.keeps_logits for ability in step.abilities)
    if keeps and step.shape.extra(Sampled) is None:  # a sampling has made its own
        logits_RLV = logits_RLV.clone()  # which may be changed in place
    stats, made.adjusted_RLV, draw = proposed_tokens(step, step.lanes, made.view, logits_RLV, made.decoder_state)
    if keeps:
        step.notes[Raw] = Raw(raw_RLV, draw)
    return stats


def proposed_tokens(
    step: Step, lanes: RowCursors, view: BlockView, logits_RLV: Tensor, decoder_state: State
) -> tuple[TokenStats, Tensor, Draw | None]:
    """A token for each position of the blocks, drawn if some row asks for it, and what its probability is.

    And the logits, as they were adjusted, and the draw. The given logits may be changed.
    """
    recipe, shape, columns = step.recipe, step.shape, needed_vocabulary(step)
    sampling, spec, sampled = recipe.sampling, recipe.model.spec, shape.extra(Sampled)
    draw, options = None, {}
    if sampled is not None:
        options = step.state.options(recipe, lanes.slot_B, "sampling", shape.blocks)
        logits_RLV = sampling.adjust(logits_RLV, view, options, spec, columns)
    for ability in step.abilities:
        logits_RLV = ability.adjust(step, view, logits_RLV, decoder_state)
    for ability in step.abilities:
        logits_RLV = ability.allow(step, view, logits_RLV)
    if sampled is not None:
        count_BV = columns.part(token_counts(step.state.canvas, lanes.slot_B, spec))
        draw = sampling.draw(logits_RLV, rows_of(count_BV, shape.blocks), view, options, spec, sampled.top, columns)
    wanted_RL, drawn_RL = (~view.given_RL, view.masked_RL) if view.edits else (view.masked_RL, None)
    return statistics(step, logits_RLV, wanted_RL, draw, drawn_RL), logits_RLV, draw


def token_counts(canvas: Canvas, slot_B: Tensor, spec: ModelSpec) -> Tensor:
    """How often each lane's canvas holds each token, given or decoded; 0 of the mask token. int32 [B, vocab]"""
    column_S = torch.arange(canvas.tokens_NS.shape[1], device=slot_B.device)
    length_B = canvas.cursors_NC[:, CURSORS.index("length_B")].index_select(0, slot_B)
    known_BS = canvas.status_NS.index_select(0, slot_B) != int(Status.OPEN)
    known_BS = known_BS & (column_S < length_B[:, None])
    token_BS = torch.where(known_BS, canvas.tokens_NS.index_select(0, slot_B), spec.vocab)
    count_BX = torch.zeros(slot_B.shape[0], spec.vocab + 1, dtype=torch.int32, device=slot_B.device)
    count_BX.scatter_add_(1, token_BS, known_BS.to(torch.int32))
    if spec.mask_id is not None:
        count_BX[:, spec.mask_id].fill_(0)
    return count_BX[:, : spec.vocab]


def statistics(
    step: Step, logits_RLV: Tensor, wanted_RL: Tensor, draw: Draw | None = None, drawn_RL: Tensor | None = None
) -> TokenStats:
    """What the decoder needs to know of the logits. `drawn_RL`: where tokens are drawn; None: wherever any are."""
    recipe, needs = step.recipe, {*step.recipe.decoder.needs}
    precision = recipe.sampling.precision or recipe.decoder.precision
    needs.update(*(ability.needs(step) for ability in step.abilities))
    return token_stats(
        logits_RLV, recipe.model.spec.mask_id, vars(torch)[precision], needs=needs, draw=draw, wanted_RL=wanted_RL,
        columns=needed_vocabulary(step), drawn_RL=drawn_RL,
    )  # fmt: skip
