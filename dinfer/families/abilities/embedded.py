"""Prompt positions whose embeddings a request brings, such as those of an image: what is fed there, what they see.

Shape suffixes: N slots, S positions (the last is scratch), X given embeddings, D hidden, A requests, B lanes, W window.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dinfer.core.abilities.registry import ABILITIES
from dinfer.core.kernels.canvas import padded, uploaded
from dinfer.core.memory import Seen
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.step.ability import Ask, ByExtra, Canvas, Entry, Extra, Forward, Parts, Request, Step, Window
from dinfer.core.step.cursors import Phase, RowCursors
from dinfer.families.abilities.encoder import Encoder
from dinfer.families.images import Seeing

MOST = 2240  # given embeddings of a request, if its model does not say: eight images of 280
Mutual = Literal["causal", "local", "all"]
"""What a position of a stretch sees of the stretch behind itself: nothing; all of it in layers with a window, which
still cuts what is far behind (Gemma 4); all of it in every layer, and nothing of it cut (transformers' `generate` of
DiffusionGemma)."""


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Embeddings [X, D], equal to others if their digests are."""

    rows_XD: Tensor
    digest: bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Embeddings) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __len__(self) -> int:
        return self.rows_XD.shape[0]

    def plain(self) -> list[str]:
        """What another process reads with `of_plain`."""
        raw = self.rows_XD.contiguous().view(torch.uint8).numpy().tobytes()
        kind, shape = str(self.rows_XD.dtype).removeprefix("torch."), " ".join(map(str, self.rows_XD.shape))
        return [kind, shape, base64.b64encode(raw).decode(), self.digest.hex()]

    @classmethod
    def of_plain(cls, told: Sequence[str]) -> Self:
        kind, shape, raw, digest = told
        flat_X = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=vars(torch)[kind])
        return cls(flat_X.view(*map(int, shape.split())), bytes.fromhex(digest))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring positions of a prompt whose embeddings are given."""

    first: int
    embeddings: Embeddings
    mutual: Mutual = "causal"

    @property
    def end(self) -> int:
        return self.first + len(self.embeddings)

    @property
    def whole(self) -> int:
        """How many positions one pass must compute: those that see each other."""
        return 1 if self.mutual == "causal" else len(self.embeddings)


@dataclass(frozen=True, slots=True)
class Embedded(Ask):
    """Asks to be fed these embeddings in place of those of the prompt's tokens. The stretches do not overlap."""

    stretches: tuple[Stretch, ...]

    @property
    def keyed(self) -> tuple[tuple[int, bytes], ...]:
        digests = [hashlib.sha256(one.embeddings.digest + one.mutual.encode()).digest() for one in self.stretches]
        return tuple((one.first, digest) for one, digest in zip(self.stretches, digests, strict=True))

    def __len__(self) -> int:
        return sum(len(one.embeddings) for one in self.stretches)


@dataclass(frozen=True, slots=True)
class Given(Extra):
    """Some row is fed embeddings that it brought."""

    prefills: ClassVar[bool] = True


@dataclass(slots=True)
class Tables:
    """What all slots bring. Without eyes it takes memory from the first request on that brings something."""

    canvas: Canvas
    like_D: Tensor  # of the dtype and width of embeddings
    most: int  # given embeddings of a slot
    x_XD: Tensor | None = None  # `most` rows for each slot
    row_NS: Tensor | None = None  # int32, which of these rows is fed at a position; -1: none
    seen_3NS: Tensor | None = None  # int32: least begin and end in layers with a window, end in the others
    piece_NS: Tensor | None = None  # int32, where a prefill ends that would end before this position

    def take(self) -> None:
        """Takes the memory."""
        slots, length = self.canvas.tokens_NS.shape
        self.x_XD = self.like_D.new_empty(slots * self.most, self.like_D.shape[0])
        self.row_NS = torch.full((slots, length), -1, dtype=torch.int32, device=self.like_D.device)
        self.seen_3NS = torch.zeros(3, slots, length, dtype=torch.int32, device=self.like_D.device)
        self.piece_NS = torch.full_like(self.row_NS, length)

    def write(self, slot_A: Tensor, asked: Sequence[tuple[int, Embedded | None]]) -> None:
        """`asked`: slots, and what their requests bring. Host side."""
        device, length = slot_A.device, self.canvas.tokens_NS.shape[1]
        if self.x_XD is None:
            if not any(ask for _, ask in asked):
                return
            self.take()
        assert self.x_XD is not None
        row_AS, piece_AS = (torch.full((len(asked), length), fill, dtype=torch.int32) for fill in (-1, length))
        seen_3AS = torch.tensor([length, 0, 0], dtype=torch.int32)[:, None, None].repeat(1, len(asked), length)
        for at, (slot, ask) in enumerate(asked):
            next_row = slot * self.most
            for one in () if ask is None else ask.stretches:
                here, rows_XD = slice(one.first, one.end), one.embeddings.rows_XD
                row_AS[at, here] = torch.arange(next_row, next_row + len(rows_XD), dtype=torch.int32)
                self.x_XD[next_row : next_row + len(rows_XD)] = uploaded(rows_XD.to(self.x_XD.dtype), device)
                next_row += len(rows_XD)
                if one.mutual != "causal":
                    piece_AS[at, one.first + 1 : one.end] = one.first
                    seen_3AS[1, at, here] = one.end
                if one.mutual == "all":
                    seen_3AS[0, at, here], seen_3AS[2, at, here] = one.first, one.end
        assert self.row_NS is not None and self.seen_3NS is not None and self.piece_NS is not None
        self.row_NS.index_copy_(0, slot_A, uploaded(row_AS, device))
        self.seen_3NS.index_copy_(1, slot_A, uploaded(seen_3AS, device))
        self.piece_NS.index_copy_(0, slot_A, uploaded(piece_AS, device))


def most_of(model: Any) -> int:
    """How many given embeddings a request of a model may bring."""
    return int(model.eyes.most) if sees(model) else MOST


def sees(model: Any) -> bool:
    """Whether it has a vision tower."""
    return isinstance(model, Seeing) and not isinstance(model.eyes, str)


def _exceeds(parts: Mapping[str, Any]) -> bool:
    """Whether a stretch that is computed in one piece is longer than a step."""
    return any(one.whole > parts["runtime"].positions for one in parts["request"].ask(Embedded).stretches)


@ABILITIES.register("embedded", before=("encoder",), after=("feeding",))
class Embeds(ByExtra[Given]):
    """Steps in which some rows are fed embeddings that they brought."""

    kind = Given
    answers = (Embedded,)
    refusals = (
        Refusal("An image is computed in one piece, and has more positions than a step: raise runtime.positions.",
                recipe=Trait(_exceeds, "an image of more positions than `runtime.positions`"),
                request=Trait(lambda request: request.ask(Embedded) is not None, "a request")),
    )  # fmt: skip

    @classmethod
    def refusal(cls, recipe: Parts, request: Request) -> str | None:
        ask, most = request.ask(Embedded), most_of(recipe.model)
        token = recipe.model.placeholder if isinstance(recipe.model, Seeing) else None
        if token is not None and request.prompt.count(token) != (0 if ask is None else len(ask)):
            inside = {at for one in (ask.stretches if ask else ()) for at in range(one.first, one.end)}
            at = next((at for at, one in enumerate(request.prompt) if one == token and at not in inside), request.start)
            return f"the image token {token} stands at position {at} without an image: send messages with one"
        if ask is None:
            return None
        if len(ask) > most:
            return f"a request's images take {len(ask)} positions, and {most} is the most: send fewer or smaller ones"
        spec, end = recipe.model.spec, 0
        for one in ask.stretches:
            if one.first < end or one.end > request.start or one.embeddings.rows_XD.shape[1:] != (spec.hidden,):
                return (
                    f"embeddings {[*one.embeddings.rows_XD.shape]} at position {one.first} must be [X, {spec.hidden}], "
                    f"behind those before them and within the prompt of {request.start} positions"
                )
            end = one.end
        if not spec.encoder and any(one.mutual != "causal" for one in ask.stretches):
            return "positions with given embeddings see each other only in a model with an encoder: use mutual='causal'"
        return None

    @classmethod
    def alloc(cls, recipe: Parts, canvas: Canvas, block: int, extras: Sequence[Extra]) -> Tables:
        spec, model = recipe.model.spec, recipe.model
        like_D = torch.empty(spec.hidden, dtype=model.dtype, device=canvas.tokens_NS.device)
        kept = Tables(canvas, like_D, min(most_of(model), canvas.capacity))
        if sees(model):  # no picture may find that others took the memory
            kept.take()
        return kept

    @classmethod
    def admit(cls, kept: Tables, slot_A: Tensor, entries: Sequence[Entry]) -> None:
        kept.write(slot_A, [(entry.slot, entry.request.ask(Embedded)) for entry in entries])

    def window(self, step: Step, window: Window) -> Window:
        """A prefill that would end within a stretch ends before it. It goes on there in the next step."""
        stop_B, kept = window.final_until_B, step.kept(Embeds)
        if step.shape.phase != Phase.PREFILL or stop_B is None:
            return window
        first_B = kept.piece_NS[step.lanes.slot_B, padded(stop_B, kept.canvas.capacity)].long()
        stop_B = torch.where(first_B > window.pos_BW[:, 0], torch.minimum(stop_B, first_B), stop_B)
        pos_BW, place_BW = (
            torch.where(window.pos_BW < stop_B[:, None], at_BW, -1) for at_BW in (window.pos_BW, window.place_BW)
        )
        return replace(window, pos_BW=pos_BW, place_BW=place_BW, final_until_B=stop_B)

    def seen(self, step: Step, lanes: RowCursors, place_BW: Tensor) -> Seen | None:
        sees = Encoder().seen(step, lanes, place_BW) if step.recipe.model.spec.encoder else None
        if sees is None:
            return None
        kept = step.kept(Embeds)
        near_begin_BW, near_end_BW, end_BW = kept.seen_3NS[
            :, lanes.slot_B[:, None], padded(place_BW, kept.canvas.capacity)
        ].long()
        (begin_BW, stop_BW), local_BW = sees.interval_BW, sees.local_BW
        if local_BW is not None:
            local_BW = torch.minimum(local_BW[0], near_begin_BW), torch.maximum(local_BW[1], near_end_BW)
        return sees._replace(interval_BW=(begin_BW, torch.maximum(stop_BW, end_BW)), local_BW=local_BW)

    def feed(self, step: Step, run: Forward) -> None:
        kept, pos_BW = step.kept(Embeds), run.attend.pos_BW
        slot_B = step.lanes.slot_B.repeat(pos_BW.shape[0] // step.lanes.slot_B.shape[0])
        row_BW = kept.row_NS[slot_B[:, None], padded(pos_BW, kept.canvas.capacity)]
        x_BWD = run.model.embed(run.tokens_BW) if run.x_BWD is None else run.x_BWD
        run.x_BWD = torch.where((row_BW >= 0)[..., None], kept.x_XD[row_BW.clamp_min(0)], x_BWD)
