"""Introspective strided decoding: one causal forward verifies drafts and makes the next ones (I-DLM)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.kernels.dispatch import triton, use_triton
from dinfer.core.kernels.random import uniform
from dinfer.core.refusals import Refusal
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Large, ModelSpec, Proposal, State, TokenStats
from dinfer.families.abilities.drafting import Confirms
from dinfer.families.abilities.two_modes import Seeds


@DECODERS.register("isd")
@dataclass(frozen=True, kw_only=True)
class ISD(Decoder, Confirms):
    """Commits the drafts that the model confirms from the left, and one token more.

    A step feeds the last token, `stride` - 1 drafts and as many masks. Row i confirms or corrects draft i; the row of
    the last draft gives one token more, and the masks' rows the next drafts; after a correction there are none for a
    step. With rejected=branches there are: few rows verify the likeliest paths of a tree of drafts, each in a lane with
    masks behind. With accept=drawn a draft is accepted if it is the token that the sampling draws there: the tokens
    have the distribution of decoding one by one, at temperature 0 they are the same.

    The other rules are the published variants, and lossy. "ratio" accepts by p / q, the chances of the draft now and
    when it was made, and draws the correction from max(p - q, 0), both without top_k and top_p. Since drafts are the
    most likely tokens and no draws from q, that is not the model's distribution. It keeps q, a float32 per position and
    vocabulary entry.
    """

    paper = "I-DLM, github.com/thuEcstasy/I-DLM"
    refuses = ("repetition_penalty", "frequency_penalty", "presence_penalty", "eos_last")  # drafts are not counted yet

    stride: int = option(4, "N, the tokens of a step at most; needs iteration.block of 2N - 1", least=2)
    accept: Literal["drawn", "ratio", "top", "sure", "all"] = option(
        "drawn", "a draft if it is what is drawn, by p / q, among the `top` most likely, with p >= `sure`, or always"
    )
    top: tuple[int, ...] = option((5,), "with accept=top: for each draft; the last holds for further ones")
    sure: float = option(0.5, "with accept=sure: least probability", most=1)
    alpha: float = option(1.0, "with accept=ratio: what q is multiplied with")
    rejected: Literal["cold", "branches"] = option(
        "cold", "drafts after a correction: none for a step, or those of a tree"
    )
    branches: int = option(15, "with rejected=branches: most paths", least=1)
    verified: int = option(0, "verify so many drafts of a step, and accept the others unseen; 0: all")
    correct: bool = option(False, "show the most likely token in place of an accepted draft, whose keys stay")

    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal("{decoder} drafts by masks of the pass that verifies, and {iteration} has passes of both kinds.",
                decoder=Confirms, iteration=Seeds),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "top", tuple(self.top))
        if not self.top or not all(type(count) is int and count >= 1 for count in self.top):
            raise ValueError(f"decoder.top={list(self.top)} must be numbers of tokens, 1 or more each")
        if self.rejected == "branches" and self.accept != "drawn":
            raise ValueError(
                f"decoder.rejected=branches compares paths with what is drawn, and decoder.accept={self.accept} does "
                "not: use cold"
            )

    @property
    def versions(self) -> int:
        return self.branches if self.rejected == "branches" else 0

    @property
    def looks(self) -> int | None:
        return None if self.versions or self.accept != "drawn" else self.stride

    @property
    def needs(self) -> tuple[str, ...]:
        return ("best",)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.causal_block == spec.shift == 1 and spec.mask_id is not None:
            return None
        return "decoder=isd verifies drafts in a causal model whose logits predict the next token."

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        state: State = {"draft": torch.full((block,), -1)}
        if self.accept != "drawn":
            state["right"] = torch.zeros(block, dtype=torch.bool)
        if self.versions:
            state["paths"] = torch.full((self.versions, self.stride - 1), -1)
        if self.accept == "ratio":
            state |= {"instead": torch.zeros(block, dtype=torch.int64)}
            state |= {"chance": Large(torch.zeros(()).expand(block, spec.vocab))}
        return state

    def confirm(self, logits_RLV: Tensor, view: BlockView, state: State, heat_R1: Tensor) -> None:
        if self.accept == "drawn":
            return
        draft_RL1 = state["draft"].clamp_min(0)[..., None]
        place_L = torch.arange(draft_RL1.shape[1], device=draft_RL1.device)
        right_RL = torch.ones_like(view.masked_RL)
        if self.accept == "top":
            most_L = torch.full_like(place_L, self.top[-1])
            for place, count in enumerate(self.top[:-1]):
                most_L = torch.where(place_L == place, count, most_L)
            right_RL = (logits_RLV > logits_RLV.gather(-1, draft_RL1)).sum(-1) < most_L
        elif self.accept in ("sure", "ratio"):
            chance_RLV = tempered(logits_RLV, heat_R1)
            own_RL = chance_RLV.gather(-1, draft_RL1)[..., 0]
            right_RL = own_RL >= self.sure
        if self.accept == "ratio":
            right_RL = self.by_ratio(chance_RLV, own_RL, view, state)
        state["right"].copy_(right_RL | self.unseen(place_L))
        if self.accept == "ratio":  # where a draft is made, its row is read again as q of the next step
            count_R1 = self.accepted(state["right"], state["draft"])
            from_RL = (place_L + count_R1 + 1).clamp_max(len(place_L) - 1)
            state["chance"].write(chance_RLV.gather(1, from_RL[..., None].expand_as(chance_RLV)))

    def unseen(self, place_L: Tensor) -> Tensor:
        """Which drafts are accepted without a look. bool [L]"""
        return (place_L >= self.verified) & (self.verified > 0)

    def accepted(self, right_RL: Tensor, draft_RL: Tensor) -> Tensor:
        """How many drafts are accepted. int64 [R, 1]"""
        return (right_RL & (draft_RL >= 0)).cumprod(-1).sum(-1, keepdim=True)

    def by_ratio(self, chance_RLV: Tensor, own_RL: Tensor, view: BlockView, state: State) -> Tensor:
        """Which drafts p / (alpha q) accepts; draws what corrects each of the others. bool [R, L]"""
        draft_RL, before_RLV = state["draft"], state["chance"].read()
        q_RL = before_RLV.gather(-1, draft_RL.clamp_min(0)[..., None])[..., 0]
        ratio_RL = own_RL / (self.alpha * q_RL).clamp_min(1e-12)
        rest_RLV = (chance_RLV - before_RLV).clamp_min(0).double()
        share_RLV = rest_RLV.cumsum(-1) / rest_RLV.sum(-1, keepdim=True).clamp_min(1e-30)
        drawn_RL = (share_RLV <= self.draws(view, 1)[..., None]).sum(-1).clamp_max(share_RLV.shape[-1] - 1)
        state["instead"].copy_(drawn_RL)
        return self.draws(view, 0) < ratio_RL

    def draws(self, view: BlockView, which: int) -> Tensor:
        """Uniform numbers for acceptance (0) and corrections (1). [R, L]"""
        stream = torch.full_like(view.seed_R, -2 - which)[:, None]  # no token: draws of tokens use other numbers
        return uniform(view.seed_R[:, None], view.pos_RL, view.forward_R[:, None], stream)

    def confirmed(self, stats: TokenStats, state: State) -> Tensor:
        """How many drafts become tokens. int64 [R, 1]"""
        draft_RL = state["draft"]
        if self.accept != "drawn":
            return self.accepted(state["right"], draft_RL)
        right_RL = draft_RL == stats.token_RL
        if self.verified:
            right_RL = right_RL | self.unseen(torch.arange(draft_RL.shape[1], device=draft_RL.device))
        return self.accepted(right_RL, draft_RL)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        draft_RL, token_RL, best_RL = state["draft"], stats.token_RL, stats.stat("best")
        if (self.accept, self.verified, self.correct) == ("drawn", 0, False) and use_triton(draft_RL, "commit"):
            made_R = None if self.versions else view.forward_R
            given = draft_RL, token_RL, best_RL, view.masked_RL, made_R, self.stride - 1
            commit_RL, shown_RL, state["draft"] = triton("drafts").decide(*given)
            return Proposal(commit_RL, shown_RL)
        there_RL, place_L = draft_RL >= 0, torch.arange(draft_RL.shape[1], device=draft_RL.device)
        count_R1 = self.confirmed(stats, state)
        whole_R1 = count_R1 == there_RL.sum(-1, keepdim=True)
        from_RL = place_L + count_R1 + 1  # the drafts of the next region are what the masks behind say
        drafts_RL = whole_R1 & (place_L < self.stride - 1) & (from_RL < place_L.shape[0])
        if not self.versions:
            drafts_RL = drafts_RL & (view.forward_R > 0)[:, None]  # the first step makes a token alone, as published
        next_RL = best_RL.gather(1, from_RL.clamp_max(place_L.shape[0] - 1))
        instead_RL = token_RL
        if self.accept == "ratio":
            instead_RL = torch.where(~whole_R1 & there_RL, state["instead"], token_RL)
        elif self.accept in ("top", "sure"):
            instead_RL = torch.where(there_RL, best_RL, token_RL)
        shown_RL = best_RL if self.correct else draft_RL
        shown_RL = torch.where(place_L < count_R1, shown_RL, instead_RL)
        state["draft"] = torch.where(drafts_RL, next_RL, -1)
        return Proposal(view.masked_RL & (place_L <= count_R1), shown_RL)

    def redraft(self, logits_RLV: Tensor, first_R: Tensor, state: State) -> None:
        paths = triton("drafts").paths if use_triton(logits_RLV, "token_stats") else likeliest
        few = min(WIDEST, logits_RLV.shape[-1])
        state["paths"] = paths(logits_RLV, first_R, state["draft"], self.versions, self.stride - 1, few)

    def within(self, find: Callable[[int, int, int], Any], state: State) -> None:
        if self.accept != "drawn" or (found := find(max(self.versions, 1), self.stride - 1, WIDEST)) is None:
            return
        draft_RL, bound_R1 = state["draft"], found.bound_B[:, None]
        # Behind a draft that was refused, what the masks said holds no longer, but what a form leaves alone does.
        own_RD = torch.where(draft_RL[:, :1] >= 0, found.draft_BD, found.sure_BD)
        padded_RL = F.pad(own_RD, (0, draft_RL.shape[1] - own_RD.shape[1]), value=-1)
        if self.versions:
            none_R11 = (draft_RL[:, :1] < 0)[..., None]
            paths_RCD = found.path_BPD.masked_fill(none_R11, -1)
            paths_RCD[:, 0] = torch.where(none_R11[..., 0], found.sure_BD, paths_RCD[:, 0])
            state["paths"] = torch.where(bound_R1[..., None], paths_RCD, state["paths"])
        state["draft"] = torch.where(bound_R1, padded_RL, draft_RL)


WIDEST = 8  # tokens at the first position of a tree; half of them at each further one


def likeliest(logits_RLV: Tensor, first_R: Tensor, draft_RL: Tensor, versions: int, depth: int, few: int) -> Tensor:
    """The likeliest paths of a tree of drafts. int64 [R, versions, depth]; -1: none

    `first_R`: where its drafts begin. `few`: tokens at the first position. None where a row has no drafts at all.
    """
    rows, block, _ = logits_RLV.shape
    place_RD = first_R[:, None] + torch.arange(depth, device=first_R.device)
    there_RD = (place_RD < block) & (draft_RL[:, :1] >= 0)
    row_R1 = torch.arange(rows, device=first_R.device)[:, None]
    own_RDV = logits_RLV[row_R1, place_RD.clamp_max(block - 1)]
    worth_RDK, token_RDK = own_RDV.float().log_softmax(-1).topk(few)
    worth_RP, path_RPD = paths_of(worth_RDK.masked_fill(~there_RD[..., None], -torch.inf), token_RDK)
    count = min(versions, worth_RP.shape[1])
    worth_RC, best_RC = worth_RP.topk(count)
    paths_RCD = path_RPD.gather(1, best_RC[..., None].expand(-1, -1, depth))
    paths_RCD = paths_RCD.masked_fill(worth_RC[..., None] == -torch.inf, -1)
    return F.pad(paths_RCD, (0, 0, 0, versions - count), value=-1)


def paths_of(worth_RDK: Tensor, token_RDK: Tensor) -> tuple[Tensor, Tensor]:
    """The chances of all paths of a tree, as logarithms, and their drafts; -1: none. [R, P], int64 [R, P, D]

    Of a path's positions each is drafted without a look at the tokens before.
    """
    (rows, depth, widest), worths, paths = worth_RDK.shape, list[Tensor](), list[Tensor]()
    worth_RP, path_RPD = worth_RDK.new_zeros(rows, 1), token_RDK.new_full((rows, 1, depth), -1)
    for place in range(depth):
        wide = max(widest >> place, 1)
        worth_RP = (worth_RP[..., None] + worth_RDK[:, None, place, :wide]).flatten(1)
        path_RPD = path_RPD.repeat_interleave(wide, 1)
        path_RPD[..., place] = token_RDK[:, place, :wide].repeat(1, path_RPD.shape[1] // wide)
        worths.append(worth_RP)
        paths.append(path_RPD)
    return torch.cat(worths, 1), torch.cat(paths, 1)


def tempered(logits_RLV: Tensor, heat_R1: Tensor) -> Tensor:
    """softmax(logits / temperature), of the logits as they are where that is 0. float32"""
    heat_R1 = torch.where(heat_R1 > 0, heat_R1, 1.0)
    return (logits_RLV.float() / heat_R1[..., None].float()).softmax(-1)
