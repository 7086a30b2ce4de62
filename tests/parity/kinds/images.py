"""Cases with images (DiffusionGemma): soft tokens of the pictures, states and logits behind them, whole runs.

A case has a run for each rule of attention among the tokens of an image. The noise and the draws are recorded as in
`tests.parity.kinds.uniform`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.core.engine.pages import common, prompt_keys
from dinfer.core.kernels.attention import interval_mask
from dinfer.core.layers.transformer import WholeAttend
from dinfer.families.abilities.embedded import Embedded, Mutual, Stretch
from dinfer.families.abilities.encoder import encoder_intervals, local_interval
from dinfer.families.images.eyes import Eyes
from dinfer.families.images.pictures import opened
from tests.parity.compare import same
from tests.parity.golden import Case, Fields, Golden, GoldenError
from tests.parity.kinds.uniform import generated

FILES = "goldens/*.json"
SOFT = {"atol": 2e-5, "rtol": 1e-5}  # as transformers computes them on a CPU
RULES: dict[str, Mutual] = {"transformers": "all", "gemma4": "local"}


def takes(doc: Fields) -> bool:
    return "image_spans" in doc


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(run, golden, path.with_suffix(".safetensors"), doc))


def run(golden: Golden, tensors: Path, doc: Fields) -> str:
    """Compares soft tokens, states, logits, keys that may be shared, and the canvas after every step of each rule."""
    folder, worst = doc.text("model"), []
    network = golden.network(folder, doc.text("family"))
    if not isinstance(network.eyes, Eyes):
        raise GoldenError(f"{folder}: {network.eyes}")
    rows = [
        [(span, *soft_tokens(golden, folder, name, network.eyes)) for name, span in zip(names, spans, strict=True)]
        for names, spans in zip(doc.take("images"), doc.take("image_spans"), strict=True)
    ]
    worst += [far for row in rows for *_, far in row]
    name, bounds, runs = doc.text("name"), {at: doc.take(at) for at in ("atol", "rtol")}, doc.take("runs")
    doc.take("float32_error")
    shared = {at: doc.take(at) for at in ("prompt_ids", "canvas_length", "random_canvas")}
    params = doc.take("params")
    doc.finish()
    for rule, values in runs.items():
        causal = network.eyes.mutual == "causal"
        asks = [
            Embedded(tuple(Stretch(span[0], found, "causal" if causal else RULES[rule]) for span, found, _ in row))
            for row in rows
        ]
        parts = ("input_ids", "decoder_input_ids", f"{rule}.logits", f"{rule}.encoder_last_hidden_state")
        ids_BT, canvas_BC, logits_BCV, state_BTD = golden.tensors(tensors, *(f"{name}.{part}" for part in parts))
        h_BWD = hidden(network, ids_BT, canvas_BC, asks)
        got_BTD, got_BCV = network.norm(h_BWD[:, : ids_BT.shape[1]]), network.logits(h_BWD[:, ids_BT.shape[1] :])
        worst.append(golden.close(f"{rule}: encoder_last_hidden_state", state_BTD, got_BTD, **bounds))
        worst.append(golden.close(f"{rule}: logits", logits_BCV, got_BCV, **bounds))
        ran = Fields(f"{name}.{rule}", {**shared, **values, "params": params})
        for recorded_beside in ("argmax_after", "intervals"):
            ran.take(recorded_beside)
        if "equal_key_positions" in ran:
            same("equal_key_positions", ran.take("equal_key_positions"), equal_keys(shared["prompt_ids"], asks))
        generated(golden, network, ran, [(ask,) if ask.stretches else () for ask in asks], padded=True)
        ran.finish()
    return f"largest difference {max(worst):.2g}"


def soft_tokens(golden: Golden, folder: str, name: str, eyes: Eyes) -> tuple[Any, float]:
    """What the eyes make of a picture, and how far it is from the record."""
    picture = opened(golden.root / "pngs" / f"{name}.png", name)
    parts = ("pixel_values", "image_position_ids", "soft_tokens")
    pixels_PX, place_P2, soft_XD = golden.tensors(
        golden.root / folder / "images.safetensors", *(f"{name}.{part}" for part in parts)
    )
    got_1PX, got_1P2 = eyes.prepared(picture)
    count = pixels_PX.shape[0]
    same(f"{name}: image_position_ids", place_P2.tolist(), got_1P2[0, :count].tolist())
    golden.close(f"{name}: pixel_values", pixels_PX, got_1PX[0, :count].to(golden.device), atol=1e-6, rtol=0)
    found = eyes.see(picture)
    same(f"{name}: soft tokens", soft_XD.shape[0], eyes.soft_tokens(picture))
    return found, golden.close(f"{name}: soft_tokens", soft_XD, found.rows_XD.to(golden.device), **SOFT)


def hidden(network: Any, ids_BT: Tensor, canvas_BC: Tensor, asks: list[Embedded]) -> Tensor:
    """Hidden states of prompts with images and a canvas behind them, without a cache. [B, T + C, D]"""
    (rows, prompt), length = ids_BT.shape, ids_BT.shape[1] + canvas_BC.shape[1]
    x_BWD, local = torch.cat((network.embed(ids_BT), network.embed(canvas_BC)), 1), network.spec.local
    pos_BW = torch.arange(length, device=ids_BT.device).expand(rows, -1)
    start_B, end_B = torch.full_like(pos_BW[:, 0], prompt), torch.full_like(pos_BW[:, 0], length)
    context_BW, far = encoder_intervals(pos_BW, start_B, end_B)
    near = local_interval(far, pos_BW, start_B, local.window)
    (far_begin, far_end), (near_begin, near_end) = ([one.clone() for one in pair] for pair in (far, near))
    for row, ask in enumerate(asks):
        for one in ask.stretches:
            here = row, slice(one.first, one.end)
            x_BWD[here] = one.embeddings.rows_XD.to(x_BWD)
            if one.mutual != "causal":
                near_end[here] = one.end
            if one.mutual == "all":
                far_end[here], near_begin[here] = one.end, near_begin[here].clamp_max(one.first)
    masks = interval_mask(far_begin, far_end, length), interval_mask(near_begin, near_end, length)
    return network(x_BWD, WholeAttend(pos_BW, masks[0], context_BW, local.layers, masks[1]))


def equal_keys(prompts: list[list[int]], asks: list[Embedded]) -> int:
    """How many leading positions of two prompts may share their keys."""
    some, others = (
        prompt_keys(prompt, len(prompt), 1, 1, asks=[ask]) for prompt, ask in zip(prompts, asks, strict=True)
    )
    return common(some, others)
