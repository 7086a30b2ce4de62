"""Decoders with second thoughts: they edit tokens that are decoded, move them, mask them again, or add masks.

* remasking: Hierarchical decoding that masks doubtful tokens again (dInfer, arXiv:2510.08666).
* wino: Revocable decoding: commit many tokens, and mask the doubtful ones again (WINO, arXiv:2507.18578).
* dmax: Fill masks from the left as far as all are sure, and rewrite every decoded token (DMax, as Diffulex has it).
* insert_delete: Fill, edit, insert and delete in the same step (LLaDA2.2; SGLang's JointThresholdInDel, 0.5.23).
* daedal: A canvas that grows: adds masks where the model is unsure and predicts no end (DAEDAL, arXiv:2508.00819).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.kernels.canvas import moved
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Edit, ModelSpec, Proposal, State, TokenStats
from dinfer.core.step.mixins import Adjusts, Edits, Grows, Moves
from dinfer.research.decoders.confidence import run_leaders


@DECODERS.register("remasking")
@dataclass(frozen=True, kw_only=True)
class Remasking(Decoder, Edits):
    """Hierarchical, and masks a decoded token again where the model's best guess falls below remask_threshold.

    Let R be those positions. They count as masks. Then the best position of each run with c > low_threshold and all
    with c > threshold are committed, and more of the best until there are |R| + 1. The rest of R is masked again.
    """

    paper = "dInfer, arXiv:2510.08666"

    threshold: float = option(0.9, "commit every token more probable than this", most=1, per_request=True)
    low_threshold: float = option(
        0.4, "commit the best token of a run if it is more probable than this", most=1, per_request=True
    )
    remask_threshold: float = option(0.4, "reconsider decoded tokens below this", most=1, per_request=True)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        doubtful_RL = (stats.top_RL < view.options["remask_threshold"]) & ~view.masked_RL & ~view.given_RL
        open_RL = view.masked_RL | doubtful_RL
        score_RL = stats.top_RL.masked_fill(~open_RL, -1.0)
        chosen_RL = run_leaders(score_RL, open_RL, first=True) & (score_RL > view.options["low_threshold"])
        chosen_RL |= score_RL > view.bar(view.options["threshold"])
        missing_R1 = doubtful_RL.sum(-1, keepdim=True) + 1 - chosen_RL.sum(-1, keepdim=True)
        rest_RL = score_RL.masked_fill(chosen_RL, -1.0)
        chosen_RL |= (descending_rank(rest_RL) < missing_R1) & open_RL
        chosen_RL &= ~stats.declined_RL
        return Proposal(chosen_RL, edit=Edit(remask_RL=doubtful_RL & ~chosen_RL))


# Published: threshold 0.6 to let tokens in, 0.9 for them to stay; of n masks at most min(max(int(0.7 n), 5), 20) enter
# at a step.
# The published code appends a shadow mask token for every position of the block. A shadow sees all tokens but the one
# at its own position, so a token is judged by the probability that it has without itself. Attention is an interval here
# (`kernels.attention`), which cannot leave one position out. So this decoder judges a token while the model sees it.
# Models tend to repeat what they see: the test finds tokens that the context contradicts, and hardly those that are
# unlikely.
@DECODERS.register("wino")
@dataclass(frozen=True, kw_only=True)
class Wino(Decoder, Edits, Adjusts):
    """Commits c_i > threshold, else the best one; masks decoded tokens with p(token) < keep_threshold again.

    p(token) is the probability of a decoded token at its own position, where the model sees it. The published method
    hides it there. Tokens are masked again only in a step that commits more than one, the least probable first, and
    fewer than it commits. (With the published bound, the number of commits of the step before, a block may never end.)
    """

    paper = "WINO, arXiv:2507.18578"
    precision = "float64"

    threshold: float = option(0.6, "commit masks above this", most=1, per_request=True)
    keep_threshold: float = option(0.9, "mask decoded tokens below this again", most=1, per_request=True)
    share: float = option(0.7, "commit at most this share of the masks", most=1, per_request=True)
    fewest: int = option(5, "but at least this number", least=1, per_request=True)
    most: int = option(20, "and at most this number", least=1, per_request=True)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {"own": torch.zeros((), dtype=torch.float64).expand(block)}

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        prob_RLV = logits_RLV.double().softmax(-1)
        state["own"].copy_(prob_RLV.gather(-1, view.tokens_RL[..., None])[..., 0])
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = stats.top_RL.masked_fill(~view.masked_RL, -1.0)
        masks_R1 = view.masked_RL.sum(-1, keepdim=True)
        limit_R1 = (masks_R1.to(torch.float32) * view.options["share"].to(torch.float32)).to(torch.int64)
        limit_R1 = torch.minimum(torch.maximum(limit_R1, view.options["fewest"]), view.options["most"])
        rank_RL = descending_rank(score_RL)
        enter_RL = ((score_RL > view.bar(view.options["threshold"])) & (rank_RL < limit_R1)) | (
            rank_RL < view.at_least(1)
        )
        enter_RL &= view.masked_RL & ~stats.declined_RL
        doubtful_RL = (state["own"] < view.options["keep_threshold"]) & ~view.masked_RL & ~view.given_RL
        worst_RL = (-state["own"]).masked_fill(~doubtful_RL, float("-inf"))
        leave_RL = doubtful_RL & (descending_rank(worst_RL) < enter_RL.sum(-1, keepdim=True) - 1)
        return Proposal(enter_RL, edit=Edit(remask_RL=leave_RL))


@DECODERS.register("dmax")
@dataclass(frozen=True, kw_only=True)
class DMax(Decoder, Edits):
    """Fills the masks before the first one with c < threshold, at least the first; rewrites every decoded token.

    A decoded token becomes the most likely one, whatever its probability. A block is finished after a step that begins
    without masks, that changes nothing, or that has c >= finish_at at all masks. This is for models trained to revise
    their tokens, with iteration=dmax, which feeds them mixtures of token and mask.
    """

    paper = "DMax, github.com/SJTU-DENG-Lab/Diffulex"

    threshold: float = option(0.5, "least probability of a mask that is filled", most=1, per_request=True)
    finish_at: float = option(0.9, "a step that fills every mask at this probability finishes the block", most=1)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        low_RL = view.masked_RL & (stats.top_RL < view.bar(view.options["threshold"]))
        place_RL = view.masked_RL.cumsum(-1)
        fill_RL = view.masked_RL & ((low_RL.cumsum(-1) == 0) | (place_RL <= view.at_least(1)))
        changed_RL = self.judged(view) & ((stats.token_RL != view.tokens_RL) | stats.declined_RL)
        decoded_RL = ~view.masked_RL & ~view.given_RL
        write_RL = (fill_RL | (changed_RL & decoded_RL)) & ~stats.declined_RL
        busy_R = (fill_RL | changed_RL).any(-1) & ~(self.confidence(stats, view) >= self.finish_at).all(-1)
        return Proposal(write_RL, busy_R=busy_R, edit=Edit(remask_RL=decoded_RL & stats.declined_RL))

    def judged(self, view: BlockView) -> Tensor:
        """Decoded positions at which a change of the token keeps the block from being finished. bool [R, L]"""
        return ~view.masked_RL & ~view.given_RL

    def confidence(self, stats: TokenStats, view: BlockView) -> Tensor:
        """The confidence of each position in deciding whether the block is finished. [R, L]"""
        return torch.where(view.masked_RL, stats.top_RL, 1.0)


LONGEST = 128  # steps of editing; what a block remembers grows with them


# The model predicts two tokens that are no text. DELETE at a position takes it out, and what follows in the block moves
# to the left. SPLIT puts a mask before the token there, and what follows moves to the right.
@DECODERS.register("insert_delete")
@dataclass(frozen=True, kw_only=True)
class InsertDelete(Decoder, Moves, Adjusts):
    """Fills masks where c > threshold, rewrites, deletes and splits tokens where another has c > edit_threshold.

    Masks that the block began with are original. A step fills at least 1 + as many masks as are not original, the best
    first; if no original mask is left, it fills all. If a block returns to an earlier state, it takes another token at
    its least sure change. A block ends when a step changes nothing, or with a cleanup, which fills all masks and moves
    nothing. The cleanup comes after `post_edits` steps that began without original masks, or after block length +
    `post_edits` steps. Tokens that are pushed over the end of the block are lost.
    """

    paper = "LLaDA2.2; SGLang's JointThresholdInDel"

    threshold: float = option(0.7, "fill masks above this", most=1, per_request=True)
    edit_threshold: float = option(
        0.5, "rewrite, delete or split tokens where the prediction is above this", most=1, per_request=True
    )
    post_edits: int = option(
        16, "steps of editing once no original mask is left; 0: none", most=LONGEST, per_request=True
    )

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if None not in (spec.mask_id, spec.delete_id, spec.split_id):
            return None
        return (
            "decoder=insert_delete needs a model that predicts a delete and a split token (LLaDA2.2), and this one's "
            "config names none."
        )

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        steps = block + LONGEST + 2
        return {
            "special": torch.tensor([spec.mask, spec.delete_id or 0, spec.split_id or 0]),
            "step": torch.zeros((), dtype=torch.int64),
            "post": torch.zeros((), dtype=torch.int64),
            "over": torch.zeros((), dtype=torch.bool),
            "original": torch.zeros(block, dtype=torch.bool),
            "seen": torch.tensor(-1, dtype=torch.int32).expand(steps, block),  # the block before each step
            "taken": torch.tensor(-1, dtype=torch.int32).expand(block, steps),  # the token taken at each place and step
        }

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        state["logits"] = logits_RLV  # for `select`, which takes them out again
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        logits_RLV = state.pop("logits")
        masked_RL, budget_R1 = view.masked_RL, view.options["post_edits"]
        mask_R1, delete_R1, split_R1 = state["special"].split(1, -1)
        state["original"] |= masked_RL & (state["step"] == 0)[:, None]
        original_RL = state["original"] & masked_RL
        filled_R1 = ~original_RL.any(-1, keepdim=True)
        state["step"] += 1
        state["post"] += filled_R1[:, 0]
        size_R1 = (view.pos_RL >= 0).sum(-1, keepdim=True)
        late_R1 = torch.where(budget_R1 > 0, state["post"][:, None] >= budget_R1, filled_R1)
        cleanup_R1 = late_R1 | (state["step"][:, None] > size_R1 + budget_R1)

        # An original mask is not filled with the mask token; all others may be.
        own_RL = stats.declined_RL & ~(original_RL & ~cleanup_R1)
        token_RL = torch.where(own_RL, mask_R1, stats.token_RL)
        score_RL = torch.where(own_RL, stats.mask_confidence_RL, stats.confidence_RL)
        fill_RL = self.fills(score_RL, original_RL, view)
        last_R1 = (budget_R1 == 0) & ~filled_R1 & ~(original_RL & ~fill_RL).any(-1, keepdim=True)
        cleanup_R1 = cleanup_R1 | last_R1
        fill_RL = torch.where(cleanup_R1 | filled_R1, masked_RL, fill_RL)
        edit_RL = ~masked_RL & ~view.given_RL & (score_RL > view.options["edit_threshold"])
        chosen_RL = (fill_RL | (edit_RL & (token_RL != view.tokens_RL))) & ~state["over"][:, None]

        moves_RL = (token_RL == delete_R1) | (token_RL == split_R1)
        barred_RL = cleanup_R1 & (moves_RL | (token_RL == mask_R1))
        token_RL = torch.where(barred_RL, textual(logits_RLV, state["special"]), token_RL)
        again_RL = repeats(token_RL, score_RL, chosen_RL, view, state)
        other_R1 = untaken(logits_RLV, again_RL, original_RL, state)
        token_RL = torch.where(again_RL & ~cleanup_R1, other_R1, token_RL)
        remember(token_RL, chosen_RL, view, state)
        state["over"] |= (cleanup_R1 | ~chosen_RL.any(-1, keepdim=True))[:, 0]

        gone_RL, split_RL = chosen_RL & (token_RL == delete_R1), chosen_RL & (token_RL == split_R1)
        source_RL = sources(gone_RL, split_RL, size_R1)
        state["original"].copy_(moved(state["original"], source_RL, False))
        written_RL, blank_RL = chosen_RL & ~gone_RL & ~split_RL, token_RL == mask_R1
        return Proposal(
            moved(written_RL & ~blank_RL, source_RL, False),
            moved(token_RL, source_RL, -1),
            busy_R=~state["over"],
            edit=Edit(moved(written_RL & blank_RL & ~masked_RL, source_RL, False), source_RL=source_RL),
        )

    def fills(self, score_RL: Tensor, original_RL: Tensor, view: BlockView) -> Tensor:
        """The masks to fill while original ones are left. bool [R, L]"""
        need_R1 = 1 + (view.masked_RL & ~original_RL).sum(-1, keepdim=True)
        sure_RL = view.masked_RL & (score_RL > view.bar(view.options["threshold"]))
        best_RL = descending_rank(score_RL.masked_fill(~view.masked_RL, -1.0)) < need_R1
        return torch.where(sure_RL.sum(-1, keepdim=True) >= need_R1, sure_RL, best_RL & view.masked_RL)


def textual(logits_RLV: Tensor, special_R3: Tensor) -> Tensor:
    """The most likely token that is neither the mask nor one that moves others. int64 [R, L]"""
    best_RLC = logits_RLV.topk(4, -1).indices  # one of four is none of the three
    fine_RLC = ~(best_RLC[..., None] == special_R3[:, None, None]).any(-1)
    return best_RLC.gather(-1, fine_RLC.to(torch.int64).argmax(-1, keepdim=True))[..., 0]


def repeats(token_RL: Tensor, score_RL: Tensor, chosen_RL: Tensor, view: BlockView, state: State) -> Tensor:
    """The least sure change of a block that was the same before an earlier step. bool [R, L]"""
    same_R1 = (state["seen"] == view.tokens_RL[:, None]).all(-1).any(-1, keepdim=True)
    change_RL = chosen_RL & (token_RL != view.tokens_RL) & same_R1
    return change_RL & (descending_rank((-score_RL).masked_fill(~change_RL, float("-inf"))) == 0)


def untaken(logits_RLV: Tensor, where_RL: Tensor, original_RL: Tensor, state: State) -> Tensor:
    """The most likely token never taken at the marked place, nor the mask at an original mask. int64 [R, 1]"""
    place_R1 = where_RL.to(torch.int64).argmax(-1, keepdim=True)
    logits_RV = logits_RLV.gather(1, place_R1[..., None].expand(-1, 1, logits_RLV.shape[-1]))[:, 0]
    taken_RH = state["taken"].gather(1, place_R1[..., None].expand(-1, 1, state["taken"].shape[-1]))[:, 0].long()
    bars_RX = torch.cat((taken_RH >= 0, original_RL.gather(1, place_R1)), 1)
    token_RX = torch.cat((taken_RH.clamp_min(0), state["special"][:, :1]), 1)
    limit_RX = torch.where(bars_RX, float("-inf"), float("inf")).to(logits_RV.dtype)
    return logits_RV.scatter_reduce(1, token_RX, limit_RX, "amin").argmax(-1, keepdim=True)


def remember(token_RL: Tensor, chosen_RL: Tensor, view: BlockView, state: State) -> None:
    """Notes the block and what was taken where, if anything was."""
    steps = state["seen"].shape[1]
    step_R11 = (state["step"] - 1).clamp_max(steps - 1)[:, None, None]
    any_R11 = chosen_RL.any(-1)[:, None, None]
    block_R1L = torch.where(any_R11, view.tokens_RL[:, None], -1).to(torch.int32)
    state["seen"].scatter_(1, step_R11.expand(-1, 1, chosen_RL.shape[1]), block_R1L)
    taken_RL1 = torch.where(chosen_RL, token_RL, -1).to(torch.int32)[..., None]
    state["taken"].scatter_(2, step_R11.expand(-1, chosen_RL.shape[1], 1), taken_RL1)


def sources(gone_RL: Tensor, split_RL: Tensor, size_R1: Tensor) -> Tensor:
    """Which place of the block each place takes its token from; -1: a new mask. int64 [R, L]"""
    rows, length = gone_RL.shape
    place_RL = torch.arange(length, device=gone_RL.device).expand(rows, -1)
    width_RL = 1 - gone_RL.to(torch.int64) + split_RL.to(torch.int64)
    to_RL = width_RL.cumsum(-1) - 1  # of a split, the token is the second of two
    lost_RL = gone_RL | (to_RL >= size_R1) | (place_RL >= size_R1)
    source_RX = torch.full_like(place_RL[:, :1], -1).expand(-1, length + 1).clone()
    return source_RX.scatter_(1, to_RL.masked_fill(lost_RL, length), place_RL)[:, :length]


# Published for LLaDA: initial=64, max_new_tokens=2048, window=32, threshold=0.9, low_threshold=0.1, expansion=8,
# eos_threshold=0.5, growth_threshold=0.9, eos_tokens=32.
@DECODERS.register("daedal")
@dataclass(frozen=True, kw_only=True)
class Daedal(Decoder, Grows):
    """Finds a length first, then decodes window after window and adds masks; max_new_tokens is the greatest length.

    Let e be the sum of EOS probabilities over the last `eos_tokens` positions at which EOS is offered, divided by
    eos_tokens. The canvas begins with `initial` masks, and gains `expansion` more while e < eos_threshold. Then
    eos_tokens / 2 EOS tokens are put behind it. From then on each step commits all positions of a window of `window`
    positions with c > threshold, or the best one. If e < growth_threshold, the mask with the least c < low_threshold
    becomes `expansion` masks. Positions beyond the greatest length are dropped. When a window has no masks, the next
    one begins. A position that the mask token wins is the best one only if all are such.
    """

    paper = "DAEDAL, arXiv:2508.00819"

    initial: int = option(64, "masks at first", least=1, per_request=True)
    window: int = option(32, "positions that are decoded before those to their right", least=1, per_request=True)
    threshold: float = option(0.9, "commit every token more probable than this", most=1, per_request=True)
    low_threshold: float = option(
        0.1, "add masks at a position less sure than this; 0: never", most=1, per_request=True
    )
    expansion: int = option(8, "masks in place of one", least=1, per_request=True)
    eos_threshold: float = option(0.5, "the length is found once e reaches this", per_request=True)
    growth_threshold: float = option(0.9, "add no masks once e reaches this", per_request=True)
    eos_tokens: int = option(32, "EOS predictions that e is the mean of", least=1, per_request=True)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is not None:
            return None
        return "decoder=daedal puts masks in, and this model has no mask token."

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {
            "fixed": torch.zeros((), dtype=torch.bool),  # the length has been looked for
            "window": torch.zeros((), dtype=torch.int64),
            "eos": torch.tensor(spec.eos_id),
        }

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        place_L = torch.arange(view.pos_RL.shape[1], device=view.pos_RL.device)
        start_R1, most_R1 = view.pos_RL[:, :1], (view.pos_RL >= 0).sum(-1, keepdim=True)
        length_R1, fixed_R1 = view.length_R[:, None] - start_R1, state["fixed"][:, None].clone()
        there_RL, eos_R1 = place_L < length_R1, state["eos"][:, None]
        end_R1 = self.end_in_sight(stats, there_RL, eos_R1, view)
        more_R1, asked_R1 = view.options["expansion"], view.options["eos_tokens"]

        # Until the length is fixed, nothing is decoded; then, what may come to be behind it is EOS.
        longer_R1 = ~fixed_R1 & (end_R1 < view.options["eos_threshold"]) & (length_R1 < most_R1)
        fixing_R1 = ~fixed_R1 & ~longer_R1
        grown_R1 = length_R1 + torch.where(longer_R1, more_R1, torch.div(asked_R1, 2, rounding_mode="floor"))

        first_R1 = state["window"][:, None]
        window_RL = view.masked_RL & there_RL & (place_L >= first_R1) & (place_L < first_R1 + view.options["window"])
        commit_RL = self.sure(stats, window_RL & fixed_R1, view)
        low_RL = window_RL & ~commit_RL & (stats.top_RL < view.options["low_threshold"]) & fixed_R1
        low_RL = low_RL & (end_R1 < view.options["growth_threshold"]) & (length_R1 < most_R1)
        split_RL = low_RL & (descending_rank((-stats.top_RL).masked_fill(~low_RL, -2.0)) == 0)
        added_R1 = (more_R1 - 1) * split_RL.any(-1, keepdim=True)
        at_R1 = torch.where(split_RL, place_L, len(place_L)).amin(-1, keepdim=True)
        source_RL = torch.where(place_L > at_R1 + added_R1, place_L - added_R1, -1)
        source_RL = torch.where(place_L <= at_R1, place_L, source_RL)

        size_R1 = torch.minimum(torch.where(fixed_R1, length_R1 + added_R1, grown_R1), most_R1)
        commit_RL = moved(commit_RL, source_RL, False)
        left_RL = moved(view.masked_RL, source_RL, True) & ~commit_RL & (place_L >= first_R1) & (place_L < size_R1)
        next_R1 = torch.where(left_RL, place_L, place_L[-1]).amin(-1, keepdim=True) - first_R1
        skipped_R1 = torch.div(next_R1, view.options["window"], rounding_mode="floor").clamp_min(0) * fixed_R1
        state["window"] += (skipped_R1 * view.options["window"])[:, 0]
        state["fixed"] |= fixing_R1[:, 0]
        behind_RL = fixing_R1 & view.masked_RL & (place_L >= length_R1)
        return Proposal(
            torch.where(fixed_R1, commit_RL, behind_RL),
            torch.where(fixed_R1, moved(stats.token_RL, source_RL, -1), eos_R1),
            edit=Edit(source_RL=source_RL, length_R=(start_R1 + size_R1)[:, 0]),
        )

    def end_in_sight(self, stats: TokenStats, there_RL: Tensor, eos_R1: Tensor, view: BlockView) -> Tensor:
        """e, the mean probability of the last EOS predictions. [R, 1]"""
        ends_RL = there_RL & ~view.given_RL & (stats.token_RL == eos_R1) & ~stats.declined_RL
        rank_RL = ends_RL.flip(-1).cumsum(-1).flip(-1)
        asked_R1 = view.options["eos_tokens"]
        last_RL = ends_RL & (rank_RL <= asked_R1)
        return torch.where(last_RL, stats.confidence_RL, 0).sum(-1, keepdim=True) / asked_R1

    def sure(self, stats: TokenStats, window_RL: Tensor, view: BlockView) -> Tensor:
        """The positions of the window to commit: those above the threshold, else the best one."""
        token_RL = window_RL & ~stats.declined_RL
        sure_RL = token_RL & (stats.confidence_RL > view.bar(view.options["threshold"]))
        best_RL = token_RL & (descending_rank(stats.confidence_RL.masked_fill(~token_RL, -1.0)) == 0)
        rest_RL = stats.confidence_RL / (1 - stats.mask_confidence_RL)  # where the mask token is certain, no number
        rest_RL = rest_RL.nan_to_num(0.0, 0.0, 0.0).masked_fill(~window_RL, -1.0)
        last_RL = window_RL & (descending_rank(rest_RL) == 0)
        found_RL = torch.where(token_RL.any(-1, keepdim=True), best_RL, last_RL)
        return torch.where(sure_RL.any(-1, keepdim=True), sure_RL, found_RL)
