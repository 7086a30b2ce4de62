"""Monte-Carlo bounds of log p(answer | prompt): what a masked diffusion model says of a text it did not write.

A masked model has no left-to-right chain rule. Averaged over which k of L positions are masked, k uniform in 1..L,

    log p(a | c)  >=  -E [ L / k  *  sum over masked i of  -log p(a_i | the rest of a, c) ]

with equality for L = 1 (LLaDA, arXiv:2502.09992, eq. 14; `get_log_likelihood.py` of its repository). A block-causal
model allows a tighter bound of the same kind: the chain rule over its blocks, each of them bounded like this with all
earlier blocks clean (BD3-LM, arXiv:2503.09573). One pass holds the clean text and a noised copy of every block.

Masks are functions of (seed, sample, block, position), so a bound does not depend on its batch. Texts of equal length
see the same masks, which makes differences between the choices of a question less noisy. The counts k of the samples
are spread evenly over 1..L from a random start. No cache and no decoder take part.

Shape suffixes: X samples, L answer positions, W positions of a pass, B passes of a batch, N scored positions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from dinfer.core.kernels.attention import attention_interval, interval_mask
from dinfer.core.kernels.dispatch import on_own_device
from dinfer.core.kernels.random import uniform
from dinfer.core.layers.transformer import WholeAttend
from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.model import Model
from dinfer.core.step.told import TokenLogprob

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and answer


@dataclass(frozen=True, slots=True)
class Bound:
    """What was found for one answer."""

    value: float  # nats; a lower bound of the log-likelihood, up to `error`
    error: float  # standard error of `value`; 0 where it is exact
    samples: int
    exact: bool  # no bound but the log-likelihood itself: each block has one position to score


@dataclass(frozen=True, slots=True)
class NoisedRows:
    """Noised copies of one text, laid out for one pass each."""

    tokens_XW: Tensor
    pos_W: Tensor
    seen_WW: Tensor | None  # which position sees which; None: all see all
    read_L: Tensor  # where in W the logits of each answer position are
    answer_L: Tensor
    masked_XL: Tensor
    weight_XL: Tensor  # L / k of the position's block
    prompt_W: Tensor  # bool, what guidance masks


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
    for index, pair in enumerate(pairs):
        _check(model.spec, *pair, f"pair {index}")
    exact = [_exact(model.spec, *pair) for pair in pairs]
    sums = [torch.zeros(1 if alone else samples, dtype=torch.float64) for alone in exact]

    def work() -> Iterator[tuple[int, int, NoisedRows]]:
        # Texts of one length side by side, or padding would be computed too.
        for i in sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i]))):
            if pairs[i][1]:
                rows = noised(model.spec, *pairs[i], samples=len(sums[i]), seed=seed)
                yield from ((i, sample, rows) for sample in range(len(sums[i])))

    passes = work()
    while part := list(islice(passes, batch)):
        for (i, sample, rows), nll_N in zip(part, nll(model, [item[1:] for item in part], guidance), strict=True):
            weight_N = rows.weight_XL[sample][rows.masked_XL[sample]]
            sums[i][sample] = -(weight_N * nll_N).sum()
    return [
        Bound(
            value=float(sum_X.mean()),
            error=float(sum_X.std() / math.sqrt(len(sum_X))) if len(sum_X) > 1 else 0.0 if alone else math.inf,
            samples=len(sum_X),
            exact=alone,
        )
        for sum_X, alone in zip(sums, exact, strict=True)
    ]


@torch.inference_mode()
@on_own_device
def greedy(model: Model, pairs: Sequence[Pair], *, batch: int = 16) -> list[bool]:
    """Whether a model writes the answer when it fills as many masks as that has tokens.

    It commits one token a step, the most confident first, and block after block if it is block-causal. A text is left
    at its first wrong token. That is LLaDA's `suffix_greedy_prediction`. Raises ValueError.
    """
    spec, found = model.spec, [True] * len(pairs)
    for index, pair in enumerate(pairs):
        _check(spec, *pair, f"pair {index}")
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
        prompt_B = torch.tensor([len(pairs[i][0]) for i, _ in live]) if spec.prompt_block else None
        interval = attention_interval(pos_BW, torch.zeros_like(length_B), length_B, spec.causal_block, prompt_B)
        attend = WholeAttend(pos_BW.to(model.device), interval_mask(*interval, width).to(model.device))
        h_BWD = model.forward(model.embed(tokens_BW.to(model.device)), attend)
        after = []
        for b, (i, masked) in enumerate(live):
            block_L = block_of(spec, torch.tensor(masked), len(pairs[i][0]))
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
def left_to_right(model: Model, ids: Sequence[int], *, top: int, batch: int = 16) -> list[TokenLogprob]:
    """The log-probability of each token but the first, given those before it and masks in place of the others.

    The bound averages over orders in which tokens are revealed, and this is one of them, the only one whose sums hold
    for every division into prompt and answer. It takes a pass for each token. Raises ValueError.
    """
    _check(model.spec, ids[:1], ids[1:], "the text")
    count = len(ids) - 1
    hidden_LL = torch.ones(count, count, dtype=torch.bool).triu()
    rows = layout(model.spec, ids[:1], ids[1:], hidden_LL, torch.ones(count, count))
    rows = replace(rows, masked_XL=torch.eye(count, dtype=torch.bool))  # of those that are hidden, one is read
    found: list[TokenLogprob] = []
    for begin in range(0, count, batch):
        logits_NV, target_N, _ = masked_logits(model, [(i, rows) for i in range(begin, min(begin + batch, count))])
        logprob_NV = logits_NV.log_softmax(-1)
        best = logprob_NV.topk(min(top, logprob_NV.shape[1]))
        own_N = logprob_NV.gather(1, target_N[:, None])[:, 0].tolist()
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found += [TokenLogprob(own, [*zip(*one, strict=True)]) for own, one in zip(own_N, tops, strict=True)]
    return found


def nll(model: Model, passes: Sequence[tuple[int, NoisedRows]], guidance: float = 0.0) -> list[Tensor]:
    """-log p of the answer's token at the masked positions of each pass (sample, rows), float64 on the CPU. [N] each"""
    logits_NV, target_N, lane_N = masked_logits(model, passes, guidance)
    nll_N = -logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0].double().cpu()
    return list(nll_N.split([int((lane_N == b).sum()) for b in range(len(passes))]))


def masked_logits(
    model: Model, passes: Sequence[tuple[int, NoisedRows]], guidance: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, V] at the masked positions of each pass (sample, rows), the tokens there, and the pass of each."""
    width, spec, device = max(rows.pos_W.shape[0] for _, rows in passes), model.spec, model.device
    shape = (len(passes), width)
    tokens_BW, pos_BW = torch.full(shape, spec.mask), torch.zeros(shape, dtype=torch.int64)
    prompt_BW = torch.zeros(shape, dtype=torch.bool)
    whole = all(rows.seen_WW is None and rows.pos_W.shape[0] == width for _, rows in passes)
    seen_BWW = None if whole else torch.zeros(*shape, width, dtype=torch.bool)
    for b, (sample, rows) in enumerate(passes):
        w = rows.pos_W.shape[0]
        tokens_BW[b, :w], pos_BW[b, :w], prompt_BW[b, :w] = rows.tokens_XW[sample], rows.pos_W, rows.prompt_W
        if seen_BWW is not None:
            seen_BWW[b, :w, :w] = True if rows.seen_WW is None else rows.seen_WW
            seen_BWW[b, w:, 0] = True  # so that the softmax of padding is defined
    attend = WholeAttend(pos_BW.to(device), None if seen_BWW is None else seen_BWW.to(device))
    lane_N = torch.cat([torch.full((int(rows.masked_XL[s].sum()),), b) for b, (s, rows) in enumerate(passes)])
    read_N = torch.cat([rows.read_L[rows.masked_XL[s]] for s, rows in passes])
    target_N = torch.cat([rows.answer_L[rows.masked_XL[s]] for s, rows in passes]).to(device)

    def logits(tokens_BW: Tensor) -> Tensor:
        h_BWD = model.forward(model.embed(tokens_BW.to(device)), attend)
        logits_NV = model.logits(h_BWD[lane_N.to(device), read_N.to(device)][None])[0]
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))

    logits_NV = logits(tokens_BW)
    if guidance > 0:
        bare_NV = logits(torch.where(prompt_BW, spec.mask, tokens_BW))
        logits_NV = bare_NV + (guidance + 1) * (logits_NV - bare_NV)
    return logits_NV, target_N, lane_N


def noised(spec: ModelSpec, prompt: Sequence[int], answer: Sequence[int], *, samples: int, seed: int) -> NoisedRows:
    """`samples` copies of the text with the masks that the bound asks for."""
    blocks = _blocks(spec, len(prompt), len(answer))
    drawn = [masks(len(part), samples, (seed, index)) for index, part in enumerate(blocks)]
    masked_XL = torch.cat([masked for masked in drawn], 1)
    weight_XL = torch.cat([m.shape[1] / m.sum(1, keepdim=True).double().expand(m.shape) for m in drawn], 1)
    return layout(spec, prompt, answer, masked_XL, weight_XL)


def masks(length: int, samples: int, counters: tuple[int, int]) -> Tensor:
    """Which of `length` positions each sample masks: k of them, any k and any subset equally likely. bool [X, L]"""
    sample_X = torch.arange(samples)
    start = uniform(*(torch.tensor(counter) for counter in (*counters, -1)))
    count_X = ((start + sample_X / samples) % 1 * length).long() + 1
    key_XL = uniform(*(torch.tensor(counter) for counter in counters), sample_X[:, None], torch.arange(length))
    return key_XL.argsort(-1).argsort(-1) < count_X[:, None]


def layout(
    spec: ModelSpec, prompt: Sequence[int], answer: Sequence[int], masked_XL: Tensor, weight_XL: Tensor
) -> NoisedRows:
    """Puts the clean text, as far as a block-causal model needs it, before the noised copy of every block."""
    first, length = len(prompt), len(prompt) + len(answer)
    text_S, answer_L, place_S = torch.tensor([*prompt, *answer]), torch.tensor(answer), torch.arange(length)
    noised_XS = text_S.repeat(masked_XL.shape[0], 1)
    carried_L = _carried(spec, place_S[first:], first)
    noised_XS[:, first:] = torch.where(masked_XL & ~carried_L, spec.mask, answer_L)
    if spec.causal_block is None:
        read_L = place_S[first:] - spec.shift
        return NoisedRows(noised_XS, place_S, None, read_L, answer_L, masked_XL, weight_XL, place_S < first)
    block_S = block_of(spec, place_S, first)
    start = int((block_S < block_S[first]).sum())  # of the first block with a position to score
    kept = int((block_S < block_S[-1]).sum())  # nobody needs the last block clean
    pos_W = torch.cat((place_S[:kept], place_S[start:]))
    copy_W = torch.arange(len(pos_W)) >= kept
    block_W = block_S[pos_W]
    earlier_WW, same_WW = block_W < block_W[:, None], block_W == block_W[:, None]
    seen_WW = torch.where(copy_W, same_WW & copy_W[:, None], earlier_WW | (same_WW & ~copy_W[:, None]))
    source_L = place_S[first:] - spec.shift
    read_L = torch.where(carried_L, source_L, kept + source_L - start)
    tokens_XW = torch.cat((text_S[:kept].expand(masked_XL.shape[0], -1), noised_XS[:, start:]), 1)
    return NoisedRows(tokens_XW, pos_W, seen_WW, read_L, answer_L, masked_XL, weight_XL, pos_W < first)


def block_of(spec: ModelSpec, place_L: Tensor, prompt: int) -> Tensor:
    """The attention block of each position, counted from 0 or, behind a `prompt` that is one block, from its end."""
    if spec.causal_block is None:
        return torch.zeros_like(place_L)
    if spec.prompt_block:
        return (torch.div(place_L - prompt, spec.causal_block, rounding_mode="floor") + 1).clamp_min(0)
    return place_L // spec.causal_block


def _carried(spec: ModelSpec, place_L: Tensor, prompt: int) -> Tensor:
    """Which positions are predicted from the block before theirs, by logits shifted across its end. bool [L]

    Nothing of their own block is seen, masked or not: so each is a block of its own, and known to the rest.
    """
    if spec.causal_block is None:
        return torch.zeros_like(place_L, dtype=torch.bool)
    return block_of(spec, place_L - spec.shift, prompt) < block_of(spec, place_L, prompt)


def _blocks(spec: ModelSpec, prompt: int, answer: int) -> list[list[int]]:
    """The answer's positions, by the parts that are bounded each for itself."""
    parts: dict[tuple[int, bool], list[int]] = {}
    places = torch.arange(prompt, prompt + answer)
    blocks, carried = block_of(spec, places, prompt).tolist(), _carried(spec, places, prompt).tolist()
    for place, block, alone in zip(places.tolist(), blocks, carried, strict=True):
        parts.setdefault((block, not alone), []).append(place)
    return list(parts.values())


def _exact(spec: ModelSpec, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    return not answer or all(len(part) == 1 for part in _blocks(spec, len(prompt), len(answer)))


def _check(spec: ModelSpec, prompt: Sequence[int], answer: Sequence[int], what: str) -> None:
    if spec.mask_id is None:
        raise ValueError(f"{spec.family} was trained on uniform noise, not on masks: it has no bound here yet")
    if spec.experts is not None and spec.experts.capacity is not None:
        raise ValueError("a model with expert_capacity routes whole blocks, clean or noised: it has no bound here yet")
    if spec.shift and not prompt and answer:
        raise ValueError(f"{what}: this model predicts a token from the one before it, so the prompt must not be empty")
    if (length := len(prompt) + len(answer)) > spec.max_length:
        raise ValueError(f"{what}: {length} tokens, prompt and answer, exceed the model's {spec.max_length} positions")
    for token in (*prompt, *answer):
        if not 0 <= token < spec.vocab or token == spec.mask:
            raise ValueError(f"{what}: token {token} is the mask or outside the vocabulary of {spec.vocab}")
