"""Log-probabilities as OpenAI's objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dinfer.abilities.reports import TokenLogprob
from dinfer.analysis.trace.pieces import Pieces

LEAST = -9999.0  # stands for minus infinity, which JSON lacks
Scored = Sequence[tuple[int, TokenLogprob]]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Makes the objects of a chat or a completion. `top`: alternatives of each token."""

    pieces: Pieces
    top: int
    chat: bool

    def of(self, scored: Scored, offset: int) -> dict[str, Any]:
        """`offset`: characters of the answer before the first of these tokens."""
        return self._chat(scored) if self.chat else self._completion(scored, offset)

    def _chat(self, scored: Scored) -> dict[str, Any]:
        content = []
        for token, told in scored:
            top = [self._entry(other, logprob) for other, logprob in told.top[: self.top]]
            content.append(self._entry(token, told.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _completion(self, scored: Scored, offset: int) -> dict[str, Any]:
        tokens = [self.pieces.of(token) for token, _ in scored]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        top = [{self.pieces.of(t): max(p, LEAST) for t, p in told.top[: self.top]} for _, told in scored]
        return {
            "tokens": tokens,
            "token_logprobs": [max(told.logprob, LEAST) for _, told in scored],
            "top_logprobs": top if self.top else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.pieces.of(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # otherwise the token is a part of a character
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode()) if whole else None}
