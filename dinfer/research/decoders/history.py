"""Decoders that weigh confidence by what they saw before, or by the place and the token.

* klass: A token is committed once its distribution has stopped to move (KLASS, arXiv:2511.05664).
* credit: A token that is predicted again and again earns credit, added to its logit (arXiv:2510.06133).
* calibrated: Confidence calibrated by the place (certainty prior of d2Cache) and by the token (PC-Sampler).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dinfer.core.decoders.threshold import confident
from dinfer.core.kernels.selection import descending_rank
from dinfer.core.registry import DECODERS, option
from dinfer.core.step.contracts import BlockView, Decoder, Large, ModelSpec, Proposal, State, TokenStats
from dinfer.core.step.mixins import Adjusts
from dinfer.research.abilities.following import Weighs
from dinfer.research.kernels.blocks import density

TINY = 1e-12  # added before the logarithm, as published


# Published code: conf_threshold=0.9, kl_threshold=0.01, kl_history_length=2, and, where no position qualifies, the
# quota of LLaDA's fixed schedule; here `least`, which is that quota for as many steps as tokens.
@DECODERS.register("klass")
@dataclass(frozen=True, kw_only=True)
class Klass(Decoder, Adjusts):
    """Commits c_i > threshold where KL(p_i || p_i a step before) < kl_threshold in each of the last `history` steps.

    If no position qualifies, the `least` most confident are committed. Only steps of the block count: the reference,
    which also counts steps of earlier blocks, may commit one step sooner. Each request keeps a float32 per position of
    the block and vocabulary entry.
    """

    paper = "KLASS, arXiv:2511.05664"

    threshold: float = option(0.9, "least probability of a stable token", most=1, per_request=True)
    kl_threshold: float = option(0.01, "KL divergence, in nats, below which a step is stable", per_request=True)
    history: int = option(2, "stable steps in a row that a commit needs", least=1, per_request=True)
    least: int = option(1, "tokens to commit where none is stable", least=1, per_request=True)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {
            "before": Large(torch.zeros(()).expand(block, spec.vocab)),
            "stable": torch.zeros((), dtype=torch.int64).expand(block),
        }

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        now_RLV = logits_RLV.to(torch.promote_types(logits_RLV.dtype, torch.float32)).softmax(-1)
        kl_RL = (now_RLV * ((now_RLV + TINY).log() - (state["before"].read() + TINY).log())).sum(-1)
        calm_RL = (kl_RL < view.options["kl_threshold"]) & (view.step_R > 0)[:, None]  # a first step is never stable
        state["before"].write(now_RLV.float())
        state["stable"].copy_((state["stable"] + 1) * calm_RL)
        return logits_RLV

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        sure_RL = (stats.top_RL > view.bar(view.options["threshold"])) & view.masked_RL
        ready_RL = sure_RL & (state["stable"] >= view.options["history"])
        least_R1 = view.at_least(view.options["least"])
        best_RL = descending_rank(stats.top_RL.masked_fill(~view.masked_RL, -1.0)) < least_R1
        chosen_RL = torch.where(ready_RL.any(-1, keepdim=True), ready_RL, best_RL & view.masked_RL)
        return Proposal(chosen_RL & ~stats.declined_RL)


@DECODERS.register("credit")
@dataclass(frozen=True, kw_only=True)
class Credit(Decoder, Adjusts):
    """The threshold rule on l + alpha * log(1 + C), where C[i, v] gathers the credit of token v at position i.

    At each step of a block C decays by `decay`, and the most likely token v of each masked position gains p(v)^gamma.
    It helps where predictions settle long before their probability is high.
    """

    paper = "CreditDecoding, arXiv:2510.06133"

    threshold: float = option(0.9, "least probability of a commit, credit included", most=1, per_request=True)
    alpha: float = option(0.7, "weight of the credit in the logits", most=1e3, per_request=True)
    gamma: float = option(0.2, "power of the probability that is gained", per_request=True)
    decay: float = option(0.8, "of the credit, per step", most=1, per_request=True)

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {
            "token": torch.zeros((), dtype=torch.int64).expand(block, block),
            "credit": torch.zeros(()).expand(block, block),
        }

    def adjust(self, logits_RLV: Tensor, view: BlockView, state: State) -> Tensor:
        token_RLC, credit_RLC = state["token"], state["credit"]  # C: tokens that are remembered
        given = {name: value[..., None].float() for name, value in view.options.items()}
        logits_RLV = logits_RLV.to(torch.promote_types(logits_RLV.dtype, torch.float32))
        confidence_RL, token_RL = logits_RLV.softmax(-1).max(-1)
        gain_RL1 = confidence_RL[..., None].float().pow(given["gamma"]) * view.masked_RL[..., None]
        credit_RLC.mul_(given["decay"])
        same_RLC = (token_RLC == token_RL[..., None]) & (credit_RLC > 0)
        known_RL1 = same_RLC.any(-1, keepdim=True)
        # A new token takes the place of the one with the least credit: one without any, as long as there is one.
        place_RL1 = torch.where(known_RL1, same_RLC.to(torch.int64).argmax(-1, True), credit_RLC.argmin(-1, True))
        old_RL1 = torch.where(known_RL1, credit_RLC.gather(2, place_RL1), 0)
        credit_RLC.scatter_(2, place_RL1, old_RL1 + gain_RL1)
        token_RLC.scatter_(2, place_RL1, token_RL[..., None])
        return logits_RLV.scatter_add(2, token_RLC, (given["alpha"] * credit_RLC.log1p()).to(logits_RLV.dtype))

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        return Proposal(confident(stats, view.masked_RL, view.bar(view.options["threshold"]), least=view.at_least(1)))


SELDOM = 1e-10  # added before the logarithm, as published


# PC-Sampler is as the repository of d2Cache has it, which leaves its weight by position out and takes the certainty
# prior in its place.
@DECODERS.register("calibrated")
@dataclass(frozen=True, kw_only=True)
class Calibrated(Decoder, Weighs):
    """Commits s_i >= threshold, and in any case the `least` best, where s_i is a calibrated confidence.

    With `sigma` above 0, s_i = c_i * d_i, where d_i is the share of decoded positions around i, weighted by a Gaussian
    of that standard deviation. Positions before the block count as decoded, and those to its right do not. With
    `frequencies`, c_i = min(-p_i ln f(token), clip): a frequent token needs a higher probability p_i than a rare one.
    """

    paper = "d2Cache, arXiv:2509.23094; PC-Sampler, arXiv:2508.13021"

    threshold: float = option(0.9, "least calibrated confidence of a commit", per_request=True)
    least: int = option(1, "commit at least so many tokens a step", least=1, per_request=True)
    sigma: float = option(10.0, "reach of the certainty prior, in positions; 0: no such prior", most=256)
    frequencies: str | None = option(
        None,
        'JSON file {"total": tokens of a corpus, "counts": {"token id": times it occurs}}; null: not calibrated by it',
    )
    clip: float = option(10.0, "with frequencies: the largest c_i", per_request=True)
    score: Literal["low_confidence", "margin"] = option(
        "low_confidence", "what is calibrated: the probability, or the lead over the second token"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frequencies is not None and self.score == "margin":
            raise ValueError("decoder.frequencies calibrate a probability: use decoder.score=low_confidence with them")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        self.fresh_state(spec, 1)  # a file that cannot be used is an error before any work
        return None

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {} if self.frequencies is None else {"surprise": surprise(Path(self.frequencies), spec.vocab)}

    def weighed(self, top_RL: Tensor, token_RL: Tensor, options: Mapping[str, Tensor], state: State) -> Tensor:
        if self.frequencies is None:
            return top_RL
        return torch.minimum(top_RL * state["surprise"].gather(1, token_RL), options["clip"])

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = self.weighed(stats.surest(self.score), stats.token_RL, view.options, state)
        if self.sigma:
            score_RL = score_RL * density(~view.masked_RL, view.pos_RL, view.prompt_R, view.length_R, self.sigma)
        score_RL = score_RL.masked_fill(~view.masked_RL, -1.0)
        chosen_RL = (score_RL >= view.bar(view.options["threshold"])) | (
            descending_rank(score_RL) < view.at_least(view.options["least"])
        )
        return Proposal(chosen_RL & view.masked_RL & ~stats.declined_RL)


def surprise(path: Path, vocab: int) -> Tensor:
    """-ln of the frequency of each token; one that is not listed counts as seen once. float32 [V]

    Raises ValueError for a file that is not of the form the option `frequencies` asks for.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        total = float(table["total"])
        times = {int(token): float(count) for token, count in table["counts"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"decoder.frequencies={path} cannot be read: {error!r}. "
            'It must be a JSON file such as {"total": 10000, "counts": {"13": 250, "198": 900}}'
        ) from error
    if not total > 0 or not all(0 <= token < vocab and 0 <= count <= total for token, count in times.items()):
        raise ValueError(
            f"decoder.frequencies={path} must have a total above 0, token ids below {vocab}, and counts up to the total"
        )
    count_V = torch.ones(vocab, dtype=torch.float64)
    count_V[torch.tensor([*times], dtype=torch.int64)] = torch.tensor([*times.values()], dtype=torch.float64)
    return -(count_V / total + SELDOM).log().float()
