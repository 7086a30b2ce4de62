"""Exact keys of a causal model whose first pass, over the prompt, decodes too."""

from dataclasses import dataclass

from dinfer.core.caches.window import PLAN, BlockCache
from dinfer.core.registry import CACHES
from dinfer.core.step.contracts import Phase, WindowPlan


@CACHES.register("block_at_once")
@dataclass(frozen=True, kw_only=True)
class BlockAtOnce(BlockCache):
    """`block` without a prefill of its own: one pass computes the prompt's keys and decodes the first tokens.

    It saves a forward of each request. The prompt is computed in one piece, and no request shares its keys, so `block`
    is better for long prompts that begin alike.
    """

    paper = "I-DLM, github.com/thuEcstasy/I-DLM"

    def plan(self, phase: Phase) -> WindowPlan:
        return WindowPlan(None, None) if phase == Phase.PREFILL else PLAN
