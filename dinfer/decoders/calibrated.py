"""Confidence calibrated by the place and by the token: certainty prior (d2Cache) and PC-Sampler's token frequencies.

Certainty prior: arXiv:2509.23094. PC-Sampler: arXiv:2508.13021, as the repository of d2Cache has it, which leaves its
weight by position out and takes the certainty prior in its place.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dinfer.kernels.selection import density, descending_rank
from dinfer.recipe.registry import DECODERS, check_range, option
from dinfer.step.contracts import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats

TINY = 1e-10  # added to frequencies before the logarithm, as published


@DECODERS.register("calibrated")
@dataclass(frozen=True, kw_only=True)
class Calibrated(Decoder):
    """Commits s_i >= threshold, and in any case the `least` best, where s_i is a calibrated confidence.

    With `sigma` above 0, s_i = c_i * d_i, where d_i is the share of decoded positions around i, weighted by a Gaussian
    of that standard deviation. Positions before the block count as decoded, and those to its right do not. With
    `frequencies`, c_i = min(-p_i ln f(token), clip): a frequent token needs a higher probability p_i than a rare one.
    """

    paper = "d2Cache, arXiv:2509.23094; PC-Sampler, arXiv:2508.13021"

    threshold: float = option(0.9, "least calibrated confidence of a commit", per_request=True)
    least: int = option(1, "commit at least so many tokens a step", per_request=True)
    sigma: float = option(10.0, "reach of the certainty prior, in positions; 0: no such prior")
    frequencies: str | None = option(
        None,
        'JSON file {"total": tokens of a corpus, "counts": {"token id": times it occurs}}; null: not calibrated by it',
    )
    clip: float = option(10.0, "with frequencies: the largest c_i", per_request=True)
    score: Literal["low_confidence", "margin"] = option(
        "low_confidence", "what is calibrated: the probability, or the lead over the second token"
    )

    def __post_init__(self) -> None:
        check_range("decoder", self, "threshold", "clip", least=0)
        check_range("decoder", self, "least", least=1)
        check_range("decoder", self, "sigma", least=0, most=256)
        if self.frequencies is not None and self.score == "margin":
            raise ValueError("decoder.frequencies calibrate a probability: use decoder.score=low_confidence with them")

    def incompatibility(self, spec: ModelSpec) -> str | None:
        self.fresh_state(spec, 1)  # a file that cannot be used is an error before any work
        return None

    @property
    def needs(self) -> tuple[str, ...]:
        return ("margin",) if self.score == "margin" else ()

    @property
    def refuses(self) -> tuple[str, ...]:
        # `eos_last` takes the confidence of stop tokens as 0, so the score must be the confidence.
        return ("eos_last",) if self.score == "margin" else ()

    def fresh_state(self, spec: ModelSpec, block: int) -> State:
        return {} if self.frequencies is None else {"surprise": surprise(Path(self.frequencies), spec.vocab)}

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = stats.stat("margin") if self.score == "margin" else stats.top_RL
        if self.frequencies is not None:
            score_RL = torch.minimum(score_RL * state["surprise"].gather(1, stats.token_RL), view.options["clip"])
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
    return -(count_V / total + TINY).log().float()
