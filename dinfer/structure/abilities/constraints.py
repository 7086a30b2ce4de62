"""Answers that are in a language, whatever the model says: regular expressions, JSON Schema, choices, tools.

Before the statistics, tokens that no accepted answer has at a position get the logit -inf, so no decoder changes. What
the decoder chose is then projected: each commit must leave the row an accepted answer. Last, positions with one allowed
token get it, and so does all that lies behind the end of the answer. So every answer that ends is in its language.

Shape suffixes: N slots, S canvas length, B lanes, R rows of blocks, L block length, X positions of a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import rows_of, uploaded
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import (
    Ask,
    BlockView,
    ByExtra,
    Canvas,
    Decision,
    Entry,
    Extra,
    Parts,
    Request,
    RowCursors,
    Step,
    StepShape,
)
from dinfer.core.step.commits import with_progress
from dinfer.core.step.cursors import Status
from dinfer.core.step.mixins import Drafts, Moves
from dinfer.core.step.shape import HostFacts, Sampled, power_of_2
from dinfer.core.step.told import Forced
from dinfer.structure.kernels.languages import Sweeps, placed
from dinfer.structure.kernels.lines import Languages, Line, Settled
from dinfer.structure.language import NOWHERE, Language

LEAST = 64  # the number of states, and of pairs and edges, is rounded up to a power of two from here on
TAKEN_BACK = 16  # steps of a block in which edits may take back text, or keep masks from being filled
FREE = -1  # the language of a row without one
ENTRIES = 2**18  # of the table of next states, for each slot; a large schema has as many
ROOM = 2**23  # entries of it at least, so that a language of `MOST_STATES` and `MOST_CLASSES` fits alone
PAIRS, EDGES = 16, 4  # so many entries of it are there for each pair of neighbouring states, and for each edge
MOST_STATES, MOST_CLASSES = 8192, 1024


class Kind(IntEnum):
    """What a position of the canvas is to a language."""

    OUTSIDE = 0  # the state stays as it is
    INSIDE = 1
    BETWEEN = 2  # of two gaps: the token of no class, see `dinfer.structure.language`


@dataclass(frozen=True, slots=True)
class Active:
    """The active positions alone: what lies behind them is open."""

    view: BlockView
    lanes: int

    @property
    def pos_BX(self) -> Tensor:
        return self.by_lane(self.view.pos_RL)

    def by_lane(self, value_RL: Tensor) -> Tensor:
        return value_RL.view(self.lanes, -1)

    def by_row(self, value_BX: Tensor, behind: Tensor | int = 0) -> Tensor:
        """[B, X, ...] to [R, L, ...]. `behind`: what positions get that the line does not have."""
        return value_BX.view(*self.view.pos_RL.shape, *value_BX.shape[2:])


@dataclass(frozen=True, slots=True)
class Whole(Active):
    """The first `span` positions of the canvas: text may stand behind the active ones."""

    span: int

    @property
    def pos_BX(self) -> Tensor:
        return torch.arange(self.span, device=self.view.pos_RL.device).expand(self.lanes, -1)

    def by_lane(self, value_RL: Tensor) -> Tensor:
        """0 at positions that are not active."""
        place_BX = self.view.pos_RL.view(self.lanes, -1)
        line_BX = value_RL.new_zeros(self.lanes, self.span + 1)
        place_BX = torch.where(place_BX < 0, self.span, place_BX.clamp_max(self.span))  # rows without a language
        return line_BX.scatter(1, place_BX, value_RL.view(self.lanes, -1))[:, : self.span]

    def by_row(self, value_BX: Tensor, behind: Tensor | int = 0) -> Tensor:
        place_RL, lane_B1 = self.view.pos_RL, torch.arange(self.lanes, device=value_BX.device)[:, None]
        value_RL = value_BX[rows_of(lane_B1, len(place_RL) // self.lanes), place_RL.clamp(0, self.span - 1)]
        there_RL = (place_RL >= 0) & (place_RL < self.span)
        behind = behind if isinstance(behind, Tensor) else value_RL.new_full((), behind)
        return torch.where(there_RL.view(*there_RL.shape, *(1,) * (value_RL.dim() - 2)), value_RL, behind)

    def stands(
        self, canvas: Canvas, kind_NS: Tensor, slot_B: Tensor, between_B1: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, which positions are open, and which are outside. `between_B1`: what stands between two gaps."""
        kind_BX, token_BX, status_BX = (
            rows[:, : self.span].index_select(0, slot_B) for rows in (kind_NS, canvas.tokens_NS, canvas.status_NS)
        )
        token_BX = torch.where(kind_BX == Kind.BETWEEN, between_B1, token_BX)
        return token_BX, (status_BX == Status.OPEN) & (kind_BX == Kind.INSIDE), kind_BX == Kind.OUTSIDE


@dataclass(frozen=True, slots=True)
class InLanguage(Ask):
    """Asks for text at the positions `[first, until)` that is in a language."""

    language: Language
    first: int
    until: int
    kinds: tuple[int, ...] | None = None  # of `Kind`, of each position; None: nothing is given behind an open position


@dataclass(frozen=True, slots=True)
class ForcedCount:
    """Tells how many tokens of an answer its language left no choice of."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Constrained(Extra):
    """Some row is in a language of at most so many states, pairs of neighbouring states, and edges."""

    whole_logits = True
    states: int
    pairs: int
    edges: int
    length: int = 0  # at least the positions of the longest of these rows; 0: not needed
    behind: bool = False  # in some of them text stands behind a gap, so the whole canvas counts

    def joined(self, other: Constrained) -> Constrained:
        return Constrained(*map(max, astuple(self), astuple(other)))

    def bucket(self, shape: StepShape, vocab: int) -> Constrained:
        states, pairs, edges, length = (max(power_of_2(count), LEAST) for count in astuple(self)[:4])
        return Constrained(states, pairs, edges, length if self.behind else 0, self.behind)

    def holds(self, asked: Constrained | None, own: StepShape, shape: StepShape) -> bool:
        return asked is not None and self.joined(asked) == self and self.behind == asked.behind


@dataclass(slots=True)
class LanguageRows:
    """The languages that slots are in, and where each slot is in its own. Languages that are equal lie there once."""

    row_N6: Tensor  # int64, see `dinfer.structure.kernels.languages.placed`
    vocab: int
    kind_NS: Tensor  # int8, of `Kind`
    languages: Languages | None = None  # allocated for the first step that some row is in one
    placed: dict[int, tuple[Language, int]] = field(default_factory=dict)  # by the language's identity: its place
    used: list[int] = field(default_factory=list)  # how many slots are in the language of each place
    of_slot: dict[int, int] = field(default_factory=dict)  # the place of each slot that is in a language

    def admit(self, slot: int, brought: InLanguage | None) -> list[int]:
        """Takes a request into a slot; returns its row. Host side."""
        if (place := self.of_slot.pop(slot, None)) is not None:
            self.used[place] -= 1
        if brought is None:
            return [FREE, 0, 0, 0, 0, 0]
        place = self.of_slot[slot] = self._place(brought.language)
        self.used[place] += 1
        return [place, 0, brought.first, brought.until, 0, 0]

    def _place(self, language: Language) -> int:
        """Where a language is, after it was written there if need be."""
        if (known := self.placed.get(id(language))) is not None:
            return known[1]
        self.tables()
        place = self.used.index(0)
        self.placed = {key: (other, at) for key, (other, at) in self.placed.items() if at != place}
        try:
            self._write(place, language)
        except MemoryError:  # languages that no slot is in any more make room
            self.placed = {key: (other, at) for key, (other, at) in self.placed.items() if self.used[at]}
            self._write(place, language)
        self.placed[id(language)] = language, place
        return place

    def tables(self) -> Languages:
        """Room for the languages of all slots."""
        if self.languages is not None:
            return self.languages
        slots, device = self.row_N6.shape[0], self.row_N6.device

        def zeros(*size: int, dtype: torch.dtype = torch.int16) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)  # whoever plans memory runs steps of no language

        self.used = [0] * slots
        entries = max(slots * ENTRIES, ROOM)
        self.languages = Languages(
            class_GV=zeros(slots, self.vocab),
            size_GC=zeros(slots, MOST_CLASSES, dtype=torch.int32),
            token_GC=zeros(slots, MOST_CLASSES, dtype=torch.int32),
            distance_GQ=zeros(slots, MOST_STATES, dtype=torch.int32),
            next_Y=zeros(entries),
            pair_Y2=zeros(entries // PAIRS, 2),
            edge_Y3=zeros(entries // EDGES, 3),
            meta_G8=zeros(slots, 8, dtype=torch.int64),
        )
        return self.languages

    def _write(self, place: int, language: Language) -> None:
        """Writes a language's arrays to its place, and to a free stretch of those that all languages share."""
        held = self.tables()
        classes, vocab = language.classes, len(language.class_V)
        class_V = np.zeros(self.vocab, np.int16)
        class_V[:vocab] = language.class_V
        stretches = (
            (held.next_Y, language.next_QC.T.reshape(-1)), (held.pair_Y2, language.pairs_P2),
            (held.edge_Y3, language.edges_E3),
        )  # fmt: skip
        meta = [language.states, classes]
        for column, (flat, values) in zip((2, 3, 5), stretches, strict=True):
            first = self._stretch(column, len(values), len(flat))
            flat[first : first + len(values)] = tensor(values, flat)
            meta += [first] if column == 2 else [first, len(values)]
        for rows, values in (
            (held.class_GV, class_V), (held.distance_GQ, language.distance_Q), (held.token_GC, language.token_C),
            (held.size_GC, np.bincount(language.class_V, minlength=classes)),
        ):  # fmt: skip
            rows[place, : len(values)] = tensor(values, rows)
        held.size_GC[place, classes:] = 0
        held.meta_G8[place] = tensor(np.array([*meta, 0]), held.meta_G8)

    def _stretch(self, column: int, length: int, room: int) -> int:
        """The first free entry before a stretch of `length`, in the array that column `column` of `meta_G8` names."""
        held = self.tables()
        meta = held.meta_G8.tolist()
        taken = sorted(
            (meta[place][column], meta[place][0] * meta[place][1] if column == 2 else meta[place][column + 1])
            for _, place in self.placed.values()
        )
        first = 0
        for begin, count in taken:
            if begin - first >= length:
                return first
            first = max(first, begin + count)
        if room - first < length:
            raise MemoryError("the constraints of the requests in flight are too large together: ask again later")
        return first


def _kinds(brought: InLanguage | None, length: int) -> Tensor:
    """Of each position of a request's slot. int8 [S]"""
    kind_S = torch.zeros(length, dtype=torch.int8)
    if brought is not None:
        kind_S[brought.first : brought.until] = Kind.INSIDE
        if brought.kinds is not None:
            kind_S[: len(brought.kinds)] = torch.tensor(brought.kinds)
    return kind_S


def tensor(values: np.ndarray, like: Tensor) -> Tensor:
    return uploaded(torch.from_numpy(np.array(values)).to(like.dtype), like.device)


IN_LANGUAGE = Trait(lambda request: request.ask(InLanguage) is not None, "a constraint", instead="no constraint")


@ABILITIES.register("constraints", after=("branches", "offering", "bias", "reading", "verification", "drafting"))
class Constraints(ByExtra[Constrained]):
    """Steps in which some row is in a language. Rows without one come out as they would without this ability."""

    refusals = (
        Refusal("{decoder} moves tokens or lengthens the canvas, so what it leaves could have no accepted answer.",
                decoder=Moves, request=IN_LANGUAGE),
    )  # fmt: skip

    kind = Constrained
    answers = (InLanguage,)
    whole_logits = True

    @classmethod
    def facts(cls, recipe: Parts) -> HostFacts:
        """A language as large as the place that each slot has for one."""
        most = Constrained(MOST_STATES, ENTRIES // PAIRS, ENTRIES // EDGES)
        return HostFacts(asks=() if isinstance(recipe.decoder, Moves) else (most,))

    @classmethod
    def adds_for(cls, recipe: Parts, request: Request) -> Extra | None:
        if (brought := request.ask(InLanguage)) is None:
            return None
        own = brought.language
        return Constrained(
            own.states, len(own.pairs_P2), len(own.edges_E3), power_of_2(brought.until), brought.kinds is not None
        )

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        if (brought := request.ask(InLanguage)) is None:
            return None
        if brought.kinds is None and (room := brought.until - brought.first) < brought.language.shortest:
            return f"the shortest answer that the constraint allows has {brought.language.shortest} tokens, not {room}"
        if least := recipe.sampling_of(request.options).get("min_tokens", 0):
            return f"sampling.min_tokens={least:g} contradicts the constraint, which says where an answer may end"
        return too_large(brought.language)

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Any:
        slots, device = canvas.tokens_NS.shape[0], canvas.tokens_NS.device
        row_N6 = torch.tensor([FREE, 0, 0, 0, 0, 0], device=device).repeat(slots, 1)
        kind_NS = torch.zeros_like(canvas.status_NS, dtype=torch.int8)
        return LanguageRows(row_N6, recipe.model.spec.vocab, kind_NS)

    @classmethod
    def admit(cls, kept: LanguageRows, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        brought = [entry.request.ask(InLanguage) for entry in entries]
        rows = [kept.admit(entry.slot, own) for entry, own in zip(entries, brought, strict=True)]
        kept.row_N6.index_copy_(0, slot_A, uploaded(torch.tensor(rows), slot_A.device))
        if any(place != FREE for place, *_ in rows):
            kinds = (_kinds(own, kept.kind_NS.shape[1]) for own in brought)
            kept.kind_NS.index_copy_(0, slot_A, uploaded(torch.stack([*kinds]), slot_A.device))

    @classmethod
    def told(cls, kept: LanguageRows, slots: Sequence[int]) -> dict[int, ForcedCount]:
        bound = [slot for slot in slots if slot in kept.of_slot]
        counts = kept.row_N6[bound, 4].tolist() if bound else []
        return {slot: ForcedCount(count) for slot, count in zip(bound, counts, strict=True)}

    # The step.

    def allow(self, step: Step, view: BlockView, logits_RLV: Tensor) -> Tensor:
        sweeps, line, _ = self.line(step, view)
        layout, allowed_BXC = self.layout(step, view), sweeps.allowed(line)
        if verifies_drafts(step.recipe):
            allowed_BXC = behind_drafts(sweeps, line, layout.by_lane(drafts_of(step)), allowed_BXC)
        if view.edits:
            loose_BXC = sweeps.allowed(self._loose(step, view, line, step.lanes))
            allowed_BXC = torch.where(line.open_BX[..., None], allowed_BXC, loose_BXC)
        outside_RL, allowed_RLC = layout.by_row(line.outside_BX, behind=1), layout.by_row(allowed_BXC)
        mask_id, stays_RL = step.recipe.model.spec.mask_id, None
        if mask_id is not None and view.edits:
            # What is decoded a model takes back only if it would do so without the language.
            stays_RL = ~view.masked_RL & (logits_RLV[..., mask_id] < logits_RLV.amax(-1))
        # A model may still rather wait. Where a request has ruled out all that is allowed, such as a stop token with
        # ban_eos, the language decides.
        keep, sampled = -1 if mask_id is None else mask_id, step.shape.extra(Sampled) is not None
        logits_RLV = sweeps.masked(logits_RLV, allowed_RLC, outside_RL, keep, revive=sampled)
        if stays_RL is not None:
            logits_RLV[..., mask_id].masked_fill_(~outside_RL & stays_RL, float("-inf"))
        return logits_RLV

    def proposed(self, step: Step, made: Decision) -> None:
        """The projection of what the decoder chose, and forced commits."""
        view, proposal, stats = made.view, made.proposal, made.stats
        sweeps, line, live_B = self.line(step, view)
        layout, bound_R, taken_BX = self.layout(step, view), rows_of(live_B, step.shape.blocks), None
        token_RL = (
            stats.token_RL
            if proposal.token_RL is None
            else offered_tokens(proposal.token_RL, made, step.recipe.model.spec.mask_id)
        )
        must_R = bound_R if view.must_progress_R is None else bound_R & view.must_progress_R
        writable_RL = ~view.given_RL if view.edits else view.masked_RL
        commit_RL = with_progress(proposal.commit_RL & writable_RL, stats, replace(view, must_progress_R=must_R))
        choice = tuple(layout.by_lane(x_RL) for x_RL in (commit_RL, token_RL, stats.confidence_RL))
        if view.edits:
            found, taken_BX = self._edited(step, made, sweeps, line, choice)
        else:
            found = sweeps.settled(line, *choice)
        made.proposal = replace(
            proposal,
            commit_RL=layout.by_row(found.written_BX, commit_RL),
            token_RL=layout.by_row(found.token_BX, token_RL),
        )
        if taken_BX is not None:
            fixed_RL = layout.by_row(found.only_BX)  # what can be nothing else is not decoded again
            self._take_back(made, layout.by_row(taken_BX), fixed_RL, bound_R)
            self._count(step, made, live_B, taken_BX)
        step.notes[Forced] = layout.by_row(found.text_BX)
        made.view = replace(
            view, must_progress_R=~bound_R if view.must_progress_R is None else view.must_progress_R & ~bound_R
        )

    def _edited(
        self, step: Step, made: Decision, sweeps: Sweeps, line: Line, choice: tuple[Tensor, ...]
    ) -> tuple[Settled, Tensor]:
        """What is written of a choice of a decoder that edits, and what is taken back. bool [B, X]

        Edits go first, and what the decoder would say again; then what else is decoded, then masks.
        """
        commit_BX, token_BX, confidence_BX = choice
        loose = self._loose(step, made.view, line, made.lanes)
        held_BX = loose.open_BX & ~line.open_BX
        said_BX = held_BX & (commit_BX | (token_BX == line.token_BX))
        said_BX = sweeps.admitted(loose, said_BX, token_BX, confidence_BX)
        stays_BX = held_BX & ~said_BX
        rest = replace(line, token_BX=torch.where(said_BX, token_BX, line.token_BX), open_BX=loose.open_BX & ~said_BX)
        rest_BX = torch.where(stays_BX, line.token_BX, token_BX)
        # Once nothing is taken back any more, what is decoded stays, or edits might be in the way of masks for ever.
        wanted_BX = stays_BX | (commit_BX & (line.open_BX | line.outside_BX))
        first_BX = confidence_BX.masked_fill(stays_BX, 2.0)
        found = sweeps.settled(rest, wanted_BX, rest_BX, first_BX)
        taken_BX = rest.open_BX & ~found.written_BX & ~line.open_BX
        other_BX = found.written_BX & ~found.forced_BX & ~held_BX
        written_BX = (commit_BX & (said_BX | other_BX)) | found.forced_BX
        token_BX = torch.where(found.forced_BX, found.token_BX, token_BX)
        return found._replace(written_BX=written_BX, token_BX=token_BX), taken_BX

    def _loose(self, step: Step, view: BlockView, line: Line, lanes: RowCursors) -> Line:
        """The line with what edits may take back open. Edits often come in groups, as where a word moves by a position,
        and each alone would contradict its neighbours."""
        able_B = step.kept(type(self)).row_N6[:, 5].index_select(0, lanes.slot_B) < TAKEN_BACK
        decoded_BX = self.layout(step, view).by_lane(~view.given_RL) & ~line.outside_BX
        return replace(line, open_BX=line.open_BX | (able_B[:, None] & decoded_BX))

    def _take_back(self, made: Decision, taken_RL: Tensor, fixed_RL: Tensor, bound_R: Tensor) -> None:
        """Masks again what contradicts an edit. A row that changes nothing is not busy: it would be refused again."""
        proposal, view, edit = made.proposal, made.view, made.proposal.edit
        remask_RL = taken_RL if edit.remask_RL is None else (edit.remask_RL & ~fixed_RL) | taken_RL
        retry_R = taken_RL.any(-1) if edit.retry_R is None else edit.retry_R | taken_RL.any(-1)
        busy_R = proposal.busy_R
        if busy_R is not None:
            changes_RL = proposal.commit_RL & (view.masked_RL | (proposal.token_RL != view.tokens_RL))
            busy_R = busy_R & ((changes_RL | remask_RL).any(-1) | ~bound_R)
        made.proposal = replace(proposal, edit=replace(edit, remask_RL=remask_RL, retry_R=retry_R), busy_R=busy_R)

    def _count(self, step: Step, made: Decision, live_B: Tensor, taken_BX: Tensor) -> None:
        """Counts the steps that take something back or fill no mask, since edits may go round in circles for ever."""
        masked_RL, by_lane = made.view.masked_RL, (len(live_B), -1)
        filled_B = (made.proposal.commit_RL & masked_RL).view(by_lane).any(-1)
        idle_B = masked_RL.view(by_lane).any(-1) & ~filled_B
        counts_B = live_B & (taken_BX.any(-1) | idle_B)
        step.kept(type(self)).row_N6[:, 5].index_add_(0, made.lanes.slot_B, counts_B.to(torch.int64))

    def fits(self, step: Step, made: Decision) -> Tensor:
        """Those that some answer has beside what is written now."""
        view = replace(made.view, tokens_RL=made.commits.tokens_RL, masked_RL=made.commits.open_RL)
        (sweeps, line, _), layout = self.line(step, view), self.layout(step, view)
        class_BX1 = sweeps.classes_of(layout.by_lane(made.stats.token_RL))[..., None]
        fits_BX = sweeps.allowed(line).gather(2, class_BX1)[..., 0] | line.outside_BX
        return layout.by_row(fits_BX, behind=1)

    def moved(self, step: Step, made: Decision) -> None:
        """The state moves on over the positions that the active region has left."""
        before, after = made.lanes, step.lanes
        (sweeps, line, _), layout = self.line(step, made.view), self.layout(step, made.view)
        token_BX = line.token_BX if self.extra.behind else layout.by_lane(made.commits.tokens_RL)
        sweeps.leave(
            step.kept(type(self)).row_N6, after.slot_B, line, token_BX, layout.pos_BX,
            layout.by_lane(step.notes[Forced]),
            (before.start_B, after.start_B, before.live_B, after.live_B),
        )  # fmt: skip

    def layout(self, step: Step, view: BlockView) -> Active:
        lanes, canvas = step.shape.lanes, step.state.canvas
        return Whole(view, lanes, min(self.extra.length, canvas.capacity)) if self.extra.behind else Active(view, lanes)

    def line(self, step: Step, view: BlockView) -> tuple[Sweeps, Line, Tensor]:
        """The languages of the lanes, their active positions, and which lanes are in a language."""
        sweeps, seen, *found = step.notes.get(Constraints, (None, None))
        if seen is view.tokens_RL:  # the same positions once more
            return sweeps, *found
        rows, layout = step.kept(type(self)), self.layout(step, view)
        place_B, live_B, outside_BX, state_B, room_B = placed(rows.row_N6, step.lanes.slot_B, layout.pos_BX)
        if sweeps is None:  # a step's rows stay in their languages
            sweeps = Sweeps(rows.tables(), place_B, self.extra.states, self.extra.pairs, self.extra.edges)
            step.notes[Constraints] = sweeps, None
        if isinstance(layout, Whole):
            between_B = rows.tables().token_GC[:, NOWHERE].index_select(0, place_B)
            token_BX, open_BX, outside_BX = layout.stands(
                step.state.canvas, rows.kind_NS, step.lanes.slot_B, between_B[:, None]
            )
            none_B = torch.zeros_like(state_B)
            return sweeps, Line(token_BX, open_BX, outside_BX | ~live_B[:, None], none_B, none_B), live_B
        line = Line(layout.by_lane(view.tokens_RL), layout.by_lane(view.masked_RL), outside_BX, state_B, room_B)
        step.notes[Constraints] = sweeps, view.tokens_RL, line, live_B
        return sweeps, line, live_B


def verifies_drafts(recipe: Parts) -> bool:
    """Whether a causal model reads drafts at open positions, and writes what it would write one by one."""
    return isinstance(recipe.decoder, Drafts) and recipe.model.spec.causal_block == recipe.model.spec.shift == 1


def drafts_of(step: Step) -> Tensor:
    """What open positions were fed. int64 [R, L]"""
    lanes, state = step.lanes, step.state
    rows_R = state.block_rows(lanes.slot_B, lanes.block_B, step.shape.blocks)
    return state.decoder.rows["draft"].index_select(0, rows_R)


def behind_drafts(sweeps: Sweeps, line: Line, draft_BX: Tensor, allowed_BXC: Tensor) -> Tensor:
    """What is allowed at each position behind the drafts before it, which a causal model has read. bool [B, X, C]

    Behind drafts that no answer begins with, it is what is allowed without them: such a draft is refused.
    """
    held_BX, place_X = line.open_BX & (draft_BX >= 0), torch.arange(draft_BX.shape[1], device=draft_BX.device)
    for place in range(draft_BX.shape[1] - 1):
        fed_BX = held_BX & (place_X <= place)
        fed = replace(line, token_BX=torch.where(fed_BX, draft_BX, line.token_BX), open_BX=line.open_BX & ~fed_BX)
        own_BXC = sweeps.allowed(fed)
        takes_BX = (place_X > place) & own_BXC.any(-1)
        allowed_BXC = torch.where(takes_BX[..., None], own_BXC, allowed_BXC)
    return allowed_BXC


def too_large(language: Language) -> str | None:
    """Why a language has no room on a device, even alone; None: it has."""
    for what, count, most in (
        ("classes of tokens", language.classes, MOST_CLASSES), ("states", language.states, MOST_STATES),
        ("pairs of states", len(language.pairs_P2), ROOM // PAIRS), ("edges", len(language.edges_E3), ROOM // EDGES),
    ):  # fmt: skip
        if count > most:
            return f"the constraint has {count:,} {what}; at most {most:,} are possible: make it simpler"
    return None


def offered_tokens(token_RL: Tensor, made: Decision, mask_id: int | None) -> Tensor:
    """The tokens, and the most likely allowed ones in place of the mask and of what the logits rule out.

    A decoder may take its tokens of logits that were not yet masked.
    """
    index_RL1 = token_RL.clamp(0, made.adjusted_RLV.shape[-1] - 1)[..., None]
    ruled_out_RL = made.adjusted_RLV.gather(2, index_RL1)[..., 0] == float("-inf")
    if mask_id is not None:
        ruled_out_RL = ruled_out_RL | (token_RL == mask_id)
    return torch.where(ruled_out_RL, made.stats.token_RL, token_RL)
