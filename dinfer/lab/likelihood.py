"""Likelihoods of texts under a masked diffusion model, by the estimators that trainers publish.

A likelihood is three things. `passes` says which forwards an estimator wants: texts, masks and weights, which are data.
They may be kept, sent and used again, so that an old, a new and a reference policy see the same masks. `logps` computes
the log-probabilities that they ask for, with gradients. `combine` makes the estimate of these.

    samples = Samples.of([(prompt_ids, answer_ids)])
    drawn = passes("diffu_grpo", model.spec, samples, seed=3)
    scored = combine(drawn, logps(model, drawn))

An estimator is a file: a frozen dataclass that registers itself in `LIKELIHOODS`, here in `dinfer.lab.likelihoods`, or
from another distribution by an entry point of the group `dinfer.likelihood`.

Shape suffixes: N sequences, T their positions, A positions of an answer, M passes, X scored positions, K samples,
B rows of a forward, W positions of a row, S clean positions, D hidden, V vocabulary.
"""

import dataclasses
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dinfer.core.kernels.attention import interval_attention
from dinfer.core.kernels.dispatch import on_device
from dinfer.core.kernels.random import uniform
from dinfer.core.kernels.rotary import queries_keys_values
from dinfer.core.provided import packages
from dinfer.core.registry import Registry, check_types, values_of
from dinfer.core.step.contracts import Component
from dinfer.core.step.model import Model
from dinfer.core.terms.spec import ModelSpec

LIKELIHOODS: Registry = Registry("likelihood", *packages("likelihoods"))
Origin = Literal["position", "prompt"]
Picked = TypeVar("Picked")
HEAD_ROWS = 1024  # rows whose logits are held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Prompts and answers as a rollout gives them, N of each, padded on the right with anything.

    Raises ValueError for shapes that do not fit.
    """

    prompt_ids: Tensor  # int64 [N, P]
    prompt_lengths: Tensor  # int64 [N]
    answer_ids: Tensor  # int64 [N, A]
    lengths: Tensor  # int64 [N], tokens of the answer
    steps: Tensor | None = None  # int [N, A], the step that wrote each position, in any count that grows; -1: none did
    block: int | None = None  # positions of a block of the run that wrote them
    origin: Origin = "position"  # whether blocks are counted from position 0 or from the prompt's end

    def __post_init__(self) -> None:
        count = len(self.prompt_ids)
        for ids, ids_NT, lengths, length_N in (
            ("prompt_ids", self.prompt_ids, "prompt_lengths", self.prompt_lengths),
            ("answer_ids", self.answer_ids, "lengths", self.lengths),
        ):
            if ids_NT.dim() != 2 or len(ids_NT) != count or ids_NT.is_floating_point():
                raise ValueError(f"{ids} must be integers of shape [{count}, length], not {_shape(ids_NT)}")
            if length_N.shape != (count,) or bool(((length_N < 0) | (length_N > ids_NT.shape[1])).any()):
                raise ValueError(f"{lengths} must be {count} numbers from 0 to {ids_NT.shape[1]}, as {ids} is wide")
        if self.steps is not None and self.steps.shape != self.answer_ids.shape:
            raise ValueError(f"steps must have the shape of answer_ids, {_shape(self.answer_ids)}, not that "
                             f"of {_shape(self.steps)}")  # fmt: skip

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, steps: Sequence[Sequence[int]] | None = None,
        block: int | None = None, origin: Origin = "position",
    ) -> Self:  # fmt: skip
        """Of pairs of prompt and answer ids. `steps`: the step that wrote each position of each. Raises ValueError."""
        prompts, answers = [list(prompt) for prompt, _ in pairs], [list(answer) for _, answer in pairs]
        if steps is not None and [len(row) for row in steps] != [len(answer) for answer in answers]:
            raise ValueError("steps must have a number for each token of each answer")
        return cls(
            prompt_ids=_padded(prompts), prompt_lengths=torch.tensor([*map(len, prompts)], dtype=torch.int64),
            answer_ids=_padded(answers), lengths=torch.tensor([*map(len, answers)], dtype=torch.int64),
            steps=None if steps is None else _padded([list(row) for row in steps], -1), block=block, origin=origin,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """One sequence as an estimator sees it."""

    index: int
    ids_T: Tensor  # int64, prompt and answer
    prompt: int
    spec: ModelSpec
    samples: Samples
    block_T: Tensor | None = None  # int64, the attention block of each position, ascending; None: all see all

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return len(self.ids_T) - self.prompt

    @property
    def answer_A(self) -> Tensor:
        return self.ids_T[self.prompt :]

    @property
    def steps_A(self) -> Tensor:
        """The step that wrote each position of the answer."""
        assert self.samples.steps is not None
        return self.samples.steps[self.index, : self.answer].long().cpu()

    @property
    def ended_A(self) -> Tensor:
        """The answer up to and with its first stop token. bool"""
        stop_A = torch.isin(self.answer_A, torch.tensor(self.spec.stop_ids))
        return stop_A.cumsum(0) - stop_A.long() == 0

    @property
    def carried_A(self) -> Tensor:
        """Answer positions predicted from the block before theirs, by logits shifted across its end. bool

        Nothing of their own block is seen, masked or not: so each is a block of its own, and known to the rest.
        """
        if self.block_T is None or not self.spec.shift:
            return torch.zeros(self.answer, dtype=torch.bool)
        return self.block_T[self.prompt - self.spec.shift : -self.spec.shift] < self.block_T[self.prompt :]

    def masks(self, masked_A: Tensor) -> Tensor:
        """Masks of the answer as masks of the text. bool [T]"""
        return torch.cat((torch.zeros(self.prompt, dtype=torch.bool), masked_A))


@dataclass(frozen=True, slots=True)
class Mask:
    """One forward: what is masked in a text."""

    text: int
    masked_T: Tensor  # bool
    sample: int = 0  # an estimate is a mean over these
    scale: float = 1.0  # what an estimator multiplies its weights with, if masks alone do not say them


@dataclass(frozen=True, slots=True)
class Scored:
    """What an estimator makes of the log-probabilities. float64, with gradients if these have them."""

    sequence: Tensor  # [N]
    per_sample: Tensor  # [K, N]; `sequence` is their mean. NaN where a sequence has fewer
    per_token: Tensor  # [K, N, A], weighted as the estimator does; 0 where nothing was scored
    counted: Tensor  # bool [N, A], positions that `sequence` is the sum of
    error: Tensor  # [N], standard error of `sequence`; infinite of one sample
    more: dict[str, Tensor] = field(default_factory=dict)  # what one estimator gives beside these


@dataclass(frozen=True, kw_only=True)
class Likelihood(Component):
    """An estimator. Options are its fields."""

    kind = "likelihood"
    attention: ClassVar[Literal["any", "full", "blocks"]] = "any"  # of the families that can have it
    replays: ClassVar[bool] = False  # it needs the steps of the samples
    drops: ClassVar[bool] = False  # a pass without a target counts for nothing, not for 0

    def __post_init__(self) -> None:
        check_types(self.kind, self)

    def incompatibility(self, spec: ModelSpec) -> str | None:
        if spec.mask_id is None:
            return f"{spec.family} was trained on uniform noise, not on masks"
        if spec.experts is not None and spec.experts.capacity is not None:
            return "a model with expert_capacity routes whole blocks, clean or noised"
        if self.attention == "full" and spec.causal_block is not None:
            return f"it masks texts whose positions all see each other, and {spec.family} is block-causal"
        if self.attention == "blocks" and spec.causal_block is None:
            return f"it goes block by block, and {spec.family} is bidirectional"
        return None

    def blocks(self, spec: ModelSpec, samples: Samples, prompt: int, length: int) -> Tensor | None:
        """The attention block of each of `length` positions, ascending; None: all see all. int64 [T]"""
        return None if spec.causal_block is None else family_blocks(spec, torch.arange(length), prompt)

    @abstractmethod
    def draw(self, texts: Sequence[Text], seed: int) -> Iterator[Mask]:
        """The forwards of the estimate, as a function of the seed and of the index of each text."""

    def weigh(self, text: Text, mask: Mask) -> Tensor:
        """The weight of each position of the answer in its sample's sum; 0: not scored. float64 [A]"""
        return mask.masked_T[text.prompt :].double() * mask.scale

    def counted(self, text: Text) -> Tensor:
        """Answer positions that a sequence's value is the sum of. bool [A]"""
        return torch.ones(text.answer, dtype=torch.bool)

    def combine(self, passes: "Passes", logp_X: Tensor, **known: Any) -> Scored:
        """The estimate: weighted sums of each sample, and their mean. Raises ValueError."""
        if known:
            raise ValueError(f"{', '.join(known)}: likelihood={passes.estimator} takes no such argument to combine")
        return weighted(passes, logp_X)

    def compare(self, passes: "Passes", scored: Scored, other: Scored) -> Tensor:
        """How another policy values the same passes: log ratios, other to this one, unless papers say it otherwise."""
        return other.sequence - scored.sequence


@dataclass(frozen=True, slots=True)
class Passes:
    """The forwards of an estimate: data, on the CPU."""

    estimator: str
    options: dict[str, Any]
    mask_id: int
    shift: int
    ids_NT: Tensor  # int64, prompt and answer, padded with 0
    prompt_N: Tensor
    length_N: Tensor
    counted_NA: Tensor  # bool
    samples_N: Tensor  # int64, of how many the estimate is the mean
    block_NT: Tensor | None  # int64, attention blocks
    sequence_M: Tensor  # int64, the text of each pass
    sample_M: Tensor
    masked_MT: Tensor  # bool
    pass_X: Tensor  # int64, ascending
    place_X: Tensor  # int64, the position that is scored
    weight_X: Tensor  # float64

    def state(self) -> dict[str, Any]:
        """Tensors, numbers and texts alone, which `torch.load(weights_only=True)` reads."""
        return values_of(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """The passes of a `state`."""
        return cls(**state)

    @property
    def targets_X(self) -> Tensor:
        return self.ids_NT[self.sequence_M[self.pass_X], self.place_X]


def passes(
    estimator: str, spec: ModelSpec, samples: Samples, /, *, seed: int = 0, masks: Sequence[Mask] | None = None,
    **options: Any,
) -> Passes:  # fmt: skip
    """The forwards that an estimator wants of these samples. The same seed gives the same masks.

    `masks`: recorded ones, in place of those that the seed gives. Raises ValueError for an estimator that the family
    cannot have, for an unknown name or option, and for samples that do not fit.
    """
    if "name" in options:
        raise ValueError(f"name={options['name']!r:.40} is no option: the estimator is {estimator}")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed!r:.40} must be an integer of 64 bits")
    rule: Likelihood = LIKELIHOODS.build({"name": estimator, **options})
    if (reason := rule.incompatibility(spec)) is not None:
        able = [n for n in LIKELIHOODS.names() if LIKELIHOODS.get(n)().incompatibility(spec) is None]
        raise ValueError(
            f"likelihood={estimator} cannot be had here: {reason}. Use one of: {', '.join(able) or 'none'}"
        )
    texts = [_text(rule, spec, samples, n) for n in range(len(samples.prompt_ids))]
    _check_steps(rule, texts)
    kept: list[Mask] = []
    weights: list[Tensor] = []
    count = [0] * len(texts)  # samples of each text
    for mask in rule.draw(texts, seed) if masks is None else masks:
        weight_A = rule.weigh(texts[mask.text], mask)
        if scored := bool(weight_A.count_nonzero()):
            kept.append(dataclasses.replace(mask, sample=count[mask.text]) if rule.drops else mask)
            weights.append(weight_A)
        count[mask.text] = count[mask.text] + scored if rule.drops else max(count[mask.text], mask.sample + 1)
    place = [weight_A.nonzero()[:, 0] for weight_A in weights]
    blocks = [text.block_T for text in texts if text.block_T is not None]
    return Passes(
        estimator=estimator, options=values_of(rule), mask_id=spec.mask, shift=spec.shift,
        ids_NT=_stack([text.ids_T for text in texts]),
        prompt_N=torch.tensor([text.prompt for text in texts], dtype=torch.int64),
        length_N=torch.tensor([len(text.ids_T) for text in texts], dtype=torch.int64),
        counted_NA=_stack([rule.counted(text) for text in texts]), samples_N=torch.tensor(count, dtype=torch.int64),
        block_NT=_stack(blocks) if blocks else None,
        sequence_M=torch.tensor([mask.text for mask in kept], dtype=torch.int64),
        sample_M=torch.tensor([mask.sample for mask in kept], dtype=torch.int64),
        masked_MT=_stack([mask.masked_T for mask in kept]),
        pass_X=torch.repeat_interleave(torch.tensor([*map(len, place)], dtype=torch.int64)),
        place_X=_cat([at_X + texts[mask.text].prompt for at_X, mask in zip(place, kept, strict=True)], torch.int64),
        weight_X=_cat([weight_A[at_X] for weight_A, at_X in zip(weights, place, strict=True)], torch.float64),
    )  # fmt: skip


def logps(model: Any, passes: Passes, *, batch_tokens: int = 8192, grad: bool = True) -> Tensor:
    """The log-probability of each scored token: log-softmax of raw logits, the mask token's among them. float32 [X],
    float64 of a network in that.

    `model`: a network, or what wraps one and shows its methods, such as peft's models. `grad=False` keeps no graph.
    `batch_tokens`: positions of a forward at most, unless one text has more. With a graph everything is kept until it
    is used: call this for as many texts at a time as there is memory for. The clean text of a block-causal model is
    computed once, however many passes it has. Raises ValueError.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens} must be at least 1")

    def own(logits_XV: Tensor, target_X: Tensor) -> Tensor:
        chosen_X = logits_XV.gather(1, target_X[:, None])[:, 0]
        return chosen_X - logits_XV.logsumexp(-1)

    with nullcontext() if grad else torch.no_grad():
        parts = [*readings(model, passes, own, batch_tokens)]
        if not parts:
            return torch.zeros(0, device=network_of(model).device)
        index_X, logp_X = (torch.cat(values) for values in zip(*parts, strict=True))
        return logp_X[index_X.argsort().to(logp_X.device)]


def combine(passes: Passes, logps: Tensor, **known: Any) -> Scored:
    """The estimate of log-probabilities that `logps` gave for these passes. Keeps their gradients.

    `known`: what an estimator needs beside them (spg: `positive`, bool [N]). Raises ValueError.
    """
    if logps.shape != passes.place_X.shape:
        raise ValueError(f"logps must be of shape {_shape(passes.place_X)}, one for each place of passes.place_X, not "
                         f"{_shape(logps)}")  # fmt: skip
    return _rule(passes).combine(passes, logps, **known)


def compare(passes: Passes, scored: Scored, other: Scored) -> Tensor:
    """How another policy values the same passes, as the estimator's paper takes it.

    Mostly the log ratio of the other to this one, [N]. espo: the ratio of a token, [N]. vrpo: the loss of each pair of
    answers, the preferred one first, with `other` as the reference, [N / 2].
    """
    return _rule(passes).compare(passes, scored, other)


def weighted(passes: Passes, logp_X: Tensor) -> Scored:
    """Weighted sums over the scored positions of each sample, and their mean over samples."""
    device = logp_X.device
    n_X = passes.sequence_M[passes.pass_X]
    a_X, k_X = passes.place_X - passes.prompt_N[n_X], passes.sample_M[passes.pass_X]
    count, (n, a) = max(int(passes.samples_N.max()) if len(passes.samples_N) else 0, 1), passes.counted_NA.shape
    flat_X = ((k_X * n + n_X) * a + a_X).to(device)
    value_X = passes.weight_X.to(device) * logp_X.double()
    per_token = value_X.new_zeros(count * n * a).index_add(0, flat_X, value_X).view(count, n, a)
    scored = value_X.new_zeros(count * n * a, dtype=torch.bool).index_fill(0, flat_X, True).view(count, n, a).any(0)
    counted = scored & passes.counted_NA.to(device)
    per_sample = (per_token * counted).sum(-1)
    have_N = passes.samples_N.to(device)
    sequence = per_sample.sum(0) / have_N.clamp_min(1)
    there_KN = torch.arange(count, device=device)[:, None] < have_N
    square_N = ((per_sample - sequence).detach().square() * there_KN).sum(0)
    error = torch.where(have_N > 1, (square_N / (have_N - 1).clamp_min(1) / have_N.clamp_min(1)).sqrt(), torch.inf)
    return Scored(sequence, per_sample.masked_fill(~there_KN, torch.nan), per_token, counted, error)


def uniforms(count: int, *counters: int) -> Tensor:
    """Uniform numbers in (0, 1), a function of the counters. float64 [count]"""
    return uniform(*(torch.tensor(counter) for counter in counters), torch.arange(count))


def spread(length: int, samples: int, counters: tuple[int, ...]) -> Tensor:
    """Which of `length` positions each sample masks: k of them, any k and any subset equally likely. bool [K, length]

    The counts k are spread evenly over 1..length from a random start.
    """
    sample_K = torch.arange(samples)
    start = uniform(*(torch.tensor(counter) for counter in (*counters, -1)))
    return subsets(length, ((start + sample_K / samples) % 1 * length).long() + 1, counters)


def subsets(length: int, count_K: Tensor, counters: tuple[int, ...]) -> Tensor:
    """A random subset of each size. bool [K, length]"""
    keys = (torch.tensor(counter) for counter in counters)
    key_KL = uniform(*keys, torch.arange(len(count_K))[:, None], torch.arange(length))
    return key_KL.argsort(-1).argsort(-1) < count_K[:, None]


def family_blocks(spec: ModelSpec, place_T: Tensor, prompt: int) -> Tensor:
    """The attention block of each position, counted from 0 or from the end of a `prompt`."""
    if spec.causal_block is None:
        return torch.zeros_like(place_T)
    if spec.prompt_block:
        return (torch.div(place_T - spec.origin(prompt), spec.causal_block, rounding_mode="floor") + 1).clamp_min(0)
    return place_T // spec.causal_block


def network_of(model: Any) -> Any:
    """The network: the model, or what is in peft's, whose own call may take other arguments. Raises ValueError."""
    if (peft := sys.modules.get("peft")) is not None and isinstance(model, peft.PeftModel):
        model = model.get_base_model()
    try:
        _ = model.embed, model.logits, model.spec, model.device
    except AttributeError:
        raise ValueError(
            f"{type(model).__name__} hides the methods of the network in it (embed, logits, spec, device): give that "
            "network, such as its .module"
        ) from None
    return model


def readings(
    model: Any, passes: Passes, pick: Callable[[Tensor, Tensor], Picked], batch_tokens: int
) -> Iterator[tuple[Tensor, Picked]]:
    """What `pick(logits [n, V], targets [n])` makes of some scored positions at a time, and the index of these.

    Logits are in float32 at least, and guided and divided by a temperature as the passes' options say.
    """
    network = network_of(model)
    _check_network(network.spec, passes)
    guidance, temperature = passes.options.get("guidance", 0.0), passes.options.get("temperature", 1.0)

    def picked(h_XD: Tensor, bare_XD: Tensor | None, target_X: Tensor) -> Picked:
        logits_XV = _logits(network, h_XD)
        if bare_XD is not None:
            bare_XV = _logits(network, bare_XD)
            logits_XV = bare_XV + (guidance + 1) * (logits_XV - bare_XV)
        return pick(logits_XV / temperature, target_X)

    targets_X = passes.targets_X
    with on_device(network.device):
        hidden = _hidden(network, passes, batch_tokens, bare=False)
        bare = _hidden(network, passes, batch_tokens, bare=True) if guidance > 0 else None
        for index_X, h_XD in hidden:
            bare_XD = None if bare is None else next(bare)[1]
            for begin in range(0, len(index_X), HEAD_ROWS):
                part = slice(begin, begin + HEAD_ROWS)
                given = h_XD[part], None if bare_XD is None else bare_XD[part], targets_X[index_X[part]].to(h_XD.device)
                # Logits of a large vocabulary are computed again in the backward pass rather than kept.
                again = torch.is_grad_enabled() and h_XD.requires_grad
                found = checkpoint(picked, *given, use_reentrant=False) if again else picked(*given)
                yield index_X[part], found


@dataclass(slots=True)
class _Attention:
    """Attention of texts over themselves, and of masked blocks over the clean text before them, too."""

    pos_BW: Tensor
    seen_BWS: Tensor | None  # clean keys, then those of the row itself; None: all
    kept: dict[int, tuple[Tensor, Tensor]] | None = None  # by layer, keys and values for what comes behind
    clean: dict[int, tuple[Tensor, Tensor]] | None = None  # those that were kept for these rows
    lane_B: Tensor | None = None  # which of the clean texts is before each row
    context_BW: None = None
    needed_BX: None = None

    def __call__(self, layer: int, qkv: Any, needed_BX: Tensor | None = None) -> Tensor:
        q, k, v = queries_keys_values(qkv)
        if self.kept is not None:
            self.kept[layer] = k, v
        if self.clean is not None:
            clean_k, clean_v = self.clean[layer]
            k, v = torch.cat((clean_k[self.lane_B], k), 1), torch.cat((clean_v[self.lane_B], v), 1)
        return interval_attention(q, k, v, self.seen_BWS)


def _hidden(network: Model, passes: Passes, batch_tokens: int, *, bare: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states where scored positions are read, and the index of these. `bare`: prompts are masked."""
    if passes.block_NT is None:
        yield from _whole(network, passes, batch_tokens, bare=bare)
        return
    sequences = [int(n) for n in passes.sequence_M.unique()]
    width = {n: _clean_width(passes, n) for n in sequences}
    for group in _chunks(sequences, [width[n] for n in sequences], batch_tokens):
        yield from _blockwise(network, passes, group, [width[n] for n in group], batch_tokens, bare=bare)


def _whole(network: Model, passes: Passes, batch_tokens: int, *, bare: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Of texts whose positions all see each other."""
    length_M = passes.length_N[passes.sequence_M]
    for chunk in _chunks(range(len(length_M)), length_M.tolist(), batch_tokens):
        m_B = torch.tensor(chunk)
        width = int(length_M[m_B].max())
        pos_BW = torch.arange(width).expand(len(m_B), width)
        real_BW = pos_BW < length_M[m_B][:, None]
        seen_BWS = None if bool(real_BW.all()) else real_BW[:, None].expand(-1, width, -1)
        h_BWD = _forward(network, _tokens(passes, m_B, pos_BW, bare=bare), _Attention(pos_BW, seen_BWS))
        index_X = torch.isin(passes.pass_X, m_B).nonzero()[:, 0]
        row_X = torch.searchsorted(m_B, passes.pass_X[index_X])
        read_X = passes.place_X[index_X] - passes.shift
        yield index_X, h_BWD[row_X.to(h_BWD.device), read_X.to(h_BWD.device)]


def _blockwise(
    network: Model, passes: Passes, group: Sequence[int], widths: Sequence[int], batch_tokens: int, *, bare: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of block-causal texts: the clean ones once, and behind them the blocks of each pass that have a target."""
    assert passes.block_NT is not None
    n_B, width_B = torch.tensor(group), torch.tensor(widths)
    pos_BW = torch.arange(int(width_B.max())).expand(len(group), -1)
    block_BW = passes.block_NT[n_B][:, : pos_BW.shape[1]]
    real_BW = pos_BW < width_B[:, None]
    seen_BWS = (block_BW[:, None] <= block_BW[..., None]) & real_BW[:, None]
    seen_BWS[..., 0] |= ~seen_BWS.any(-1)  # so that the softmax of padding is defined
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    tokens_BW = torch.where(_prompts(passes, n_B, pos_BW) & bare, passes.mask_id, passes.ids_NT[n_B][:, pos_BW[0]])
    h_BWD = _forward(network, tokens_BW, _Attention(pos_BW, seen_BWS, kept))
    index_X = torch.isin(passes.sequence_M[passes.pass_X], n_B).nonzero()[:, 0]
    n_X, place_X = passes.sequence_M[passes.pass_X[index_X]], passes.place_X[index_X]
    read_X = place_X - passes.shift
    target_X = passes.block_NT[n_X, place_X]
    carried_X = passes.block_NT[n_X, read_X] < target_X
    if bool(carried_X.any()):
        lane_X = torch.searchsorted(n_B, n_X[carried_X]).to(h_BWD.device)
        yield index_X[carried_X], h_BWD[lane_X, read_X[carried_X].to(h_BWD.device)]
    index_X = index_X[~carried_X]
    fed = {
        m: torch.isin(passes.block_NT[n], passes.block_NT[n, passes.place_X[index_X][passes.pass_X[index_X] == m]])
        & (torch.arange(passes.ids_NT.shape[1]) < passes.length_N[n])
        for m in passes.pass_X[index_X].unique().tolist()
        for n in (int(passes.sequence_M[m]),)
    }
    for chunk in _chunks([*fed], [int(fed_T.sum()) for fed_T in fed.values()], batch_tokens):
        m_B = torch.tensor(chunk)
        yield _noised(
            network, passes, m_B, [fed[m].nonzero()[:, 0] for m in chunk], (kept, n_B, real_BW), index_X, bare
        )


def _noised(
    network: Model, passes: Passes, m_B: Tensor, places: list[Tensor], behind: tuple[Any, Tensor, Tensor],
    index_X: Tensor, bare: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The masked blocks of some passes. `behind`: keys and values of clean texts, their sequences, what is real."""
    assert passes.block_NT is not None
    kept, n_L, real_LS = behind
    pos_BW, real_BW = _stack(places), _stack([torch.ones_like(place, dtype=torch.bool) for place in places])
    n_B = passes.sequence_M[m_B]
    lane_B = torch.searchsorted(n_L, n_B)
    block_BW = passes.block_NT[n_B[:, None], pos_BW]
    before_BWS = (passes.block_NT[n_B][:, None, : real_LS.shape[1]] < block_BW[..., None]) & real_LS[lane_B][:, None]
    own_BWW = (block_BW[:, None] == block_BW[..., None]) & real_BW[:, None]
    seen_BWS, on_card_B = torch.cat((before_BWS, own_BWW), -1), lane_B.to(network.device)
    attend = _Attention(pos_BW, seen_BWS, clean=kept, lane_B=on_card_B)
    h_BWD = _forward(network, _tokens(passes, m_B, pos_BW, bare=bare), attend)
    index_X = index_X[torch.isin(passes.pass_X[index_X], m_B)]
    row_X, read_X = torch.searchsorted(m_B, passes.pass_X[index_X]), passes.place_X[index_X] - passes.shift
    at_X = (pos_BW[row_X] == read_X[:, None]).long().masked_fill(~real_BW[row_X], 0).argmax(-1)
    return index_X, h_BWD[row_X.to(h_BWD.device), at_X.to(h_BWD.device)]


def _clean_width(passes: Passes, n: int) -> int:
    """How much of a clean text its passes see: all before the last block that has a target. 1 at least"""
    assert passes.block_NT is not None
    place_X = passes.place_X[passes.sequence_M[passes.pass_X] == n]
    real_T = torch.arange(passes.ids_NT.shape[1]) < passes.length_N[n]
    return max(int(((passes.block_NT[n] < passes.block_NT[n, place_X].max()) & real_T).sum()), 1)


def _chunks(items: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Items alike in size together, while the largest times their number is at most `most`; each chunk ascending."""
    chunk: list[int] = []
    for size, item in sorted(zip(sizes, items, strict=True)):
        if chunk and size * (len(chunk) + 1) > most:
            yield sorted(chunk)
            chunk = []
        chunk.append(item)
    if chunk:
        yield sorted(chunk)


def _prompts(passes: Passes, n_B: Tensor, pos_BW: Tensor) -> Tensor:
    return pos_BW < passes.prompt_N[n_B][:, None]


def _tokens(passes: Passes, m_B: Tensor, pos_BW: Tensor, *, bare: bool) -> Tensor:
    """What a forward of these passes is fed at these positions."""
    n_B = passes.sequence_M[m_B]
    masked_BW = passes.masked_MT[m_B[:, None], pos_BW] | (_prompts(passes, n_B, pos_BW) & bare)
    return torch.where(masked_BW, passes.mask_id, passes.ids_NT[n_B[:, None], pos_BW])


def _forward(network: Any, tokens_BW: Tensor, attend: Any) -> Tensor:
    """Hidden states of a forward, through whatever wraps the network. [B, W, D]"""
    device = network.device
    attend.pos_BW = attend.pos_BW.to(device)
    attend.seen_BWS = None if attend.seen_BWS is None else attend.seen_BWS.to(device)
    call = network if isinstance(network, nn.Module) else network.forward
    return call(network.embed(tokens_BW.to(device)), attend)


def _logits(network: Any, h_XD: Tensor) -> Tensor:
    logits_XV = network.logits(h_XD[None])[0]
    return logits_XV.to(torch.promote_types(logits_XV.dtype, torch.float32))


def _rule(passes: Passes) -> Likelihood:
    return LIKELIHOODS.build({"name": passes.estimator, **passes.options})


def _text(rule: Likelihood, spec: ModelSpec, samples: Samples, n: int) -> Text:
    """One sequence, checked. Raises ValueError."""
    prompt, answer = int(samples.prompt_lengths[n]), int(samples.lengths[n])
    ids_T = torch.cat((samples.prompt_ids[n, :prompt], samples.answer_ids[n, :answer])).long().cpu()
    if spec.shift and not prompt and answer:
        raise ValueError(f"sample {n}: this model predicts a token from the one before it, so the prompt must not "
                         "be empty")  # fmt: skip
    if len(ids_T) > spec.max_length:
        raise ValueError(f"sample {n}: {len(ids_T)} tokens, prompt and answer, exceed the model's {spec.max_length} "
                         "positions")  # fmt: skip
    wrong_T = (ids_T < 0) | (ids_T >= spec.vocab) | (ids_T == spec.mask)
    if bool(wrong_T.any()):
        token = int(ids_T[wrong_T][0])
        raise ValueError(f"sample {n}: token {token} is the mask or outside the vocabulary of {spec.vocab}")
    return Text(n, ids_T, prompt, spec, samples, rule.blocks(spec, samples, prompt, len(ids_T)))


def _check_steps(rule: Likelihood, texts: Sequence[Text]) -> None:
    if not rule.replays or not texts:
        return
    if texts[0].samples.steps is None:
        raise ValueError(f"likelihood={LIKELIHOODS.name_of(rule)} replays a run: give the samples its `steps`")
    for text in texts:
        if bool((text.steps_A < -1).any()):
            place = int((text.steps_A < -1).nonzero()[0])
            raise ValueError(f"sample {text.index}: steps has {int(text.steps_A[place])} at position {place} of the "
                             "answer: give the step that wrote it, or -1 where no step did")  # fmt: skip


def _check_network(spec: ModelSpec, passes: Passes) -> None:
    strange = not 0 <= passes.mask_id < spec.vocab or bool((passes.ids_NT >= spec.vocab).any())
    if spec.shift != passes.shift or strange:
        raise ValueError(
            f"these passes are of another family than {spec.family}: make them with the spec of this model"
        )
    if passes.block_NT is None and spec.causal_block is not None:
        raise ValueError(f"these passes are of a bidirectional model, and {spec.family} is block-causal")


def _padded(rows: Sequence[Sequence[int]], pad: int = 0) -> Tensor:
    return _stack([torch.tensor(row, dtype=torch.int64) for row in rows], pad).long()


def _stack(rows: Sequence[Tensor], pad: int = 0) -> Tensor:
    """Rows side by side, padded."""
    return nn.utils.rnn.pad_sequence([*rows], True, pad) if rows else torch.zeros(0, 0, dtype=torch.bool)


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([*parts]).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def _shape(tensor: Tensor) -> str:
    return str([*tensor.shape])
