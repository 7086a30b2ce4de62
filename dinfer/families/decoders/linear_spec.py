"""Drafts of a bidirectional pass, verified by a causal one of the same weights (Nemotron-Labs-Diffusion)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats
from dinfer.families.abilities.drafting import Confirms
from dinfer.families.abilities.two_modes import Seeds
from dinfer.families.nemotron import TwoModeSpec


@DECODERS.register("linear_spec")
@dataclass(frozen=True, kw_only=True)
class LinearSpec(Decoder, Confirms):
    """Drafts the masks of the region, then commits the drafts that the causal pass confirms, and one token more.

    A draft is confirmed if it is the token that the sampling draws in the causal pass; the first other one is replaced
    by that token. So the tokens have the distribution of decoding one by one, at temperature 0 they are the same. With
    `threshold` 0 one pass drafts all masks. Above 0 each pass drafts those with such a probability, or else the best.
    """

    paper = "NVIDIA Nemotron-Labs-Diffusion"
    refuses = ("repetition_penalty", "frequency_penalty", "presence_penalty", "eos_last")  # drafts are not counted yet

    threshold: float = option(0.0, "draft masks of at least this probability in a pass; 0: all in one", most=1)

    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal("{decoder} verifies drafts behind the last token, where the active region must begin.",
                decoder=Confirms, iteration=Trait(lambda iteration: not isinstance(iteration, Seeds))),
    )  # fmt: skip

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if isinstance(spec, TwoModeSpec):
            return None
        return "decoder=linear_spec needs a model that reads blocks of masks bidirectionally and all else causally."

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        none = torch.zeros((), dtype=torch.bool)
        return {"draft": torch.full((), -1, dtype=torch.int64).expand(block), "drafting": none}

    def confirm(self, logits_RLV: Tensor, view: BlockView, state: State, heat_R1: Tensor) -> None:
        return None

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        draft_RL, token_RL, drafting_R1 = state["draft"], stats.token_RL, state["drafting"][:, None]
        place_L = torch.arange(draft_RL.shape[1], device=draft_RL.device)
        size_R1 = (view.pos_RL >= 0).sum(-1, keepdim=True)
        missing_RL = (draft_RL < 0) & (place_L < size_R1 - 1)
        score_RL = stats.confidence_RL.masked_fill(~missing_RL, -1.0)
        best_RL = place_L == score_RL.argmax(-1, keepdim=True)
        drafted_RL = missing_RL & (best_RL | (score_RL >= self.threshold))
        count_R1 = ((draft_RL == token_RL) & (place_L < size_R1 - 1)).cumprod(-1).sum(-1, keepdim=True)
        draft_RL = torch.where(drafting_R1, torch.where(drafted_RL, token_RL, draft_RL), -1)
        state["draft"].copy_(draft_RL)
        commit_RL = view.masked_RL & ~drafting_R1 & (place_L <= count_R1)
        return Proposal(commit_RL, waits_R=drafting_R1[:, 0])
