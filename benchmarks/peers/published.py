"""The published dInfer on the common work, with its LLaDA. `benchmarks.peers.compare` starts it.

It runs as its own benchmark does: bfloat16 weights, the model's forward compiled with mode "reduce-overhead", blocks
aligned to the start, early stop. One card needs nothing of vLLM and sglang, which its package imports, so stand-ins
take their place. Nothing of its code is here.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import torch

from benchmarks.clock import milliseconds, moment
from benchmarks.peers.work import RATE, arguments, fill, report

# What config.json of LLaDA-8B-Instruct says, and our shapes leave out since it changes nothing there.
MORE = {
    "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0, "include_bias": False,
    "include_qkv_bias": False, "bias_for_layer_norm": False, "init_device": "meta", "precision": "amp_bf16",
}  # fmt: skip


def stand_in(name: str, **names: Any) -> None:
    """A module that the package imports and this measurement does not use."""
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[name] = module


def import_published() -> Any:
    """The peer's package. Raises ImportError if it is ours, which has the same name."""
    stand_in("vllm")
    stand_in(
        "vllm.distributed", get_tensor_model_parallel_rank=lambda: 0, get_tensor_model_parallel_world_size=lambda: 1
    )
    stand_in("transformers.models.layoutlmv2.modeling_layoutlmv2", relative_position_bucket=None)
    stand_in("dinfer.decoding.serving", DiffusionLLMServing=None, SamplingParams=None)
    stand_in("dinfer.model.modeling_fused_olmoe", FusedOlmoeForCausalLM=None)
    stand_in("dinfer.model.modeling_llada2_moe", LLaDA2MoeModelLM=None)
    import dinfer

    if not hasattr(dinfer, "BlockWiseDiffusionLLM"):
        raise ImportError(f"{dinfer.__file__} is not the published dInfer: put its folder first in PYTHONPATH")
    return dinfer


def random_model(config: dict[str, Any], device: torch.device) -> Any:
    """Its LLaDA with random weights, as `from_pretrained` in bfloat16 leaves it."""
    from dinfer.model import modeling_llada as published
    from dinfer.model.configuration_llada import LLaDAConfig

    LLaDAConfig.use_cache, LLaDAConfig.use_return_dict = False, True  # which transformers 5 no longer keeps
    settings = LLaDAConfig(**config, **MORE, pad_token_id=config["eos_token_id"])
    sizes = published.create_model_config_from_pretrained_config(settings)
    sizes.init_device = str(device)
    torch.set_default_dtype(torch.bfloat16)
    model = published.LLaDAModelLM(settings, model=published.LLaDAModel(sizes, init_params=False))
    torch.set_default_dtype(torch.float32)
    # Neither a stop token nor a mask is ever the most likely.
    return fill(model, model.model.transformer.ff_out.weight, config["eos_token_id"]).eval()


def scripted_decoder(dinfer: Any, config: dict[str, Any], block: int, device: torch.device) -> Any:
    """Its threshold decoder, which computes its rule and commits the leftmost masks."""
    from dinfer.decoding import parallel_strategy as published

    rule = published.get_transfer_index_threshold
    # Twice as many as a block needs: in a batch it runs one step more, which finds no mask.
    leftmost = torch.arange(block, device=device)[None] // RATE
    chosen = [leftmost == step for step in range(2 * -(-block // RATE))]

    class Scripted(dinfer.ThresholdParallelDecoder):  # type: ignore[misc, name-defined]
        def block_init(self, *given: Any) -> None:
            super().block_init(*given)
            self.steps = iter(chosen)

    decoder = Scripted(0, 0.9, mask_id=config["mask_token_id"], eos_id=config["eos_token_id"])
    published.get_transfer_index_threshold = lambda *given, **more: (rule(*given, **more)[0], next(decoder.steps))
    return decoder


@torch.no_grad()
def main(args: list[str] | None = None) -> None:
    given = arguments(__doc__, args)
    device, config = torch.device(given.device), json.loads(given.config.read_text())
    cuda, dinfer = device.type == "cuda", import_published()
    model = random_model(config, device)
    if not given.eager:
        model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False, dynamic=True)
    decoder, iterators = scripted_decoder(dinfer, config, given.block, device), dinfer.BlockIteratorFactory(True)
    if given.cache == "vicinity":
        run = dinfer.VicinityCacheDiffusionLLM(
            model, decoder, iterators, cache_factory=dinfer.KVCacheFactory("dual"), early_stop=True, prefix_look=16,
            after_look=16, warmup_steps=4,
        )  # fmt: skip
    else:
        cache = None if given.cache == "none" else dinfer.KVCacheFactory(given.cache)
        run = dinfer.BlockWiseDiffusionLLM(model, decoder, iterators, cache_factory=cache, early_stop=True)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, config["eos_token_id"], (given.batch, given.prompt), generator=generator).to(device)

    def generate() -> tuple[int, Any]:
        before = run.num_forwards
        canvas = run.generate(prompts, gen_length=given.new, block_length=given.block)
        return run.num_forwards - before, canvas.tolist()

    def widths() -> dict[int, list[float]]:
        """From the beginning of each forward to that of the next one."""
        marks: list[tuple[int, Any]] = []
        inner = model.forward

        def marked(tokens: Any, *rest: Any, **more: Any) -> Any:
            marks.append((tokens.shape[1], moment(cuda)))
            return inner(tokens, *rest, **more)

        model.forward = marked
        generate()
        model.forward = inner
        marks.append((0, moment(cuda)))
        torch.cuda.synchronize() if cuda else None
        found: dict[int, list[float]] = {}
        for (width, begin), (_, end) in zip(marks, marks[1:], strict=False):
            found.setdefault(width, []).append(milliseconds(begin, end))
        return found

    found = report(given, generate, widths)
    if not found["same_tokens"]:
        raise RuntimeError("runs of the same work gave different tokens")


if __name__ == "__main__":
    main()
