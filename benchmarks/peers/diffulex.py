"""Diffulex on the common work, with its LLaDA or SDAR. `benchmarks.peers.compare` starts it, on a GPU alone.

It runs with CUDA graphs and without vLLM, for which it has kernels of its own. One block of a request is active
(buffer_size 1), as here. Its LLaDA is D2F's: block-causal, so keys of finished blocks are final and no pass over the
whole canvas comes after the first. Nothing of its code is here.

It counts the masks of the next block as new tokens and ends a request before that block is decoded. So it is asked for
one block more, and the tokens before that block count. Its log and its record of each step are off, and functions that
it compiles may have as many shapes as they meet: all in its favour.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.published import MORE
from benchmarks.peers.work import arguments, fill, report

# Its names of the model, the strategy and the class of the config, by model_type.
KINDS = {"llada": ("llada", "d2f", "LLaDAConfig"), "sdar": ("sdar", "multi_bd", "SDARConfig")}
SDAR_IDS = {"mask_token_id": 151669, "eos_token_id": 151643}


class NoTokenizer:
    """What the engine asks of a tokenizer, where prompts are token ids and nobody reads the text."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.eos_token_id, self.mask_token_id = config, config["eos_token_id"], config["mask_token_id"]

    def __len__(self) -> int:
        return self.config["vocab_size"]

    def decode(self, tokens: list[int], **settings: Any) -> str:
        return ""


def engine(given: Any, config: dict[str, Any], folder: str) -> Any:
    """Its engine, whose sampler computes the threshold rule and accepts the leftmost masks."""
    import diffulex.engine.engine
    import diffulex.model.auto_model
    from diffulex import Diffulex

    name, strategy, kind = KINDS[config["model_type"]]
    # Of its own class: for these models it would take that of the checkpoint, which is remote code.
    settings = getattr(import_module(f"diffulex.model.config.{name}.configuration_{name}"), kind)(**config)
    begin = torch.distributed.init_process_group  # one process: without a device it does not start NCCL
    torch.distributed.init_process_group = lambda device_id=None, **more: begin(**more)
    diffulex.engine.engine.auto_tokenizer_from_pretrained = lambda *given, **more: NoTokenizer(config)
    first = min(config["eos_token_id"], config["mask_token_id"])  # neither is ever the most likely
    diffulex.model.auto_model.load_model = lambda model, settings: fill(model, model.lm_head.weight, first)
    length = given.prompt + given.new + 2 * given.block  # the block more, and the masks behind it
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    made = Diffulex(
        folder, hf_config=settings, model_name=name, decoding_strategy=strategy, buffer_size=1,
        mask_token_id=config["mask_token_id"], block_size=given.block, page_size=32, tensor_parallel_size=1,
        max_num_reqs=given.batch, max_model_len=length, max_num_batched_tokens=max(given.batch, 2) * length,
        num_pages=given.batch * (length // 32 + 2), master_port=port,
        enable_prefix_caching=False, enable_vllm_layers=False, enforce_eager=given.eager, device_ids=[0],
        decoding_thresholds={"add_block_threshold": 1.0, "semi_complete_threshold": 1.0, "accept_threshold": 0.9},
    )  # fmt: skip
    sampler = type(made.model_runner.sampler)
    rule = sampler._compute_accepted_ids

    def leftmost(self: Any, block: Any, confidence: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        rule(self, block, confidence, *rest, **more)
        return torch.arange(min(given.rate, len(confidence)), device=confidence.device)

    sampler._compute_accepted_ids = leftmost
    return made


def main(args: list[str] | None = None) -> None:
    given, scratch = arguments(__doc__, args), tempfile.TemporaryDirectory(prefix="dinfer-diffulex-")
    config = json.loads(given.config.read_text())
    config = (MORE if config["model_type"] == "llada" else SDAR_IDS) | config
    config |= {"pad_token_id": config["eos_token_id"], "torch_dtype": "bfloat16"}
    Path(scratch.name, "config.json").write_text(json.dumps(config))
    os.environ["DIFFULEX_SAVE_TRACE"] = "0"
    torch._dynamo.config.recompile_limit = 64
    run = engine(given, config, scratch.name)
    from diffulex import SamplingParams

    logging.disable(logging.INFO)
    # Without max_nfe it guesses a limit of forwards from the first eight.
    settings = SamplingParams(temperature=0.0, max_tokens=given.new + given.block, max_nfe=10**6, ignore_eos=True)
    generator, last = torch.Generator().manual_seed(1), min(config["eos_token_id"], config["mask_token_id"])
    prompts = torch.randint(1, last, (given.batch, given.prompt), generator=generator, device="cpu").tolist()

    last: list[Any] = []  # steps of the latest generation, which its engine times on its own

    def generate() -> tuple[int, Any]:
        outputs = run.generate(prompts, settings, progress_log_interval=0)
        last[:] = outputs.trajectories[0].trajectory
        tokens = [one.token_ids[: given.new] for one in outputs.trajectories]
        decoded = [sum(token != config["mask_token_id"] for token in row) for row in tokens]
        if set(decoded) != {given.new}:
            raise RuntimeError(f"{sorted(set(decoded))} tokens of a row were decoded, {given.new} were asked for")
        return outputs.batch_step_count, tokens

    def widths() -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for step in last:
            found.setdefault(given.prompt if step.is_prefill else given.block, []).append(1e3 * step.step_time)
        return found

    try:
        report(given, generate, widths)
    finally:
        run.exit()
        scratch.cleanup()


if __name__ == "__main__":
    main()
