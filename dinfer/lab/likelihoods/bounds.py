"""Bounds of the likelihood by masks of many rates: LLaDA's, and what VRPO, ESPO, GDPO and EBPO made of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dinfer.core.registry import option
from dinfer.lab.likelihood import LIKELIHOODS, Likelihood, Mask, Passes, Scored, Text, spread, subsets, uniforms
from dinfer.lab.likelihoods.blocks import Counted


def parts_of(text: Text) -> list[Tensor]:
    """The answer's positions, counted from its begin, by the parts that are bounded each for itself."""
    alone_A = text.carried_A
    block_A = torch.zeros(text.answer, dtype=torch.int64) if text.block_T is None else text.block_T[text.prompt :]
    parts: dict[tuple[int, bool], list[int]] = {}
    for place, key in enumerate(zip(block_A.tolist(), (~alone_A).tolist(), strict=True)):
        parts.setdefault(key, []).append(place)
    return [torch.tensor(part) for part in parts.values()]


@LIKELIHOODS.register("elbo")
@dataclass(frozen=True, kw_only=True)
class Elbo(Likelihood):
    """L / k times the sum over k masked of L positions, k uniform in 1..L; a bound of each block if block-causal.

    One sample where it is exact: each block has one position.
    """

    paper = "LLaDA, arXiv:2502.09992, eq. 14; BD3-LM, arXiv:2503.09573"

    samples: int = option(128, "forwards of each answer, their counts of masks spread evenly", least=1)
    guidance: float = option(0.0, "of a second forward whose prompt is masked, as LLaDA reports for some tasks")

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            parts = parts_of(text)
            count = 1 if all(len(part) == 1 for part in parts) else self.samples
            masked_KA = torch.zeros(count, text.answer, dtype=torch.bool)
            for index, part in enumerate(parts):
                # Not of the text: answers of equal length see the same masks, so differences are less noisy.
                masked_KA[:, part] = spread(len(part), count, (seed, index))
            if text.answer:
                yield from (Mask(text.index, text.masks(masked_KA[k] & ~text.carried_A), k) for k in range(count))

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        scored_A = mask.masked_T[text.prompt :] | text.carried_A
        weight_A = torch.zeros(text.answer, dtype=torch.float64)
        for part in parts_of(text):
            weight_A[part] = scored_A[part] * len(part) / scored_A[part].sum().clamp_min(1).double()
        return weight_A


@LIKELIHOODS.register("vrpo")
@dataclass(frozen=True, kw_only=True)
class Vrpo(Elbo):
    """As elbo, of pairs of answers, the preferred one first; compared to a reference it is a DPO loss."""

    paper = "LLaDA 1.5, arXiv:2505.19223"

    samples: int = option(8, "forwards of each answer, their counts of masks spread evenly", least=1)
    beta: float = option(0.2, "of the preference loss")

    def compare(self, passes: Passes, scored: Scored, other: Scored) -> Tensor:
        lead_N = scored.sequence - other.sequence
        if len(lead_N) % 2:
            raise ValueError(f"likelihood=vrpo compares pairs, preferred answer first: {len(lead_N)} answers are odd")
        return -F.logsigmoid(self.beta * (lead_N[0::2] - lead_N[1::2]))


@LIKELIHOODS.register("espo")
@dataclass(frozen=True, kw_only=True)
class Espo(Likelihood):
    """(L + 1) / x times the sum over x masked positions, x uniform in 0..L; coupled: the mean of it and its complement.

    Compared, it is the ratio of the policies for a token: exp of the difference by L.
    """

    paper = "ESPO, ML-GSAI/ESPO"
    attention = "full"

    samples: int = option(2, "masks of each answer, their counts spread evenly", least=1)
    coupled: bool = option(True, "a second forward masks what the first one leaves")

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            start = uniforms(1, seed, text.index, -1)
            share_K = (start + torch.arange(self.samples) / self.samples) % 1
            masked_KA = subsets(text.answer, (share_K * (text.answer + 1)).long(), (seed, text.index))
            for k in range(self.samples):
                yield Mask(text.index, text.masks(masked_KA[k]), k)
                if self.coupled:
                    yield Mask(text.index, text.masks(~masked_KA[k]), k)

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        masked_A = mask.masked_T[text.prompt :].double()
        return masked_A * (text.answer + 1) / masked_A.sum().clamp_min(1) / (2 if self.coupled else 1)

    def compare(self, passes: Passes, scored: Scored, other: Scored) -> Tensor:
        length_N = (passes.length_N - passes.prompt_N).to(scored.sequence.device)
        return ((other.sequence - scored.sequence) / length_N.clamp_min(1)).exp()


@LIKELIHOODS.register("gdpo")
@dataclass(frozen=True, kw_only=True)
class Gdpo(Likelihood):
    """The bound's integral over rates t by Gauss and Legendre: w / t times the sum at masks of rate t, over all nodes.

    Rates are no longer drawn, masks are.
    """

    paper = "GDPO, arXiv:2510.08554"
    attention = "full"

    nodes: int = option(2, "rates of the quadrature on (0, 1), a forward for each", least=1, most=16)
    samples: int = option(1, "masks of each rate", least=1)

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        for text in texts:
            for k in range(self.samples):
                for node, (rate, weight) in enumerate(zip(*(part.tolist() for part in gauss(self.nodes)), strict=True)):
                    masked_A = uniforms(text.answer, seed, text.index, k, node) < rate
                    yield Mask(text.index, text.masks(masked_A), k, weight / rate)


def gauss(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss and Legendre on (0, 1) (Golub and Welsch 1969). float64 [nodes] twice"""
    k = torch.arange(1, nodes, dtype=torch.float64)
    beside = k / (4 * k * k - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return (values + 1) / 2, vectors[0].square()


@LIKELIHOODS.register("ebpo")
@dataclass(frozen=True, kw_only=True)
class Ebpo(Counted):
    """Each block masked at a rate of its own behind clean ones: size / m times the sum over its m masked positions.

    m is 1 to the size of the block, spread evenly over all blocks of a call.
    """

    paper = "LLaDA2.1, sections 3.2, eq. 4, 5; as in DARE, yjyddq/DARE"

    samples: int = option(1, "forwards of each answer", least=1)

    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        sizes = [text.block_T[text.prompt :].unique_consecutive(return_counts=True)[1] for text in texts
                 if text.block_T is not None]  # fmt: skip
        count = sum(map(len, sizes))
        for k in range(self.samples):
            share = (uniforms(1, seed, k, -1) + uniforms(count, seed, k, -2).argsort() / max(count, 1)) % 1
            shares = share.split([len(size) for size in sizes])
            for text, size, own in zip(texts, sizes, shares, strict=True):
                most = torch.minimum((own * size).long() + 1, size).tolist()
                parts = [
                    subsets(length, torch.tensor([m]), (seed, text.index, k, index))[0]
                    for index, (length, m) in enumerate(zip(size.tolist(), most, strict=True))
                ]
                if parts:
                    yield Mask(text.index, text.masks(torch.cat(parts)), k)

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        assert text.block_T is not None
        masked_A = mask.masked_T[text.prompt :].double()
        _, part_A, size = text.block_T[text.prompt :].unique_consecutive(return_inverse=True, return_counts=True)
        masks = torch.zeros(len(size), dtype=torch.float64).index_add(0, part_A, masked_A)
        return masked_A * (size / masks.clamp_min(1))[part_A]
