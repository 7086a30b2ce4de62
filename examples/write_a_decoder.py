"""A decoder of your own: commit every sure token, but never one beside another, since neighbours depend on each other.

    python examples/write_a_decoder.py

It needs no registering; docs/add_a_decoder.md says how a name for the command line is had, and explains every field.
"""

from __future__ import annotations

from dataclasses import dataclass

import dinfer
from dinfer.core.registry import option
from dinfer.core.step.contracts import BlockView, Decoder, Proposal, State, TokenStats


@dataclass(frozen=True, kw_only=True)
class Apart(Decoder):
    """Commits masked positions with c >= threshold that are surer than both neighbours, decoded ones left aside."""

    threshold: float = option(0.6, "least probability of a commit", per_request=True)

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        score_RL = stats.confidence_RL.masked_fill(~view.masked_RL, -1.0)
        padded_RX = score_RL.new_full((score_RL.shape[0], score_RL.shape[1] + 2), -1.0)
        padded_RX[:, 1:-1] = score_RL
        # One comparison is strict, so that of two equal neighbours one goes first.
        peak_RL = (score_RL > padded_RX[:, :-2]) & (score_RL >= padded_RX[:, 2:])
        return Proposal(view.masked_RL & peak_RL & (score_RL >= view.options["threshold"]))


question = "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?"
for decoder in ("threshold", Apart(), Apart(threshold=0.3)):
    result = dinfer.load("tiny", decoder=decoder).generate(question)
    print(f"{decoder}: {result.counts.forwards} forwards, {result.counts.tpf:.2f} tokens per forward")
    print(f"  {' / '.join(result.text.splitlines())}")
