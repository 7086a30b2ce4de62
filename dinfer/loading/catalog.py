"""Published checkpoints, as data: what `dinfer models` lists.

Sizes, ids and block lengths are those of the configs and cards on the hub; `test_sizes.py` holds the sizes of five
against our networks. A checkpoint that is not here loads just as well, if its family is known.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint on the Hugging Face hub."""

    checkpoint: str  # hub name; of an adapter, its own
    family: str
    size: str  # parameters, those active for a token behind the dash
    preset: str  # the choice of `model` with the published decoding, in conf/model
    mask_id: int | None  # None: what is still to be decoded holds uniform noise
    eos_ids: tuple[int, ...]  # those of its files, and those that the preset adds
    block: int | None = None  # length of its attention blocks; None: bidirectional
    canvas: int | None = None  # length of the canvas in front of which a causal encoder reads
    prompt_block: bool = False  # the prompt is an attention block of its own, and the others are counted from its end
    shifted: bool = False  # logits predict the next token

    @property
    def attention(self) -> str:
        """Who sees whom, in words."""
        if self.canvas is not None:
            return f"causal encoder, bidirectional canvas of {self.canvas}"
        if self.block is None:
            return "bidirectional"
        return f"block-causal, {self.block}{' behind the prompt' if self.prompt_block else ''}"


def _all(names: dict[str, str], **same: object) -> list[Published]:
    """Checkpoints, each with its size, that are alike in all else."""
    return [Published(checkpoint=name, size=size, **same) for name, size in names.items()]  # type: ignore[arg-type]


LLADA = {"family": "llada", "mask_id": 126336}
INCLUSION = {"mask_id": 156895, "eos_ids": (156892,)}
DREAM = {"family": "dream", "mask_id": 151666, "shifted": True}
SDAR = {"family": "sdar", "preset": "sdar_8b_chat", "mask_id": 151669}
QWEN = (151643, 151645)  # end of text, end of a turn

CATALOG: tuple[Published, ...] = (
    *_all({"GSAI-ML/LLaDA-8B-Base": "8.0B"}, **LLADA, preset="llada_8b_base", eos_ids=(126081,)),
    *_all({"GSAI-ML/LLaDA-8B-Instruct": "8.0B"}, **LLADA, preset="llada_8b_instruct", eos_ids=(126081, 126348)),
    *_all({"GSAI-ML/LLaDA-1.5": "8.0B"}, **LLADA, preset="llada_1_5", eos_ids=(126081, 126348)),
    *_all(
        {"SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora": "8.0B"},
        **LLADA, preset="d2f_llada_8b_instruct", eos_ids=(126081, 126348), block=32, prompt_block=True,
    ),
    *_all(
        {f"inclusionAI/LLaDA-MoE-7B-A1B-{kind}": "7.4B-A1.4B" for kind in ("Instruct", "Instruct-TD", "Base")},
        **INCLUSION, family="llada_moe", preset="llada_moe_7b_instruct",
    ),
    *_all(
        {"inclusionAI/LLaDA2.0-mini": "16B-A1.4B", "inclusionAI/LLaDA2.0-mini-preview": "16B-A1.4B",
         "inclusionAI/LLaDA2.0-mini-CAP": "16B-A1.4B", "inclusionAI/LLaDA2.0-flash": "100B-A6.1B",
         "inclusionAI/LLaDA2.0-flash-preview": "100B-A6.1B", "inclusionAI/LLaDA2.0-flash-CAP": "100B-A6.1B"},
        **INCLUSION, family="llada2", preset="llada2_mini", block=32,
    ),
    *_all(
        {"inclusionAI/LLaDA2.1-mini": "16B-A1.4B", "inclusionAI/LLaDA2.1-flash": "100B-A6.1B"},
        **INCLUSION, family="llada2", preset="llada2_1_mini", block=32,
    ),
    *_all(
        {"inclusionAI/LLaDA2.2-flash": "100B-A6.1B"}, **INCLUSION, family="llada2", preset="llada2_2_flash", block=32
    ),
    *_all(
        {"Dream-org/Dream-v0-Instruct-7B": "7.6B", "Dream-org/Dream-v0-Base-7B": "7.6B",
         "Dream-org/Dream-Coder-v0-Instruct-7B": "7.6B", "Dream-org/Dream-Coder-v0-Base-7B": "7.6B",
         "apple/DiffuCoder-7B-Instruct": "7.6B", "apple/DiffuCoder-7B-cpGRPO": "7.6B",
         "apple/DiffuCoder-7B-Base": "7.6B"},
        **DREAM, preset="dream_7b_instruct", eos_ids=QWEN,
    ),
    *_all(
        {"SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora": "7.6B"},
        **DREAM, preset="d2f_dream_7b_base", eos_ids=(151643,), block=32, prompt_block=True,
    ),
    *_all(
        {"JetLM/SDAR-8B-Chat": "8.2B", "JetLM/SDAR-1.7B-Chat": "2.03B", "JetLM/SDAR-4B-Chat": "4.41B",
         "JetLM/SDAR-30B-A3B-Chat": "30B-A3B", "Gen-Verse/TraDo-4B-Instruct": "4.41B",
         "Gen-Verse/TraDo-8B-Instruct": "8.2B", "Gen-Verse/TraDo-8B-Thinking": "8.2B"},
        **SDAR, eos_ids=QWEN, block=4,
    ),
    *_all(
        {"Efficient-Large-Model/Fast_dLLM_v2_7B": "7.6B", "Efficient-Large-Model/Fast_dLLM_v2_1.5B": "1.5B"},
        family="fast_dllm_v2", preset="fast_dllm_v2_7b", mask_id=151665, eos_ids=(151645,), block=32, shifted=True,
    ),
    *_all(
        {"ByteDance-Seed/Stable-DiffCoder-8B-Instruct": "8.3B", "ByteDance-Seed/Stable-DiffCoder-8B-Base": "8.3B"},
        family="stable_diffcoder", preset="stable_diffcoder_8b_instruct", mask_id=5, eos_ids=(2,), block=4,
    ),
    *_all(
        {"google/diffusiongemma-26B-A4B-it": "25.2B-A3.8B"},
        family="diffusion_gemma", preset="diffusion_gemma_26b_a4b_it", mask_id=None, eos_ids=(1, 106, 50), canvas=256,
    ),
)  # fmt: skip


def entry_of(name: str, family: str) -> Published | None:
    """The entry of the checkpoint with this hub name, or in a folder called like it."""
    parts = {re.split("__|--", part)[-1].casefold() for part in Path(name).parts}  # folders as the hub's cache has them
    entries = (entry for entry in CATALOG if entry.family == family)
    return next((entry for entry in entries if entry.checkpoint.split("/")[1].casefold() in parts), None)
