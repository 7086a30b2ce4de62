"""Tiny models with a vision tower, as transformers has them: DiffusionGemma, LLaDA-V; pictures for them."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from support.families import LLADA_V
from support.models import GEMMA
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlavaOnevisionConfig, LlavaOnevisionModel, PreTrainedTokenizerFast
from transformers.models.diffusion_gemma import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

WORDS = ["<pad>", "<eos>", "<|turn>", "<turn|>", "<|image|>", "<|image>", "<image|>", "user", "model", "\n", " "]
TEMPLATE = (
    "{% for m in messages %}<|turn>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|image|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
# As published: it knows texts alone.
LLADA_V_TEMPLATE = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
VISION = {
    "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 3,
    "position_embedding_size": 256, "standardize": True,
}  # fmt: skip
TEXT = GEMMA["text_config"] | {"pad_token_id": 0, "use_bidirectional_attention": "vision"}


def seeing() -> DiffusionGemmaForBlockDiffusion:
    """Random weights, whose norms and scalars differ from 1."""
    config = DiffusionGemmaConfig(
        text_config=TEXT, vision_config=VISION, canvas_length=6, image_token_id=4, boi_token_id=5, eoi_token_id=6
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = DiffusionGemmaForBlockDiffusion(config).eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name:
                tensor.data.copy_(torch.randn_like(tensor) * (0.3 if tensor.dim() > 1 else 0.2) + (tensor.dim() < 2))
    return model


def save_seeing(theirs: DiffusionGemmaForBlockDiffusion, path: Path) -> Path:
    """A checkpoint with a tower."""
    theirs.save_pretrained(path)
    save_words(path, WORDS, TEXT["vocab_size"], TEMPLATE, 7)
    sizes = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    return path


LLADA_V_WORDS = [
    "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|reserved_token_0|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "user", "system", "assistant", "\n", " ",
]  # fmt: skip
LLADA_V_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 7, "patch_size": 2,
}  # fmt: skip
GRIDS = [[7 * i, 7 * j] for i in range(1, 4) for j in range(1, 4)]  # width first
LLADA_V_CONFIG = LLADA_V | {
    "image_aspect_ratio": "anyres_max_2", "image_grid_pinpoints": GRIDS, "image_token_index": 3, "mask_token_id": 2,
    "eos_token_id": 1, "bos_token_id": 0, "vision_config": LLADA_V_VISION,
}  # fmt: skip


def llada_v() -> LlavaOnevisionModel:
    """LLaVA-OneVision's network, with random weights. Its tower has the layer that LLaDA-V leaves out."""
    text = {name: LLADA_V[name] for name in LLADA_V if name not in ("architectures", "model_type", "mask_token_id")}
    config = LlavaOnevisionConfig(
        text_config=text | {"model_type": "llama"}, image_grid_pinpoints=GRIDS, image_token_index=3,
        vision_config=LLADA_V_VISION | {"num_hidden_layers": 3, "vision_use_head": False}, vision_feature_layer=-2,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlavaOnevisionModel(config).eval()
        for tensor in model.parameters():
            tensor.data.copy_(torch.randn_like(tensor) * 0.4 + (tensor.dim() < 2))
        model.head = torch.nn.Linear(text["hidden_size"], text["vocab_size"], bias=False)
    return model


def save_llada_v(theirs: LlavaOnevisionModel, path: Path) -> Path:
    """A checkpoint under the published names."""
    renamed = (
        ("vision_tower.", "model.vision_tower.vision_tower.vision_model."), ("language_model.", "model."),
        ("multi_modal_projector.linear_1.", "model.mm_projector.0."), ("head.", "lm_head."),
        ("multi_modal_projector.linear_2.", "model.mm_projector.2."), ("image_newline", "model.image_newline"),
    )  # fmt: skip
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        if "vision_tower.encoder.layers.2." not in name:
            begin, published = next(pair for pair in renamed if name.startswith(pair[0]))
            tensors[published + name.removeprefix(begin)] = tensor.contiguous()
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(LLADA_V_CONFIG))
    save_words(path, LLADA_V_WORDS, LLADA_V["vocab_size"], LLADA_V_TEMPLATE, 7, bos_token=LLADA_V_WORDS[0])
    return path


def save_words(path: Path, words: list[str], size: int, template: str, special: int, **named: str) -> None:
    """A tokenizer of words, the first ones special."""
    vocab = {word: i for i, word in enumerate([*words, *(f"w{i}" for i in range(size - len(words)))])}
    model = Tokenizer(WordLevel(vocab, unk_token="w0"))
    model.pre_tokenizer = Split(Regex("\n| "), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template, **named)
    tokenizer.add_special_tokens({"additional_special_tokens": words[:special]})
    tokenizer.save_pretrained(path)


def picture(seed: int, width: int = 20, height: int = 14) -> Image.Image:
    noise = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def png(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **how)
    return file.getvalue()
