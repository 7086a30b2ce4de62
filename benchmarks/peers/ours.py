"""This project on the common work, through its public API. `benchmarks.peers.compare` starts it.

A pipeline of random weights is put together as `dinfer.load` does it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

import dinfer
from benchmarks.clock import Clock
from benchmarks.feeds import random_prompts
from benchmarks.peers.work import RATE, arguments, report
from benchmarks.shapes import random_weights
from dinfer.core.decoders.threshold import Threshold
from dinfer.core.loading.checkpoint import family_of
from dinfer.core.registry import MODELS, option
from dinfer.core.step.contracts import BlockView, Proposal, State, TokenStats
from dinfer.formats.holding import quantize


@dataclass(frozen=True, kw_only=True)
class Scripted(Threshold):
    """Computes the threshold rule, and commits the leftmost masks."""

    rate: int = option(RATE, "masks that every step commits")

    def select(self, stats: TokenStats, view: BlockView, state: State) -> Proposal:
        super().select(stats, view, state)
        return Proposal(view.masked_RL & (view.masked_RL.cumsum(-1) <= self.rate))


def main(args: list[str] | None = None) -> None:
    given = arguments(__doc__, args)
    device, config = torch.device(given.device), json.loads(given.config.read_text())
    cuda = device.type == "cuda"
    family = family_of(config)
    family = MODELS.build({"name": family, "block": given.attention_block} if given.attention_block else family)
    model = random_weights(family, family.spec(config), device)
    with torch.no_grad():  # neither a stop token nor a mask is ever the most likely
        model.head.weight[min(model.spec.mask, *model.spec.stop_ids) :] = 0
    if given.quantize:
        quantize(model, given.quantize)
    cache = {"name": "vicinity", "back": 16, "ahead": 16, "warmup": 4} if given.cache == "vicinity" else given.cache
    counted = model.spec.causal_block is not None and not model.spec.prompt_block  # from position 0
    iteration = {"name": "block_diffusion" if counted else "blockwise", "block": given.block, "stop": "off"}
    recipe = dinfer.compose(model, iteration=iteration, decoder=Scripted(rate=given.rate), cache=cache)
    pipe = dinfer.Pipeline(recipe, None, dinfer.Runtime(rows=given.batch, graphs=cuda and not given.eager))
    prompts = random_prompts(model.spec, given.batch, given.prompt)

    def generate() -> tuple[int, Any]:
        results = pipe.generate_ids(prompts, max_new_tokens=given.new)
        return max(result.counts.forwards for result in results), [result.canvas for result in results]

    def widths() -> dict[int, list[float]]:
        with Clock(pipe.engine) as clock:
            generate()
        found: dict[int, list[float]] = {}
        for row in clock.table():
            found.setdefault(row["width"], []).extend([row["median_ms"]] * row["launches"])
        return found

    report(given, generate, widths, pipe.engine)


if __name__ == "__main__":
    main()
