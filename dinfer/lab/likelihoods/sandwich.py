"""SPG: a lower bound for good answers, an upper one for bad answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dinfer.core.registry import option
from dinfer.lab.likelihood import LIKELIHOODS, Likelihood, Mask, Passes, Scored, Text, subsets, uniforms
from dinfer.lab.likelihoods.random_masks import mean


@LIKELIHOODS.register("spg")
@dataclass(frozen=True, kw_only=True)
class Spg(Likelihood):
    """The mean of a masked token as a lower, a power mean of its probability as an upper bound; the sign decides.

    `lower` is a mean for each masked token, as in the published code, and so no bound of the whole answer. `combine`
    takes `positive`, bool [N], for answers of which it is to be the lower bound; without it, of all.
    """

    paper = "SPG, arXiv:2510.09541"
    attention = "full"

    forward: Literal["all", "random", "block_all", "block_random"] = option("block_random", "what a forward masks")
    samples: int = option(2, "forwards of each answer", least=1)
    low: float = option(0.0, "random forms: least share that is masked", most=1)
    high: float = option(1.0, "random forms: greatest share", most=1)
    block: int = option(32, "block forms: positions of a block, counted from the prompt's end", least=1)
    prompt_rate: float = option(0.0, "share masked of the prompt, in block forms of all before the block", most=1)
    estimate: Literal["elbo", "eubo", "mix"] = option("mix", "of bad answers: lower, upper bound, or both")
    beta: float = option(1.5, "exponent of the upper bound", least=1e-6)
    mix: float = option(0.5, "share of the upper bound in mix", most=1)

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            for k in range(self.samples):
                if text.answer:
                    yield Mask(text.index, self.masked(text, (seed, text.index, k)), k)

    def masked(self, text: Text, key: tuple[int, ...]) -> Tensor:
        """What one forward masks. bool [T]"""
        place_A, ended_A = torch.arange(text.answer), text.ended_A
        real, begin, end = int(ended_A.sum()), 0, text.answer
        if self.forward.startswith("block"):
            begin = int(uniforms(1, *key, -1) * -(-real // self.block)) * self.block
            end = begin + self.block
        masked_A = place_A >= begin
        if self.forward.endswith("random"):
            size = min(end, real) - begin
            least, most = max(1, int(size * self.low)), max(1, int(size * self.high))
            count = least + int(uniforms(1, *key, -2) * (most - least + 1))
            masked_A[begin : begin + size] = subsets(size, torch.tensor([count]), key)[0]
        masked_T = text.masks(masked_A)
        before = text.prompt + begin
        masked_T[:before] |= uniforms(before, *key, -3) < self.prompt_rate
        return masked_T

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        return mean(mask.masked_T[text.prompt :] & text.ended_A)

    def counted(self, text: Text) -> Tensor:
        return text.ended_A

    def combine(self, passes: Passes, logp_X: Tensor, **known: Any) -> Scored:
        positive = known.pop("positive", None)
        scored = super().combine(passes, logp_X, **known)
        lower_N = scored.sequence
        upper_N = self.upper(passes, logp_X)
        negative_N = {"elbo": lower_N, "eubo": upper_N, "mix": self.mix * upper_N + (1 - self.mix) * lower_N}[
            self.estimate
        ]
        positive_N = torch.as_tensor(True if positive is None else positive, device=lower_N.device).expand(len(lower_N))
        more = {"lower": lower_N, "upper": upper_N, "negative": negative_N}
        return replace(scored, sequence=torch.where(positive_N, lower_N, negative_N), more=more)

    def upper(self, passes: Passes, logp_X: Tensor) -> Tensor:
        """The mean over positions of log(a) / beta, a the mean over forwards of p ** beta n / m where masked. [N]"""
        device, (n, a) = logp_X.device, passes.counted_NA.shape
        n_X = passes.sequence_M[passes.pass_X]
        flat_X = n_X * a + passes.place_X - passes.prompt_N[n_X]
        # The weight of a scored position is 1 / m, m masked positions of its forward.
        share_X = passes.weight_X * (passes.counted_NA.sum(1) / passes.samples_N.clamp_min(1))[n_X]
        log_X = (self.beta * logp_X.double() + share_X.log().to(device)).clamp_min(-1e4)
        top = torch.full((n * a,), -torch.inf, dtype=torch.float64, device=device)
        top = top.scatter_reduce(0, flat_X.to(device), log_X.detach(), "amax")
        there = top.isfinite()
        scaled_X = (log_X - top[flat_X.to(device)]).exp()
        sums = torch.zeros_like(top).index_add(0, flat_X.to(device), scaled_X)
        value = torch.where(there, sums.clamp_min(torch.finfo(torch.float64).tiny).log() + top.nan_to_num(neginf=0), 0)
        there_NA = there.view(n, a)
        return (value.view(n, a) / self.beta).sum(1) / there_NA.sum(1).clamp_min(1)
