"""Cases of models of uniform noise (DiffusionGemma): logits of a canvas behind a prompt, and whole runs.

The reference's random canvases are recorded in order of use: one when a canvas begins, and one after each of its steps.
Its draw of tokens was replaced by the most likely token, which is dinfer's temperature 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Ask, Request, Wants
from dinfer.core.engine.runtime import Runtime
from dinfer.core.recipe.recipe import compose
from dinfer.core.sampling.gumbel import StandardSampling
from dinfer.core.step.cursors import Phase
from tests.parity.compare import same
from tests.parity.golden import Case, Fields, Golden, Skip

FILES = "generation/**/*.json"


def takes(doc: Fields) -> bool:
    return "random_canvas" in doc


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(run, golden, doc))


def run_model(golden: Golden, network: Any, case: Fields, tensors: Path) -> str:
    """Compares the encoder's states and the logits of the canvas."""
    name, bounds = case.take("name"), {"atol": case.take("atol"), "rtol": case.take("rtol")}
    told = [f"{name}.self_conditioning_logits"] if case.take("self_conditioning") else []
    parts = [f"{name}.{part}" for part in ("input_ids", "decoder_input_ids", "logits", "encoder_last_hidden_state")]
    ids_BT, canvas_BC, logits_BCV, state_BTD, *expected = golden.tensors(tensors, *parts, *told)
    worst = golden.close("logits", logits_BCV, network.score(ids_BT, canvas_BC, *expected), **bounds)
    state = network.norm(network.hidden(ids_BT, canvas_BC)[:, : ids_BT.shape[1]])
    worst = max(worst, golden.close("encoder_last_hidden_state", state_BTD, state, **bounds))
    return f"largest difference {worst:.2g}"


@dataclass(frozen=True, kw_only=True)
class Recorded(StandardSampling):
    """Noise from a record. The seed of a request is its row."""

    canvas_XBC: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0, dtype=torch.int64))
    prompt: int = 0
    first_K: tuple[int, ...] = (0,)  # where in the record each canvas begins

    def noise(self, seed: Tensor, pos: Tensor, step: Tensor, vocab: int) -> Tensor:
        place = (pos - self.prompt).clamp_min(0)
        block = torch.div(place, self.canvas_XBC.shape[2], rounding_mode="floor")
        at = torch.where(step == 0, block.new_tensor(self.first_K)[block], step + block)
        return self.canvas_XBC[at.clamp_max(len(self.canvas_XBC) - 1), seed, place % self.canvas_XBC.shape[2]]


def renoise(params: Fields) -> dict[str, Any]:
    """The decoder of these models, in the words of transformers and of SGLang, which are the same."""
    names = {"max_denoising_steps": "steps", "entropy_bound": "bound", "t_min": "t_min", "t_max": "t_max"}
    names |= {"stability_threshold": "stability", "confidence_threshold": "confidence"}
    return {"name": "renoise"} | {ours: params.take(name) for name, ours in names.items()}


def run(golden: Golden, doc: Fields) -> str:
    """Generates as the reference did."""
    return generated(golden, golden.network(doc.take("model"), doc.take("family")), doc)


def generated(
    golden: Golden, network: Any, doc: Fields, asks: Sequence[tuple[Ask, ...]] = (), *, padded: bool = False
) -> str:
    """Compares the canvas after every step, the answers and the number of steps.

    `asks`: of each row. `padded`: the reference pads what is behind a stop token.
    """
    params, prompts, length = doc.fields("params"), doc.take("prompt_ids"), doc.take("canvas_length")
    decoder = renoise(params)
    new_tokens, canvases = params.take("max_new_tokens"), -(-params.take("max_new_tokens") // length)
    params.finish()
    record = golden.tensor(doc.take("random_canvas"))
    if len({len(prompt) for prompt in prompts}) > 1:
        raise Skip("prompts of several lengths in a batch are not there yet")
    if canvases > 1 and (len(prompts) > 1 or len(record) != canvases * (decoder["steps"] + 1)):
        raise Skip("where the canvases of a run begin is not recorded")
    first_K = tuple(block * (decoder["steps"] + 1) for block in range(canvases))
    noise = Recorded(canvas_XBC=record, prompt=len(prompts[0]), first_K=first_K)
    iteration = {"name": "self_conditioned", "block": length}
    recipe = compose(network, iteration=iteration, decoder=decoder, cache="block", sampling=noise)
    requests = [
        Request.behind(prompt, canvases * length, recipe.resolve({"seed": row}), asks=own)
        for row, (prompt, own) in enumerate(zip(prompts, asks or [()] * len(prompts), strict=True))
    ]
    rows: list[list[int]] = [[] for _ in prompts]
    after, steps = doc.take("canvas_after"), [0] * len(prompts)
    engine = Engine(recipe, Runtime(rows=len(prompts)))
    for update in engine.run(requests, Wants(snapshots=True)):
        row, (start, end) = update.index, update.region
        if update.phase == Phase.PREFILL:
            continue
        if any((update.masked or [])[start:end]):  # of the last step of a canvas, the result counts
            same(f"canvas_after[{steps[row]}][{row}]", after[steps[row]][row], (update.tokens or [])[start:end])
        steps[row] += 1
        if update.completion is not None:
            rows[row] = update.completion.canvas[: len(prompts[row]) + new_tokens]
    wanted = doc.take("output_ids")
    for at, (row, prompt) in enumerate(zip(wanted, prompts, strict=True)):
        stop = next((i for i in range(len(prompt), len(row)) if row[i] in network.spec.stop_ids), len(row))
        if padded and len({*row[stop + 1 :]}) < 2:
            rows[at][stop + 1 :] = row[stop + 1 :]
    same("output_ids", wanted, rows)
    same("decoder_forwards", doc.take("decoder_forwards"), max(steps))
    return f"{max(steps)} steps"
