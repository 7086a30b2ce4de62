"""Log-probabilities as the objects of OpenAI's chats and completions, and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dinfer.core.step.told import TokenLogprob
from dinfer.lab.trace.record import Pieces

# What the log-probabilities of a prompt are.
OF_PROMPT = "left to right, others masked: one of the orders that the likelihood bound averages"
LEAST = -9999.0  # stands for minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Makes them. `top`: alternatives of each token."""

    pieces: Pieces
    top: int
    by_number: bool = False  # tokens are called token_id:NUMBER
    named: bool = False  # a request names the alternatives; beside them the token itself is told

    def of_chat(self, ids: Sequence[int], told: Sequence[TokenLogprob | None]) -> list[dict[str, Any]]:
        """The tokens of a chat; those of unknown probability are left out."""
        content = []
        for token, (logprob, best) in zip(ids, (one for one in told if one is not None), strict=True):
            others = best[: self.top]
            if self.named and token not in dict(others):
                others = [(token, logprob), *others]
            top = [self._entry(*other) for other in others]
            content.append(self._entry(token, logprob) | {"top_logprobs": top})
        return content

    def of_completion(self, ids: Sequence[int], told: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        """`told` is None for a token of unknown probability. `offset`: characters of the answer before these tokens."""
        lengths = [len(self.pieces.of(token)) for token in ids]
        chosen = [None if one is None else max(one.logprob, LEAST) for one in told]
        top = [
            one and {self._name(t): max(p, LEAST) for t, p in [(token, one.logprob), *one.top[: self.top]]}
            for token, one in zip(ids, told, strict=True)
        ]
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": [offset + sum(lengths[:i]) for i in range(len(ids))],
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.by_number else self.pieces.of(token)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.pieces.of(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # otherwise the token is a part of a character
        return {
            "token": self._name(token), "logprob": max(logprob, LEAST), "bytes": list(text.encode()) if whole else None,
        }  # fmt: skip


def prompt_logprobs(
    pieces: Pieces, ids: Sequence[int], told: Sequence[tuple[TokenLogprob, int] | None], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's objects of a prompt: by token id the `top` best of each position, and the prompt's own token."""
    made: list[dict[str, Any] | None] = []
    for token, pair in zip(ids, told, strict=True):
        if pair is None:
            made.append(None)
            continue
        one, own = pair
        found = {other: (p, rank) for rank, (other, p) in enumerate(one.top[:top], 1)}
        found = {token: (one.logprob, own)} | found
        made.append({
            str(other): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": pieces.of(other)}
            for other, (logprob, rank) in found.items()
        })  # fmt: skip
    return made
