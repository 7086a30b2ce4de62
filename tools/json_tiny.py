"""Trains an adapter with which a model in the box writes its answers as JSON: {"steps": [...], "answer": N}.

A round has two parts. The base model answers fresh problems of the training split, and each answer is rewritten as
JSON; the problem's own solution replaces a wrong one. Then the adapter is trained to give the JSON, with masks behind a
random place and in part before it. Half of the questions ask for JSON (`IN_PROMPT`).

    python -m tools.json_tiny tiny OUT --fit-seconds 420
    python -m tools.json_tiny tiny OUT --device cpu --no-compile --no-graphs --rows 2048 --batch 16 --steps 400

OUT gets adapter_config.json, adapter_model.safetensors and training.json.

Shape suffixes: B rows, T positions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from dinfer.core.layers.transformer import Transformer
from dinfer.core.models.family import ModelFamily
from dinfer.demo.problems import ANSWER_LABEL
from tools import distill_tiny
from tools.distill_tiny import Distillation, run
from tools.rollout import Rollout, answers
from tools.training import parsed

BLOCK = 32  # of decoding
IN_PROMPT = ' Answer as JSON: {"steps": [...], "answer": N}'
SCHEMA = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "answer": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    },
    "required": ["steps", "answer"],
}


@dataclass(frozen=True, slots=True)
class Options(distill_tiny.Options):
    """The hyper-parameters of a run. Every field is an option of the command line."""

    block: int = BLOCK
    length: int = 208


class Json:
    """Prompts with solutions as lines, rewritten as prompts with JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos: int = tokenizer.encode("<|endoftext|>").ids[0]
        self.asked = tokenizer.encode(IN_PROMPT).ids

    def __call__(self, tokens: list[int], prompt: int, asked: bool) -> tuple[list[int], list[int]] | None:
        """The prompt, which asks for JSON or not, and the answer; None where the lines are no solution."""
        said = tokens[prompt:]
        said = said[: said.index(self.eos)] if self.eos in said else said
        *steps, last = self.tokenizer.decode(said).split("\n")
        value = last.removeprefix(ANSWER_LABEL).strip()
        if not last.startswith(ANSWER_LABEL) or not value or not all(steps):
            return None
        text = json.dumps({"steps": steps, "answer": int(value) if value.isdigit() else value})
        *question, assistant = tokens[:prompt]
        return [*question, *(self.asked if asked else []), assistant], self.tokenizer.encode(text).ids


def masks(response_BT: Tensor, generator: torch.Generator) -> Tensor:
    """Most rows are masked from a block on and in part within it, and the others in part everywhere. bool [B, T]"""

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device)

    rows, length = response_BT.shape
    block_BT = (response_BT.cumsum(1) - 1).div(BLOCK, rounding_mode="floor")
    at_B1 = (rand(rows, 1) * (block_BT[:, -1:] + 1)).floor()
    some_BT = rand(rows, length) < rand(rows, 1).clamp_min(0.05)
    blockwise_BT = (block_BT > at_B1) | ((block_BT == at_B1) & some_BT)
    return response_BT & torch.where(rand(rows, 1) < 0.7, blockwise_BT, some_BT)


class Lesson(Distillation):
    """A network with an adapter, and the answers of its base, as JSON."""

    def __init__(self, model: Transformer, family: ModelFamily, options: Options, tokenizer: Tokenizer) -> None:
        super().__init__(model, family, options, tokenizer)
        self.as_json = Json(tokenizer)

    @torch.no_grad()
    def answer(self, source: Iterator[tuple[Tensor, Tensor]], first: bool) -> dict[str, float]:
        """Fills the rows of a round. Returns the share of the base's right answers, and its mean steps of an answer."""
        options, spec, right, steps = self.options, self.spec, 0, 0
        eos_id = self.as_json.eos
        made: list[tuple[list[int], list[int]]] = []
        rollout = Rollout(threshold=options.threshold, mask_id=spec.mask, eos_id=eos_id, blocks=1)
        for name, weight in self.adapter.weights.items():
            weight.copy_(self.adapter.base[name])
        for _ in range(0, options.rows, options.batch):
            tokens_BT, prompt_B = next(source)
            place_BT = torch.arange(options.length, device=tokens_BT.device) - prompt_B[:, None]
            block_BT = (place_BT.div(BLOCK, rounding_mode="floor") + 1).clamp_min(0).long()
            given_BT, _, steps_B = rollout(
                lambda shown_BT: self.best(self.model, shown_BT, None, self.barred_V), tokens_BT, prompt_B, block_BT
            )
            got_BX, want_BX = (answers(x_BT, prompt_B, self.answer_id, eos_id) for x_BT in (given_BT, tokens_BT))
            right_B = (got_BX == want_BX).all(1)
            lines_BT = torch.where(right_B[:, None], given_BT, tokens_BT)
            for lines, length in zip(lines_BT.tolist(), prompt_B.tolist(), strict=True):
                row = self.as_json(lines, length, asked=len(made) % 2 == 0)
                if row is not None and sum(map(len, row)) < options.length:
                    made.append(row)
            right, steps = right + int(right_B.sum()), steps + int(steps_B.sum())
        rows_NT = torch.full(self.tokens_NT.shape, eos_id, dtype=torch.int16)
        for at in range(options.rows):  # some come twice, in place of those that are no JSON
            prompt_ids, said = made[at % len(made)]
            rows_NT[at, : len(prompt_ids) + len(said)] = torch.tensor(prompt_ids + said, dtype=torch.int16)
        self.tokens_NT.copy_(rows_NT)
        self.prompt_N.copy_(torch.tensor([len(made[at % len(made)][0]) for at in range(options.rows)]))
        return {"right": right / options.rows, "steps": steps / options.rows, "rows": len(made)}

    def loss(self, tokens_BT: Tensor, step_BT: Tensor, prompt_B: Tensor) -> Tensor:
        place_T = torch.arange(self.options.length, device=tokens_BT.device)
        masked_BT = masks(place_T >= prompt_B[:, None], self.generator)
        loss_BT = self.losses(self.model, torch.where(masked_BT, self.spec.mask, tokens_BT), tokens_BT, None)
        return (loss_BT * masked_BT).sum() / masked_BT.sum().clamp_min(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny"], help="a model in the box that sees both sides")
    parser.add_argument("out", type=Path)
    given, options = parsed(parser, Options)
    run(Lesson, "tools.json_tiny", given["model"], given["out"], options)


if __name__ == "__main__":
    main()
