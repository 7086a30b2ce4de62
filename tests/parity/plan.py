"""How dinfer repeats a recorded run, and what is compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dinfer.engine.request import Request
from dinfer.step.contracts import Decoder
from tests.parity.golden import Fields, GoldenError, Skip

Drawn = Callable[[dict[str, Any], Fields, list[list[int]], int], Decoder]  # of options, run, prompts, new tokens
NEVER = 1e9  # a threshold that no confidence reaches


@dataclass(frozen=True, slots=True)
class Plan:
    """The components and settings that repeat a run of the goldens."""

    iteration: dict[str, Any]  # of components, see `tests.parity.references.build`
    decoder: dict[str, Any]
    cache: dict[str, Any]
    new_tokens: int
    sweep: dict[str, Any] = field(default_factory=dict)  # options that only the reference's iteration has
    spec: dict[str, Any] = field(default_factory=dict)  # what differs from the model's own `ModelSpec`
    pads_B: Sequence[int] | None = None  # padding in front of each prompt
    options: dict[str, Any] = field(default_factory=dict)  # of every request
    drawn: Drawn | None = None  # makes the decoder, with recorded random numbers; row b is the request of seed b
    wraps: Callable[[Any], Any] | None = None  # what the reference changes of the model's forward
    every_step: bool = False  # compare the canvas after each step too, but for those that change nothing
    keep_masks: bool = False  # the reference returns what an early stop left undecoded as masks, not as EOS
    drop_eos: bool = False  # the reference returns a single row without its EOS tokens
    response: bool = False  # the reference returns what it generated, without the prompt
    answer: int | None = None  # the reference returns so many new tokens at most, up to the first EOS, and no prompt
    computed: bool = False  # compare the positions that each forward computes, too; of a single row
    grows: bool = False  # the canvas of the reference ends where ours holds EOS; nothing counts there
    constraints: dict[int, int] = field(default_factory=dict)  # tokens that are given, by place behind the prompt

    def request(self, prompt: list[int], mask_id: int, options: list[float]) -> Request:
        """The run of one row."""
        if not self.constraints:
            return Request(prompt, self.new_tokens, options)
        places = range(self.new_tokens)
        tokens = [self.constraints.get(place, mask_id) for place in places]
        gaps = [False] * len(prompt) + [place not in self.constraints for place in places]
        return Request(prompt + tokens, 0, options, gaps)


def aligned(prompts: list[list[int]], params: Fields, decoder: dict[str, Any], cache: str) -> Plan:
    """Blocks from a multiple of their length on, the last one complete; attention to the own block and those before."""
    block, length = params.take("block_length"), max(len(prompt) for prompt in prompts) + params.take("gen_length")
    if len({len(prompt) for prompt in prompts}) > 1:
        raise Skip("block diffusion: prompts of several lengths in a batch share their blocks in the references")
    new_tokens = -(-length // block) * block - len(prompts[0])
    iteration = {"name": "block_diffusion", "block": block}
    return Plan(iteration, decoder, {"name": cache}, new_tokens, spec={"causal_block": block})


def fixed_blocks(params: Fields, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Blocks from the end of the prompt on, and as many of the `steps` for each."""
    steps, length, block = params.take("steps"), params.take("gen_length"), params.take("block_length")
    if length % block or steps % (length // block):
        raise GoldenError(f"steps={steps} and gen_length={length} do not divide into blocks of {block}")
    iteration = {"name": "blockwise", "block": block, "stop": "off"}
    return iteration, {"name": "fixed", "steps": steps // (length // block), "precision": precision}


# Algorithm of the goldens -> plan, of prompts and parameters.
Algorithms = dict[str, Callable[[list[list[int]], Fields], Plan]]
