"""Monte-Carlo bounds of log p(answer | prompt): what a masked diffusion model says of a text it did not write.

A masked model has no left-to-right chain rule. Averaged over which k of L positions are masked, k uniform in 1..L,

    log p(a | c)  >=  -E [ L / k  *  sum over masked i of  -log p(a_i | the rest of a, c) ]

with equality for L = 1 (LLaDA, arXiv:2502.09992, eq. 14; `get_log_likelihood.py` of its repository). A block-causal
model allows a tighter bound of the same kind: the chain rule over its blocks, each of them bounded like this with all
earlier blocks clean (BD3-LM, arXiv:2503.09573). One pass holds the clean text and a noised copy of every block.

`dinfer.lab.likelihood` has the estimator, `elbo`, and all others. Here is what evaluations and servers ask of it. No
cache and no decoder take part.

Shape suffixes: L positions still masked, W positions of a pass, B passes of a batch, N scored positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.core.kernels.attention import attention_interval, interval_mask
from dinfer.core.kernels.dispatch import on_own_device
from dinfer.core.layers.transformer import WholeAttend
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.model import Model
from dinfer.core.step.told import TokenLogprob
from dinfer.lab.likelihood import Samples, combine, family_blocks, logps, passes, readings

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and answer


@dataclass(frozen=True, slots=True)
class Bound:
    """What was found for one answer."""

    value: float  # nats; a lower bound of the log-likelihood, up to `error`
    error: float  # standard error of `value`; 0 where it is exact
    samples: int
    exact: bool  # no bound but the log-likelihood itself: each block has one position to score


def estimator(spec: ModelSpec) -> str:
    """Which bound holds for a model: the name that results are labelled with."""
    return "masked" if spec.causal_block is None else f"masked per block of {spec.causal_block}"


@torch.inference_mode()
@on_own_device
def log_likelihoods(
    model: Model, pairs: Sequence[Pair], *, samples: int = 128, seed: int = 0, guidance: float = 0.0, batch: int = 16
) -> list[Bound]:
    """A bound for each pair of prompt and answer ids. An empty answer has log-likelihood 0.

    `guidance`: classifier-free, as LLaDA reports for some tasks; `batch`: passes at a time. Raises ValueError.
    """
    for name, value, least in (("samples", samples, 1), ("batch", batch, 1), ("guidance", guidance, 0)):
        if not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")
    _check(model.spec, pairs)
    found = [Bound(0.0, 0.0, 1, True)] * len(pairs)
    # Texts of one length side by side, or padding would be computed too.
    order = [i for i in sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i]))) if pairs[i][1]]
    size = max(batch // samples, 1)
    for group in (order[begin : begin + size] for begin in range(0, len(order), size)):
        given = Samples.of([pairs[i] for i in group])
        drawn = passes("elbo", model.spec, given, seed=seed, samples=samples, guidance=guidance)
        most = batch * max(sum(map(len, pairs[i])) for i in group)
        scored = combine(drawn, logps(model, drawn, batch_tokens=most, grad=False))
        for n, i in enumerate(group):
            exact = bool((drawn.weight_X[drawn.sequence_M[drawn.pass_X] == n] == 1).all() and drawn.samples_N[n] == 1)
            exact = exact and int((drawn.sequence_M[drawn.pass_X] == n).sum()) == len(pairs[i][1])
            found[i] = Bound(
                value=float(scored.sequence[n]), error=0.0 if exact else float(scored.error[n]),
                samples=int(drawn.samples_N[n]), exact=exact,
            )  # fmt: skip
    return found


@torch.inference_mode()
@on_own_device
def greedy(model: Model, pairs: Sequence[Pair], *, batch: int = 16) -> list[bool]:
    """Whether a model writes the answer when it fills as many masks as that has tokens.

    It commits one token a step, the most confident first, and block after block if it is block-causal. A text is left
    at its first wrong token. That is LLaDA's `suffix_greedy_prediction`. Raises ValueError.
    """
    spec, found = model.spec, [True] * len(pairs)
    _check(spec, pairs)
    waiting = [i for i, (_, answer) in enumerate(pairs) if answer]
    live: list[tuple[int, list[int]]] = []  # which pair, and its positions that are still masked
    while waiting or live:
        while waiting and len(live) < batch:
            i = waiting.pop(0)
            live.append((i, list(range(len(pairs[i][0]), sum(map(len, pairs[i]))))))
        texts = [[*pairs[i][0], *pairs[i][1]] for i, _ in live]
        width = max(map(len, texts))
        tokens_BW = torch.full((len(live), width), spec.mask)
        length_B = torch.tensor([len(text) for text in texts])
        for b, ((_, masked), text) in enumerate(zip(live, texts, strict=True)):
            tokens_BW[b, : len(text)] = torch.tensor(text)
            tokens_BW[b, masked] = spec.mask
        pos_BW = torch.arange(width).expand_as(tokens_BW)
        prompt_B = torch.tensor([spec.origin(len(pairs[i][0])) for i, _ in live]) if spec.prompt_block else None
        interval = attention_interval(pos_BW, torch.zeros_like(length_B), length_B, spec.causal_block, prompt_B)
        attend = WholeAttend(pos_BW.to(model.device), interval_mask(*interval, width).to(model.device))
        h_BWD = model.forward(model.embed(tokens_BW.to(model.device)), attend)
        after = []
        for b, (i, masked) in enumerate(live):
            block_L = family_blocks(spec, torch.tensor(masked), len(pairs[i][0]))
            first = [place for place, block in zip(masked, block_L.tolist(), strict=True) if block == block_L[0]]
            logits_LV = model.logits(h_BWD[b : b + 1, torch.tensor(first, device=model.device) - spec.shift])[0]
            sure_LV = logits_LV.double().softmax(-1)
            mask_L = sure_LV[:, spec.mask].clone()
            sure_LV[:, spec.mask] = -1
            top_L, token_L = sure_LV.max(-1)
            best = int((top_L - 2.0 * (mask_L > top_L)).argmax())  # where the mask wins comes last
            found[i] = int(token_L[best]) == texts[b][first[best]]
            masked.remove(first[best])
            if found[i] and masked:
                after.append((i, masked))
        live = after
    return found


@torch.inference_mode()
@on_own_device
def left_to_right(model: Model, ids: Sequence[int], *, top: int, batch: int = 16) -> list[tuple[TokenLogprob, int]]:
    """The log-probability and the rank (1: the likeliest) of each token but the first, given those before it and masks
    in place of the others.

    The bound averages over orders in which tokens are revealed, and this is one of them, the only one whose sums hold
    for every division into prompt and answer. It takes a pass for each token. Raises ValueError.
    """
    drawn = passes("left_to_right", model.spec, Samples.of([(ids[:1], ids[1:])]))

    def alternatives(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, ...]:
        logprob_NV = logits_NV.log_softmax(-1)
        best, own_N1 = logprob_NV.topk(min(top, logprob_NV.shape[1])), logprob_NV.gather(1, target_N[:, None])
        return own_N1[:, 0], (logprob_NV > own_N1).sum(1) + 1, best.indices, best.values

    found: dict[int, tuple[TokenLogprob, int]] = {}
    for index_N, read in readings(model, drawn, alternatives, batch * len(ids)):
        places = drawn.place_X[index_N].tolist()
        for place, own, rank, *tops in zip(places, *(one.tolist() for one in read), strict=True):
            found[place] = TokenLogprob(own, [*zip(*tops, strict=True)]), rank
    return [found[place] for place in sorted(found)]


def _check(spec: ModelSpec, pairs: Sequence[Pair]) -> None:
    """Raises ValueError for a model or for texts that have no bound."""
    passes("elbo", spec, Samples.of(pairs), masks=[])
