"""What a rollout gives a trainer: tokens, and what the policy did at every step, as CPU tensors.

Shape suffixes: N samples, prompt-major; P prompt positions, A positions of an answer, E events of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dinfer.core.registry import unknown, values_of

Dialect = Literal["dllm-rl", "jetengine", "sglang", "lmdeploy"]
CONTRACT = 1  # version of SGLang's replay fields
STEPS = ("steps", "first_steps")  # padded with -1


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rollouts:
    """Samples, padded on the right: ids with EOS, steps with -1, other numbers with 0.

    A step of -1 is that of a position which no step wrote. An answer that ends early leaves masks there, which a
    bidirectional model saw. `logps` are of raw logits (guided ones with guidance), `sampled_logps` of the distribution
    that the token was drawn from: with temperature, top-k, top-p, penalties, and without what a form rules out.
    """

    prompt_ids: Tensor  # int64 [N, P]
    prompt_lengths: Tensor  # int64 [N]
    answer_ids: Tensor  # int64 [N, A]
    lengths: Tensor  # int64 [N], positions to the end of the last block that was decoded
    widths: Tensor  # int64 [N], positions of the canvas behind the prompt
    stops: Tensor  # int64 [N], positions up to and with the stop token; `lengths` without one
    stopped: Tensor  # bool [N], whether there is one
    aborted: Tensor  # bool [N], an update of the weights ended it before its time
    forwards: Tensor  # int64 [N]
    seeds: Tensor  # int64 [N]; -1: nothing is drawn
    versions: Tensor  # int64 [N, A], of the weights that wrote a position
    steps: Tensor | None  # int32 [N, A], the step of the request that wrote it last, from 0
    first_steps: Tensor | None  # int32 [N, A], the one that wrote it first
    logps: Tensor | None  # float32 [N, A]
    sampled_logps: Tensor | None  # float32 [N, A]; NaN: the most likely token was taken
    events: (
        list[Tensor] | None
    )  # int32 [E, 4] each: step, position in the answer, token before, token after; -1: a mask
    event_logps: list[Tensor] | None  # float32 [E] each; NaN where a token was masked again
    block: int | None  # positions of a block; None: the canvas is one
    origin: Literal["position", "prompt"]  # whether blocks are counted from position 0 or from the prompt's end
    eos_id: int
    attention: int | None  # positions of the model's attention blocks; None: it saw the whole canvas
    inexact: str  # why replaying `steps` gives other `logps`; "": it gives the same

    @property
    def exact(self) -> bool:
        """Whether forwards that are fed what each step saw (estimator `trajectory`) give `logps`."""
        return not self.inexact

    def __len__(self) -> int:
        return len(self.seeds)

    def __repr__(self) -> str:
        tokens, forwards = int(self.stops.sum()), int(self.forwards.sum())
        return f"Rollouts({len(self)} samples, {tokens} tokens, {forwards} forwards, exact={self.exact})"

    def __getitem__(self, rows: Sequence[int] | slice) -> Rollouts:
        """Some of the samples."""
        chosen = [*range(len(self))[rows]] if isinstance(rows, slice) else [int(row) for row in rows]
        pick: dict[type, Callable[[Any], Any]] = {Tensor: lambda x: x[chosen], list: lambda x: [x[n] for n in chosen]}
        return Rollouts(**{name: pick.get(type(x), lambda x: x)(x) for name, x in values_of(self).items()})

    @classmethod
    def cat(cls, parts: Iterable[Rollouts]) -> Rollouts:
        """The samples of several rollouts, one after the other. Raises ValueError if they differ in what they hold."""
        columns = [values_of(part) for part in parts]
        if not columns:
            raise ValueError("there are no rollouts to put together")
        return cls(**{name: _joined(name, [column[name] for column in columns], columns[0]) for name in columns[0]})

    def samples(self) -> Any:
        """What estimators of likelihoods take, see `dinfer.lab.likelihood.Samples`.

        Of a bidirectional model it is the whole canvas: what no step wrote stays masked in a replay.
        """
        from dinfer.lab.likelihood import Samples  # another layer

        return Samples(
            prompt_ids=self.prompt_ids, prompt_lengths=self.prompt_lengths, answer_ids=self.answer_ids,
            lengths=self.widths if self.attention is None else self.lengths, steps=self.steps,
            block=self.block if self.attention is None else None, origin=self.origin,
        )  # fmt: skip

    def block_of(self, n: int) -> Tensor:
        """The block of each position of an answer, to the end of its last one. int64, from 0"""
        length, prompt = int(self.lengths[n]), int(self.prompt_lengths[n])
        block = self.block or max(length, 1)
        before = prompt % block if self.origin == "position" else 0
        return (torch.arange(length) + before) // block

    def step_map(self, dialect: Dialect) -> list[list[int]]:
        """The step that wrote each position first, as programs count it.

        dllm-rl: steps of the request from 0, of the whole answer. jetengine: these from 1, up to and with the stop
        token. sglang: steps of each block from 1, up to and with the stop token. lmdeploy: as sglang, one number for
        each step of the answer that wrote anything. Raises ValueError.
        """
        if dialect not in DIALECTS:
            raise unknown("dialect", dialect, list(DIALECTS))
        return [DIALECTS[dialect](self, n) for n in range(len(self))]

    def first_of(self, n: int) -> Tensor:
        """The step that first wrote each position of an answer. int64. Raises ValueError if none was recorded."""
        if self.first_steps is None:
            raise ValueError("no steps were recorded: ask for record='steps' or more")
        return self.first_steps[n, : int(self.lengths[n])].long()

    def block_steps(self, n: int) -> Tensor:
        """The same, in each block only those steps that wrote anything there, counted from 0."""
        first_A, block_A = self.first_of(n), self.block_of(n)
        found_A = torch.full_like(first_A, -1)
        for block in block_A.unique():
            found_A[block_A == block] = _dense(first_A[block_A == block])
        return found_A

    def to_sglang(self) -> list[dict[str, Any]]:
        """Each sample as SGLang's `/generate` returns it, with its replay fields (pull request 27943).

        Log-probabilities are as in `to_trl`: SGLang's own are those of the temperature.
        """
        drawn_NA = self._drawn()
        maps, found = None if self.first_steps is None else self.step_map("sglang"), []
        for n in range(len(self)):
            stop, length = int(self.stops[n]), int(self.lengths[n])
            ids = self.answer_ids[n, :length].tolist()
            meta: dict[str, Any] = {
                "finish_reason": self._reason(n), "prompt_tokens": int(self.prompt_lengths[n]),
                "completion_tokens": stop,
                "weight_version": str(int(self.versions[n, : max(stop, 1)].max())) if length else "0",
            }  # fmt: skip
            if drawn_NA is not None:
                pairs = zip(drawn_NA[n, :stop].tolist(), ids, strict=False)
                meta["output_token_logprobs"] = [(logp, token, None) for logp, token in pairs]
            if maps is not None:
                meta |= {
                    "step_maps": maps[n], "dllm_replay_token_ids": ids,
                    "dllm_replay_step_maps": (self.block_steps(n) + 1).tolist(), "dllm_stop_length": stop,
                    "dllm_replay_contract_version": CONTRACT,
                }  # fmt: skip
            found.append({"output_ids": ids[:stop], "meta_info": meta})
        return found

    def _reason(self, n: int) -> dict[str, Any]:
        """Why a sample ended, as SGLang says it."""
        stop = int(self.stops[n])
        if self.aborted[n]:
            return {"type": "abort", "message": "the weights were updated, or paused"}
        if self.stopped[n]:
            return {"type": "stop", "matched": int(self.answer_ids[n, stop - 1])}
        return {"type": "length", "length": stop}

    def to_trl(self) -> dict[str, Any]:
        """What TRL's rollout functions return: answers up to and with the stop token. Log-probabilities are those of
        the distribution that was drawn from, raw ones where the most likely token was taken."""
        stops = self.stops.tolist()
        found: dict[str, Any] = {
            "prompt_ids": _cut(self.prompt_ids, self.prompt_lengths.tolist()),
            "completion_ids": _cut(self.answer_ids, stops), "logprobs": None,
        }  # fmt: skip
        if (drawn_NA := self._drawn()) is not None:
            found["logprobs"] = _cut(drawn_NA, stops)
        return found

    def _drawn(self) -> Tensor | None:
        """Log-probabilities under the distribution that was drawn from, raw where the likeliest token was taken."""
        if self.logps is None or self.sampled_logps is None:
            return self.logps
        return torch.where(self.sampled_logps.isnan(), self.logps, self.sampled_logps)


def _dense(steps_A: Tensor) -> Tensor:
    """The steps without those that wrote nothing, from 0; -1 stays."""
    dense_A = torch.full_like(steps_A, -1)
    dense_A[steps_A >= 0] = steps_A[steps_A >= 0].unique(return_inverse=True)[1]
    return dense_A


def _cut(rows_NT: Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    return [row[:length] for row, length in zip(rows_NT.tolist(), lengths, strict=True)]


DIALECTS: dict[str, Callable[[Rollouts, int], list[int]]] = {
    "dllm-rl": lambda made, n: made.first_of(n).tolist(),
    "jetengine": lambda made, n: (made.first_of(n) + 1)[: int(made.stops[n])].tolist(),
    "sglang": lambda made, n: (made.block_steps(n) + 1)[: int(made.stops[n])].tolist(),
    "lmdeploy": lambda made, n: (_dense(made.first_of(n)) + 1)[: int(made.stops[n])].tolist(),
}


def padded(name: str, rows: Sequence[Tensor], eos_id: int) -> Tensor:
    """Rows of a field side by side."""
    pad = eos_id if name in ("prompt_ids", "answer_ids") else -1 if name in STEPS else 0
    return pad_sequence([*rows], batch_first=True, padding_value=pad)


def _joined(name: str, values: list[Any], first: dict[str, Any]) -> Any:
    """One field of several rollouts."""
    if len({*map(type, values)}) > 1:
        raise ValueError(f"some of the rollouts have no {name}: record the same of all")
    if isinstance(first[name], Tensor):
        if first[name].dim() == 1:
            return torch.cat(values)
        return padded(name, [row for value in values for row in value], first["eos_id"])
    if isinstance(first[name], list):
        return [item for value in values for item in value]
    if name == "inexact":
        return next(filter(None, values), "")
    if len({*values}) > 1:
        raise ValueError(f"{name} differs among the rollouts: {', '.join(map(str, {*values}))}")
    return values[0]
